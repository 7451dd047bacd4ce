"""What it takes each method to bring ||grad F||^2 to 1e-6 of its start on a quadratic.

The settings are those of the contract tests. What is counted are evaluations of f and of g, each
differentiated at least once; products with second derivatives come on top for the methods of
order 2.
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
from bilevel.errors import NonFiniteError
from bilevel.errors.checks import check_count
from bilevel.methods import METHODS
from bilevel.problems import Quadratic
from bilevel.run import Solver
from bilevel.stepping.schedules import Power, Ramp

TARGET = 1e-6
"""Of ||grad F||^2, as a share of what it is at the start."""


@dataclass(frozen=True)
class Case:
    """A method with settings that a user could have chosen.

    Attributes:
        name: in :data:`bilevel.METHODS`.
        settings: its arguments.
        steps: outer steps in which they reach :data:`TARGET` on ``Quadratic(seed=0)``.
        label: which of several cases of one method.
    """

    name: str
    settings: dict[str, Any]
    steps: int
    label: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.label}".strip()

    def method(self, **more: Any) -> Any:
        """The method with these settings, and ``more``."""
        return METHODS[self.name](**{**self.settings, **more})

    @property
    def order(self) -> int:
        """The highest order of derivatives used."""
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
"""Every method that moves x."""


@dataclass(frozen=True)
class Row:
    """What one method took.

    Attributes:
        method: its name.
        order: the highest order of derivatives used.
        settings: its arguments.
        reached: whether it came to the target; if not, the rest is what it had spent by then.
        steps: outer steps.
        upper_evaluations, lower_evaluations: of f and of g.
        seconds: the median of the repeats.
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
        """Count from 0 again."""
        self.upper_evaluations = self.lower_evaluations = 0

    def _upper(self, x: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        self.upper_evaluations += 1
        return super()._upper(x, y, noise)

    def _lower(self, x: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        self.lower_evaluations += 1
        return super()._lower(x, y, noise)


def measure(case: Case, *, seed: int = 0, repeats: int = 3) -> Row:
    """Run one case to the target, to twice the steps that it is good for, or until it breaks."""
    check_count("repeats", repeats)
    seconds = []
    for _ in range(repeats):
        problem = Counted(seed=seed)
        solver = Solver(problem, problem.x0, problem.y0, method=case.method())
        problem.reset()
        start = time.perf_counter()
        with suppress(NonFiniteError):
            while left(problem, solver) > TARGET and solver.k < 2 * case.steps:
                solver.step(measure=False)
        seconds.append(time.perf_counter() - start)
    return Row(
        method=case.name,
        order=case.order,
        settings={name: repr(value) for name, value in case.settings.items()},
        reached=left(problem, solver) <= TARGET,
        steps=solver.k,
        upper_evaluations=problem.upper_evaluations,
        lower_evaluations=problem.lower_evaluations,
        seconds=median(seconds),
    )


def left(problem: Quadratic, solver: Solver) -> float:
    """||grad F||^2 as a share of what it is at the start."""
    now, start = (problem.gradient(x) for x in (solver.x, problem.x0))
    return float((now @ now) / (start @ start))


def run(*, seed: int = 0, repeats: int = 3, track: report.Track = iter) -> list[Row]:
    """Every case on the quadratic of that seed."""
    return [measure(case, seed=seed, repeats=repeats) for case in track(CASES)]


def table(rows: Sequence[Row]) -> Table:
    """The rows to read."""
    return report.table(
        "to ||grad F||^2 = 1e-6 of its start",
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
