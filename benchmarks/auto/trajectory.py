"""A run that is watched: F against seconds and against evaluations of f and g."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from benchmarks.auto.case import Case
from bilevel import F2SA, Problem, Solver, minimize

Clock: TypeAlias = Literal["seconds", "evaluations"]

LONGEST = 50_000
"""The most outer steps of a run; budgets end all runs before."""


@dataclass(frozen=True)
class Trajectory:
    """F along a run; the first entry is the start.

    Attributes:
        steps: the outer steps taken.
        seconds: the processor time of this one thread, without that of the judge.
        evaluations: those of f and g together. On minibatches an evaluation on more rows than one
            minibatch has counts as that many more.
        values: F.
    """

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, seconds: float, evaluations: float, value: float) -> None:
        """Append an entry, rounded to what is worth storing."""
        self.steps.append(step)
        self.seconds.append(round(seconds, 5))
        self.evaluations.append(round(evaluations, 1))
        self.values.append(float(f"{value:.9g}") if math.isfinite(value) else math.inf)

    def clock(self, name: Clock) -> list[float]:
        """Return the seconds or the evaluations."""
        return self.seconds if name == "seconds" else self.evaluations

    def value_at(self, name: Clock, budget: float) -> float:
        """Return the last F that was reached within a budget."""
        spent = zip(self.clock(name), self.values, strict=True)
        return [value for cost, value in spent if cost <= budget][-1]

    def cost_to(self, name: Clock, value: float) -> float:
        """Return the cost at which F was first no larger than ``value``; infinite if never."""
        spent = zip(self.clock(name), self.values, strict=True)
        return next((cost for cost, reached in spent if reached <= value), math.inf)


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        crash: the error that ended it; None: no error did.
        outcome: the name of the outcome of :func:`bilevel.minimize`.
        warnings: the warnings on the way.
    """

    crash: str | None
    outcome: str
    warnings: list[str]


class Counted(Problem):
    """A problem that counts the evaluations of its objectives."""

    def __init__(self, problem: Problem, batch_size: int | None) -> None:
        self.evaluations = 0.0

        def counted(objective: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def call(x: Any, y: Any, batch: Any) -> Tensor:
                rows = _rows(batch) if batch_size else None
                self.evaluations += max(1.0, rows / batch_size) if rows and batch_size else 1.0
                return objective(x, y, batch)

            return call

        super().__init__(
            counted(problem.upper), counted(problem.lower), problem.x_set, problem.y_set
        )


def _rows(batch: Any) -> int | None:
    first = batch[0] if isinstance(batch, tuple) else batch
    return len(first) if isinstance(first, Tensor) and first.ndim else None


def solve(
    case: Case, seed: int, method: F2SA | None, steps: int, watch: Any = None, problem: Any = None
) -> tuple[Ending, float]:
    """Call :func:`bilevel.minimize` as a user would, and judge its result.

    No method: nothing is set. F is infinite after a crash.
    """
    chosen: dict[str, Any] = {} if method is None else {"method": method}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        crash, outcome, value = None, "BROKEN", math.inf
        try:
            result = minimize(
                problem or case.problem,
                case.x0,
                case.y0,
                steps=steps,
                seed=seed,
                callback=watch,
                **case.data,
                **chosen,
            )
            outcome, value = result.outcome.name, case.value(result.x, result.y)
        except Exception as error:  # whatever it is, the user sees a traceback
            crash = f"{type(error).__name__}: {error}"[:300]
    said = sorted({f"{w.category.__name__}: {w.message}"[:300] for w in caught})
    return Ending(crash, outcome, said), value


def follow(
    case: Case,
    seed: int,
    method: F2SA | None = None,
    *,
    steps: int = LONGEST,
    enough: Callable[[float, float], bool] = lambda seconds, evaluations: False,
    every_mark: bool = True,
) -> tuple[Trajectory, Ending]:
    """Run and record F at the start, at steps that grow geometrically, and at the end.

    Args:
        case: the problem.
        seed: the seed of the run.
        method: None: nothing is set.
        steps: the most outer steps.
        enough: (seconds, evaluations) -> whether the run may end.
        every_mark: False: F at the start and at the end only.
    """
    problem = Counted(case.problem, case.data.get("batch_size"))
    path = Trajectory()
    path.add(0, 0.0, 0.0, case.start)
    spent, mark, since = 0.0, 1.0, 0.0

    def watch(solver: Solver, info: Any) -> bool:
        nonlocal spent, mark, since
        spent += time.process_time() - since
        end = solver.k >= steps or enough(spent, problem.evaluations)
        if end or (every_mark and solver.k >= mark):
            mark = max(solver.k + 1.0, solver.k * case.spacing)
            with torch.enable_grad():
                path.add(solver.k, spent, problem.evaluations, case.value(solver.x, solver.y))
        since = time.process_time()
        return end

    since = time.process_time()
    ending, value = solve(case, seed, method, steps, watch, problem)
    if ending.crash is None:
        # The last step of x may not have been tested; the result is what the user gets.
        path.values[-1] = value
    return path, ending
