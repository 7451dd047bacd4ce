"""``bilevel bench soak``: a million small steps, after which nothing has grown or drifted.

A run of F2SA on a quadratic in the plane, with noise in both levels and a history, compiled, and a
twentieth as many steps as they are. The memory that the process holds is taken a hundredth into the
run and at its end. A checkpoint of the last step but one is then loaded into a fresh solver, which
takes the last step: what it reports and where it ends has to be what the history says and what the
run returned, to the last bit.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table as Shown
from torch import Tensor

from bilevel.benchmarks import report
from bilevel.errors.checks import check_count
from bilevel.methods import F2SA, Info
from bilevel.problems import Quadratic
from bilevel.run import Checkpoint, Solver, minimize
from bilevel.run.history import MEASURED

PARTS = 100
EAGER = 20
"""By which the number of steps is divided that are not compiled."""

METHOD = F2SA(lower_lr=0.3, upper_lr=0.01, multiplier=10.0, inner_steps=1, single_pass=True)


@dataclass(frozen=True)
class Row:
    """What a run left behind.

    Attributes:
        kind: how its steps were taken.
        steps: how many.
        seconds: that these took.
        start_kb, end_kb: memory held a hundredth into the run and at its end; None where the
            system does not tell.
        start_tensors, end_tensors: that were alive then.
        drift: the largest difference between what the history says of the last step and what the
            state before it gives, and between where the two end.
        distance: of x from the optimum at the end, as a share of that at the start.
    """

    kind: str
    steps: int
    seconds: float
    start_kb: int | None
    end_kb: int | None
    start_tensors: int
    end_tensors: int
    drift: float
    distance: float


class Meter:
    """What is held when a hundredth of a run is done, and at its end."""

    def __init__(self, steps: int, parts: Iterator[Any]) -> None:
        self.held: list[int | None] = []
        self.tensors: list[int] = []
        self._looks = (steps // PARTS, steps - 1)
        self._parts = parts

    def __call__(self, solver: Solver, info: Info) -> None:
        next(self._parts, None)
        if info.step not in self._looks:
            return
        gc.collect()
        self.tensors.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
        size = report.resident()
        self.held.append(None if size is None else size // 1024)


def run(
    *, steps: int = 10**6, compiled: bool = True, seed: int = 0, track: report.Track = iter
) -> list[Row]:
    """So many steps compiled, if that is wished, and a twentieth as many as they are."""
    check_count("steps", steps, least=2 * EAGER * PARTS)
    parts = iter(track(range((1 + compiled) * PARTS)))
    rows = [soaked("compiled", steps, seed, parts)] if compiled else []
    return [*rows, soaked("eager", steps // EAGER, seed, parts)]


def soaked(kind: str, steps: int, seed: int, parts: Iterator[Any]) -> Row:
    """One run, and what it left behind."""
    problem = Quadratic(dim_x=2, dim_y=2, sigma_f=0.05, sigma_g=0.05, seed=0)
    options: dict[str, Any] = {
        "problem": problem,
        "method": METHOD,
        "x0": problem.x0,
        "y0": problem.y0,
        "seed": seed,
        "upper_data": problem.upper_noise,
        "lower_data": problem.lower_noise,
        "compile": kind == "compiled",
    }
    meter = Meter(steps, parts)
    with tempfile.TemporaryDirectory() as place:
        result = minimize(
            **options,
            steps=steps,
            record_every=steps // PARTS,
            callback=meter,
            # at the start, before the last step, and after it
            checkpoint=Checkpoint(place, every_steps=steps - 1, every_seconds=None),
        )
        solver = Solver(**options)
        _, before, _ = sorted(Path(place).iterdir())
        solver.load(before)
    info = solver.step()
    start, end = (float((problem.solution - x).norm()) for x in (problem.x0, result.x))
    told = {name: float(result.history[name][-1]) for name in MEASURED}
    given = {name: float(getattr(info, name)) for name in MEASURED}
    points = (solver.x, result.x), (solver.lower_solution(), result.y)
    ends = [float((a - b).abs().max()) for a, b in points]
    return Row(
        kind=kind,
        steps=result.steps,
        seconds=result.seconds,
        start_kb=meter.held[0],
        end_kb=meter.held[-1],
        start_tensors=meter.tensors[0],
        end_tensors=meter.tensors[-1],
        drift=max(*ends, *(abs(told[name] - given[name]) for name in MEASURED)),
        distance=end / start,
    )


def table(rows: Sequence[Row]) -> Shown:
    """The rows to read."""
    return report.table(
        "memory, tensors and history after many steps",
        rows,
        {
            "kind": lambda row: row.kind,
            "steps": lambda row: row.steps,
            "seconds": lambda row: round(row.seconds),
            "kB at 1%": lambda row: "?" if row.start_kb is None else row.start_kb,
            "at the end": lambda row: "?" if row.end_kb is None else row.end_kb,
            "tensors": lambda row: f"{row.start_tensors}, {row.end_tensors}",
            "drift": lambda row: row.drift,
        },
    )
