"""Inspects a run now and then, and warns, raises or goes back where it diverges."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from bilevel.errors import DivergenceError, DivergenceWarning, NonFiniteError, RunError, warn
from bilevel.problem import Level
from bilevel.run.advice import Source, choices_of, finds_a_rate, source_of
from bilevel.run.divergence.diagnosis import (
    BOTH_LEVELS,
    Diagnosis,
    diagnose,
    measured_cause,
    probing,
    slow_down,
    x_rests,
)
from bilevel.run.divergence.signs import BLOCK, Signs
from bilevel.run.history import Recorder
from bilevel.run.solver import Solver
from bilevel.variables import Form, Stateful, form_of, saved
from bilevel.variables.forms import flag, many, maybe, record, whole, word

Reaction: TypeAlias = Literal["raise", "warn", "backtrack"]

REACTIONS = ("raise", "warn", "backtrack")
BACKTRACKS = 10
"""How often a step is halved in one run at most."""

FIRST_BLOCKS = (4, 8, 16, 32)
PATIENCE = 32
"""For so many recorded steps an "auto" step of x may go too far and be taken back."""

NOISY_SAMPLE = 2.0
"""How much steeper a minibatch may be than the mean, where L is measured on one."""

LARGEST_PROBE = 1 << 20
"""The curvature is not measured where y has more numbers than this."""

LARGEST_KEPT = 1 << 24
"""A state with more numbers than this is only kept to go back to where that is asked for: it takes
the memory of one more copy of all that the run carries."""


def default_reaction(solver: Solver) -> Reaction:
    """What is done unless ``on_divergence`` says something.

    Steps that the library found are its own to correct; those that were given are the user's.
    """
    numbers = sum(leaf.numel() for v in solver.state.variables() for leaf in v.leaves)
    keeps = finds_a_rate(solver.method) and numbers <= LARGEST_KEPT
    return "backtrack" if keeps else "warn"


class Guard:
    """Inspects a run now and then, and does what ``on_divergence`` says where it diverges.

    Args:
        solver: the run.
        recorder: its history.
        others: whatever else goes back when the run does.
        reaction: "raise", "warn" or "backtrack"; None: as :func:`default_reaction` says, and where
            going back no longer helps, warn and go on.

    Attributes:
        reaction: what is done.
        diverged: whether the last inspection found that the run diverges.
    """

    def __init__(
        self, solver: Solver, recorder: Recorder, others: Stateful, reaction: Reaction | None
    ) -> None:
        self._solver = solver
        self._recorder = recorder
        self._others = others
        self.reaction = reaction or default_reaction(solver)
        self._insists = reaction is not None
        adaptive = source_of(solver.method, Level.UPPER) is Source.FOUND
        self._signs = Signs(
            scheduled=callable(getattr(solver.method, "multiplier", None)),
            patience=PATIENCE if adaptive else 0,
        )
        self._found = source_of(solver.method, Level.LOWER) is Source.FOUND
        self._halved = 0
        self._halved_since: list[Level] = []  # after the good state was kept
        self._good: dict[str, Any] | None = None
        self._jumping: Diagnosis | None = None  # by the last measurement of the curvature
        self.diverged = False

    def due(self, rows: int, *, last: bool) -> bool:
        """Whether to inspect the run when so many rows are recorded."""
        return last or rows % BLOCK == 0 or rows in FIRST_BLOCKS

    def begin(self) -> None:
        """Keep the start, so that a run can go back to it."""
        if self.reaction == "backtrack" and self._good is None:
            self._keep()

    def look(self) -> None:
        """Inspect what was recorded since the last time; the solver has settled.

        Raises:
            DivergenceError: if the reaction is "raise", or going back did not help.
        """
        rows = self._recorder.rows
        if rows <= self._signs.rows:
            return
        block = self._recorder.history(self._solver.k, first=self._signs.rows)
        sign = self._signs.inspect(block, rows)
        # steps of y that are found meet their own tests, and x may be where it does not stay
        if not self._found and rows >= BLOCK and rows & (rows - 1) == 0:
            self._jumping = self._overlong(rows)
        found = self._jumping
        if sign is not None:
            growth, rests = self._signs.multiplier_growth, x_rests(self._solver, block)
            found = diagnose(self._solver, sign, growth, x_rests=rests)
        before, self.diverged = self.diverged, found is not None
        if found is None:
            if self.reaction == "backtrack" and self._signs.calm:
                self._keep()
        elif self.reaction == "backtrack" and self._go_back(str(found), *found.levels):
            return
        elif self.reaction == "warn" or not self._insists:
            if not before:
                warn(
                    DivergenceWarning(f"the run seems to diverge at step {self._solver.k}: {found}")
                )
        else:
            error = DivergenceError(self._solver.k, str(found))
            error.state = self._solver.state_dict()
            raise error

    def undo(self, error: RunError) -> bool:
        """Go back after a number that is not finite, if that is wanted; whether it was done.

        If not, the error gets a diagnosis where one can be made.
        """
        if not isinstance(error, NonFiniteError):
            return False
        seen = f"{error.quantity} is not finite"
        found = measured_cause(self._solver, seen)
        if found is not None:
            error.diagnosis = f"{found.cause}. What helps: {found.advice}"
        error.advice = choices_of(self._solver).against_overflow
        levels = BOTH_LEVELS if found is None else found.levels
        return self.reaction == "backtrack" and self._go_back(str(found or seen), *levels)

    def _overlong(self, rows: int) -> Diagnosis | None:
        """Whether the steps of y are too long, though nothing runs away."""
        if self._signs.lower_fell():
            return None
        if sum(leaf.numel() for leaf in self._solver.state.solution.leaves) > LARGEST_PROBE:
            return None
        noise = 1.0 if self._solver.draw.lower.deterministic else NOISY_SAMPLE
        with probing(self._solver) as probe:
            step = None if probe is None else probe.longest_step(smallest=noise)
        if step is None:
            return None
        return step.diagnosis(f"after {rows} recorded steps g at the lower solution does not fall")

    def _keep(self) -> None:
        self._halved_since = []
        self._good = {
            "solver": self._solver.state_dict(),
            "others": self._others.state_dict(),
            "rows": self._recorder.rows,
            "signs": self._signs.state_dict(),
        }

    def _go_back(self, why: str, *levels: Level) -> bool:
        """Go back to the last good state, with half the step; False: no more attempts are left."""
        if self._halved >= BACKTRACKS or self._good is None:
            return False
        diverged = self._solver.k
        self._halved += 1
        self._halved_since += levels
        self._solver.go_back_to(self._good["solver"])
        self._others.load_state_dict(self._good["others"])
        self._recorder.forget(self._good["rows"])
        self._signs.load_state_dict(self._good["signs"])
        for level in self._halved_since:
            slow_down(self._solver, level)
        self._jumping, self.diverged = None, False
        halved = " and ".join("x" if level is Level.UPPER else "y" for level in levels)
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
            "since": [level.value for level in self._halved_since],
            "good": saved(self._good),
        }

    def state_form(self) -> Form:
        """What was seen, and a whole state of the run to go back to."""
        signs = self._signs.state_form()
        good = {
            "solver": self._solver.state_form(),
            "others": form_of(self._others),
            "rows": whole(),
            "signs": signs,
        }
        return record(
            {
                "signs": signs,
                "diverged": flag,
                "halved": whole(most=BACKTRACKS),
                "since": many(word(*(level.value for level in Level))),
                "good": maybe(record(good)),
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._signs.load_state_dict(state["signs"])
        self.diverged, self._halved = state["diverged"], state["halved"]
        self._halved_since, self._good = [Level(name) for name in state["since"]], state["good"]
