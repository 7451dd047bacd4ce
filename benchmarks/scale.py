"""The cost of F2SA steps against the sizes of a problem, varied one at a time.

The problem is softmax regression with weights sigmoid(x_i), as in :mod:`benchmarks.overhead`. The
sizes are d, the number of features; n, the number of samples, each with its own weight; T, the
number of inner steps of an outer step; and the batch size. Each varies from a tenth to ten times
its value in label cleaning of MNIST.

The time of an inner step is that of an outer step with 2T inner steps minus that of an outer step
with T, divided by T. The rest of an outer step is the step of x.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rich.table import Table

from benchmarks import report
from benchmarks.overhead.task import Task
from bilevel import Solver
from bilevel.errors.checks import check_count


@dataclass(frozen=True)
class Sizes:
    """The sizes of a problem and of its steps."""

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
    """One value of one size, with all other sizes at the base.

    Attributes:
        way: "eager" or "compiled".
        varied: the size that is varied, "d", "n", "T" or "batch".
        size: the value of that size.
        outer_seconds: the time of an outer step, the median of the repeats.
        outer_ratio: the median over the repeats of the ratio of that time to the base's in the same
            repeat.
        inner_seconds: the time of an inner step, the median of the repeats.
        inner_ratio: the ratio of ``inner_seconds`` to the base's.
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
    """Measure every size, with eager and with compiled steps.

    Args:
        compiled: whether to measure compiled steps as well.
        steps: the number of outer steps that are timed together.
        repeats: the number of repeats; within each, all values of a size take turns.
        device: where to compute.
        seed: the seed of the data and the batches.
        track: wraps a sequence to show progress.
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
            points.clear()  # Frees the data of the previous series.
            points += [_Point(sizes, WAYS[way], device, seed) for sizes in _around(varied)]
        for turn in range(len(points)):
            points[(turn + repeat) % len(points)].measure(steps)
        if repeat == repeats - 1:
            base = next(point for point in points if point.sizes == BASE)
            rows += [point.row(way, varied, base) for point in points]
    return rows


def table(rows: Sequence[Row]) -> Table:
    """Lay the rows out for printing."""
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
    """The solvers for one choice of sizes, and the times of their steps."""

    def __init__(self, sizes: Sizes, compile: bool, device: str, seed: int) -> None:
        self.sizes = sizes
        task = Task.random(sizes.n, sizes.batch, sizes.T, device, seed, sizes.d)
        tasks = task, replace(task, inner_steps=2 * sizes.T)
        self._synchronise = task.synchronise
        self._solvers = [task.solver(compile=compile) for task in tasks]
        self._outer: list[float] = []
        self._inner: list[float] = []
        for solver in self._solvers:
            solver.step(measure=False)  # Warm-up: compilation is not measured.

    def measure(self, steps: int) -> None:
        """Take the times of one more repeat."""
        once, twice = (self._seconds(solver, steps) for solver in self._solvers)
        self._outer.append(once)
        self._inner.append((twice - once) / self.sizes.T)

    def row(self, way: str, varied: str, base: _Point) -> Row:
        """Summarize the repeats, with ratios to the base."""
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
        solver.step(measure=False)  # Refills the caches that the other solvers emptied.
        self._synchronise()
        start = time.perf_counter()
        for _ in range(steps):
            solver.step(measure=False)
        self._synchronise()
        return (time.perf_counter() - start) / steps
