"""``python -m benchmarks methods``: what it counts and writes, and methods that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import methods, report
from benchmarks.commands import app
from benchmarks.methods import Case
from bilevel.cli.experiments import torch_threads
from bilevel.methods import METHODS

BY_NAME = {case.name: case for case in methods.CASES}
ROOT = Path(__file__).parents[2]


def test_every_method_that_moves_x_is_measured() -> None:
    assert {case.name for case in methods.CASES} == set(METHODS) - {"no-bilevel"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "f", "g"),
    [("f2sa", 11, 22), ("soba", 1, 1), ("aid", 1, 12), ("sobo", 1, 41), ("itd", 1, 60)],
)
def test_counts_are_those_of_the_algorithm(name: str, f: int, g: int) -> None:
    row = methods.measure(BY_NAME[name], repeats=1)
    assert row.reached
    assert 0 < row.steps <= BY_NAME[name].steps
    assert (row.upper_evaluations, row.lower_evaluations) == (f * row.steps, g * row.steps)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({"upper_lr": 1e-6}, 10), ({"lower_lr": 1e3}, 5)],
    ids=["slow", "diverging"],
)
def test_a_method_that_does_not_get_there_is_a_row_too(
    settings: dict[str, float], steps: int
) -> None:
    row = methods.measure(Case("f2sa", settings, steps=5), repeats=1)
    assert not row.reached
    assert row.steps <= steps
    (line,) = [text for text in _lines(row) if "f2sa" in text]
    assert f"not in {row.steps}" in line


def _lines(*rows: methods.Row) -> list[str]:
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as capture:
        console.print(methods.table(rows))
    return capture.get().splitlines()


@pytest.mark.slow
def test_the_command_prints_one_table_and_writes_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "CASES", [BY_NAME["aid"], BY_NAME["f2sa"]])
    file = tmp_path / "deep" / "methods.json"
    before = torch.get_num_threads()
    result = CliRunner().invoke(
        app, ["methods", "--seed", "1", "--repeats", "1", "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    assert torch.get_num_threads() == before
    figures = json.loads(file.read_text())
    assert figures["options"] == {"seed": 1, "repeats": 1}
    machine = figures["machine"]
    assert machine["torch"] == torch.__version__
    assert machine["threads"] == 1
    assert machine["cores"] >= 1
    assert machine["processor"].endswith(torch.backends.cpu.get_cpu_capability())
    assert machine["platform"].split()[0] in result.stdout
    assert [row["method"] for row in figures["rows"]] == ["aid", "f2sa"]
    for row in figures["rows"]:
        assert row["seconds"] > 0
        (line,) = [text for text in result.stdout.splitlines() if f"│ {row['method']} " in text]
        assert f" {row['steps']} " in line
        assert f" {row['lower_evaluations']:,} " in line


@pytest.mark.slow
def test_the_seed_is_of_the_quadratic() -> None:
    steps = [methods.measure(BY_NAME["soba"], seed=seed, repeats=1).steps for seed in (0, 0, 1)]
    assert steps[0] == steps[1] != steps[2]


@pytest.mark.slow  # an interpreter of its own
def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "benchmarks", "methods", "--repeats", "0"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 2
    assert "--repeats" in run.stderr


def test_threads_are_given_back_after_an_error() -> None:
    before = torch.get_num_threads()
    with suppress(KeyError), torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before


def test_numbers_go_right_and_text_goes_left() -> None:
    table = report.table("", [(1, "a"), (20_000, "b")], {"n": lambda r: r[0], "t": lambda r: r[1]})
    assert [column.justify for column in table.columns] == ["right", "left"]
    assert list(table.columns[0].cells) == ["1", "20,000"]
