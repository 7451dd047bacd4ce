"""The recipes for other people's training loops run, and what they train gets better."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"

# what these packages warn of among themselves is not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def example(name: str, *needs: str) -> Any:
    for package in needs:
        pytest.importorskip(package)
    return importlib.import_module(name)


def assert_better(history: list[float], solver: Any) -> None:
    """The target loss fell, and what taught nothing lost its weight."""
    assert sum(history[-3:]) < 0.95 * sum(history[:3])
    assert torch.softmax(solver.x, 0)[0] > 0.7


def test_accelerate(tmp_path: Path) -> None:
    train = example("accelerate_loop", "accelerate", "transformers").train
    history, solver = train(60, tmp_path / "state")
    assert_better(history, solver)
    # saved at step 50, so ten are left; Accelerate restores what its loaders draw with
    rest, again = train(60, tmp_path / "state")
    assert len(rest) == 10
    assert torch.equal(again.x, solver.x)
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(again.y.parameters(), solver.y.parameters(), strict=True)
    )


def test_huggingface_trainer() -> None:
    history, trainer = example("huggingface_trainer", "accelerate", "transformers").train(60)
    assert len(history) == 6
    assert_better(history, trainer.solver)
    saved, solved = trainer.model.state_dict(), trainer.solver.y.state_dict()
    assert all(torch.equal(saved[name], solved[name]) for name in solved)


def test_lightning(tmp_path: Path) -> None:
    train = example("lightning_module", "lightning").train
    begun = train(3, tmp_path, until=1)
    assert begun.solver.k == 32
    mixture = train(3, tmp_path)
    assert mixture.solver.k == 96
    assert len(mixture.found) == 64
    assert_better([*begun.found, *mixture.found], mixture.solver)
