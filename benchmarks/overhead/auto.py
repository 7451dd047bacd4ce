"""What it costs to find the rates: F2SA with "auto" beside the same steps with these rates given.

The shapes are those of :mod:`benchmarks.overhead`. A first run with "auto" finds the rates. Then a
run that finds them anew, and one that is given where they ended, take turns of a few steps, both
from the start. Their x directions are of as many minibatches, so that what differs is the work of
finding alone: looks at curvatures and merits. What is compiled was compiled
before, as in a second run; the time is that of the processor, on one thread.

    from benchmarks.overhead import auto
    rows = auto.run(steps=800)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from benchmarks import report
from benchmarks.overhead.task import Task
from bilevel import F2SA, Solver
from bilevel.errors.checks import check_count
from bilevel.stepping import PER_INNER_STEP

BATCHES = (50, 500)
TURN = 20
"""Outer steps after which the other run is at the turn."""

UPPER_LR = 1e-3
"""The step of x that is given. That of "auto" is for an x whose moves it limits; without these
limits weights become denormal numbers, with which processors take longer."""


@dataclass(frozen=True)
class Row:
    """One batch size, eager or compiled.

    Attributes:
        batch: the number of samples of each kind in a batch.
        compiled: whether steps are compiled.
        steps: the outer steps that were timed, from the start of the run.
        given: the microseconds of an outer step with given rates, the median of the repeats.
        found: the same with "auto".
        ratio: of the second to the first, the median of the ratios within a repeat.
        looks: how many times "auto" looked at the objectives in those steps.
    """

    batch: int
    compiled: bool
    steps: int
    given: float
    found: float
    ratio: float
    looks: int


@dataclass(frozen=True)
class Given(F2SA):
    """F2SA with given rates, and an x direction of as many minibatches as "auto" takes."""

    @property
    def most_direction_batches(self) -> int:
        return PER_INNER_STEP * self.inner_steps


def run(
    *,
    batches: Sequence[int] = BATCHES,
    compiled: Sequence[bool] = (False, True),
    samples: int = 19_000,
    inner_steps: int = 10,
    steps: int = 800,
    repeats: int = 5,
    device: str = "cpu",
    seed: int = 0,
    track: report.Track = iter,
) -> list[Row]:
    """Measure "auto" at every batch size, eager and compiled.

    Args:
        batches: the batch sizes.
        compiled: whether steps are compiled, each of these.
        samples: n; there are a twentieth as many trusted samples.
        inner_steps: T.
        steps: the outer steps of a run that are timed.
        repeats: how many times both runs are taken from their start.
        device: where to compute.
        seed: the seed of the data and the batches.
        track: wraps a sequence to show progress.
    """
    for name, value in (("steps", steps), ("repeats", repeats)):
        check_count(name, value)
    rows = []
    for batch, of_compiled in track([(batch, c) for batch in batches for c in compiled]):
        task = Task.random(samples, batch, inner_steps, device, seed)
        rows.append(_row(task, of_compiled, steps, repeats))
    return rows


def table(rows: Sequence[Row]) -> Table:
    """Lay the rows out for printing."""
    return report.table(
        "microseconds of processor time of an outer step, with rates that are given and found",
        rows,
        {
            "batch": lambda row: row.batch,
            "": lambda row: "compiled" if row.compiled else "eager",
            "steps": lambda row: row.steps,
            "given": lambda row: row.given,
            '"auto"': lambda row: row.found,
            '"auto" to given': lambda row: f"{row.ratio:.3f}",
            "looks": lambda row: row.looks,
        },
    )


def _row(task: Task, compiled: bool, steps: int, repeats: int) -> Row:
    auto = task.solver(
        compile=compiled,
        method=F2SA(lower_lr="auto", upper_lr="auto", inner_steps=task.inner_steps),
    )
    start = auto.state_dict()
    _advance(task, auto, steps)
    found, sizes = auto.state.policy.state_dict()["found"], auto.state.policy.current
    assert sizes is not None
    given = task.solver(
        compile=compiled,
        method=Given(
            lower_lr=float(sizes.lower),
            upper_lr=UPPER_LR,
            multiplier=float(sizes.multiplier),
            inner_steps=task.inner_steps,
        ),
    )
    begin = given.state_dict()
    _advance(task, given, 1)
    times: list[tuple[float, float]] = []
    for _ in range(repeats):
        auto.load_state_dict(start)
        given.load_state_dict(begin)
        of_auto = of_given = 0.0
        for first in range(0, steps, TURN):
            count = min(TURN, steps - first)
            of_given += _advance(task, given, count)
            of_auto += _advance(task, auto, count)
        times.append((of_given / steps, of_auto / steps))
    return Row(
        task.batch,
        compiled,
        steps,
        1e6 * median(t for t, _ in times),
        1e6 * median(t for _, t in times),
        median(b / a for a, b in times),
        found["looks"],
    )


def _advance(task: Task, solver: Solver, steps: int) -> float:
    """Take steps; the seconds of processor time that they took."""
    with solver.assume_unchanged():
        begin = time.process_time()
        for _ in range(steps):
            solver.step(measure=False)
        task.synchronise()
        return time.process_time() - begin
