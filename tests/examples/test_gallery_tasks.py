"""Few-shot learning, adversaries, discounts and domains at a small size."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def compared(name: str) -> tuple[Any, list[float]]:
    """An example, and what it measured at a small size: bilevel's way first."""
    module = importlib.import_module(f"gallery.{name}")
    return module, list(module.compare(small=True).values())


@pytest.mark.slow
def test_domain_weights() -> None:
    _, (learned, equal, alone, both) = compared("domain_weights")
    assert learned < min(equal, alone, both)


@pytest.mark.slow
def test_learned_discount() -> None:
    _, (learned, true, _) = compared("learned_discount")
    assert learned < true


@pytest.mark.slow
def test_adversarial_training() -> None:
    _, (robust, plain, noisy) = compared("adversarial_training")
    assert robust < min(plain, noisy)


@pytest.mark.slow
def test_omniglot() -> None:
    found = importlib.import_module("gallery.omniglot").compare(small=True)
    assert found["iMAML (F2SA), 5 shots"] > found["untrained weights, 5 shots"]
    assert found["iMAML (F2SA), 1 shot"] > found["untrained weights, 1 shot"]
