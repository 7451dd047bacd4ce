"""Which cases of a test are quick."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[str], cases: Iterable[Any]) -> list[Any]:
    """All cases, with those marked slow whose text is not among the quick ones."""
    return [
        case if str(case) in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases
    ]
