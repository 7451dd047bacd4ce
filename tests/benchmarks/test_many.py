"""``python -m benchmarks many``: what it measures and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import many
from benchmarks.commands import app
from bilevel.errors import ArgumentError
from bilevel.run import minimize
from bilevel.run.many import minimize_many


@pytest.mark.slow
def test_the_command_measures_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "SAMPLES", 60)
    monkeypatch.setattr(many, "PIXELS", 5)
    file = tmp_path / "many.json"
    command = ["many", "--runs", "3", "--steps", "1", "--repeats", "2", "--threads", "1"]
    result = CliRunner().invoke(app, [*command, "--json", str(file)])
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text())
    wanted = {"runs": 3, "steps": 1, "repeats": 2, "device": "cpu", "seed": 0}
    assert figures["options"] == wanted
    assert figures["machine"]["threads"] == 1
    assert [row["runs"] for row in figures["rows"]] == [1, 2, 3]
    for row in figures["rows"]:
        assert min(row["loop_seconds"], row["many_seconds"], row["ratio"]) > 0
    assert "at once" in result.stdout


def test_both_ways_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "SAMPLES", 80)
    problem, start, options = many.cleaning("cpu", 0)
    results = minimize_many(problem, *start, methods=many.METHOD, seeds=2, steps=2, **options)
    for seed, result in enumerate(results):
        alone = minimize(problem, *start, method=many.METHOD, seed=seed, steps=2, **options)
        torch.testing.assert_close(result.x, alone.x)
        torch.testing.assert_close(result.y, alone.y)


@pytest.mark.parametrize("name", ["runs", "steps", "repeats"])
def test_what_cannot_be_measured_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        many.run(**{name: 0})
