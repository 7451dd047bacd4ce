"""Seconds until the upper loss of hyper-cleaning is near its best, for this library and others.

The data are 19,000 training samples of MNIST, a part of them with wrong labels, and 1,000 trusted
samples. The weights that a contestant found are evaluated by F(x) = f(x, y*(x)) at the exact lower
solution, never by its own estimate; gap = (F - F_best) / (F_none - F_best), where F_none belongs to
all weights 1, without bilevel optimization. The evaluations are not timed.

Every contestant runs alone, in its own process with one thread, once with each of its settings. The
settings that are best by seconds and by steady seconds are then run again, all contestants in
turns, and their times are medians, because the speed of a machine varies. Seconds are processor
time of all threads together: on an idle machine this is the elapsed time, and other programs change
it little. It starts after the imports and includes compilation. Steady seconds count the first
chunk of steps, which may include compilation, as long as a usual chunk.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from benchmarks import report
from benchmarks.peers import environment
from benchmarks.peers.lineup import LINEUP, Contestant, Settings
from benchmarks.peers.starter import Kept, Log
from benchmarks.peers.task import Task
from bilevel.cli.experiments.judge import BEST, TARGETS, Judge, crossings
from bilevel.errors import ArgumentError
from bilevel.errors.checks import check_count, checked_number
from bilevel.problems import HyperCleaning


@dataclass(frozen=True)
class Row:
    """One contestant with one of its settings.

    Attributes:
        contestant: the name of the contestant.
        own: whether the contestant is this library's.
        settings: the settings of the run.
        failure: the reason why it did not run; None if it did.
        seconds: the processor time until each of :data:`TARGETS`; None if it was not reached.
        steady: the same, with the first chunk counted as long as a usual one.
        wall: the elapsed time until each target.
        chunks: the number of chunks until each target.
        chunk: the processor time of a chunk, the median.
        gap: the gap at the end.
        runs: the number of runs; the times are their medians.
    """

    contestant: str
    own: bool
    settings: Settings
    failure: str | None = None
    seconds: tuple[float | None, ...] = (None,) * len(TARGETS)
    steady: tuple[float | None, ...] = (None,) * len(TARGETS)
    wall: tuple[float | None, ...] = (None,) * len(TARGETS)
    chunks: tuple[int | None, ...] = (None,) * len(TARGETS)
    chunk: float | None = None
    gap: float | None = None
    runs: int = 1


Read: TypeAlias = Callable[[Row], Sequence[float | None]]

KINDS: dict[str, Read] = {"s": lambda row: row.seconds, "steady s": lambda row: row.steady}
"""The times by which contestants are compared, under their headings in the table."""


def judged(contestant: Contestant, settings: Settings, folder: Path, judge: Judge) -> Row:
    """Evaluate a contestant that saved its log and its weights in the folder."""
    log = Log.load(folder)
    places = crossings(judge.gap(_weights(kept, folder)) for kept in log.kept)
    row = Row(
        contestant.name,
        contestant.own,
        settings,
        chunks=tuple(None if place is None else log.kept[place].chunk for place in places),
        gap=judge.gap(_weights(log.kept[-1], folder)),
    )
    return timed(row, log)


def timed(row: Row, log: Log) -> Row:
    """Return the row with the times of a run that takes the same steps."""
    usual = median(log.chunks[1:] or log.chunks)
    warm_up = max(0.0, log.chunks[0] - usual)
    by_chunk = {kept.chunk: kept for kept in log.kept}

    def at(read: Callable[[Kept], float]) -> tuple[float | None, ...]:
        found = (None if chunk is None else by_chunk.get(chunk) for chunk in row.chunks)
        return tuple(None if kept is None else read(kept) for kept in found)

    return replace(
        row,
        seconds=at(lambda kept: kept.cpu),
        steady=at(lambda kept: kept.cpu - warm_up),
        wall=at(lambda kept: kept.wall),
        chunk=usual,
    )


def _weights(kept: Kept, folder: Path) -> Tensor:
    return torch.from_numpy(np.load(kept.file(folder)))


@dataclass(frozen=True)
class Course:
    """Runs contestants under the same conditions.

    Attributes:
        where: the environment in which they run.
        task_folder: the folder of the saved task.
        seconds: the processor time of a run.
        seed: the seed of the batches.
        judge: evaluates the weights that they found.
    """

    where: environment.Environment
    task_folder: Path
    seconds: float
    seed: int
    judge: Judge

    def run(self, contestant: Contestant, settings: Settings) -> Row:
        """Run a contestant with one of its settings and evaluate its weights."""
        reason = self.where.reason(contestant.needs)
        if reason is not None:
            return Row(contestant.name, contestant.own, settings, failure=reason)
        with tempfile.TemporaryDirectory() as folder:
            reason = self._start(contestant, settings, Path(folder))
            if reason is not None:
                return Row(contestant.name, contestant.own, settings, failure=reason)
            return judged(contestant, settings, Path(folder), self.judge)

    def again(self, contestant: Contestant, row: Row) -> Row:
        """Repeat a run for its times; the time of a target that it now misses is None."""
        keep = sorted({chunk for chunk in row.chunks if chunk is not None})
        with tempfile.TemporaryDirectory() as folder:
            if self._start(contestant, row.settings, Path(folder), keep) is not None:
                return Row(row.contestant, row.own, row.settings)
            log = Log.load(Path(folder))
            # Several targets may share a chunk; the last of them is the hardest.
            hardest = dict(zip(row.chunks, TARGETS, strict=True))
            there = [
                kept
                for kept in log.kept
                if self.judge.gap(_weights(kept, Path(folder))) <= hardest[kept.chunk]
            ]
            return timed(row, replace(log, kept=there))

    def _start(
        self, contestant: Contestant, settings: Settings, folder: Path, keep: Sequence[int] = ()
    ) -> str | None:
        """Run a contestant in a process; return the reason if it failed, otherwise None."""
        done = subprocess.run(
            [
                self.where.python,
                *("-m", "benchmarks.peers.starter", contestant.module),
                *(self.task_folder, folder, str(self.seconds), json.dumps(keep)),
                json.dumps({"seed": self.seed, **settings}),
            ],
            env=self.where.variables,
            capture_output=True,
            text=True,
            check=False,
        )
        if not done.returncode:
            return None
        return (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]


def run(
    *,
    corruption: float = 0.3,
    seconds: float = 12.0,
    repeats: int = 5,
    seed: int = 0,
    data_dir: Path | None = None,
    track: report.Track = iter,
) -> list[Row]:
    """Run every contestant with every setting.

    Args:
        corruption: the fraction of labels that are wrong, one of :data:`BEST`.
        seconds: the processor time of each run.
        repeats: the number of runs of the best settings.
        seed: the seed of the batches; the data are those of seed 0.
        data_dir: the folder of MNIST, see :func:`bilevel.data.mnist`.
        track: wraps a sequence to show progress.
    """
    if corruption not in BEST:
        known = " or ".join(map(str, BEST))
        raise ArgumentError(
            f"corruption must be {known}, whose best upper loss is known, not {corruption!r}"
        )
    checked_number("seconds", seconds, above=True)
    check_count("repeats", repeats)
    problem = HyperCleaning.mnist(corruption, weights="box", data_dir=data_dir)
    judge = Judge(problem, BEST[corruption])
    where = environment.prepare()
    with tempfile.TemporaryDirectory() as folder:
        task_of(problem).save(Path(folder))
        course = Course(where, Path(folder), seconds, seed, judge)
        lineup = [(contestant, choice) for contestant in LINEUP for choice in contestant.settings]
        rows = [course.run(contestant, choice) for contestant, choice in track(lineup)]
        found: list[list[Row]] = [[row] for row in rows]
        best = [row for read in KINDS.values() for row in best_of(rows, read)]
        chosen = [place for place, row in enumerate(rows) if row in best and any(row.chunks)]
        for place in track(chosen * (repeats - 1)):
            found[place].append(course.again(lineup[place][0], rows[place]))
    return [medians(same) for same in found]


def medians(rows: Sequence[Row]) -> Row:
    """Combine runs that take the same steps; a target that was not reached counts as infinite."""

    def of(read: Read) -> tuple[float | None, ...]:
        times = zip(*map(read, rows), strict=True)
        found = (median(map(_or_infinite, time)) for time in times)
        return tuple(None if math.isinf(time) else time for time in found)

    usual = [row.chunk for row in rows if row.chunk is not None]
    return replace(
        rows[0],
        seconds=of(lambda row: row.seconds),
        steady=of(lambda row: row.steady),
        wall=of(lambda row: row.wall),
        chunk=median(usual) if usual else None,
        runs=len(rows),
    )


def task_of(problem: HyperCleaning) -> Task:
    """Convert the problem into the arrays that contestants are given."""
    features, labels, _ = problem.lower_data
    trusted_features, trusted_labels = problem.upper_data
    return Task(
        features.numpy(),
        labels.numpy(),
        trusted_features.numpy(),
        trusted_labels.numpy(),
        problem.classes,
        problem.ridge,
    )


def best_of(rows: Sequence[Row], read: Read) -> list[Row]:
    """Return the best setting of each contestant, in the order of the rows.

    Among the settings with the most runs it is the fastest to the hardest target that is reached;
    if none is reached, it is the one with the smallest gap at the end.
    """

    def rank(row: Row) -> tuple[float, ...]:
        return (-row.runs, *map(_or_infinite, reversed(read(row))), _or_infinite(row.gap))

    return [min(group, key=rank) for _, group in groupby(rows, key=lambda row: row.contestant)]


def table(rows: Sequence[Row]) -> Table:
    """Lay out the best setting of each contestant.

    "x" is the time to 2% as a multiple of this library's fastest. Steady seconds belong to the
    setting that is best by them; the setting that is named is the best by seconds.
    """
    columns: dict[str, Any] = {
        "contestant": lambda pair: pair[0].contestant,
        "best setting": lambda pair: pair[0].failure or _stated(pair[0].settings),
    }
    shown = list(zip(*(best_of(rows, read) for read in KINDS.values()), strict=True))
    for kind, (heading, read) in enumerate(KINDS.items()):
        for place, target in enumerate(TARGETS):
            columns[f"{target:.0%} {heading}"] = lambda pair, k=kind, r=read, p=place: _shown(
                r(pair[k])[p]
            )
        own = (read(pair[kind])[-1] for pair in shown if pair[kind].own)
        ours = min(map(_or_infinite, own), default=math.inf)
        columns[f"x {heading}"] = lambda pair, k=kind, r=read, o=ours: _shown(
            _over(r(pair[k])[-1], o)
        )
    columns["gap"] = lambda pair: "-" if pair[0].gap is None else f"{pair[0].gap:.1%}"
    return report.table(
        "seconds until the gap to the best upper loss is small",
        shown,
        columns,
    )


def _or_infinite(number: float | None) -> float:
    return math.inf if number is None else number


def _over(number: float | None, ours: float) -> float | None:
    return None if number is None or math.isinf(ours) else number / ours


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def _stated(settings: Settings) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
