"""``python -m benchmarks scale`` on small problems: every size has its figures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

import bilevel
from benchmarks import scale
from benchmarks.commands import app
from benchmarks.overhead.task import Task
from bilevel.errors import ArgumentError
from bilevel.run import Solver


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "BASE", scale.Sizes(d=4, n=60, T=2, batch=2))
    monkeypatch.setattr(scale, "FACTORS", (0.5, 1.0, 1.5))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_command_varies_one_size_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    command = ["scale", "--repeats", "2", "--no-compiled", "--json", str(file)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text())
    wanted = {"compiled": False, "repeats": 2, "device": "cpu", "seed": 0}
    assert figures["options"] == wanted
    assert figures["machine"]["threads"] == 1
    rows = figures["rows"]
    assert [(row["varied"], row["size"]) for row in rows] == [
        *(("d", size) for size in (2, 4, 6)),
        *(("n", size) for size in (30, 60, 90)),
        *(("T", size) for size in (1, 2, 3)),
        *(("batch", size) for size in (1, 2, 3)),
    ]
    assert {row["way"] for row in rows} == {"eager"}
    assert [row["outer_ratio"] for row in rows][1::3] == [1.0] * 4
    for row in rows:
        assert row["outer_seconds"] > 0
        assert math.isfinite(row["inner_ratio"])
    assert "n = 60" in result.stdout


@pytest.mark.usefixtures("small")
def test_compiled_steps_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    solver = Task.solver

    def not_compiled(task: Task, *, compile: bool) -> Solver:
        asked.append(compile)
        return solver(task, compile=False)  # how long it takes to compile is not of interest here

    monkeypatch.setattr(Task, "solver", not_compiled)
    monkeypatch.setattr(scale, "FACTORS", (1.0,))
    monkeypatch.setattr(scale, "VARIED", ("batch",))
    rows = scale.run(steps=1, repeats=1)
    assert [(row.way, row.size, row.outer_ratio) for row in rows] == [
        ("eager", 2, 1.0),
        ("compiled", 2, 1.0),
    ]
    assert asked == [False, False, True, True]
    assert scale.table(rows).row_count == 2


@pytest.mark.usefixtures("small")
def test_an_inner_step_is_the_difference_of_two_outer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(point: object, solver: Solver, steps: int) -> float:
        problem, method = solver.problem, solver.method
        assert isinstance(problem, bilevel.problems.HyperCleaning)
        assert isinstance(method, bilevel.F2SA)
        return len(problem.x0) + 7.0 * method.inner_steps

    monkeypatch.setattr(scale._Point, "_seconds", seconds)
    rows = scale.run(compiled=False, repeats=1)
    assert [row.inner_seconds for row in rows] == [7.0] * 12
    assert [row.inner_ratio for row in rows] == [1.0] * 12
    outer = {(row.varied, row.size): (row.outer_seconds, row.outer_ratio) for row in rows}
    assert outer["n", 90] == (104.0, 104 / 74)
    assert outer["T", 3] == (81.0, 81 / 74)


@pytest.mark.parametrize("name", ["steps", "repeats"])
def test_what_cannot_be_measured_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        scale.run(**{name: 0})
