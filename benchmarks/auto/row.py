"""What is compared on one problem with one seed, and the arithmetic of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.auto.case import Case
from benchmarks.auto.trajectory import LONGEST, Clock, Ending, Trajectory, follow, solve
from benchmarks.auto.tuning import Settings, Tuned, tune

BUDGET = 2.0
"""The budget of the run with nothing set, as a multiple of the tuned run's."""

LIMIT = 3.0
"""It goes on for evaluations that are still missing until this multiple of the seconds."""

SHARE = 0.9
"""The share of the tuned run's decrease that has to be reached."""

RISE = 0.01
"""A run ended above its start if F rose by more than this share of the tuned decrease."""


@dataclass(frozen=True)
class Row:
    """One problem with one seed.

    Shares are of the tuned run's decrease of F; costs are multiples of the tuned run's.

    Attributes:
        problem, family, seed: the problem.
        tuned: the best run of the search.
        auto: the run with nothing set.
        ending: how that run ended.
        silent: whether it ended above its start without a warning, as if all was well.
        share_equal_seconds, share_twice_seconds, share_equal_evaluations: the share within the
            tuned run's time, within twice that, and within its evaluations.
        share_end: the share at the end of the run.
        seconds, evaluations: the cost until 90% of the tuned decrease; infinite if not reached.
    """

    problem: str
    family: str
    seed: int
    tuned: Tuned
    auto: Trajectory
    ending: Ending
    silent: bool
    share_equal_seconds: float = field(init=False)
    share_twice_seconds: float = field(init=False)
    share_equal_evaluations: float = field(init=False)
    share_end: float = field(init=False)
    seconds: float = field(init=False)
    evaluations: float = field(init=False)

    def __post_init__(self) -> None:
        for name, value in (
            ("share_equal_seconds", self.share("seconds", 1.0)),
            ("share_twice_seconds", self.share("seconds", BUDGET)),
            ("share_equal_evaluations", self.share("evaluations", 1.0)),
            ("share_end", self.share("seconds", math.inf)),
            ("seconds", self.cost("seconds", SHARE)),
            ("evaluations", self.cost("evaluations", SHARE)),
        ):
            object.__setattr__(self, name, float(f"{value:.4g}"))

    @property
    def decrease(self) -> float:
        """The tuned run's decrease of F, kept above 0 so that shares are defined."""
        values = self.tuned.trajectory.values
        return max(values[0] - values[-1], 1e-9 * abs(values[0]), 1e-300)

    def share(self, clock: Clock, multiple: float) -> float:
        """Return the share of the decrease at the end of a budget."""
        budget = multiple * self.tuned.trajectory.clock(clock)[-1]
        return (self.auto.values[0] - self.auto.value_at(clock, budget)) / self.decrease

    def cost(self, clock: Clock, share: float, *, tuned: bool = False) -> float:
        """Return the cost until that share of the decrease was first reached, by either run."""
        run = self.tuned.trajectory if tuned else self.auto
        cost = run.cost_to(clock, run.values[0] - share * self.decrease)
        return cost / self.tuned.trajectory.clock(clock)[-1]

    @property
    def crashed(self) -> bool:
        """Whether an error ended the run."""
        return self.ending.crash is not None

    @property
    def above(self) -> bool:
        """Whether the run ended above its start."""
        return not self.share_end >= -RISE

    @property
    def passed(self) -> bool:
        """Whether 90% of the tuned decrease was reached in twice the tuned run's time."""
        return not self.crashed and self.seconds <= BUDGET


def measure(
    case: Case, problem: str, family: str, seed: int, known: Settings | None = None, tried: int = 0
) -> Row:
    """Tune, then run with nothing set for twice the time and twice the evaluations."""
    tuned = tune(case, seed, known, tried)
    seconds, evaluations = (
        tuned.trajectory.seconds[-1],
        tuned.trajectory.evaluations[-1],
    )

    def enough(spent: float, evaluated: float) -> bool:
        both = spent >= BUDGET * seconds and evaluated >= BUDGET * evaluations
        return both or spent >= LIMIT * seconds

    path, ending = follow(case, seed, enough=enough)
    row = Row(problem, family, seed, tuned, path, ending, silent=False)
    if not row.above or row.crashed or ending.warnings:
        return row
    # The watch stopped the run. What does a user see whose run ends here by itself?
    steps = min(path.steps[-1], LONGEST)
    alone, _ = solve(case, seed, None, steps)
    silent = alone.crash is None and not alone.warnings and alone.outcome == "COMPLETED"
    return Row(problem, family, seed, tuned, path, alone, silent)


def profile(
    rows: Sequence[Row],
    clock: Clock,
    within: float,
    multiples: Sequence[float],
    *,
    tuned: bool = False,
) -> list[float]:
    """Return for each budget the share of rows solved to within a share of the tuned decrease.

    Args:
        rows: the rows.
        clock: what the budgets are of.
        within: the share of the tuned decrease that may be missing.
        multiples: the budgets, as multiples of the whole cost of the tuned run.
        tuned: count the tuned runs themselves, which get there before they end.
    """
    costs = [
        math.inf if row.crashed and not tuned else row.cost(clock, 1 - within, tuned=tuned)
        for row in rows
    ]
    return [sum(cost <= multiple for cost in costs) / len(costs) for multiple in multiples]
