"""Cleaning that was stopped goes on and finds the same."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import bilevel
from bilevel.cleaning import checkpoint, weights
from bilevel.cleaning.checkpoint import SearchCheckpoint
from bilevel.cli.app import app
from bilevel.errors import CheckpointError, InterruptedRunError
from tests.cleaning.files import Animals

rng = np.random.default_rng(0)
X = rng.normal(size=(120, 3))
TRUE = (X[:, 0] > 0).astype(int)
GIVEN = np.where(rng.random(120) < 0.3, 1 - TRUE, TRUE)


def fit(folder: Path | None, **options: Any) -> bilevel.LabelCleaner:
    cleaner = bilevel.LabelCleaner(max_steps=8, batch_size=20, checkpoint=folder, **options)
    return cleaner.fit(X[40:], GIVEN[40:], X_clean=X[:40], y_clean=TRUE[:40])


class Stopped(Exception):  # noqa: N818
    """As if the machine had gone down."""


def stop_after(saves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, seen = SearchCheckpoint.save, []

    def save(self: SearchCheckpoint, *arguments: Any) -> None:
        honest(self, *arguments)
        seen.append(1)
        if len(seen) == saves:
            raise Stopped

    monkeypatch.setattr(SearchCheckpoint, "save", save)


def test_what_is_interrupted_is_not_taken_for_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = bilevel.minimize

    def interrupted(*arguments: Any, callback: Any, **options: Any) -> bilevel.Result:
        def interrupt(solver: bilevel.Solver, info: Any) -> bool | None:
            if info.step == 1:
                signal.raise_signal(signal.SIGTERM)
            told: bool | None = callback(solver, info)
            return told

        return honest(*arguments, callback=interrupt, **options)

    with monkeypatch.context() as patch:
        patch.setattr(weights, "minimize", interrupted)
        with pytest.raises(InterruptedRunError, match="interrupted after 2 steps"):
            fit(tmp_path)
    assert np.array_equal(fit(tmp_path).sample_weight_, fit(None).sample_weight_)


@pytest.mark.slow
@pytest.mark.parametrize("saves", [1, 3])
@pytest.mark.parametrize("every", [0.0, 1e9])
@pytest.mark.parametrize("patience", [2, 8])
def test_goes_on_to_the_same(
    saves: int, every: float, patience: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit(None, patience=patience)
    usual = bilevel.Checkpoint
    monkeypatch.setattr(checkpoint, "Checkpoint", lambda folder, **_: usual(folder, 1, every))
    with monkeypatch.context() as patch:
        stop_after(saves, patch)
        with pytest.raises(Stopped):
            fit(tmp_path, patience=patience)
    for again in (fit(tmp_path, patience=patience), fit(tmp_path, patience=patience)):
        assert np.array_equal(again.sample_weight_, whole.sample_weight_)
        assert np.array_equal(again.label_quality_, whole.label_quality_)
        assert np.array_equal(again.history_["held_back"], whole.history_["held_back"])
        assert again.settings_ == whole.settings_
        for name, part in again._model.items():
            assert torch.equal(part, whole._model[name])


def test_other_samples_are_refused(tmp_path: Path) -> None:
    fit(tmp_path)
    other = bilevel.LabelCleaner(max_steps=8, batch_size=20, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="was refused"):
        other.fit(X[40:] * 2 + 1, 1 - GIVEN[40:], X_clean=X[:40], y_clean=TRUE[:40])


def test_losses_that_are_none_are_refused(tmp_path: Path) -> None:
    fit(tmp_path)
    (tmp_path / "losses.json").write_text(json.dumps({"losses": ["a"]}))
    with pytest.raises(CheckpointError, match="does not hold losses"):
        fit(tmp_path)


@pytest.mark.slow
def test_the_command_goes_on(tmp_path: Path) -> None:
    paths = Animals().write_csv(tmp_path)

    def command(out: str, *more: str) -> Any:
        arguments = ["clean", str(paths["train"]), "--trusted", str(paths["trusted"])]
        arguments += ["--label", "label", "--out", str(tmp_path / out), *more]
        return CliRunner().invoke(app, arguments)

    kept = ("--checkpoint", str(tmp_path / "kept"))
    for out, more in (("plain", ()), ("first", kept), ("again", (*kept, "--resume"))):
        done = command(out, *more)
        assert done.exit_code == 0, done.output
    tables = [(tmp_path / out / "labels.csv").read_text() for out in ("plain", "first", "again")]
    assert tables[0] == tables[1] == tables[2]
    assert command("more", *kept).exit_code == 1
    other = command("more", *kept, "--resume", "--seed", "1")
    assert "seed is 0 there and 1 here" in " ".join(other.output.split())
    assert "--resume needs --checkpoint" in " ".join(command("more", "--resume").output.split())
