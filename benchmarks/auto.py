"""Nothing set by hand against the best of many settings.

For each task a grid of F2SA's settings (both rates and the multiplier) is run for the same number
of outer steps, and the run that ends with the lowest F is the tuned one. Then F2SA runs with its
defaults alone, with three times the evaluations of f and g of the tuned run, those of its own
measurements included. What is asked of it: to come to 90% of the tuned decrease of F, and never to
end above where it began.

The quadratic is scaled: f and g by a factor each, x and y by changing their units. A scaled
quadratic with settings scaled likewise has the same iterates, so each condition is tuned once,
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
from bilevel.errors import NonFiniteError
from bilevel.methods import F2SA
from bilevel.problem import Problem
from bilevel.problems import HyperCleaning, Quadratic, WeightedLogistic
from bilevel.run import Solver

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
"""Of f, g, x and y: none, each alone, all together in every combination."""

SHARE = 0.9
BUDGET = 3


@dataclass(frozen=True)
class Task:
    """A problem whose F is known, where to start, and what to try.

    Attributes:
        name: what the row is called.
        problem, x0, y0: as a solver takes them.
        value: F.
        lower_lrs, upper_lrs, multipliers: the grid.
        steps: of each tuned run.
        data: of the solver.
        look: at which outer steps F is evaluated, of those in the budget.
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
        """The grid."""
        names = ("lower_lr", "upper_lr", "multiplier")
        grid = itertools.product(self.lower_lrs, self.upper_lrs, self.multipliers)
        return [dict(zip(names, choice, strict=True)) for choice in grid]


@dataclass(frozen=True)
class Tuned:
    """The best of a grid.

    Attributes:
        settings: that led to it.
        tried: how many were.
        decrease: of F, from the start to the end.
        evaluations: of f and g together.
    """

    settings: dict[str, float]
    tried: int
    decrease: float
    evaluations: int


@dataclass(frozen=True)
class Row:
    """One task.

    Attributes:
        task: its name.
        scales: of f, g, x and y.
        tuned: the best of the grid.
        reached: the evaluations after which 90% of its decrease was reached, as a multiple of its
            own; infinite if never.
        highest: the largest decrease within the budget, as a share of the tuned one.
        last: that at the end of the budget.
        diverged: whether it broke or ended above its start.
        multiplier, lower_lr, upper_lr: what was used in the last step.
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
        """Whether what is asked was done."""
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
    """Run the grid, and keep the run that ends lowest."""
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
    assert best is not None, "every setting of the grid diverged"
    return best


def measure(task: Task, tuned: Tuned, scales: tuple[float, ...] = UNSCALED, seed: int = 0) -> Row:
    """Run with nothing set, on three times the evaluations."""
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
    highest, share, reached, broken, info = -math.inf, 0.0, math.inf, False, None
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
        broken = True
    return Row(
        task=task.name,
        scales=scales,
        tuned=tuned,
        reached=reached,
        highest=highest,
        last=share,
        diverged=broken or not share >= 0,
        multiplier=math.nan if info is None else info.multiplier,
        lower_lr=math.nan if info is None else info.lower_lr,
        upper_lr=math.nan if info is None else info.upper_lr,
    )


def quadratic(condition: float, seed: int) -> Task:
    """The known quadratic; its largest curvatures are 1."""
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
    """Sample weights for logistic regression."""
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
    """The paper's task, 30% of the labels wrong, minibatches of 500."""
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
    """Every task."""
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
    """One line per task; of the scaled ones the worst.

    "decrease" is that of the tuned run, "cost" what it took to come to 90% of it, as a multiple of
    the tuned run's evaluations; "best" and "end" are shares of its decrease.
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
