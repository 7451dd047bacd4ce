"""Values in messages and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def listed(values: Sequence[Any], most: int = 10) -> str:
    """The values as Python writes them, separated by commas; only the first ``most`` of them."""
    shown = ", ".join(repr(value) for value in values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def shortened(text: str, most: int) -> str:
    """The text, cut to at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
