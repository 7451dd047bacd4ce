"""Checks of arguments that several places need."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np

from bilevel.errors import ArgumentError, ArgumentTypeError


def check_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Raise unless ``value`` is one of the ``known`` names."""
    choices = list(known)
    if value not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise unless ``value`` is a whole number of at least ``least``."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least:
        raise ArgumentError(f"{name} must be a whole number of at least {least}, not {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Raise unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be True or False, not {value!r}")


def checked_number(name: str, value: Any, *, least: float = 0.0, above: bool = False) -> float:
    """``value`` as a finite float of at least ``least`` (``above``: greater than it)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(f"{name} must be a number, not {value!r}")
    result = float(value)
    if not math.isfinite(result) or result < least or (above and result == least):
        bound = f"{'greater than' if above else 'at least'} {least:g}"
        raise ArgumentError(f"{name} must be finite and {bound}, not {value!r}")
    return result
