"""What "auto" remembers from one look to the next; all of it is saved with the state."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel.errors import StateError
from bilevel.stepping.curvature import Curvature
from bilevel.stepping.merit import TOLERATED, Merits, standard_error, surely_rose
from bilevel.stepping.policy import Iterate
from bilevel.variables import flatten, inner, length, saved

MOST_RESTS, LATER_RESTS = 10, 3
"""At the start, until y is near the lower solution; later three are enough to tell."""

LONGEST_WINDOW, GROWING_WINDOW = 64, 8
"""In longer ones a failure costs much; while the step still grows, a look costs about a step."""

WINDOW_OF_GIVEN_STEPS = 8
"""The longest window where the steps of x are given, which nothing tests."""

LONGEST_MOVE = 4.0
"""In units of x: from one end of a sigmoid to the other."""

FIRST_SHARE = 0.1

LEAST_SHARE = 1e-3
"""Of the first step of x: a few unlucky tests must not end a run."""

FALLBACK_RATE = 0.1
"""Where g is linear in y, so that no curvature limits the step."""

MOST_RETURNS = 30
"""After so many returns in a row the step is next to nothing, and shortening it does not help."""


@dataclass
class Numbers:
    """What the policy remembers, apart from tensors.

    Attributes:
        upper: the step of x.
        first: the first one.
        longest_move: the most that an entry of x may move by in a step.
        window: outer steps from one look to the next.
        since: those taken since the last look.
        looks: how many there were.
        rests: how many looks x has rested for.
        drift: by how much the merit changed while x rested.
        last: the merit at the last look at which x rested.
        failed: the merit that failed the test; NaN: none did.
        uncertain: three standard errors of the difference that failed.
        promised: the decrease that was promised then.
        brake: by how much the step of y is shorter than its curvature says.
        steady: the share of 1/L with which the method's estimates do not grow by noise.
        noisy: the outer steps in which noise hid what y has left to gain.
        multiplier: the raised one.
        steepness: the curvature that the lower steps meet.
        returns: how often x went back since a window last passed.
        unsettled: at how many more looks the copies of y had not settled than had.
        kinked: whether g was then found to have kinks.
        flat: whether it was said that nothing changes with x.
        measuring: whether x rests until its merit is known.
        resting: whether neither x nor y was moved since the last inner step.
    """

    upper: float = math.nan
    first: float = 0.0
    longest_move: float = math.inf
    window: int = 1
    since: int = 0
    looks: int = 0
    rests: int = 0
    drift: float = 0.0
    last: float = math.nan
    failed: float = math.nan
    uncertain: float = 0.0
    promised: float = 0.0
    brake: float = 1.0
    steady: float = 1.0
    noisy: float = 0.0
    multiplier: float = 0.0
    steepness: float = 0.0
    returns: int = 0
    unsettled: int = 0
    kinked: bool = False
    flat: bool = False
    measuring: bool = True
    resting: bool = False

    def begin_window_of_given_steps(self, unit: int, *, renewed: bool) -> None:
        """From one look to the next where nothing tests the steps of x.

        ``renewed``: each outer step has a lower level of its own, whose curvature may be any.
        """
        longest = 1 if renewed else min(2 * self.window, WINDOW_OF_GIVEN_STEPS * unit)
        self.since, self.window = 0, longest

    def begin_at(
        self, x: Tensor, direction: Tensor, towards: Tensor, merit: float, unit: int
    ) -> None:
        """The first step of x: it promises a tenth of the merit, and moves x by a tenth at most."""
        reach = FIRST_SHARE * (length(x) or math.sqrt(x.numel())) / length(towards)
        promise = FIRST_SHARE * abs(merit) / inner(direction, towards)
        self.upper = self.first = min(reach, promise or reach) / unit

    @property
    def early(self) -> bool:
        """Whether there were too few looks to say that x does not move."""
        return self.looks <= LONGEST_WINDOW

    def measure_anew(self) -> None:
        """The merit is another one from now on: measure it before x moves again."""
        self.measuring, self.rests = True, MOST_RESTS - LATER_RESTS
        self.last = self.failed = math.nan

    def seldom_settles(self, settled: bool) -> bool:
        """Count a look; whether the copies of y had not settled at many more than they had."""
        self.unsettled = max(0, self.unsettled % MOST_RESTS + (-1 if settled else 1))
        return self.unsettled == MOST_RESTS

    def look_is_due(self, unit: int) -> bool:
        """Whether the next outer step, of which ``unit`` count as one, ends a window.

        Where x rests, nothing is gained by a long one.
        """
        rests = self.measuring or self.rests
        longest = min(self.window, GROWING_WINDOW * unit) if rests else self.window
        return self.since + 1 >= longest

    @property
    def stuck(self) -> bool:
        """Whether x went back so often in a row that shortening its step does not help."""
        return self.returns > MOST_RETURNS

    def lower_step(self, unit: int) -> float:
        """The step of y, in outer steps of which ``unit`` count as one."""
        if not (self.steepness > 0 and math.isfinite(self.steepness)):
            return FALLBACK_RATE
        share = min(self.steady, 1 / math.sqrt(1 + self.noisy / (10 * unit)))
        return share / (self.steepness * self.brake)

    def longest_step(self, direction: Tensor) -> float:
        """The step with which entries of its usual size move as far as they may.

        That is the root of the mean square of those that are not 0, of which one outlier among many
        hardly says anything.
        """
        count = int(direction.count_nonzero())
        return self.longest_move * math.sqrt(count) / length(direction) if count else math.inf

    def shorten(self, rise: float, longest: float, *, noisy: bool) -> None:
        """Shorten the step of x after a window that failed, by which the merit rose by so much.

        Beyond the ``longest`` it made no difference: what is shortened is the step that was taken.
        """
        self.upper = min(self.upper, longest)
        if not math.isfinite(rise):
            self.upper *= 0.25
        elif noisy or not self.promised > 0:
            self.upper *= 0.5
        else:
            self.upper *= min(0.5, max(0.5 * self.promised / (self.promised + rise), 0.1))

    def learn_from_secant(
        self, way: Tensor, before: Tensor, direction: Tensor, units: Tensor | None
    ) -> None:
        """The step after one that passed the test, by which the direction turned.

        It is at most twice as long, and its rate at most twice that of the last.
        """
        bend = float(way @ (direction - before))
        measured = way if units is None else units * way
        secant = float(measured @ way) / bend if bend > 0 else math.inf
        shorter = min(1.0, length(before) / (length(direction) or 1.0))
        self.upper = max(0.1 * self.upper, min(2 * shorter * self.upper, secant))

    def learn_from_merits(self, rises: list[float], unit: int, longest: float) -> None:
        """The step and the window after one that passed, by what the merits rose in it.

        A step does not grow beyond the ``longest``; nor is it shortened to that, which a single
        entry of one noisy direction may decide: no step moves x further than it may anyway.
        """
        fell = bool(rises) and statistics.fmean(rises) < -standard_error(rises)
        grows = fell and 2 * self.upper <= longest
        if fell:
            self.upper = max(self.upper, min(2 * self.upper, longest))
        else:
            self.upper *= 0.8 ** (self.window / LONGEST_WINDOW / unit)
        most = GROWING_WINDOW if grows else LONGEST_WINDOW
        self.window = max(self.window, min(2 * self.window, most * unit))

    def limit_moves(self, x: Tensor, direction: Tensor, *, first: bool) -> None:
        """Limit how far x moves, and its step on both sides."""
        self.longest_move = LONGEST_MOVE * max(1.0, float(x.abs().median()))
        if first:
            self.upper = min(self.upper, self.longest_step(direction))
        self.upper = max(self.upper, LEAST_SHARE * self.first)

    @classmethod
    def checked(cls, found: Any) -> Numbers:
        """The numbers of a saved state, if they are such."""
        kinds = {name: type(value) for name, value in asdict(cls()).items()}
        if not isinstance(found, dict) or {name: type(v) for name, v in found.items()} != kinds:
            raise StateError(f"the numbers that 'auto' remembers are {kinds}, not {found!r}")
        return cls(**found)


@dataclass
class Reference:
    """Where the merit was last seen to fall: what follows is tested against it, or goes back there.

    Attributes:
        k: the outer step in which x was there.
        x: the upper variable, flat.
        places: the leaves and buffers of x and of all copies of y.
        direction: that of x.
        merits: on each minibatch of the probe; empty where the data cannot be sampled again.
        latest: the same at the end of the last window.
        lower: g at the lower solution on each of them.
        solution: f there, where its mean was lowest since the merit was last measured anew.
        spread: by how much that was above f at the penalised copy.
        gap: the part of the merit that is lam * ( g(x, y) - g(x, z) ).
        steepness: the curvature that the lower steps met.
        curvatures: what is known of those of g and f.
        settled: whether the copies of y had settled; at a kink they never do.
    """

    k: int
    x: Tensor
    places: list[list[Tensor]]
    direction: Tensor
    merits: list[float]
    latest: list[float]
    lower: list[float]
    solution: list[float]
    spread: list[float]
    gap: float
    steepness: float
    curvatures: list[dict[str, Any]]
    settled: bool

    def restore(self, state: Iterate, curvatures: list[Curvature]) -> None:
        """Put x, all copies of y and what is known of the curvatures back to what they were."""
        for variable, place in zip(state.variables(), self.places, strict=True):
            torch._foreach_copy_([*variable.leaves, *variable.buffers], place)
            variable.reshard()
        for curvature, known in zip(curvatures, self.curvatures, strict=True):
            curvature.load_state_dict(known)

    def remember_lowest(self, before: Reference) -> None:
        """Keep f at the lower solution of an earlier reference if it was lower there."""
        if before.solution and statistics.fmean(before.solution) < statistics.fmean(self.solution):
            self.solution, self.spread = before.solution, before.spread

    def misled(self, found: Merits, *, noisy: bool) -> bool:
        """Whether f at the lower solution did not fall as the merit did, which stands for it.

        Without noise, that it did not fall at all says so if the merit fell by a tenth. With it,
        that it rose may be an error of the copies, which they have in common; it has to rise for
        sure, and away from where the merit takes it.
        """
        if not self.solution:
            return False
        rose = surely_rose(found.solution, self.solution)
        if noisy:
            level = abs(statistics.fmean(self.solution))
            return rose and surely_rose(found.spread, self.spread, least=level)
        fell = self.merits[0] - found.values[0] > TOLERATED * abs(self.merits[0])
        return rose or (fell and found.solution[0] > self.solution[0])


def reference_at(
    state: Iterate,
    direction: Tensor,
    found: Merits,
    steepness: float,
    curvatures: list[Curvature],
    settled: bool,
) -> Reference:
    """The reference that is where the state is now."""
    x = flatten(state.x.leaves).detach()
    places = [[t.detach().clone() for t in (*v.leaves, *v.buffers)] for v in state.variables()]
    merits = found.values
    known = merits, merits, found.lower, found.solution, found.spread, found.gap
    return Reference(state.k, x, places, direction, *known, steepness, saved(curvatures), settled)
