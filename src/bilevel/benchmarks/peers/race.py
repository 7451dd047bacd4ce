"""Seconds until the upper loss of hyper-cleaning is near its best, ours and others'.

MNIST with 19,000 training samples, a part of them with wrong labels, and 1,000 trusted ones. What
is evaluated is F(x) = f(x, y*(x)) at the exact lower solution for the weights that a contestant has
found, never what it believes itself; gap = (F - F_best) / (F_none - F_best), where F_none is
without bilevel, all weights 1. Evaluations are not on the clock.

Every contestant runs alone, in a process of its own with one thread, with each of its settings
once; the best is shown. Seconds are those of the processor, all threads together: on an idle
machine those on the wall, and little changed where other programs run. They count from after the
imports on, and compilation is in them. Steady seconds take the first chunk of steps at what a chunk
usually costs.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.table import Table

from bilevel.benchmarks import report
from bilevel.benchmarks.peers import environment
from bilevel.benchmarks.peers.lineup import LINEUP, Contestant, Settings
from bilevel.benchmarks.peers.starter import Kept, Log
from bilevel.benchmarks.peers.task import Task
from bilevel.checks import checked_number
from bilevel.errors import ArgumentError
from bilevel.experiments.judge import BEST, TARGETS, Judge, crossings
from bilevel.problems import HyperCleaning


@dataclass(frozen=True)
class Row:
    """One contestant with one of its settings.

    Attributes:
        contestant: its name.
        own: whether it is of this library.
        settings: what it was given.
        failure: why it did not run; None: it did.
        seconds: of the processor until each of :data:`TARGETS`; None: not within the time.
        steady: the same with the first chunk at the usual cost.
        wall: the same as ``seconds`` on the wall.
        chunk: seconds of a chunk of its steps, the median.
        gap: at the end.
    """

    contestant: str
    own: bool
    settings: Settings
    failure: str | None = None
    seconds: tuple[float | None, ...] = (None,) * len(TARGETS)
    steady: tuple[float | None, ...] = (None,) * len(TARGETS)
    wall: tuple[float | None, ...] = (None,) * len(TARGETS)
    chunk: float | None = None
    gap: float | None = None

    @property
    def rank(self) -> tuple[float, ...]:
        """The smaller, the better: by the hardest target first, then by the gap at the end."""
        return (*map(_or_infinite, reversed(self.seconds)), _or_infinite(self.gap))


def judged(contestant: Contestant, settings: Settings, folder: Path, judge: Judge) -> Row:
    """The row of a contestant that left its log and its weights in the folder."""
    log = Log.load(folder)

    def gaps() -> Iterator[float]:
        for kept in log.kept:
            yield judge.gap(torch.from_numpy(np.load(kept.file(folder))))

    places = crossings(gaps())
    last = log.kept[-1]
    usual = median(log.chunks[1:] or log.chunks)
    warm_up = max(0.0, log.chunks[0] - usual)

    def at(read: Callable[[Kept], float]) -> tuple[float | None, ...]:
        return tuple(None if place is None else read(log.kept[place]) for place in places)

    return Row(
        contestant.name,
        contestant.own,
        settings,
        seconds=at(lambda kept: kept.cpu),
        steady=at(lambda kept: kept.cpu - warm_up),
        wall=at(lambda kept: kept.wall),
        chunk=usual,
        gap=judge.gap(torch.from_numpy(np.load(last.file(folder)))),
    )


def race(
    contestant: Contestant,
    settings: Settings,
    *,
    where: environment.Environment,
    task_folder: Path,
    seconds: float,
    seed: int,
    judge: Judge,
) -> Row:
    """Run a contestant with one of its settings, and evaluate what it found."""
    reason = where.reason(contestant.needs)
    if reason is not None:
        return Row(contestant.name, contestant.own, settings, failure=reason)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                where.python,
                *("-m", "bilevel.benchmarks.peers.starter", contestant.module),
                *(task_folder, folder, str(seconds), json.dumps({"seed": seed, **settings})),
            ],
            env=where.variables,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
            return Row(contestant.name, contestant.own, settings, failure=reason)
        return judged(contestant, settings, Path(folder), judge)


def run(
    *,
    corruption: float = 0.3,
    seconds: float = 12.0,
    seed: int = 0,
    data_dir: Path | None = None,
    track: report.Track = iter,
) -> list[Row]:
    """Every contestant with every setting.

    Args:
        corruption: the part of labels that are wrong, one of :data:`BEST`.
        seconds: of the processor that each run may take.
        seed: of the minibatches; the data are those of seed 0.
        data_dir: where MNIST lies, see :func:`bilevel.data.mnist`.
        track: shows progress.
    """
    if corruption not in BEST:
        known = " or ".join(map(str, BEST))
        raise ArgumentError(
            f"corruption must be {known}, for which the best value is known, not {corruption!r}"
        )
    checked_number("seconds", seconds, above=True)
    problem = HyperCleaning.mnist(corruption, weights="box", data_dir=data_dir)
    judge = Judge(problem, BEST[corruption])
    where = environment.prepare()
    runs = [(contestant, choice) for contestant in LINEUP for choice in contestant.settings]
    with tempfile.TemporaryDirectory() as folder:
        task_of(problem).save(Path(folder))
        return [
            race(
                contestant,
                choice,
                where=where,
                task_folder=Path(folder),
                seconds=seconds,
                seed=seed,
                judge=judge,
            )
            for contestant, choice in track(runs)
        ]


def task_of(problem: HyperCleaning) -> Task:
    """The problem as the contestants are given it."""
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


def best_of(rows: Sequence[Row]) -> list[Row]:
    """Of each contestant the best setting, in the order of the rows."""
    return [
        min(group, key=lambda row: row.rank)
        for _, group in groupby(rows, key=lambda row: row.contestant)
    ]


def table(rows: Sequence[Row]) -> Table:
    """The best setting of each contestant; "x" is the time to 2% as a multiple of our fastest."""
    columns: dict[str, Any] = {
        "contestant": lambda row: row.contestant,
        "best setting": lambda row: row.failure or _stated(row.settings),
    }
    kinds: dict[str, Callable[[Row], tuple[float | None, ...]]] = {
        "s": lambda row: row.seconds,
        "steady s": lambda row: row.steady,
    }
    shown = best_of(rows)
    for heading, read in kinds.items():
        for place, target in enumerate(TARGETS):
            columns[f"{target:.0%} {heading}"] = lambda row, r=read, p=place: _shown(r(row)[p])
        ours = min((_or_infinite(read(row)[-1]) for row in shown if row.own), default=math.inf)
        columns[f"x {heading}"] = lambda row, r=read, o=ours: _shown(_over(r(row)[-1], o))
    columns["gap"] = lambda row: "-" if row.gap is None else f"{row.gap:.1%}"
    return report.table("seconds to the best upper loss, but for a gap", shown, columns)


def _or_infinite(number: float | None) -> float:
    return math.inf if number is None else number


def _over(number: float | None, ours: float) -> float | None:
    return None if number is None or math.isinf(ours) else number / ours


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def _stated(settings: Settings) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
