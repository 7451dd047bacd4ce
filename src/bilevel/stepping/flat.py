"""A direction of x that is exactly zero: has x arrived, or does nothing depend on it?"""

from __future__ import annotations

import math

import torch

from bilevel.errors import FlatWarning, warn
from bilevel.stepping.curvature import Slope
from bilevel.stepping.memory import MOST_RESTS, Numbers
from bilevel.stepping.policy import Iterate
from bilevel.variables import flatten, length


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
            f"are not zero (those of x**2 at 0 are, and those of x.clamp(...) outside)?"
        )
    )


def _feels_f(state: Iterate, slope_of_f: Slope | None) -> bool:
    """Whether f would move y: else a direction of zero says that x has arrived."""
    y, z = state.penalised, state.solution
    if y is not None:
        where = flatten(z.leaves)
        seen: float = torch.finfo(where.dtype).eps ** 0.5 * length(where)
        return length(flatten(y.leaves) - where) > seen
    return slope_of_f is None or bool(slope_of_f(z).any())
