"""Autocast around a whole run: it keeps casts of parameters, which must not outlive a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bilevel
from bilevel import AID, F2SA


def upper(x: Tensor, y: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = ((y(batch) - 1) ** 2).mean()
    return loss


def lower(x: Tensor, y: nn.Module, batch: Tensor) -> Tensor:
    ridge = sum((p**2).sum() for p in y.parameters())
    loss: Tensor = ((y(batch) - x) ** 2).mean() + 0.1 * ridge
    return loss


def run(method: Any, *, cache_enabled: bool) -> bilevel.Result:
    torch.manual_seed(0)
    net, rows = nn.Linear(4, 3), torch.randn(20, 4)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
        return bilevel.minimize(
            bilevel.Problem(upper, lower), torch.zeros(3), net,
            method=method, upper_data=rows, lower_data=rows, steps=20,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("method", [F2SA(0.3, 0.3), F2SA(), AID(0.3, 0.3)], ids=str)
def test_steps_see_the_parameters_as_they_are(method: Any) -> None:
    kept, fresh = (run(method, cache_enabled=c) for c in (True, False))
    assert torch.equal(kept.x, fresh.x)
    assert kept.history["upper"][-1] == fresh.history["upper"][-1]
    assert fresh.history["upper"][-1] < 0.5 * fresh.history["upper"][0]


def test_labels_are_cleaned_in_full_precision() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 2, 120)
    rows = rng.normal(size=(120, 3)) + 3 * np.eye(2, 3)[truth]
    given = np.where(rng.random(120) < 0.2, 1 - truth, truth)
    known = bilevel.LabelCleaner(max_steps=2).fit(rows, given, trusted=np.arange(20))
    with torch.autocast("cpu", torch.bfloat16):
        found = bilevel.LabelCleaner(max_steps=2).fit(rows, given, trusted=np.arange(20))
        probabilities = found.predict_proba(rows)
    assert np.array_equal(found.label_quality_, known.label_quality_)
    assert np.array_equal(probabilities, known.predict_proba(rows))
