"""y fitted to the last x, where minibatches keep it from resting.

The steps of y under noise shrink as 1/sqrt(n), with which the error of the *average* of y falls as
fast as that of any method (Polyak and Juditsky 1992), while y itself stays about as far from its
solution as a step takes it, and behind an x that still moves. At the end of a run the lower
solution therefore takes further steps, with x where it is, and goes to their average if g is lower
there, on the samples that x is tested on, by more than its standard error. Otherwise it stays.
"""

from __future__ import annotations

import math
import statistics

import torch

from bilevel.problem import Objectives
from bilevel.sampling import Rewind
from bilevel.stepping.curvature import slope_of
from bilevel.stepping.merit import standard_error
from bilevel.stepping.policy import Iterate
from bilevel.variables import unflatten_like, values_only

SHARE = 0.25
"""Of the lower steps of a run: so many more to fit y to its end, which costs a tenth of its time,
since an outer step evaluates two copies of y and a direction of x as well."""

MOST = 400
"""Of these steps, which divide what minibatches add to y by about 20."""


@torch.no_grad()
def fit(objectives: Objectives, state: Iterate, rate: float, lower_steps: int) -> None:
    """Move the lower solution to the average of further steps, after a run of so many.

    Older ones count for less: the n-th has the weight n.
    """
    x, y, draw = state.x, state.solution, objectives.draw
    steps = min(MOST, int(SHARE * lower_steps))
    known = draw.upper.probed and draw.lower.probed  # which can go back to where they are now
    if not (steps and known) or any(y.row_sparse):
        return
    update = next(update for update in state.updates() if update.variable is y)
    here = _values(objectives, state)
    place = [leaf.clone() for leaf in y.leaves]
    means = [leaf.clone() for leaf in y.leaves]
    for step in range(1, steps + 1):
        slope = slope_of(objectives.g, x, [draw.lower.next()], objectives.mean)
        y.set_grads(unflatten_like(slope(y), y.leaves))
        update.apply(rate)
        torch._foreach_lerp_(means, y.leaves, 2 / (step + 1))
    torch._foreach_copy_(y.leaves, means)
    update.project()  # a set need not hold the averages of its members
    falls = [now - there for now, there in zip(here, _values(objectives, state), strict=True)]
    known = all(map(math.isfinite, falls))
    if not (known and statistics.fmean(falls) > standard_error(falls)):
        torch._foreach_copy_(y.leaves, place)


def _values(objectives: Objectives, state: Iterate) -> list[float]:
    """The values of g at the lower solution, on each minibatch of the probe."""
    x, y, rewind = state.x, state.solution, Rewind(state.x.device)
    values = []
    with values_only(x, y):
        for batch in objectives.draw.lower.wide_probe():
            rewind()
            values.append(objectives.g(x, y, batch).detach().double())
    rewind()
    found: list[float] = objectives.mean(torch.stack(values)).tolist()
    return found
