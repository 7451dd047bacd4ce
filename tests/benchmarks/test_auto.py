"""``python -m benchmarks auto``: what it compares, and what counts as passed."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import auto
from benchmarks.commands import app


def _small() -> auto.Task:
    task = auto.quadratic(10.0, seed=0)
    return dataclasses.replace(
        task, lower_lrs=(1.0,), upper_lrs=(0.01, 0.5, 1e3), multipliers=(100.0,), steps=20
    )


def test_the_tuned_run_is_the_best_of_the_grid_and_survives_settings_that_diverge() -> None:
    task = _small()
    tuned = auto.tune(task)
    assert tuned.settings == {"lower_lr": 1.0, "upper_lr": 0.5, "multiplier": 100.0}
    assert tuned.tried == 3
    assert tuned.evaluations == 20 * 33  # T = 10: 11 of f and 22 of g in each step
    problem: Any = task.problem
    assert (
        0.9
        < tuned.decrease / float(problem.value(problem.x0) - problem.value(problem.solution))
        <= 1
    )


def test_nothing_set_passes_in_any_units() -> None:
    task = _small()
    tuned = auto.tune(task)
    for scales in (auto.UNSCALED, (1e3, 1e-3, 1e-3, 1e3)):
        row = auto.measure(task, tuned, scales)
        assert row.passed
        assert row.scales == scales
        assert row.highest >= 0.9


def test_what_does_not_get_there_has_not_passed() -> None:
    task = _small()
    tuned = dataclasses.replace(auto.tune(task), decrease=1e3)
    row = auto.measure(task, tuned)
    assert math.isinf(row.reached)
    assert not row.passed
    assert not row.diverged
    uphill = auto.measure(task, dataclasses.replace(tuned, decrease=-1.0, evaluations=33))
    assert uphill.last <= 0


def test_scales_are_each_alone_and_all_together() -> None:
    assert len(auto.SCALES) == len(set(auto.SCALES)) == 1 + 8 + 16


def test_the_command_prints_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = _small()
    monkeypatch.setattr(auto, "quadratic", lambda condition, seed: task)
    monkeypatch.setattr(auto, "logistic", lambda seed, batch_size: task)
    run = auto.run
    monkeypatch.setattr(
        auto,
        "run",
        lambda **options: run(conditions=(10.0,), scales=(auto.UNSCALED,), **options),
    )
    file = tmp_path / "auto.json"
    result = CliRunner().invoke(
        app, ["auto", "--no-mnist", "--data-dir", str(tmp_path), "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    assert "3/3" in result.output  # tasks of one name are one line
    figures = json.loads(file.read_text())
    assert len(figures["rows"]) == 3
    assert figures["rows"][0]["reached"] < 3
    assert figures["options"] == {"seed": 0, "mnist": False}  # where the data lie is private
    assert figures["machine"]["torch"] == torch.__version__
