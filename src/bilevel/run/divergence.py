"""Runs that diverge: what betrays them, what is wrong, and what to change.

What a run reports is looked at in blocks, after 4, 8, 16, 32, 64 recorded steps and then after
every 64, so that a device is waited for seldom and a step costs nothing more. There are four signs.

*Running away.* Of |f(x, z)|, |g(x, z)|, ||direction|| and lam ||y - z||, two are a hundred times
larger than they ever were in the first three quarters of the run. What grows like a power of k, as
everything may that begins at zero, does not do that; what grows like a power of anything above 1
soon does. (Medians over blocks are compared, so that a rare bad batch counts for nothing, and
lam ||y - z|| is taken from the reported gap, lam sqrt(2 (g(x, y) - g(x, z))), which is the same
distance in the metric of g.)

*The multiplier outgrows the step.* A multiplier that is a function of k is ten times what it was at
half the run, and lam ||y - z||, which should tend to a constant, has grown tenfold as well.

*The lower solution lags.* g(x, y) < g(x, z) over half of the run and no less than at first, by more
than f / lam: the copy that is to solve the lower level is worse at it than the penalised one.

*A step beyond 2/L.* Where y is bounded, or g flattens away from its minimum, steps that are too
long do not run away; they jump to and fro. So after 64, 128, 256, ... recorded steps the curvature
L of the lower level is measured, if g did not fall since the last time, by power iterations on
differences of gradients. (Not where y has more than a million numbers: L needs memory for a few
more of them.)

Where there is a sign, the curvatures of g and f in y tell which of the step sizes is to blame.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch

from bilevel.errors import DivergenceError, DivergenceWarning, NonFiniteError, RunError, warn
from bilevel.run.solver import Solver
from bilevel.stepping.adaptive import AdaptiveUpdate
from bilevel.stepping.policy import Slopes, difference, slope_of
from bilevel.stepping.updates import Update
from bilevel.variables import Variable, flatten
from bilevel.variables.state import Stateful, saved

Reaction: TypeAlias = Literal["raise", "warn", "backtrack"]
Level: TypeAlias = Literal["lower", "upper"]

LEVELS: tuple[Level, ...] = ("lower", "upper")
REACTIONS = ("raise", "warn", "backtrack")
BACKTRACKS = 10
"""How often a step is halved in one run at most."""

BLOCK = 64
FIRST_BLOCKS = (4, 8, 16, 32)
PATIENCE = 32
"""While a step of x that is to be found may go too far and be taken back."""

RUNAWAY = 100.0
UNEASY = 3.0
OUTGROWN = 10.0
LONGER_THAN_IT_MAY = 1.1
"""How far beyond 2/L a step is for certain; L is measured from below."""

NOISY_SAMPLE = 2.0
"""And where L is that of a minibatch, which may be steeper than the mean."""

POWER_STEPS = 8
LARGEST_PROBE = 1 << 20
SERIES = ("upper", "lower", "direction", "spread")
NAMES = {
    "upper": "f(x, z)",
    "lower": "g(x, z)",
    "direction": "the norm of the direction",
    "spread": "multiplier * ||y - z||",
}


class Records(Protocol):
    """The history of a run so far."""

    @property
    def rows(self) -> int:
        """How many steps were recorded."""

    def block(self, first: int) -> dict[str, np.ndarray[Any, Any]]:
        """The columns of the history from that row on."""

    def forget(self, rows: int) -> None:
        """Keep only the first rows."""


@dataclass(frozen=True)
class Diagnosis:
    """What was seen, what is wrong, and what to change.

    Attributes:
        seen: what betrayed it.
        cause: what is wrong, as far as it can be told.
        advice: what to change.
        levels: whose steps may be too long.
    """

    seen: str
    cause: str
    advice: str
    levels: tuple[Level, ...]

    def __str__(self) -> str:
        return f"{self.seen}. The likely cause: {self.cause}. What helps: {self.advice}"


class Guard:
    """Looks at a run now and then, and does what ``on_divergence`` says where it diverges.

    Args:
        solver: the run.
        records: its history.
        others: whatever else goes back when the run does.
        reaction: "raise", "warn" or "backtrack".
    """

    def __init__(
        self, solver: Solver, records: Records, others: Stateful, reaction: Reaction
    ) -> None:
        self._solver = solver
        self._records = records
        self._others = others
        self._reaction = reaction
        found = any(isinstance(u, AdaptiveUpdate) for u in _updates(solver, "upper"))
        self._signs = Signs(
            scheduled=callable(getattr(solver.method, "multiplier", None)),
            patience=PATIENCE if found else 0,
        )
        self._halved = 0
        self._since: list[Level] = []  # what was halved after the good state was kept
        self._good: dict[str, Any] | None = None
        self._jumping: Diagnosis | None = None  # by the last measurement
        self.diverged = False

    def due(self, rows: int, *, last: bool) -> bool:
        """Whether to look when so many rows are recorded."""
        return last or rows % BLOCK == 0 or rows in FIRST_BLOCKS

    def begin(self) -> None:
        """Where a run is to go back, it can go back to its start."""
        if self._reaction == "backtrack" and self._good is None:
            self._keep()

    def look(self) -> None:
        """Look at what was recorded since the last time; the solver has settled.

        Raises:
            DivergenceError: if that is what is to be done, or nothing else helps.
        """
        rows = self._records.rows
        if rows <= self._signs.rows:
            return
        sign = self._signs.look(self._records.block(self._signs.rows), rows)
        if rows >= BLOCK and rows & (rows - 1) == 0:
            self._jumping = self._overlong(rows)
        found = self._jumping
        if sign is not None:
            found = diagnose(self._solver, sign, self._signs.multiplier_growth)
        before, self.diverged = self.diverged, found is not None
        if found is None:
            if self._reaction == "backtrack" and self._signs.calm:
                self._keep()
        elif self._reaction == "warn":
            if not before:
                warn(
                    DivergenceWarning(f"the run seems to diverge at step {self._solver.k}: {found}")
                )
        elif self._reaction == "raise" or not self._go_back(str(found), *found.levels):
            error = DivergenceError(self._solver.k, str(found))
            error.state = self._solver.state_dict()
            raise error

    def broke(self, error: RunError) -> bool:
        """Whether a step that met a number that is not finite was undone; else told why it did."""
        if not isinstance(error, NonFiniteError):
            return False
        found = measured_cause(self._solver, f"{error.quantity} is not finite")
        if found is not None:
            error.diagnosis = f"{found.cause}. What helps: {found.advice}"
        levels = LEVELS if found is None else found.levels
        return self._reaction == "backtrack" and self._go_back(str(found or error), *levels)

    def _overlong(self, rows: int) -> Diagnosis | None:
        """Whether the steps of y are too long, though nothing runs away."""
        if self._signs.lower_fell():
            return None
        if sum(leaf.numel() for leaf in self._solver.state.solution.leaves) > LARGEST_PROBE:
            return None
        noise = 1.0 if self._solver.draw.lower.deterministic else NOISY_SAMPLE
        with _probing(self._solver) as probe:
            step = None if probe is None else probe.longest_step(smallest=noise)
        if step is None:
            return None
        return step.diagnosis(f"after {rows} recorded steps g(x, z) does not fall")

    def _keep(self) -> None:
        self._since = []
        self._good = {
            "solver": self._solver.state_dict(),
            "others": self._others.state_dict(),
            "rows": self._records.rows,
            "signs": self._signs.state_dict(),
        }

    def _go_back(self, why: str, *levels: Level) -> bool:
        """To the last good state, with half the step; False: that was done often enough."""
        if self._halved >= BACKTRACKS or self._good is None:
            return False
        diverged = self._solver.k
        self._halved += 1
        self._since += levels
        self._solver.load_state_dict(self._good["solver"])
        self._others.load_state_dict(self._good["others"])
        self._records.forget(self._good["rows"])
        self._signs.load_state_dict(self._good["signs"])
        for each in self._since:
            slow_down(self._solver, each)
        self._jumping, self.diverged = None, False
        halved = " and ".join("x" if level == "upper" else "y" for level in levels)
        warn(
            DivergenceWarning(
                f"the run diverged at step {diverged}: {why}. It goes back to step "
                f"{self._solver.k} with half the step of {halved}"
            )
        )
        return True

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far, and the state to go back to."""
        return {
            "signs": self._signs.state_dict(),
            "diverged": self.diverged,
            "halved": self._halved,
            "since": list(self._since),
            "good": saved(self._good),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._signs.load_state_dict(state["signs"])
        self.diverged, self._halved = state["diverged"], state["halved"]
        self._since, self._good = list(state["since"]), state["good"]


class Signs:
    """What the history says, in memory that does not depend on its length but for a few numbers.

    Args:
        scheduled: whether the multiplier is a function of k.
        patience: before so many recorded steps nothing is a sign.
    """

    def __init__(self, *, scheduled: bool, patience: int) -> None:
        self._scheduled = scheduled
        self._patience = patience
        self.rows = 0
        self._ends: list[int] = []
        self._levels: dict[str, list[float]] = {name: [] for name in (*SERIES, "multiplier")}
        self._peaks: dict[str, list[float]] = {name: [] for name in SERIES}
        self._lagging: tuple[int, float] | None = None  # since which row, and by how much at first
        self._probed_lower = math.inf
        self._noticed: int | None = None  # how many blocks there were when a sign was first seen
        self.calm = True

    def look(self, block: dict[str, np.ndarray[Any, Any]], rows: int) -> str | None:
        """Take a block that ends at that row; what is wrong with it, in words."""
        first, self.rows = self.rows, rows
        lam = np.where(np.isnan(block["multiplier"]), 0.0, block["multiplier"])
        gap = np.where(np.isnan(block["gap"]), 0.0, block["gap"])
        series = {
            "upper": np.abs(block["upper"]),
            "lower": np.abs(block["lower"]),
            "direction": block["direction_norm"],
            "spread": lam * np.sqrt(2 * np.abs(gap)),
            "multiplier": lam,
        }
        for name, values in series.items():
            self._levels[name].append(float(np.median(values)))
        self._ends.append(rows)
        self._become_calm({name: series[name] for name in SERIES})
        sign = self._ran_away() or self._outgrown() or self._lags(first, lam * gap, series["upper"])
        sign = sign if rows >= self._patience else None
        if sign is None:
            self._noticed = None
        elif self._noticed is None:
            self._noticed = len(self._ends) - 1
        for name in SERIES:
            peaks = self._peaks[name]
            peaks.append(max(self._levels[name][-1], peaks[-1] if peaks else 0.0))
        return sign

    def lower_fell(self) -> bool:
        """Whether g fell since this was last asked."""
        before, self._probed_lower = self._probed_lower, self._levels["lower"][-1]
        return self._probed_lower < 0.95 * before

    @property
    def multiplier_growth(self) -> float:
        """By which factor the multiplier grew over the second half of the run."""
        multipliers = self._levels["multiplier"]
        before = multipliers[self._block_before(0.5)] if len(multipliers) > 1 else 0.0
        return multipliers[-1] / before if before > 0 else 1.0

    def _block_before(self, share: float) -> int:
        """The last block that ended in that share of the run, or before a sign was first seen."""
        index = max(0, bisect.bisect_right(self._ends, share * self._ends[-1]) - 1)
        return index if self._noticed is None else max(0, min(index, self._noticed - 1))

    def _become_calm(self, series: dict[str, np.ndarray[Any, Any]]) -> None:
        """Whether nothing rises, neither within the block nor to it."""
        before = self._block_before(0.75)
        self.calm = True
        for name, values in series.items():
            half = len(values) // 2
            early = float(np.median(values[:half])) if half else math.inf
            known = self._peaks[name][before] if len(self._ends) > 1 else 0.0
            self.calm &= float(np.median(values[half:])) <= UNEASY * max(early, known)

    def _ran_away(self) -> str | None:
        if len(self._ends) < 2:
            return None
        reference = self._block_before(0.75)
        levels = {name: (self._peaks[name][reference], self._levels[name][-1]) for name in SERIES}
        runaway = {name: (a, b) for name, (a, b) in levels.items() if b > RUNAWAY * a > 0}
        if len(runaway) < 2:
            return None
        told = " and ".join(
            f"{NAMES[name]} from {a:.3g} to {b:.3g}" for name, (a, b) in runaway.items()
        )
        return f"over {self.rows} recorded steps there rose {told}"

    def _outgrown(self) -> str | None:
        if not self._scheduled or self.rows < BLOCK or len(self._ends) < 2:
            return None
        half, growth = self._block_before(0.5), self.multiplier_growth
        before, now = self._peaks["spread"][half], self._levels["spread"][-1]
        if growth < OUTGROWN or not now > OUTGROWN * before > 0:
            return None
        return (
            f"over {self.rows} recorded steps {NAMES['spread']} rose from {before:.3g} to {now:.3g}"
        )

    def _lags(
        self, first: int, excess: np.ndarray[Any, Any], upper: np.ndarray[Any, Any]
    ) -> str | None:
        """Whether g(x, y) < g(x, z) for long; ``excess`` is lam times the gap."""
        amount = -float(np.median(excess))
        if not (np.mean(excess < 0) >= 0.95 and amount > float(np.median(upper))):
            self._lagging = None
            return None
        if self._lagging is None:
            self._lagging = first, amount
        since, at_first = self._lagging
        long = self.rows - since
        if long < max(BLOCK, self.rows / 2) or amount < 0.5 * at_first:
            return None
        return (
            f"for {long} recorded steps g(x, y) has been below g(x, z), now by {amount:.3g} / "
            f"multiplier"
        )

    def state_dict(self) -> dict[str, Any]:
        """All of it, as lists of numbers."""
        return {
            "rows": self.rows,
            "ends": list(self._ends),
            "levels": {name: list(values) for name, values in self._levels.items()},
            "lagging": None if self._lagging is None else list(self._lagging),
            "probed_lower": self._probed_lower,
            "noticed": self._noticed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.rows, self._ends = state["rows"], list(state["ends"])
        self._levels = {name: list(values) for name, values in state["levels"].items()}
        self._peaks = {
            name: np.maximum.accumulate([0.0, *self._levels[name]])[1:].tolist() for name in SERIES
        }
        self._lagging = None if state["lagging"] is None else (*state["lagging"],)
        self._probed_lower, self._noticed = state["probed_lower"], state["noticed"]


@dataclass(frozen=True)
class Overlong:
    """A step of y beyond 2/L.

    Attributes:
        argument: that gives it.
        rate: its length.
        curvature: L, of what it descends on.
    """

    argument: str
    rate: float
    curvature: float

    def diagnosis(self, seen: str) -> Diagnosis:
        """In words."""
        return Diagnosis(
            seen,
            f"{self.argument} is {self.rate:.3g}, beyond 2/L = {2 / self.curvature:.3g} for the "
            f"curvature L = {self.curvature:.3g} that the lower steps meet, so that each step "
            f"overshoots by more than it corrects",
            f"use {self.argument}={1 / self.curvature:.2g} (1/L) or less, or lower_lr='auto'",
            ("lower",),
        )


class Probe:
    """The curvatures of g and f in y at the lower solution, on samples that come again."""

    def __init__(self, solver: Solver) -> None:
        problem, state, draw = solver.problem, solver.state, solver.draw
        self._solver = solver
        self._y = state.solution
        self._g = slope_of(problem.g, state.x, [draw.lower.peek()])
        f = slope_of(problem.f, state.x, [draw.upper.peek()])
        self.steepest = _power(self._g, self._y)
        self._of_f = abs(_power(f, self._y))

    def longest_step(self, *, smallest: float) -> Overlong | None:
        """The step of y that is longest, if it is ``smallest`` times a bit more than 2/L."""
        method, now, lower = (
            self._solver.method,
            self._solver.state.pace.now,
            _lower_step(self._solver),
        )
        if now is None or lower is None:
            return None
        name, rate = lower
        g = abs(self.steepest)
        met = g
        if hasattr(method, "stiffness"):
            met = method.stiffness(g, self._of_f, now.multiplier)
        own = getattr(method, "penalty_lr", None) is not None
        found = max(
            Overlong(name, rate, g if own else met),
            Overlong("penalty_lr", now.penalty, met if own else 0.0),
            key=lambda step: step.rate * step.curvature,
        )
        beyond = found.rate * found.curvature > 2 * smallest * LONGER_THAN_IT_MAY
        return found if beyond and math.isfinite(found.curvature) else None

    def least(self) -> float:
        """The smallest curvature of g."""
        top = abs(self.steepest)
        return top - abs(_power(self._g, self._y, shift=top))


def measured_cause(solver: Solver, seen: str) -> Diagnosis | None:
    """What the curvatures of the lower level say of a run of which so much was ``seen``."""
    with _probing(solver) as probe:
        if probe is None:
            return None
        step = probe.longest_step(smallest=1 / LONGER_THAN_IT_MAY)
        if step is not None and probe.steepest > 0:
            return step.diagnosis(seen)
        least = min(probe.steepest, probe.least())
        if not least < -1e-3 * abs(probe.steepest):
            return None
        return Diagnosis(
            seen,
            f"g is not convex in y here (it has the curvature {least:.3g} along a direction), so "
            f"that the lower level may have no minimum to follow",
            "add a term such as 0.5 * mu * ||y||^2 to g, or bound y by y_set",
            ("lower",),
        )


def diagnose(solver: Solver, seen: str, multiplier_growth: float) -> Diagnosis:
    """Which of the steps is too long for a run of which so much was ``seen``."""
    found = measured_cause(solver, seen)
    if found is not None:
        return found
    now = solver.state.pace.now
    if multiplier_growth >= OUTGROWN and now is not None:
        return Diagnosis(
            seen,
            f"the multiplier, now {now.multiplier:.3g}, has grown {multiplier_growth:.3g}-fold "
            f"over half of the run and outgrows the steps, because it multiplies all that y and z "
            f"lag behind by",
            "let it grow more slowly, let upper_lr fall as it grows, or take more inner_steps",
            ("upper",),
        )
    if seen.startswith("for "):
        return Diagnosis(
            seen,
            "z, which is to solve the lower level, does not keep up, and the direction of x is "
            "mostly its error",
            "use a larger lower_lr or more inner_steps, or a smaller upper_lr",
            ("upper",),
        )
    return _upper_too_long(solver, seen)


def _upper_too_long(solver: Solver, seen: str) -> Diagnosis:
    """What is left where the lower steps are not to blame, or cannot be judged."""
    now = solver.state.pace.now
    rate = math.nan if now is None else now.upper
    given = not math.isnan(rate) and getattr(solver.method, "upper_optimizer", None) is None
    named = f"upper_lr={rate:.3g}" if given else "the step of x"
    smaller = f"use upper_lr={rate / 4:.2g} or less" if given else "use a smaller step of x"
    if _can_probe(solver) and _lower_step(solver) is not None:
        return Diagnosis(
            seen,
            f"{named} is too long for F (the lower steps are within 2/L, so it is x that goes too "
            f"far)",
            f"{smaller}, or more inner_steps",
            ("upper",),
        )
    return Diagnosis(
        seen,
        f"{named} or that of y is too long (which of them cannot be told: the curvature cannot be "
        f"measured on this data, or an optimizer makes other steps of y than its rate says)",
        f"{smaller}, or a smaller one of y",
        LEVELS,
    )


def _lower_step(solver: Solver) -> tuple[str, float] | None:
    """The argument that gives the step of y, and its length; None: it is not a plain step."""
    optimizers = [update.optimizer for update in _updates(solver, "lower")]
    now = solver.state.pace.now
    if now is None:
        return None
    if not any(optimizers):
        return "lower_lr", now.lower
    (first, *_) = (optimizer for optimizer in optimizers if optimizer is not None)
    (group, *_) = first.param_groups
    if type(first) is torch.optim.SGD and not group["momentum"]:
        return "the lr of lower_optimizer", float(group["lr"])
    return None


def slow_down(solver: Solver, level: Level) -> None:
    """Halve the steps of x, or all those of y."""
    solver.state.pace.slow_down(level)
    for update in _updates(solver, level):
        update.slow_down()


def _updates(solver: Solver, level: Level) -> list[Update]:
    """How x moves, or the copies of y."""
    parts = [
        part
        for value in vars(solver.state).values()
        for part in (value if isinstance(value, list) else [value])
        if isinstance(part, Update)
    ]
    return [part for part in parts if (part.variable is solver.state.x) == (level == "upper")]


def _can_probe(solver: Solver) -> bool:
    """Whether there are samples to come back to; those of several ranks would not agree."""
    return solver.team is None and solver.draw.lower.probed and solver.draw.upper.probed


@contextmanager
def _probing(solver: Solver) -> Iterator[Probe | None]:
    """What measures curvatures; None: on this data, or in this memory, it cannot be done."""
    if not _can_probe(solver):
        yield None
        return
    with solver.aside():
        try:
            probe = Probe(solver)
        except torch.cuda.OutOfMemoryError:
            probe = None
        yield probe


def _power(slope: Slopes, y: Variable, shift: float = 0.0) -> float:
    """The curvature, with its sign, that is largest after that is subtracted; 0: there is none."""
    here = slope(y)
    vector = torch.randn(len(here), generator=torch.Generator().manual_seed(0)).to(here)
    size = float(torch.linalg.vector_norm(flatten(y.leaves).detach())) or math.sqrt(len(here))
    found = 0.0
    for _ in range(POWER_STEPS):
        vector /= vector.norm()
        image = difference(slope, y, here, vector, size).sub_(vector, alpha=shift)
        length = float(image.norm())
        if not (length > 0 and math.isfinite(length)):
            return found
        found = math.copysign(length, float(vector @ image))
        vector = image
    return found
