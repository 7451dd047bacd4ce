"""Checkpoints of several ranks with right checksums and wrong values: refused, or run, on all."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import bilevel
from bilevel.errors import BilevelError
from bilevel.run.checkpoint import read, write
from tests.engine.ranks import tasks
from tests.engine.ranks.ranks import Ranks
from tests.run.checkpoint.test_forged import forgeries

DOUBLE = torch.float64
RUN = "run.safetensors"


def _run(folder: Path, steps: int) -> bilevel.Result:
    data = tasks.samples(1, DOUBLE)
    return bilevel.minimize(
        bilevel.Problem(tasks.upper, tasks.lower),
        torch.zeros(tasks.SAMPLES, dtype=DOUBLE),
        torch.zeros(3, dtype=DOUBLE),
        upper_data=data,
        lower_data=data,
        batch_size=4,
        method=bilevel.F2SA(lower_lr=0.1, upper_lr=0.5, inner_steps=1),
        on_divergence="backtrack",
        steps=steps,
        checkpoint=bilevel.Checkpoint(folder, keep=1),
    )


def _save(rank: int, folder: Path) -> None:
    _run(folder, 3)


def _go_on(rank: int, folders: list[Path]) -> list[tuple[str, str]]:
    """How the run of each folder goes on: "" where it does, and the name of an error where not."""
    found = []
    for folder in folders:
        begun = time.monotonic()
        try:
            _run(folder, 4)
        except BilevelError as error:
            found.append((type(error).__name__, str(error)))
        except Exception as error:
            found.append((f"unknown {type(error).__name__}", str(error)))
        else:
            found.append(("", ""))
        if time.monotonic() - begun > 60:  # the ranks wait for each other: no sense in the rest
            break
    return found


def _forged_files(good: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """What was forged, in which file, and what is in that file instead."""
    made: list[tuple[str, str, dict[str, Any]]] = []
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        for path, bad, forged in forgeries(read(good / name), lambda _: False, every=7):
            made.append((f"{path} = {bad!r}", name, forged))
    index = read(good / RUN)
    for path, bad, forged in forgeries(index, lambda path: path == ("content",), every=13):
        made.append((f"{path} = {bad!r}", RUN, forged))
    content = json.loads(index["content"])
    for path, bad, forged in forgeries(content, lambda _: False, every=31):
        try:
            text = json.dumps(forged)
        except TypeError:  # a tensor is none of the values of JSON
            continue
        made.append((f"content {path} = {bad!r}", RUN, {**index, "content": text}))
    return made


@pytest.mark.slow
def test_forged_checkpoints_are_refused_or_run_on_every_rank(two: Ranks, tmp_path: Path) -> None:
    two.run(_save, tmp_path / "good")
    (good,) = (tmp_path / "good").glob("step-*3")
    forged, folders = _forged_files(good), []
    for number, (_, name, content) in enumerate(forged):
        folder = tmp_path / str(number)
        shutil.copytree(good, folder / good.name)
        write(folder / good.name / name, content)
        folders.append(folder)
    first, second = two.run(_go_on, folders)
    refused = 0
    for (what, name, _), mine, others in zip(forged, first, second, strict=True):
        assert "unknown" not in mine[0] + others[0], (what, name, mine, others)
        assert bool(mine[0]) == bool(others[0]), (what, name, mine, others)
        refused += bool(mine[0])
    assert refused > 100
