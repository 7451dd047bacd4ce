"""Run one contestant in this process and write down how far it was when.

    python -m benchmarks.peers.starter MODULE TASK_FOLDER OUT_FOLDER SECONDS KEEP SETTINGS

A contestant is a module with one function,

    solve(task, *, seed, **settings) -> iterator of arrays (n,)

which yields the weights of the samples after each chunk of steps, for as long as it is asked. The
clock runs only while it works: from after the imports on, so that compilation counts, but not while
its weights are saved.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.task import Task

SPACING = 1.05
"""Weights are kept whenever the time has grown by this factor."""

AT_LEAST = 30
"""Chunks of a run that is to be timed, for what one usually costs."""

Weights = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Kept:
    """Weights that were kept.

    Attributes:
        chunk: after how many chunks.
        cpu, wall: seconds until then, of the processor and of the clock on the wall.
    """

    chunk: int
    cpu: float
    wall: float

    def file(self, folder: Path) -> Path:
        """Where the weights lie."""
        return folder / f"{self.chunk}.npy"


@dataclass(frozen=True)
class Log:
    """What a contestant did.

    Attributes:
        chunks: seconds of the processor for each chunk.
        kept: of which chunks the weights were kept.
    """

    chunks: list[float]
    kept: list[Kept]

    def save(self, folder: Path) -> None:
        """Beside the weights."""
        (folder / "log.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Log:
        """What :meth:`save` saved."""
        found = json.loads((folder / "log.json").read_text())
        return cls(found["chunks"], [Kept(**kept) for kept in found["kept"]])


def follow(
    start: Callable[[], Iterator[Weights]],
    seconds: float,
    folder: Path,
    keep: Collection[int] = (),
    *,
    cpu: Callable[[], float] = time.process_time,
    wall: Callable[[], float] = time.perf_counter,
) -> Log:
    """Let a contestant go on for so many seconds of the processor; keep weights on the way.

    Args:
        start: gives the contestant's weights one after another; the clock runs from its call on.
        seconds: when to stop; at least one chunk is waited for.
        folder: where the weights are kept.
        keep: after which chunks, and to go on no longer than that takes; else whenever the time has
            grown by :data:`SPACING`.
        cpu, wall: the clocks.
    """
    log = Log([], [])
    spent = spent_wall = due = 0.0
    began, began_wall = cpu(), wall()
    for chunk, weights in enumerate(start(), 1):
        passed, passed_wall = cpu() - began, wall() - began_wall
        spent, spent_wall = spent + passed, spent_wall + passed_wall
        log.chunks.append(passed)
        # the first chunk may have compiled, which must not make the spacing wide
        steady = spent - log.chunks[0]
        over = spent >= seconds or (bool(keep) and chunk >= max(AT_LEAST, *keep))
        grown = chunk == 1 or steady >= due or over
        if chunk in keep if keep else grown:
            due = SPACING * steady
            log.kept.append(Kept(chunk, spent, spent_wall))
            np.save(log.kept[-1].file(folder), weights)
        if over:
            break
        began, began_wall = cpu(), wall()
    return log


def main() -> None:
    """What the command line asks for."""
    module, task_folder, out_folder, seconds, keep, settings = sys.argv[1:]
    solve: Any = importlib.import_module(f"benchmarks.peers.contestants.{module}").solve
    task, out = Task.load(Path(task_folder)), Path(out_folder)
    log = follow(lambda: solve(task, **json.loads(settings)), float(seconds), out, json.loads(keep))
    log.save(out)


if __name__ == "__main__":
    main()
