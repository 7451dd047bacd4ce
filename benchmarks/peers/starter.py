"""Run one contestant in this process; save its weights and the times at which it had them.

    python -m benchmarks.peers.starter MODULE TASK_FOLDER OUT_FOLDER SECONDS KEEP SETTINGS

A contestant is a module with one function,

    solve(task, *, seed, **settings) -> iterator of arrays (n,)

which yields the weights of the samples after each chunk of steps, as long as it is iterated. The
clock starts after the imports, so that compilation counts, and stops while weights are saved.
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
"""Weights are saved whenever the time has grown by this factor."""

AT_LEAST = 30
"""The least number of chunks of a run that is timed again, for the usual time of a chunk."""

Weights = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Kept:
    """Weights that were saved.

    Attributes:
        chunk: the number of chunks before they were saved.
        cpu, wall: the processor seconds and the elapsed seconds until then.
    """

    chunk: int
    cpu: float
    wall: float

    def file(self, folder: Path) -> Path:
        """Return the file of the weights."""
        return folder / f"{self.chunk}.npy"


@dataclass(frozen=True)
class Log:
    """The times of a contestant.

    Attributes:
        chunks: the processor seconds of each chunk.
        kept: the chunks after which the weights were saved.
    """

    chunks: list[float]
    kept: list[Kept]

    def save(self, folder: Path) -> None:
        """Save the log beside the weights."""
        (folder / "log.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Log:
        """Load what :meth:`save` saved."""
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
    """Run a contestant for a number of processor seconds and save weights on the way.

    Args:
        start: starts the contestant and returns an iterator of its weights; the clock starts when
            it is called.
        seconds: the processor seconds; at least one chunk is run.
        folder: the folder for the weights.
        keep: the chunks after which weights are saved, the last of which ends the run; if empty,
            weights are saved whenever the time has grown by :data:`SPACING`.
        cpu, wall: the clocks.
    """
    log = Log([], [])
    spent = spent_wall = due = 0.0
    began, began_wall = cpu(), wall()
    for chunk, weights in enumerate(start(), 1):
        passed, passed_wall = cpu() - began, wall() - began_wall
        spent, spent_wall = spent + passed, spent_wall + passed_wall
        log.chunks.append(passed)
        # The first chunk may include compilation, which must not widen the spacing.
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
    """Run the contestant that the command line names."""
    module, task_folder, out_folder, seconds, keep, settings = sys.argv[1:]
    solve: Any = importlib.import_module(f"benchmarks.peers.contestants.{module}").solve
    task, out = Task.load(Path(task_folder)), Path(out_folder)
    log = follow(lambda: solve(task, **json.loads(settings)), float(seconds), out, json.loads(keep))
    log.save(out)


if __name__ == "__main__":
    main()
