"""The step sizes and the multiplier of each outer step, where they are given by the user.

Those that are found on the way are in :mod:`bilevel.stepping.found`.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeAlias

from bilevel.errors import StateError
from bilevel.problem import Level, Objectives, Phi
from bilevel.stepping.accelerated import AcceleratedSteps
from bilevel.stepping.rates import Rates, StepSizes
from bilevel.stepping.updates import Update
from bilevel.variables import Variable


class Iterate(Protocol):
    """What step-size policies see of a method's state."""

    x: Variable
    k: int
    multiplier: float
    x_update: Update

    @property
    def solution(self) -> Variable:
        """The copy of the lower variable that solves the lower level."""

    @property
    def penalised(self) -> Variable | None:
        """The copy that follows f as well as g."""

    def variables(self) -> list[Variable]:
        """The upper variable and all copies of the lower one, always in one order."""

    def updates(self) -> list[Update]:
        """How each of them moves."""

    def contract_copies(self, share: float) -> None:
        """Leave only a share of the distances between the copies and the lower solution."""

    def reset_estimators(self) -> None:
        """Forget what was estimated along the path of x, which was put elsewhere."""


class GivenSizes:
    """The step sizes of one run, from rates that were given.

    Attributes:
        current: the step sizes of the last step; None before the first.
        accelerated: finds the steps of the copies of y from inner step to inner step; None: they
            have the length that ``current`` says.
        due: whether :meth:`judge` decides the step of x at the end of this outer step.
        returned: whether x and y went back in this outer step.
        undecided: whether x rests until its last step can be tested.
        longest_move: the most that an entry of x may move by in a step.
    """

    accelerated: AcceleratedSteps | None = None
    due = False
    returned = False
    undecided = False
    longest_move = math.inf

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._follows_k = not rates.constant
        self._shares = {"lower": 1.0, "upper": 1.0}
        self._changes = True
        self.current: StepSizes | None = None

    def without_acceleration(self) -> None:
        """Give every inner step the length that :attr:`current` says, as compiled steps need it."""

    def forget_path(self) -> None:
        """The copies of y were put elsewhere: what was their way there says nothing."""

    def looks_next(self, state: Iterate) -> bool:
        """Whether :meth:`at` is going to evaluate the objectives."""
        return False

    def at(self, objectives: Objectives, state: Iterate) -> StepSizes:
        """The step sizes of the step that the state is about to take."""
        if self.current is None or self._changes:
            self._shortened(self._rates.at(state.k, state.multiplier))
            self._changes = self._follows_k
        assert self.current is not None
        return self.current

    def judge(self, objectives: Objectives, state: Iterate, phi: Phi | None, gain: float) -> float:
        """The step of x, whose direction is ``gain`` times what is on its leaves; 0: x rests.

        ``phi`` is the function whose x gradient the direction is; None: it is f at the solution.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let the next step be one that fits y and tests x, but does not move x further."""

    def conclude(self, objectives: Objectives, state: Iterate) -> tuple[float, float] | None:
        """Fit y to the last x; F at the start of the run and there, if that can be told.

        Nothing is done where the steps of x are not tested.
        """
        return None

    def moved(self, state: Iterate) -> bool:
        """Whether x is clearly elsewhere than where the run began, or had no time to move."""
        return True

    def step_of(self, state: Iterate) -> int:
        """The outer step that x belongs to: an earlier one where x went back and stayed."""
        return state.k

    def take_back(self, state: Iterate) -> bool:
        """Go back to where all was well, after a number that is not finite; whether that is so."""
        return False

    def slow_down(self, level: Level) -> None:
        """Halve the steps of x (upper) or of y (lower) from now on."""
        self._shares[level.value] /= 2
        self._changes = True

    def _shortened(self, now: StepSizes) -> StepSizes:
        lower, upper = self._shares["lower"], self._shares["upper"]
        if lower * upper < 1:
            now = StepSizes(
                lower * now.lower, lower * now.penalty, upper * now.upper, now.multiplier
            )
        self.current = now
        return now

    def state_dict(self) -> dict[str, Any]:
        """By how much the steps were shortened; the rest are functions of k."""
        return {"shares": dict(self._shares)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if "found" in state:
            raise StateError("the state was saved with 'auto' steps, but here they are given")
        self._shares = dict(state["shares"])
        self._changes = True


StepSizePolicy: TypeAlias = GivenSizes
"""Where the step sizes of a run come from; those of "auto" are found, in FoundSizes."""
