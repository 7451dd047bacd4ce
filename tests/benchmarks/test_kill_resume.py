"""``python -m benchmarks kill-resume`` in small."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from itertools import cycle, islice
from pathlib import Path

import pytest

from benchmarks import kill_resume
from benchmarks.kill_resume import DAMAGES, TASKS, Killer, Row
from bilevel.engine.dispatch import OLDEST_TORCH
from bilevel.errors.extras import torch_version
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


COMPILING = """
import sys

def tell(event, arguments):
    # Python's own hook for what a process starts: here the compiler of C++, with its source
    if event == "subprocess.Popen" and ".cpp" in str(arguments[1]):
        print("compiling", flush=True)

sys.addaudithook(tell)
from benchmarks.kill_resume.killing import run_to_end
run_to_end("compiled", 4, *sys.argv[1:])
"""
"""A run that says on its standard output whenever it starts the compiler."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.skipif(torch_version() < OLDEST_TORCH, reason="nothing is compiled")
def test_a_run_that_is_killed_while_it_compiles_ends_with_the_same_bits(tmp_path: Path) -> None:
    def started(folder: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", COMPILING, str(folder), f"{folder}.digest"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with started(whole) as run:
        said, _ = run.communicate()
    assert run.returncode == 0
    assert "compiling" in said
    for _ in range(2):  # the second one finds what the first had compiled by half
        with started(killed) as run:
            assert run.stdout is not None
            assert run.stdout.readline() == "compiling\n"
            run.kill()
        assert run.returncode == -signal.SIGKILL
        assert [path.stem for path in killed.glob("step-*")] == [f"step-{0:012d}"]
    with started(killed) as run:
        run.communicate()
    assert run.returncode == 0
    digests = [Path(f"{folder}.digest").read_text() for folder in (whole, killed)]
    assert digests[0] == digests[1]


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
