"""What a long command keeps: done once, whole or not at all, and never of another command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bilevel.cli.app import app
from bilevel.cli.experiments import rates
from bilevel.cli.experiments.cleaning.runs import Point, Run
from bilevel.cli.experiments.ledger import OPTIONS, Ledger
from bilevel.errors import ArgumentError, CheckpointError, OutputError

OF = {"command": "test", "seed": 3, "rate": 0.1}


def never() -> Any:
    raise AssertionError("it was there")


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    first = Ledger(tmp_path, OF)
    assert not first.has("a")
    assert first.part("a", lambda: [0.1, 1e-300, None, "text"]) == [0.1, 1e-300, None, "text"]
    again = Ledger(tmp_path, OF, resume=True)
    assert again.has("a")
    assert again.part("a", never) == [0.1, 1e-300, None, "text"]
    assert again.part("b", lambda: 2) == 2


def test_without_a_folder_nothing_is_kept() -> None:
    ledger = Ledger(None, OF)
    assert [ledger.part("a", lambda: 1), ledger.part("a", lambda: 2)] == [1, 2]
    with pytest.raises(ArgumentError, match="--resume needs --checkpoint"):
        Ledger(None, OF, resume=True)


def test_a_folder_with_something_in_it_needs_a_word(tmp_path: Path) -> None:
    Ledger(tmp_path, OF)
    with pytest.raises(ArgumentError, match="is not empty; give --resume"):
        Ledger(tmp_path, OF)


def test_parts_of_another_command_are_refused(tmp_path: Path) -> None:
    Ledger(tmp_path, OF)
    with pytest.raises(CheckpointError, match="another command: seed is 3 there and 4 here"):
        Ledger(tmp_path, {**OF, "seed": 4}, resume=True)


@pytest.mark.parametrize("damage", ["", "{}", "[]", "{", "3", None, "other"])
def test_damaged_parts_are_refused(damage: str | None, tmp_path: Path) -> None:
    Ledger(tmp_path, OF).part("a", lambda: {"x": 1})
    file = tmp_path / "a.json"
    if damage is None:
        file.write_bytes(b"\xff\xfe")
    elif damage == "other":
        found = json.loads(file.read_text())
        file.write_text(json.dumps({**found, "content": found["content"].replace("1", "2")}))
    else:
        file.write_text(damage)
    with pytest.raises(CheckpointError, match=r"a\.json' was refused"):
        Ledger(tmp_path, OF, resume=True).part("a", never)


def test_a_part_that_fails_leaves_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, OF)
    with pytest.raises(ZeroDivisionError):
        ledger.part("a", lambda: 1 / 0)
    with pytest.raises(TypeError):
        ledger.part("b", object)
    assert [path.name for path in tmp_path.iterdir()] == [OPTIONS]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be used as a folder"):
        Ledger(tmp_path / "file", OF)


def test_names_stay_in_the_folder(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "inside", OF)
    ledger.part("../../outside/p0.3 <b>", lambda: 1)
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert ledger.has("../../outside/p0.3 <b>")


def test_runs_come_back_as_they_were(tmp_path: Path) -> None:
    from dataclasses import asdict

    point = Point(3, 12.0, 0.1, 0.25, float("nan"), 0.9, 0.99)
    run = Run("F2SA", 0.3, 50, 1, {"lower_lr": 0.1}, [point, point], None)
    ledger = Ledger(tmp_path, OF)
    ledger.part("a", lambda: run, to_json=asdict, from_json=Run.from_json)
    assert repr(ledger.part("a", never, from_json=Run.from_json)) == repr(run)


@pytest.mark.slow
def test_the_command_goes_on(tmp_path: Path) -> None:
    def command(*more: str) -> Any:
        folder = tmp_path / "kept"
        arguments = ["reproduce", "rates", "--steps", "100", "--runs", "2", "--workers", "1"]
        arguments += ["--plot", str(tmp_path / "rates.png"), "--json", str(tmp_path / "rates.json")]
        return CliRunner().invoke(app, [*arguments, "--checkpoint", str(folder), *more])

    first = command()
    assert first.exit_code == 0, first.output
    figures = (tmp_path / "rates.json").read_text()
    kept = sorted((tmp_path / "kept").glob("f*.json"))
    assert len(kept) == rates.CURVES
    assert command().exit_code == 1  # not without --resume
    kept[0].unlink()  # as if it had been stopped there
    times = {path: path.stat().st_mtime_ns for path in kept[1:]}
    again = command("--resume")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "rates.json").read_text() == figures
    assert {path: path.stat().st_mtime_ns for path in kept[1:]} == times
    other = command("--resume", "--seed", "1")
    assert other.exit_code == 1
    assert "seed is 0 there and 1 here" in " ".join(other.output.split())


def test_curves_come_back_as_they_were() -> None:
    curve = rates.Curve(np.array([1.0, 2.0]), np.array([0.1, 1 / 3]), -0.5)
    found = rates.Curve.from_json(json.loads(json.dumps(curve.to_json())))
    assert repr(found) == repr(curve)
