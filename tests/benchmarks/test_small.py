"""``bilevel bench lm`` and ``bench cleaning`` in small."""

from __future__ import annotations

import math

import pytest
import torch

from bilevel.benchmarks import cleaning, lm
from bilevel.data import Mnist


@pytest.mark.filterwarnings("ignore:.*CPU autocast.*:UserWarning")
def test_a_language_models_step_beside_a_plain_one() -> None:
    size = lm.Size(layers=1, width=16, heads=2, vocabulary=32, context=8, batch=4)
    rows = lm.run(size=size, device="cpu", compiled=False, steps=1, repeats=1)
    assert rows[0].ratio == 1
    assert len({row.parameters for row in rows}) == 1
    assert all(row.milliseconds > 0 and math.isnan(row.gigabytes) for row in rows)
    assert lm.table(rows).row_count == 4


def test_wrong_labels_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (700,), generator=generator)
    images = torch.randint(60, (700, 4, 5), generator=generator).to(torch.uint8)
    images.view(700, 20)[torch.arange(700), labels] += 150
    made = Mnist(images[:600], labels[:600], images[600:], labels[600:])
    monkeypatch.setattr(cleaning, "mnist", lambda data_dir: made)
    monkeypatch.setattr(cleaning, "TRAIN", 480)
    monkeypatch.setattr(cleaning, "TRUSTED", 120)
    monkeypatch.setattr(cleaning, "NOISES", (("uniform", 0.2), ("next class", 0.3)))
    rows = cleaning.run()
    assert [row.noise for row in rows] == ["uniform", "next class"]
    for row in rows:
        assert row.auc > 0.9
        assert row.accuracy > 0.9
    assert cleaning.table(rows).row_count == 2
