"""F at the end of a run and at its start, each from a y that is solved as well as that pays.

The tests of a run compare one x with the next, at copies of y that follow x. Where the lower level
is ill-conditioned they may follow so slowly that f at y falls while F rises, and no single step
shows it. At the end, therefore, the lower level is solved further at both. With minibatches that is
done on all samples, where these are few, and where the objectives are their plain means without
random draws: then f and g on all samples are what the minibatches stand for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel.problem import Objectives
from bilevel.sampling import Rewind, count_rows, split_batch
from bilevel.stepping.curvature import Objective, slope_of
from bilevel.stepping.policy import Iterate
from bilevel.variables import (
    ProximalStep,
    Variable,
    fixed_point_of,
    flatten,
    unflatten_like,
    values_only,
)

CHECKED = 0.1
"""Of the lower steps of a run: so many more, at each end, to know that it did not end worse."""


MEAN = 1e-3
"""By which part of itself an objective on all samples may differ from its mean over two halves."""


@dataclass(frozen=True)
class _Whole:
    """All samples of both levels, as a batch each; ``cost``: that of g in minibatches."""

    upper: Any
    lower: Any
    cost: float


@torch.no_grad()
def compare(
    objectives: Objectives, state: Iterate, rate: float, start: Tensor, lower_steps: int
) -> tuple[float, float] | None:
    """F at another x, ``start``, and at the present one, after a run of so many lower steps.

    ``rate`` is one over the curvature of g; NaN: that is measured. The lower solution of the
    present x stays as it was found here. None: the data cannot be evaluated as a whole, or these
    steps do not solve the lower level.
    """
    x, y, whole = state.x, state.solution, _whole(objectives, state)
    if whole is None:
        return None
    most = int(CHECKED * lower_steps / whole.cost)
    after = _solve(objectives, state, whole, 1 / rate, most)
    if after is None:
        return None
    here, solution = ([leaf.clone() for leaf in variable.leaves] for variable in (x, y))
    torch._foreach_copy_(x.leaves, unflatten_like(start, x.leaves))
    x.reshard()
    before = _solve(objectives, state, whole, math.nan, most)  # the curvature may be another
    torch._foreach_copy_([*x.leaves, *y.leaves], [*here, *solution])
    x.reshard()
    y.reshard()
    return None if before is None else (before, after)


def _whole(objectives: Objectives, state: Iterate) -> _Whole | None:
    """All samples, if the objectives on them are what single batches stand for."""
    x, y, draw = state.x, state.solution, objectives.draw
    upper, lower = draw.upper.whole(), draw.lower.whole()
    if upper is None or lower is None or (draw.chunked and not draw.sweeps):
        return None  # what is evaluated in chunks may be too large as a whole
    levels = ((objectives.f, draw.upper, upper[0]), (objectives.g, draw.lower, lower[0]))
    known = all(
        _stands_for_parts(objective, x, y, batch, in_parts=not stream.deterministic)
        for objective, stream, batch in levels
    )
    return _Whole(upper[0], lower[0], lower[1]) if known else None


def _stands_for_parts(
    objective: Objective, x: Variable, y: Variable, batch: Any, *, in_parts: bool
) -> bool:
    """Whether an objective draws nothing and, ``in_parts``, is the mean of those on two halves."""
    rewind = Rewind(x.device)
    with values_only(x, y):
        value = objective(x, y, batch)
        drew = rewind.moved()
        rewind()
        if drew or not in_parts:
            return not drew
        halves = split_batch(batch, -(-count_rows(batch) // 2))
        parts = sum(share * objective(x, y, half) for half, share in halves)
    return abs(float(parts) - float(value)) <= MEAN * abs(float(value))


def _solve(
    objectives: Objectives, state: Iterate, whole: _Whole, curvature: float, most: int
) -> float | None:
    """Go on with the lower level, if that lowers g; f at the solution, if it is one.

    The curvature of g in y is measured if it is NaN.
    """
    x, y = state.x, state.solution
    update = next(update for update in state.updates() if update.variable is y)
    rewind = Rewind(x.device)
    slope = slope_of(objectives.g, x, [whole.lower], objectives.mean)

    def put(point: Tensor) -> None:
        torch._foreach_copy_(y.leaves, unflatten_like(point, y.leaves))
        y.reshard()

    def gradient(point: Tensor) -> Tensor:
        put(point)
        return slope(y)

    def inside(point: Tensor, step: float = 0.0) -> Tensor:
        put(point)
        update.project(y.leaves, step)
        return flatten(y.leaves)

    def value(objective: Objective, batch: Any) -> float:
        rewind()
        with values_only(x, y):
            return float(objectives.mean(objective(x, y, batch).detach()))

    def g(point: Tensor) -> float:
        put(point)
        return value(objectives.g, whole.lower)

    first = flatten(y.leaves).clone()
    precision: float = torch.finfo(first.dtype).eps ** 0.5
    steps = ProximalStep(gradient, inside, inside, curvature)
    found = fixed_point_of(steps, first, tolerance=precision, steps=most)
    put(found.point if g(found.point) < g(first) else first)
    at_solution = value(objectives.f, whole.upper)
    rewind()
    return at_solution if found.converged else None
