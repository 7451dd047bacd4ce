"""The work of each method to bring ||grad F||^2 to 1e-6 of its initial value on a quadratic.

The contract tests use the same settings. The counts are evaluations of f and of g, each of which is
differentiated at least once; products with second derivatives, which methods of order 2 need as
well, are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table
from torch import Tensor

from benchmarks import report
from bilevel import METHODS, Solver
from bilevel.errors import NonFiniteError
from bilevel.errors.checks import check_count
from bilevel.problems import Quadratic
from bilevel.stepping.schedules import Power, Ramp

TARGET = 1e-6
"""The target for ||grad F||^2, as a fraction of its initial value."""


@dataclass(frozen=True)
class Case:
    """A method with settings that a user could have chosen.

    Attributes:
        name: the name in :data:`bilevel.METHODS`.
        settings: the arguments of the method.
        steps: the number of outer steps that reach :data:`TARGET` on ``Quadratic(seed=0)``.
        label: tells several cases of one method apart.
    """

    name: str
    settings: dict[str, Any]
    steps: int
    label: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.label}".strip()

    def method(self, **more: Any) -> Any:
        """Make the method with these settings and ``more``."""
        return METHODS[self.name](**{**self.settings, **more})

    @property
    def order(self) -> int:
        """The highest order of derivatives that the method uses."""
        return METHODS[self.name].properties.order


CASES = [
    Case("f2sa", {"lower_lr": 1.0, "upper_lr": 0.8, "multiplier": 3000.0}, steps=40),
    Case("f3sa", {"lower_lr": 1.0, "upper_lr": 0.05, "multiplier": 1000.0}, steps=600),
    Case("f2ba", {"lower_lr": 1.0, "upper_lr": 0.8, "multiplier": 3000.0}, steps=40),
    Case(
        "bome",
        {
            "lower_lr": Power(0.3, 10, -1),
            "upper_lr": Power(1.0, 10, -1),
            "inner_lr": 1.8,
            "inner_steps": 32,
        },
        steps=3000,
    ),
    Case(
        "vpbgd",
        {"lower_lr": 1.0, "upper_lr": 2.0, "multiplier": Power(1.0, 5, 1.0), "inner_steps": 1},
        steps=2800,
    ),
    Case(
        "meha",
        {
            "lower_lr": 0.9,
            "upper_lr": 2.0,
            "multiplier": Ramp(1.0, 1500.0, 5000),
            "proximal": 100.0,
        },
        steps=2500,
    ),
    Case("sobo", {"lower_lr": 1.8, "upper_lr": 1.0, "neumann_steps": 30}, steps=30),
    Case("soba", {"lower_lr": 1.0, "upper_lr": 0.1}, steps=240),
    Case("ma-soba", {"lower_lr": 1.0, "upper_lr": 0.1, "averaging": 0.5}, steps=240),
    Case("aid", {"lower_lr": 1.0, "upper_lr": 1.0}, steps=30),
    Case("itd", {"lower_lr": 1.0, "upper_lr": 1.0, "inner_steps": 60}, steps=30),
]
"""One case for every method that moves x."""


@dataclass(frozen=True)
class Row:
    """The work of one method.

    Attributes:
        method: the name of the method.
        order: the highest order of derivatives that it uses.
        settings: its arguments.
        reached: whether it reached the target; if not, the other figures are what it spent.
        steps: the number of outer steps.
        upper_evaluations, lower_evaluations: the numbers of evaluations of f and of g.
        seconds: the time, the median of the repeats.
    """

    method: str
    order: int
    settings: dict[str, str]
    reached: bool
    steps: int
    upper_evaluations: int
    lower_evaluations: int
    seconds: float


class Counted(Quadratic):
    """A quadratic that counts the evaluations of f and g."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.reset()

    def reset(self) -> None:
        """Set both counts to 0."""
        self.upper_evaluations = self.lower_evaluations = 0

    def _upper(self, x: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        self.upper_evaluations += 1
        return super()._upper(x, y, noise)

    def _lower(self, x: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        self.lower_evaluations += 1
        return super()._lower(x, y, noise)


def measure(case: Case, *, seed: int = 0, repeats: int = 3) -> Row:
    """Run one case to the target, to a non-finite number or to twice ``case.steps``."""
    check_count("repeats", repeats)
    seconds = []
    for _ in range(repeats):
        problem = Counted(seed=seed)
        solver = Solver(problem, problem.x0, problem.y0, method=case.method())
        problem.reset()
        start = time.perf_counter()
        with suppress(NonFiniteError):
            while remaining(problem, solver) > TARGET and solver.k < 2 * case.steps:
                solver.step(measure=False)
        seconds.append(time.perf_counter() - start)
    return Row(
        method=case.name,
        order=case.order,
        settings={name: repr(value) for name, value in case.settings.items()},
        reached=remaining(problem, solver) <= TARGET,
        steps=solver.k,
        upper_evaluations=problem.upper_evaluations,
        lower_evaluations=problem.lower_evaluations,
        seconds=median(seconds),
    )


def remaining(problem: Quadratic, solver: Solver) -> float:
    """Return ||grad F||^2 as a fraction of its initial value."""
    now, start = (problem.gradient(x) for x in (solver.x, problem.x0))
    return float((now @ now) / (start @ start))


def run(*, seed: int = 0, repeats: int = 3, track: report.Track = iter) -> list[Row]:
    """Measure every case on the quadratic of that seed."""
    return [measure(case, seed=seed, repeats=repeats) for case in track(CASES)]


def table(rows: Sequence[Row]) -> Table:
    """Lay the rows out for printing."""
    return report.table(
        "to ||grad F||^2 = 1e-6 of its initial value",
        rows,
        {
            "method": lambda row: row.method,
            "order": lambda row: row.order,
            "steps": lambda row: row.steps if row.reached else f"not in {row.steps:,}",
            "f": lambda row: row.upper_evaluations,
            "g": lambda row: row.lower_evaluations,
            "seconds": lambda row: row.seconds,
        },
    )
