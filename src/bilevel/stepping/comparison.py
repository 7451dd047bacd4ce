"""F at the end of a run and at its start, each from a y that is solved as well as that pays.

The tests of a run compare one x with the next, at copies of y that follow x. Where the lower level
is ill-conditioned they may follow so slowly that f at y falls while F rises, and no single step
shows it. At the end, therefore, the lower level is solved further at both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bilevel.problem import Level, Objectives
from bilevel.sampling import Rewind
from bilevel.stepping.curvature import probed_slopes
from bilevel.stepping.merit import merits_at
from bilevel.stepping.policy import Iterate
from bilevel.variables import (
    ProximalStep,
    fixed_point_of,
    flatten,
    unflatten_like,
    values_only,
)

CHECKED = 0.1
"""Of the lower steps of a run: so many more, at each end, to know that it did not end worse."""


@torch.no_grad()
def compare(
    objectives: Objectives, state: Iterate, rate: float, start: Tensor, taken: int
) -> tuple[float, float] | None:
    """F at another x, ``start``, and at the present one, after a run of ``taken`` lower steps.

    The lower solution of the present x stays as it was found here. None: F cannot be evaluated,
    because it is more than one step sees (a single task does not stand for all), or these steps do
    not solve the lower level.
    """
    x, y, draw = state.x, state.solution, objectives.draw
    if not (draw.upper.deterministic and draw.lower.deterministic):
        return None
    most = int(CHECKED * taken)
    after = _solve(objectives, state, 1 / rate, most)
    if after is None:
        return None
    here, solution = ([leaf.clone() for leaf in variable.leaves] for variable in (x, y))
    torch._foreach_copy_(x.leaves, unflatten_like(start, x.leaves))
    x.reshard()
    before = _solve(objectives, state, math.nan, most)  # the curvature there may be another
    torch._foreach_copy_([*x.leaves, *y.leaves], [*here, *solution])
    x.reshard()
    y.reshard()
    return None if before is None else (before, after)


def _solve(objectives: Objectives, state: Iterate, curvature: float, most: int) -> float | None:
    """Go on with the lower level, if that lowers g; f at the solution, if it is one.

    The curvature of g in y is measured if it is NaN.
    """
    x, y = state.x, state.solution
    update = next(update for update in state.updates() if update.variable is y)
    rewind = Rewind(x.device)
    [slope] = probed_slopes(objectives, x, Level.LOWER, 0)
    batch = objectives.draw.lower.peek()

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

    def g(point: Tensor) -> float:
        put(point)
        rewind()
        with values_only(x, y):
            return float(objectives.mean(objectives.g(x, y, batch).detach()))

    first = flatten(y.leaves).clone()
    precision: float = torch.finfo(first.dtype).eps ** 0.5
    steps = ProximalStep(gradient, inside, inside, curvature)
    found = fixed_point_of(steps, first, tolerance=precision, steps=most)
    put(found.point if g(found.point) < g(first) else first)
    rewind()
    return merits_at(objectives, state, None).values[0] if found.converged else None
