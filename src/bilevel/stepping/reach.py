"""How many minibatches an x direction needs where each of them reaches few entries of x.

Of a weight for each sample, a minibatch of 64 in 20,000 moves 64 and says nothing of the others:
with one minibatch behind each direction, 300 steps of x go by before each entry has moved once.
Where "auto" finds the step of x and no ``direction_batch_size`` is given, a direction is therefore
taken from as many minibatches as reach every entry, but from no more than four times as many as the
inner steps of y use. Of an x that every minibatch reaches as a whole this is one minibatch, as for
other steps. It is told once, before the first step, for f and for g
by itself: by the entries of the gradient on a minibatch that are exactly 0, if on another one these
are others. (Where y starts at 0, or a unit is dead, they are the same.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bilevel.errors import ObjectiveError
from bilevel.problem import Problem, check_means
from bilevel.sampling import Draw, Rewind, Stream
from bilevel.variables import Variable, buffers_kept, differentiate, flatten, frozen

PER_INNER_STEP = 4
"""The most minibatches behind a direction of x, for each inner step of y. They are evaluated many
at once, so that four take about as long as one inner step, which is of one."""


def batches_to_reach(
    problem: Problem, draw: Draw, x: Variable, y: Variable, most: int
) -> tuple[int, int]:
    """How many minibatches of f and of g, at most so many, reach every entry of x."""
    if draw.direction_batch_size is not None or draw.chunked or any(x.row_sparse):
        return 1, 1
    upper = _least(problem.f, x, y, draw.upper, most)
    lower = _least(problem.g, x, y, draw.lower, most)
    # what is no mean over its samples is another function of several minibatches
    means = max(upper, lower) > 1 and _are_means(problem, x, y, *draw.peek())
    return (upper, lower) if means else (1, 1)


def _least(
    objective: Callable[..., Tensor], x: Variable, y: Variable, stream: Stream, most: int
) -> int:
    """So many times the entries that a minibatch reaches are all; 1: a second reaches no other."""
    most = stream.batches_in(most)
    if most == 1:
        return 1
    first, second = (_reached(objective, x, y, batch) for batch in stream.probe()[:2])
    count = int(first.count_nonzero())
    if not count or not bool((second & ~first).any()):
        return 1
    return min(most, round(len(first) / count))


def _reached(objective: Callable[..., Tensor], x: Variable, y: Variable, batch: Any) -> Tensor:
    """Which entries of the gradient in x are not exactly 0."""
    rewind = Rewind(x.device)
    with torch.enable_grad(), frozen(y), buffers_kept(x, y):
        value = objective(x, y, batch)
        if value.requires_grad:
            differentiate([value], x.leaves, x.wrappers)
    rewind()
    return flatten(x.take_grads()) != 0


def _are_means(problem: Problem, x: Variable, y: Variable, *batches: Any) -> bool:
    try:
        check_means(problem, x, y, *batches)
    except ObjectiveError:
        return False
    return True
