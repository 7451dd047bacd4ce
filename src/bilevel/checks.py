"""Checks of arguments that several places need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from bilevel.errors import ArgumentError


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
