"""``python -m benchmarks episodes``: what it measures and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import episodes
from benchmarks.commands import app
from bilevel.errors import ArgumentError


def test_every_way_is_measured_with_one_thread_and_with_all(tmp_path: Path) -> None:
    file, before = tmp_path / "episodes.json", torch.get_num_threads()
    command = ["episodes", "--small", "--tasks", "2", "--repeats", "1", "--json", str(file)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert torch.get_num_threads() == before
    rows = json.loads(file.read_text())["rows"]
    counts = sorted({1, before})
    assert [(row["way"], row["threads"]) for row in rows] == [
        (way, count) for way in episodes.METHODS for count in counts
    ]
    for row in rows:
        assert (row["layers"], row["channels"], row["side"], row["shots"]) == ("strided", 16, 14, 1)
        assert row["ratio"] == pytest.approx(row["many_ms"] / row["one_ms"])


@pytest.mark.parametrize("name", ["tasks", "repeats"])
def test_what_cannot_be_measured_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        episodes.run(**{name: 0})
