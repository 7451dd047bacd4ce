"""The gallery runs at a small size, and each example is ahead of its baseline."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def example(name: str) -> Any:
    return importlib.import_module(f"gallery.{name}")


@pytest.mark.parametrize("method", ["MAML", "IMAML"])
def test_few_shot_sine(method: str) -> None:
    module = example("few_shot_sine")
    learned, untrained = module.solve(getattr(module, method), steps=20)
    assert learned < untrained


def test_lasso_strength() -> None:
    lasso, least_squares = example("lasso_strength").solve(steps=20)
    assert lasso < 0.6 * least_squares


def test_three_levels() -> None:
    found, first = example("three_levels").solve(steps=12)
    best = 1.5 * (4 - (5 + 1.5) / 2)
    assert first < found
    assert found == pytest.approx(best, abs=1e-3)
