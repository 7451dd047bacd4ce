"""A million small steps, after which memory has not grown and the state has not drifted.

F2SA runs on a two-dimensional quadratic with noise in both levels and a history, once compiled and
once eager with a twentieth of the steps. The resident memory of the process is measured after a
hundredth of the run and at its end. A new solver then loads the checkpoint before the last step and
takes that step: its report must equal the end of the history, and its x and y the result of the
run, to the last bit.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from benchmarks import report
from bilevel import F2SA, Checkpoint, Solver, minimize
from bilevel.errors.checks import check_count
from bilevel.methods import Info
from bilevel.problems import Quadratic
from bilevel.run.history import MEASURED

PARTS = 100
EAGER_DIVISOR = 20
"""The number of compiled steps divided by that of eager steps."""

METHOD = F2SA(lower_lr=0.3, upper_lr=0.01, multiplier=10.0, inner_steps=1, single_pass=True)


@dataclass(frozen=True)
class Row:
    """The figures of one run.

    Attributes:
        kind: "compiled" or "eager".
        steps: the number of steps.
        seconds: the time of all steps.
        start_kb, end_kb: the resident memory after a hundredth of the run and at its end; None
            where the system does not report it.
        start_tensors, end_tensors: the numbers of live tensors at these two moments.
        drift: the largest difference between the run and the last step taken again from its
            checkpoint, over the measured quantities, x and y.
        distance: the final distance of x from the optimum, divided by the initial distance.
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
    """A callback that measures memory after a hundredth of a run and at its end."""

    def __init__(self, steps: int, parts: Iterator[Any]) -> None:
        self.resident_kb: list[int | None] = []
        self.tensors: list[int] = []
        self._measured_at = (steps // PARTS, steps - 1)
        self._parts = parts

    def __call__(self, solver: Solver, info: Info) -> None:
        next(self._parts, None)
        if info.step not in self._measured_at:
            return
        gc.collect()
        self.tensors.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
        size = report.resident_bytes()
        self.resident_kb.append(None if size is None else size // 1024)


def run(
    *, steps: int = 10**6, compiled: bool = True, seed: int = 0, track: report.Track = iter
) -> list[Row]:
    """Take ``steps`` steps if ``compiled``, and a twentieth as many eager steps."""
    check_count("steps", steps, least=2 * EAGER_DIVISOR * PARTS)
    parts = iter(track(range((1 + compiled) * PARTS)))
    rows = [soak("compiled", steps, seed, parts)] if compiled else []
    return [*rows, soak("eager", steps // EAGER_DIVISOR, seed, parts)]


def soak(kind: str, steps: int, seed: int, parts: Iterator[Any]) -> Row:
    """Make one run and measure it."""
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
    with tempfile.TemporaryDirectory() as folder:
        result = minimize(
            **options,
            steps=steps,
            record_every=steps // PARTS,
            callback=meter,
            # One checkpoint at the start, one before the last step, one after it.
            checkpoint=Checkpoint(folder, every_steps=steps - 1, every_seconds=None),
        )
        solver = Solver(**options)
        _, before, _ = sorted(Path(folder).iterdir())
        solver.load(before)
    info = solver.step()
    start, end = (float((problem.solution - x).norm()) for x in (problem.x0, result.x))
    recorded = {name: float(result.history[name][-1]) for name in MEASURED}
    repeated = {name: float(getattr(info, name)) for name in MEASURED}
    points = (solver.x, result.x), (solver.lower_solution(), result.y)
    ends = [float((a - b).abs().max()) for a, b in points]
    return Row(
        kind=kind,
        steps=result.steps,
        seconds=result.seconds,
        start_kb=meter.resident_kb[0],
        end_kb=meter.resident_kb[-1],
        start_tensors=meter.tensors[0],
        end_tensors=meter.tensors[-1],
        drift=max(*ends, *(abs(recorded[name] - repeated[name]) for name in MEASURED)),
        distance=end / start,
    )


def table(rows: Sequence[Row]) -> Table:
    """Lay the rows out for printing."""
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
