"""Step sizes, multiplier and momentum as plain functions of the outer step k.

Wherever the library takes a rate it takes a float or any callable ``k -> float``. The small
classes here are such callables; they also accept NumPy arrays of k, print what they are, and
compare equal when they are the same function.

Example:
    >>> import bilevel
    >>> rate = bilevel.schedules.Power(0.5, offset=10, exponent=-0.5)
    >>> # rate(k) is 0.5 * ((k + 10) / 10) ** -0.5
    >>> rate(0), rate(30)
    (0.5, 0.25)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import as_float, check_count, check_function, checked_number

Schedule: TypeAlias = Callable[[int], float]
"""A function of the outer step k = 0, 1, 2, ..."""

Rate: TypeAlias = float | Schedule
"""What a user may pass wherever a :data:`Schedule` is needed."""


@dataclass(frozen=True)
class Constant:
    """The same ``value`` at every step."""

    value: float

    def __post_init__(self) -> None:
        checked_number("value", self.value, least=-math.inf)

    def __call__(self, k: Any) -> Any:
        return self.value + 0.0 * k


@dataclass(frozen=True)
class Power:
    """``value * ((k + offset) / offset) ** exponent``: the form of every sequence in the paper.

    ``value`` is the value at k = 0; the power law sets in when k is larger than ``offset``.
    """

    value: float
    offset: float
    exponent: float

    def __post_init__(self) -> None:
        for name in ("value", "exponent"):
            checked_number(name, getattr(self, name), least=-math.inf)
        checked_number("offset", self.offset, above=True)

    def __call__(self, k: Any) -> Any:
        return self.value * ((k + self.offset) / self.offset) ** self.exponent


@dataclass(frozen=True)
class Ramp:
    """From ``start`` to ``end`` on a straight line over ``steps`` steps, then constant."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            checked_number(name, getattr(self, name), least=-math.inf)
        check_count("steps", self.steps)

    def __call__(self, k: Any) -> Any:
        if isinstance(k, int | float):
            fraction: Any = min(k / self.steps, 1.0)
        else:
            fraction = (k / self.steps).clip(max=1.0)
        return self.start + (self.end - self.start) * fraction


def as_schedule(name: str, rate: Rate) -> Schedule:
    """``rate`` as a function of k; a number is checked at once, see :func:`positive_at`."""
    known = isinstance(rate, int | float | np.number) and not isinstance(rate, bool)
    if not (known or callable(rate)):
        raise ArgumentTypeError(
            f"{name} must be a positive number or a function of the step k, not {rate!r}"
        )
    if callable(rate):
        check_function(name, rate, "k", expected="a positive number or a function of the step k")
        return rate
    number = as_float(rate)
    _check_positive(name, number, "")
    return Constant(number)


def as_share(name: str, rate: Rate) -> Schedule:
    """As :func:`as_schedule`, for a weight between 0 and 1; see :func:`share_at`."""
    schedule = as_schedule(name, rate)
    if isinstance(schedule, Constant):
        _check_share(name, float(schedule(0)), "")
    return schedule


def positive_at(name: str, schedule: Schedule, k: int) -> float:
    """``schedule(k)`` as a float, or an error that names the argument, the step and the value."""
    if not callable(schedule):
        raise ArgumentTypeError(f"{name} must be a function of the step k, not {schedule!r}")
    value = schedule(k)
    try:
        number = as_float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{name}({k}) must be a number, not {value!r}") from error
    _check_positive(name, number, f"({k})")
    return number


def share_at(name: str, schedule: Schedule, k: int) -> float:
    """As :func:`positive_at`, and at most 1."""
    number = positive_at(name, schedule, k)
    _check_share(name, number, f"({k})")
    return number


def _check_share(name: str, number: float, at: str) -> None:
    if number > 1:
        raise ArgumentError(f"{name}{at} must be at most 1, not {number!r}")


def _check_positive(name: str, value: float, where: str) -> None:
    if not math.isfinite(value) or value <= 0:
        raise ArgumentError(f"{name}{where} must be finite and greater than 0, not {value!r}")
