"""A direction of x that is exactly zero: has x arrived, or does nothing depend on it?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bilevel.errors import FlatWarning, warn
from bilevel.stepping.curvature import Slope
from bilevel.stepping.memory import MOST_RESTS, Numbers
from bilevel.stepping.policy import Iterate
from bilevel.variables import flatten, length, unflatten_like

WAY = 1e-3
"""Of y, by which it is moved to see whether it is held."""


def warn_if_flat(state: Iterate, slope_of_f: Slope | None, numbers: Numbers) -> None:
    """Say once that neither objective changes with x, which never moved and y is fitted to."""
    begins = numbers.looks < MOST_RESTS or not math.isnan(numbers.upper)
    if numbers.flat or begins or not _feels_f(state, slope_of_f):
        return
    numbers.flat = True
    warn(
        FlatWarning(
            f"at step {state.k} neither f nor g changes with x: the direction of x is exactly "
            f"zero, and x stays where it is. Are both computed from x without .detach(), "
            f"torch.no_grad() or rounding, does g join x and y, and does x start where derivatives "
            f"are not zero (those of x**2 at 0 are, and those of x.clamp(...) outside)? Or does "
            f"y_set or y_prox hold all of y where it is, as an L1 term does at y = 0 while its "
            f"weight is large?"
        )
    )


def _feels_f(state: Iterate, slope_of_f: Slope | None) -> bool:
    """Whether f would move y: else a direction of zero says that x has arrived."""
    y, z = state.penalised, state.solution
    if y is not None:
        where = flatten(z.leaves)
        seen: float = torch.finfo(where.dtype).eps ** 0.5 * length(where)
        if length(flatten(y.leaves) - where) > seen:
            return True
        return slope_of_f is not None and _held_against(state, slope_of_f(z) / state.multiplier)
    return slope_of_f is None or bool(slope_of_f(z).any())


@torch.no_grad()
def _held_against(state: Iterate, slope: Tensor) -> bool:
    """Whether the set of y, or the kink of its term, holds z where that slope would move it."""
    z, size = state.solution, length(slope)
    update = next(update for update in state.updates() if update.variable is z)
    if not size > 0:
        return False
    start = [leaf.clone() for leaf in z.leaves]
    way = WAY * (length(flatten(start)) or 1.0)
    ends = []
    for moved in (0.0, way):
        torch._foreach_add_(z.leaves, unflatten_like(slope, z.leaves), alpha=-moved / size)
        update.project(z.leaves, way / size)
        ends.append(flatten(z.leaves).clone())
        torch._foreach_copy_(z.leaves, start)
    return length(ends[1] - ends[0]) < 0.5 * way
