"""``python -m benchmarks kill-resume`` in small, without what takes a compiler."""

from __future__ import annotations

import random
from itertools import cycle, islice
from pathlib import Path

import pytest

from benchmarks import kill_resume
from benchmarks.kill_resume import DAMAGES, TASKS, Killer, Row
from bilevel.methods import METHODS

INTERPRETED = [name for name in TASKS if name != "compiled"]


def test_every_method_is_killed() -> None:
    assert set(METHODS) <= set(INTERPRETED)


@pytest.mark.slow
def test_twenty_killed_runs_end_with_the_same_bits(tmp_path: Path) -> None:
    killer = Killer(steps=10, seed=0, folder=tmp_path)
    for name in islice(cycle(INTERPRETED), 20):
        same, kills, *_ = killer.kill_and_resume(name)
        assert same, name
        assert kills >= 1


@pytest.mark.slow
def test_another_run_has_other_bits(tmp_path: Path) -> None:
    longer, shorter = (Killer(steps=n, seed=0, folder=tmp_path / str(n)) for n in (2, 3))
    assert longer.expected("f2sa") != shorter.expected("f2sa")
    assert longer.expected("f2sa") != longer.expected("soba")


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_changes_a_file(kind: str, tmp_path: Path) -> None:
    rows = kill_resume.refusals(len(DAMAGES), 0, tmp_path)
    assert all(row.held == row.tried == 1 for row in rows)
    sound = (tmp_path / "sound.safetensors").read_bytes()
    for seed in range(20):
        assert kill_resume.damage(sound, kind, random.Random(seed)) != sound


def test_the_table_has_a_line_for_each_row_and_two_sums() -> None:
    rows = [Row("killed", "f2sa", 3, 3, 4, 2), Row("damaged", "cut short", 5, 5)]
    assert kill_resume.table(rows).row_count == 4
