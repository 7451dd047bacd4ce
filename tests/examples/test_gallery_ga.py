"""The gallery's examples on handwritten digits run at a small size, and bilevel is ahead."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def example(name: str) -> Any:
    return importlib.import_module(f"gallery.{name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "baselines"),
    [
        ("dataset_distillation", ["real images", "means of the classes"]),
        # 200 trusted digits of 8 x 8 pixels are enough to learn from; at full size they are not.
        ("meta_weight_net_noise", ["uniform weights", "uniform weights, trusted digits too"]),
        ("meta_weight_net_imbalance", ["uniform weights"]),
        ("architecture_weights", ["equal weights"]),
        ("learned_augmentation", ["one strength, by a grid"]),
    ],
)
def test_bilevel_is_ahead_of_its_baselines(name: str, baselines: list[str]) -> None:
    reached = example(name).compare(small=True)
    ours = next(iter(reached.values()))
    assert all(ours < reached[baseline] for baseline in baselines)


@pytest.mark.slow
def test_a_decay_for_each_width_is_about_as_good_as_one_where_all_widths_are_of_use() -> None:
    reached = example("weight_decay").compare(small=True)
    assert reached["a decay for each width"] < 1.2 * reached["one decay, by a grid"]
