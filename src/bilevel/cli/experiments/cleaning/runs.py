"""One run of one contender, and its evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bilevel.cli.experiments.cleaning.contenders import Contender, Settings, Sizes
from bilevel.cli.experiments.judge import BEST, Judge, auc
from bilevel.errors import RunError
from bilevel.problems import HyperCleaning
from bilevel.run import Solver

CORRUPTIONS = tuple(BEST)
BATCHES = (50, 500)
SPACING = 1.25
"""The ratio of consecutive step counts at which the weights are kept."""


@dataclass(frozen=True)
class CleaningTask:
    """The data with one fraction of wrong labels; the data do not depend on the seed of a run.

    Attributes:
        corruption: p, the fraction of wrong labels.
        problems: the problem for each value of HyperCleaning's argument ``weights``.
        judge: evaluates weights.
    """

    corruption: float
    problems: dict[str, HyperCleaning]
    judge: Judge

    @classmethod
    def mnist(cls, corruption: float, data_dir: Path | None = None) -> CleaningTask:
        """The paper's task, see :meth:`bilevel.problems.HyperCleaning.mnist`."""
        problems = {
            weights: HyperCleaning.mnist(corruption, weights=weights, data_dir=data_dir)
            for weights in ("sigmoid", "box")
        }
        return cls(corruption, problems, Judge(problems["box"], BEST[corruption]))

    def sizes(self, batch: int) -> Sizes:
        """The sizes of a run with minibatches of ``batch`` samples."""
        problem = self.problems["box"]
        return Sizes(batch, len(problem.x0), len(problem.upper_data[1]))

    def without_bilevel(self) -> Point:
        """The evaluation of all weights 1, which needs no steps."""
        return self.point(Snapshot(0, 0.0, self.judge.problem.x0), 0.0)

    def point(self, snapshot: Snapshot, gradients_per_step: float) -> Point:
        """Evaluate the weights of a snapshot at their exact lower solution."""
        problem, weights = self.judge.problem, snapshot.weights
        solution = self.judge.solution(weights)
        value = float(problem.upper(weights, solution, None))
        return Point(
            step=snapshot.step,
            gradients=snapshot.step * gradients_per_step,
            seconds=snapshot.seconds,
            value=value,
            gap=self.judge.gap_of(value),
            accuracy=problem.accuracy(solution),
            auc=auc(weights, ~problem.corrupted),
        )


@dataclass(frozen=True)
class Snapshot:
    """The weights after some steps, and the seconds that the steps took."""

    step: int
    seconds: float
    weights: Tensor


@dataclass(frozen=True)
class Point:
    """The evaluation of a run after some steps.

    Attributes:
        step: the number of outer steps taken.
        gradients: the number of minibatch gradients they took.
        seconds: their processor time.
        value: F.
        gap: the remaining fraction of the distance to the best F.
        accuracy: the accuracy of the exact lower solution on the test set.
        auc: the AUC of the weights as scores of right labels.
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
    """One run of one contender.

    Attributes:
        contender: the name of the contender.
        corruption, batch, seed: those of the run.
        settings: the settings of the method.
        points: the evaluations, beginning with the start.
        failure: the message of the error that ended the run early; None if there was none.
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
        """The evaluation at the end of the run."""
        return self.points[-1]

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Run:
        """The inverse of :func:`dataclasses.asdict`."""
        return cls(**{**found, "points": [Point(**point) for point in found["points"]]})


def follow(
    solver: Solver,
    seconds: float,
    weight: Callable[[Tensor], Tensor],
    clock: Callable[[], float] = time.process_time,
) -> tuple[list[Snapshot], str | None]:
    """Step until the seconds are spent; returns snapshots and the failure message, if any.

    The steps of the snapshots do not depend on the clock, except for the last one.
    """
    spent, due = 0.0, 1
    snapshots = [Snapshot(0, 0.0, weight(solver.x))]
    while spent < seconds:
        start = clock()
        try:
            solver.step(measure=False)
        except RunError as error:
            return snapshots, str(error)
        spent += clock() - start
        if solver.k == due or spent >= seconds:
            snapshots.append(Snapshot(solver.k, spent, weight(solver.x)))
        if solver.k == due:
            due = math.ceil(SPACING * due)
    return snapshots, None


def run(
    task: CleaningTask,
    contender: Contender,
    settings: Settings,
    *,
    batch: int,
    seed: int,
    seconds: float,
) -> Run:
    """One run, evaluated after its end so that evaluation is not timed."""
    problem = task.problems[contender.weights]
    solver = contender.solver(problem, settings, batch, seed)
    snapshots, failure = follow(solver, seconds, problem.weight)
    cost = contender.gradients_per_step(solver, task.sizes(batch))
    points = [task.point(snapshot, cost) for snapshot in snapshots]
    return Run(contender.name, task.corruption, batch, seed, settings, points, failure)
