"""What the steps of F2SA cost against the sizes of a problem, one of them varied at a time.

Softmax regression with weights sigmoid(x_i), as in :mod:`benchmarks.overhead`. What is
varied: d, the features of a sample; n, the samples, of which each has a weight; T, the inner steps
of an outer one; the batch. Each is taken from a tenth to ten times its size in label cleaning of
MNIST.

An outer step with 2T inner steps and one with T differ in T inner steps; that is how one of these
is timed. What then is left of an outer step is the step of x.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rich.table import Table

from benchmarks import report
from benchmarks.overhead.task import Task
from bilevel.errors.checks import check_count
from bilevel.run import Solver


@dataclass(frozen=True)
class Sizes:
    """Of a problem and its steps."""

    d: int
    n: int
    T: int
    batch: int


BASE = Sizes(d=784, n=19_000, T=10, batch=50)
FACTORS = (0.1, 0.5, 1.0, 2.0, 10.0)
VARIED = ("d", "n", "T", "batch")
WAYS = {"eager": False, "compiled": True}


@dataclass(frozen=True)
class Row:
    """One size, with all others at their base.

    Attributes:
        way: "eager" or "compiled".
        varied: which size, "d", "n", "T" or "batch".
        size: its value.
        outer_seconds: of an outer step, the median of the repeats.
        outer_ratio: to the base; the median of the repeats, each of which compares what ran within
            moments of each other.
        inner_seconds: of an inner step, the median of the repeats.
        inner_ratio: of that to the base's.
    """

    way: str
    varied: str
    size: int
    outer_seconds: float
    outer_ratio: float
    inner_seconds: float
    inner_ratio: float


def run(
    *,
    compiled: bool = True,
    steps: int = 3,
    repeats: int = 15,
    device: str = "cpu",
    seed: int = 0,
    track: report.Track = iter,
) -> list[Row]:
    """Every size in every way.

    Args:
        compiled: whether to time compiled steps too.
        steps: outer steps that are timed together.
        repeats: how often; all values of a size take turns within each repeat.
        device: where.
        seed: of the data and the minibatches.
        track: shows progress.
    """
    for name, value in (("steps", steps), ("repeats", repeats)):
        check_count(name, value)
    ways = [way for way, compiles in WAYS.items() if compiled or not compiles]
    series = [(way, varied) for way in ways for varied in VARIED]
    rows: list[Row] = []
    points: list[_Point] = []
    for way, varied, repeat in track(
        [(*one, repeat) for one in series for repeat in range(repeats)]
    ):
        if repeat == 0:
            points.clear()  # the data of the last series need not stay
            points += [_Point(sizes, WAYS[way], device, seed) for sizes in _around(varied)]
        for turn in range(len(points)):
            points[(turn + repeat) % len(points)].measure(steps)
        if repeat == repeats - 1:
            base = next(point for point in points if point.sizes == BASE)
            rows += [point.row(way, varied, base) for point in points]
    return rows


def table(rows: Sequence[Row]) -> Table:
    """The rows to read."""
    return report.table(
        f"F2SA at d = {BASE.d}, n = {BASE.n:,}, T = {BASE.T}, batch = {BASE.batch}, and around",
        rows,
        {
            "": lambda row: row.way,
            "varied": lambda row: row.varied,
            "to": lambda row: row.size,
            "outer, ms": lambda row: 1e3 * row.outer_seconds,
            "ratio": lambda row: row.outer_ratio,
            "inner, us": lambda row: round(1e6 * row.inner_seconds),
            "its ratio": lambda row: row.inner_ratio,
        },
    )


def _around(varied: str) -> Iterator[Sizes]:
    for factor in FACTORS:
        yield replace(BASE, **{varied: max(1, int(getattr(BASE, varied) * factor))})


class _Point:
    """The steps at one point, and how long they took."""

    def __init__(self, sizes: Sizes, compile: bool, device: str, seed: int) -> None:
        self.sizes = sizes
        task = Task.random(sizes.n, sizes.batch, sizes.T, device, seed, sizes.d)
        tasks = task, replace(task, inner_steps=2 * sizes.T)
        self._synchronise = task.synchronise
        self._solvers = [task.solver(compile=compile) for task in tasks]
        self._outer: list[float] = []
        self._inner: list[float] = []
        for solver in self._solvers:
            solver.step(measure=False)  # what is loaded and compiled once

    def measure(self, steps: int) -> None:
        """Once more."""
        once, twice = (self._seconds(solver, steps) for solver in self._solvers)
        self._outer.append(once)
        self._inner.append((twice - once) / self.sizes.T)

    def row(self, way: str, varied: str, base: _Point) -> Row:
        """What was found, beside what was found at the base."""
        ratios = [mine / other for mine, other in zip(self._outer, base._outer, strict=True)]
        inner = median(self._inner)
        return Row(
            way=way,
            varied=varied,
            size=getattr(self.sizes, varied),
            outer_seconds=median(self._outer),
            outer_ratio=median(ratios),
            inner_seconds=inner,
            inner_ratio=inner / median(base._inner),
        )

    def _seconds(self, solver: Solver, steps: int) -> float:
        solver.step(measure=False)  # what the others drove out of the caches comes back
        self._synchronise()
        start = time.perf_counter()
        for _ in range(steps):
            solver.step(measure=False)
        self._synchronise()
        return (time.perf_counter() - start) / steps
