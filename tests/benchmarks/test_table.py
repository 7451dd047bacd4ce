"""``python -m benchmarks table`` on small problems: every size has its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import table
from benchmarks.commands import app
from bilevel.errors import ArgumentError


@pytest.mark.slow
def test_the_command_measures_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "TENSOR_LIMIT", 10_000)
    file = tmp_path / "table.json"
    result = CliRunner().invoke(
        app, ["table", "--largest", "100000", "--repeats", "2", "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text())
    assert figures["options"] == {"largest": 100_000, "repeats": 2, "device": "cpu", "seed": 0}
    rows = figures["rows"]
    assert [(row["batch"], row["kind"], row["rows"]) for row in rows] == [
        (batch, kind, count)
        for batch in (50, 500)
        for kind, count in (("table", 10_000), ("table", 100_000), ("tensor", 10_000))
    ]
    assert all(row["seconds"] > 0 for row in rows)
    assert [row["ratio"] for row in rows if row["rows"] == 10_000] == [1.0] * 4
    assert "100,000" in result.stdout


def test_memory_that_is_not_known_is_not_shown() -> None:
    rows = [
        table.Row(5, "table", 10, 0.1, 1.0, 2_500_000),
        table.Row(5, "table", 10, 0.1, 1.0, None),
    ]
    assert list(table.table(rows).columns[-1].cells) == ["2.5", "-"]


@pytest.mark.parametrize("options", [{"largest": 9_999}, {"steps": 0}, {"repeats": 0}])
def test_what_cannot_be_measured_is_refused(options: dict[str, int]) -> None:
    (name,) = options
    with pytest.raises(ArgumentError, match=name):
        table.run(**options)
