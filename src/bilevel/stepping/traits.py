"""What "auto" has to know of the method whose step sizes it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Stiffness: TypeAlias = Callable[[float, float, float], float]
"""From the curvatures of g and f and the multiplier to the curvature that the lower steps meet."""


@dataclass(frozen=True)
class Traits:
    """How a method moves y.

    Attributes:
        stiffness: of the method; None: its lower steps have a rate of their own.
        raises: whether the multiplier may be chosen and raised.
        least_multiplier: what it is at least then.
        inner_steps: T.
        follows_path: whether its lower steps can be
            :class:`~bilevel.stepping.accelerated.AcceleratedSteps`.
        settles: whether F is f at y*(x), so that y may be moved on, and not f after T steps.
        approaches: whether y comes nearer to y*(x) from step to step, so that F there, at both ends
            of a run, says what it is worth.
        steady: from k to the share of 1/L with which the method's estimates do not grow by noise.
    """

    stiffness: Stiffness | None
    raises: bool = False
    least_multiplier: float = 0.0
    inner_steps: int = 1
    follows_path: bool = False
    settles: bool = False
    approaches: bool = False
    steady: Callable[[int], float] = lambda k: 1.0
