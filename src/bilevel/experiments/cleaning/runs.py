"""One run of one contender."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bilevel.errors import RunError
from bilevel.experiments.cleaning.contenders import Contender, Settings, Sizes
from bilevel.experiments.judge import BEST, Judge, auc
from bilevel.problems import HyperCleaning
from bilevel.run import Solver

CORRUPTIONS = tuple(BEST)
BATCHES = (50, 500)
SPACING = 1.25
"""Of the numbers of steps after which weights are kept: each is about this times the last."""


@dataclass(frozen=True)
class Task:
    """The data with one part of wrong labels; they are the same for every seed of a run.

    Attributes:
        corruption: p.
        problems: by how x becomes weights.
        judge: evaluates weights.
    """

    corruption: float
    problems: dict[str, HyperCleaning]
    judge: Judge

    @classmethod
    def mnist(cls, corruption: float, data_dir: Path | None = None) -> Task:
        """The paper's, see :meth:`bilevel.problems.HyperCleaning.mnist`."""
        problems = {
            weights: HyperCleaning.mnist(corruption, weights=weights, data_dir=data_dir)
            for weights in ("sigmoid", "box")
        }
        return cls(corruption, problems, Judge(problems["box"], BEST[corruption]))

    def sizes(self, batch: int) -> Sizes:
        """Of a run with minibatches of that many samples."""
        problem = self.problems["box"]
        return Sizes(batch, len(problem.x0), len(problem.upper_data[1]))

    def without_bilevel(self) -> Point:
        """What all weights 1 are worth; x never moves, so no step and no second changes it."""
        return self.point(Kept(0, 0.0, self.judge.problem.x0), 0.0)

    def point(self, kept: Kept, gradients_per_step: float) -> Point:
        """What the weights at some step are worth."""
        problem, weights = self.judge.problem, kept.weights
        solution = self.judge.solution(weights)
        value = float(problem.upper(weights, solution, None))
        return Point(
            step=kept.step,
            gradients=kept.step * gradients_per_step,
            seconds=kept.seconds,
            value=value,
            gap=self.judge.gap_of(value),
            accuracy=problem.accuracy(solution),
            auc=auc(weights, ~problem.corrupted),
        )


@dataclass(frozen=True)
class Kept:
    """The weights after some steps, and the seconds that these took."""

    step: int
    seconds: float
    weights: Tensor


@dataclass(frozen=True)
class Point:
    """Where a run was after some steps.

    Attributes:
        step: how many outer steps were taken.
        gradients: how many gradients of minibatches they took.
        seconds: of the processor.
        value: F.
        gap: the part of the way to the best F that is left.
        accuracy: of the exact lower solution, on the test set.
        auc: that of the weights, for right labels.
    """

    step: int
    gradients: float
    seconds: float
    value: float
    gap: float
    accuracy: float
    auc: float


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        contender: its name.
        corruption, batch, seed: of what.
        settings: of its method.
        points: the start first.
        failure: what broke it before its time; None: nothing.
    """

    contender: str
    corruption: float
    batch: int
    seed: int
    settings: Settings
    points: list[Point]
    failure: str | None

    def __str__(self) -> str:
        return (
            f"p {self.corruption}, batch {self.batch}, seed {self.seed}, {self.contender}: "
            f"{self.last.step} steps, F {self.last.value:.4f}, gap {self.last.gap:.1%}"
            + (f" ({self.failure})" if self.failure else "")
        )

    @property
    def last(self) -> Point:
        """Where it ended."""
        return self.points[-1]

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Run:
        """What :func:`dataclasses.asdict` gave."""
        return cls(**{**found, "points": [Point(**point) for point in found["points"]]})


def follow(
    solver: Solver,
    seconds: float,
    weight: Callable[[Tensor], Tensor],
    clock: Callable[[], float] = time.process_time,
) -> tuple[list[Kept], str | None]:
    """Step until the seconds are spent; weights on the way, and what broke the run if it did.

    Which steps are kept does not depend on the clock, but for the last of them.
    """
    spent, due = 0.0, 1
    kept = [Kept(0, 0.0, weight(solver.x))]
    while spent < seconds:
        start = clock()
        try:
            solver.step(measure=False)
        except RunError as error:
            return kept, str(error)
        spent += clock() - start
        if solver.k == due or spent >= seconds:
            kept.append(Kept(solver.k, spent, weight(solver.x)))
        if solver.k == due:
            due = math.ceil(SPACING * due)
    return kept, None


def run(
    task: Task, contender: Contender, settings: Settings, *, batch: int, seed: int, seconds: float
) -> Run:
    """One run, evaluated after it is over."""
    problem = task.problems[contender.weights]
    solver = contender.solver(problem, settings, batch, seed)
    kept, failure = follow(solver, seconds, problem.weight)
    cost = contender.gradients_per_step(solver, task.sizes(batch))
    points = [task.point(one, cost) for one in kept]
    return Run(contender.name, task.corruption, batch, seed, settings, points, failure)
