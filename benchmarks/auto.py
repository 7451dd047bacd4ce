"""F2SA with nothing set by hand against the best of a grid of settings.

For each task F2SA runs for the same number of outer steps with every setting of a grid (both rates
and the multiplier); the run that ends with the lowest F is the tuned run. Then F2SA runs with its
defaults, with three times the evaluations of f and g that the tuned run made; the evaluations by
which "auto" measures are included. It passes if it reaches 90% of the tuned run's decrease of F
and does not end above its start.

The quadratic is scaled: f and g by a factor each, x and y by a change of units. A scaled quadratic
with settings scaled accordingly has the same iterates, so each condition number is tuned once,
unscaled. MNIST needs its files, see :func:`bilevel.data.mnist`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import report
from bilevel import F2SA, Problem, Solver
from bilevel.errors import NonFiniteError
from bilevel.problems import HyperCleaning, Quadratic, WeightedLogistic

CONDITIONS = (1.0, 10.0, 100.0, 1e3, 1e4)
SMALL, LARGE = 1e-3, 1e3
UNSCALED = (1.0, 1.0, 1.0, 1.0)
SCALES = (
    UNSCALED,
    *(
        tuple(factor if place == i else 1.0 for i in range(4))
        for place in range(4)
        for factor in (SMALL, LARGE)
    ),
    *itertools.product((SMALL, LARGE), repeat=4),
)
"""The scales of f, g, x and y: none, each alone, and all combinations of all four."""

SHARE = 0.9
"""The share of the tuned run's decrease of F that has to be reached."""

BUDGET = 3
"""The evaluations that the default settings may use, as a multiple of the tuned run's."""


@dataclass(frozen=True)
class Task:
    """A problem whose F is known, its start, and the grid of settings.

    Attributes:
        name: the name of the row.
        problem, x0, y0: the arguments of a solver.
        value: the function F.
        lower_lrs, upper_lrs, multipliers: the grid.
        steps: the number of outer steps for each setting of the grid.
        data: the further keywords of the solver.
        look: says at which outer steps of the run with defaults F is evaluated.
    """

    name: str
    problem: Problem
    x0: Tensor
    y0: Tensor
    value: Callable[[Tensor], float]
    lower_lrs: Sequence[float]
    upper_lrs: Sequence[float]
    multipliers: Sequence[float] = (10.0,)
    steps: int = 100
    data: dict[str, Any] = field(default_factory=dict)
    look: Callable[[int], bool] = lambda step: True

    def settings(self) -> list[dict[str, float]]:
        """Return every combination of the grid."""
        names = ("lower_lr", "upper_lr", "multiplier")
        grid = itertools.product(self.lower_lrs, self.upper_lrs, self.multipliers)
        return [dict(zip(names, choice, strict=True)) for choice in grid]


@dataclass(frozen=True)
class Tuned:
    """The best run of a grid.

    Attributes:
        settings: the settings of that run.
        tried: the number of settings in the grid.
        decrease: the decrease of F from the start to the end.
        evaluations: the number of evaluations of f and g together.
    """

    settings: dict[str, float]
    tried: int
    decrease: float
    evaluations: int


@dataclass(frozen=True)
class Row:
    """One task.

    Attributes:
        task: the name of the task.
        scales: the scales of f, g, x and y.
        tuned: the best run of the grid.
        reached: the evaluations until 90% of the tuned decrease was reached, as a multiple of the
            tuned run's; infinite if it was not reached.
        highest: the largest decrease within the budget, as a share of the tuned decrease.
        last: the decrease at the end of the budget, as a share of the tuned decrease.
        diverged: whether a number was not finite, or F ended above its start.
        multiplier, lower_lr, upper_lr: the values that the last step used.
    """

    task: str
    scales: tuple[float, ...]
    tuned: Tuned
    reached: float
    highest: float
    last: float
    diverged: bool
    multiplier: float
    lower_lr: float
    upper_lr: float

    @property
    def passed(self) -> bool:
        """Whether 90% of the tuned decrease was reached within the budget, and kept."""
        return self.reached <= BUDGET and not self.diverged


class Counted(Problem):
    """A problem that counts the evaluations of its objectives."""

    def __init__(self, problem: Problem) -> None:
        self.evaluations = 0

        def counted(objective: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def call(*arguments: Any) -> Tensor:
                self.evaluations += 1
                return objective(*arguments)

            return call

        super().__init__(
            counted(problem.upper), counted(problem.lower), problem.x_set, problem.y_set
        )


def tune(task: Task) -> Tuned:
    """Run the grid and return the run that ends with the lowest F."""
    first = task.value(task.x0)
    best = None
    for settings in task.settings():
        problem = Counted(task.problem)
        method = F2SA(**settings)  # type: ignore[arg-type]
        solver = Solver(problem, task.x0, task.y0, method=method, **task.data)
        problem.evaluations = 0
        with suppress(NonFiniteError):
            for _ in range(task.steps):
                solver.step(measure=False)
            decrease = first - task.value(solver.x)
            if math.isfinite(decrease) and (best is None or decrease > best.decrease):
                best = Tuned(settings, len(task.settings()), decrease, problem.evaluations)
    assert best is not None, f"every setting of the grid diverged on {task.name}"
    return best


def measure(task: Task, tuned: Tuned, scales: tuple[float, ...] = UNSCALED, seed: int = 0) -> Row:
    """Run F2SA with its defaults and three times the evaluations of the tuned run."""
    f_scale, g_scale, x_scale, y_scale = scales
    problem = Counted(
        Problem(
            lambda x, y, b: f_scale * task.problem.upper(x / x_scale, y / y_scale, b),
            lambda x, y, b: g_scale * task.problem.lower(x / x_scale, y / y_scale, b),
            task.problem.x_set,
            task.problem.y_set,
        )
        if scales != UNSCALED
        else task.problem
    )
    solver = Solver(
        problem, task.x0 * x_scale, task.y0 * y_scale, method=F2SA(), seed=seed, **task.data
    )
    problem.evaluations = 0
    first = task.value(task.x0)
    highest, share, reached, failed, info = -math.inf, 0.0, math.inf, False, None
    try:
        while problem.evaluations < BUDGET * tuned.evaluations:
            info = solver.step(measure=False)
            if task.look(solver.k):
                share = (first - task.value(solver.x / x_scale)) / tuned.decrease
                highest = max(highest, share)
                if share >= SHARE and math.isinf(reached):
                    reached = problem.evaluations / tuned.evaluations
        share = (first - task.value(solver.x / x_scale)) / tuned.decrease
    except NonFiniteError:
        failed = True
    return Row(
        task=task.name,
        scales=scales,
        tuned=tuned,
        reached=reached,
        highest=highest,
        last=share,
        diverged=failed or not share >= 0,
        multiplier=float(math.nan if info is None else info.multiplier),
        lower_lr=float(math.nan if info is None else info.lower_lr),
        upper_lr=float(math.nan if info is None else info.upper_lr),
    )


def quadratic(condition: float, seed: int) -> Task:
    """Make the task of a quadratic with known F; its largest curvatures are 1."""
    problem = Quadratic(condition=condition, seed=seed)
    return Task(
        name=f"quadratic, kappa {condition:g}",
        problem=problem,
        x0=problem.x0,
        y0=problem.y0,
        value=lambda x: float(problem.value(x)),
        lower_lrs=(0.3, 1.0, 1.8),
        upper_lrs=tuple(4.0**power for power in range(-4, 3)),
        multipliers=(10.0, 100.0, 1e3, 1e4),
    )


def logistic(seed: int, batch_size: int | None) -> Task:
    """Make the task of sample weights for logistic regression."""
    problem = WeightedLogistic(seed=seed)
    data: dict[str, Any] = {}
    if batch_size is not None:
        data = {
            "upper_data": problem.upper_data,
            "lower_data": problem.lower_data,
            "batch_size": batch_size,
        }
    return Task(
        name="weighted logistic" + (f", batch {batch_size}" if batch_size else ""),
        problem=problem,
        x0=problem.x0,
        y0=problem.y0,
        value=lambda x: float(problem.value(x)),
        lower_lrs=(0.5, 2.0, 6.0),
        upper_lrs=(10.0, 100.0, 1e3, 1e4, 1e5),
        multipliers=(10.0, 100.0),
        data=data,
        look=lambda step: step % 5 == 0,
    )


def cleaning(weights: str, direction: str | None, data_dir: Path | None, seed: int) -> Task:
    """Make the paper's task on MNIST with 30% wrong labels and batches of 500."""
    problem = HyperCleaning.mnist(
        corruption=0.3, seed=seed, weights=weights, data_dir=data_dir, dtype=torch.float32
    )
    samples = len(problem.x0)
    per_visit = (0.1, 0.5, 2.0) if weights == "box" else (0.5, 2.0, 8.0, 32.0, 128.0)
    sweep = ", all" if direction == "all" else ""
    return Task(
        name=f"MNIST, {weights}{sweep}",
        problem=problem,
        x0=problem.x0,
        y0=problem.y0,
        value=lambda x: float(problem.value(x)),
        lower_lrs=(0.1, 0.3),
        upper_lrs=tuple(samples * factor for factor in per_visit),
        multipliers=(10.0,),
        steps=50,
        data={
            "upper_data": problem.upper_data,
            "lower_data": problem.lower_data,
            "batch_size": 500,
            "direction_batch_size": direction,
            **({"chunk_size": samples} if direction == "all" else {}),
        },
        look=lambda step: step % 15 == 0,
    )


def run(
    *,
    seed: int = 0,
    conditions: Sequence[float] = CONDITIONS,
    scales: Sequence[tuple[float, ...]] = SCALES,
    mnist: bool = True,
    data_dir: Path | None = None,
    track: report.Track = iter,
) -> list[Row]:
    """Measure every task."""
    makers: list[Callable[[], Iterator[Row]]] = []

    def scaled(condition: float) -> Callable[[], Iterator[Row]]:
        def rows() -> Iterator[Row]:
            task = quadratic(condition, seed)
            tuned = tune(task)
            for choice in scales:
                yield measure(task, tuned, choice, seed)

        return rows

    def plain(make: Callable[[], Task]) -> Callable[[], Iterator[Row]]:
        def rows() -> Iterator[Row]:
            task = make()
            yield measure(task, tune(task), seed=seed)

        return rows

    makers += [scaled(condition) for condition in conditions]
    makers += [plain(lambda size=size: logistic(seed, size)) for size in (None, 20)]  # type: ignore[misc]
    if mnist:
        makers += [
            plain(lambda w=weights, d=direction: cleaning(w, d, data_dir, seed))  # type: ignore[misc]
            for weights, direction in (("box", "all"), ("sigmoid", "all"), ("sigmoid", None))
        ]
    return [row for make in track(makers) for row in make()]


def table(rows: Sequence[Row]) -> Table:
    """Lay out one line per task, with the worst figures over its scales.

    "decrease" is the tuned run's, "cost" the evaluations until 90% of it as a multiple of the tuned
    run's; "best" and "end" are shares of its decrease.
    """
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(row.task, []).append(row)
    return report.table(
        "nothing set by hand against the best of a grid",
        list(lines.values()),
        {
            "task": lambda group: group[0].task,
            "scales": lambda group: len(group),
            "tried": lambda group: group[0].tuned.tried,
            "decrease": lambda group: group[0].tuned.decrease,
            "cost": lambda group: max(row.reached for row in group),
            "best": lambda group: min(row.highest for row in group),
            "end": lambda group: min(row.last for row in group),
            "diverged": lambda group: sum(row.diverged for row in group),
            "passed": lambda group: f"{sum(row.passed for row in group)}/{len(group)}",
        },
    )
