"""The step sizes and the multiplier of each outer step: given by the user, or found on the way.

``lower_lr="auto"``. The step is 1/L, where L is the curvature that the lower copies meet: of g, or
for a penalised copy of g + f/lam. It is found by power iterations on differences of gradients,

    v <- ( grad_y g(x, z + h v) - grad_y g(x, z) ) / h,

eight of them before the first step and two at every *look*: after steps 1, 2, 4, 8, 16, 24, ...
(less often where an outer step is shorter than ten inner ones). A rise is followed at once, a fall
slowly. Where the gradients of two samples disagree at z, what is left to gain is hidden in the
noise; the step is divided by sqrt(1 + n/10), where n counts the steps taken in that condition.

The multiplier starts at the number that is given (10), or at ten times the ratio of the curvatures
of f and g if that is more. It is raised where f, seen from the two ends of the finite difference,
is not the same slope, ||grad_y f(x, y) - grad_y f(x, z)|| > 0.2 ||grad_y f(x, z)||; and since y - z
is proportional to 1/lam, y is moved towards z in the same proportion, so that the x direction
does not jump. A multiplier that is a function of k is followed as it is.

``upper_lr="auto"`` is in :mod:`bilevel.stepping.adaptive`, with the check of F in
:mod:`bilevel.stepping.merit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from bilevel.errors import StateError
from bilevel.problem import Level, Objectives
from bilevel.stepping.curvature import Curvature, cosine, slope_of
from bilevel.stepping.merit import Iterate, MeritCheck
from bilevel.stepping.rates import Rates, StepSizes
from bilevel.variables import Variable, saved

POWER_STEPS = 8
LOOK_EVERY = 8
REFERENCE_INNER_STEPS = 10
"""The constants here count outer steps of so many inner steps."""

FALLBACK_RATE = 0.1
SLOPE_CHANGE = 0.2

Stiffness: TypeAlias = Callable[[float, float, float], float]
"""From the curvatures of g and f and the multiplier to the curvature that the lower steps meet."""


class GivenSizes:
    """The step sizes of one run, from rates that were given.

    Attributes:
        current: the step sizes of the last step; None before the first.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._shares = {"lower": 1.0, "upper": 1.0}
        self._changes = True
        self.current: StepSizes | None = None

    def at(self, objectives: Objectives, state: Iterate) -> StepSizes:
        """The step sizes of the step that the state is about to take."""
        if self.current is None or self._changes:
            self._shortened(self._rates.at(state.k, state.multiplier))
            self._changes = not self._rates.constant
        assert self.current is not None
        return self.current

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
        if "curvatures" in state:
            raise StateError("the state was saved with 'auto' steps, but here they are given")
        self._shares = dict(state["shares"])
        self._changes = True


class MeasuredSizes(GivenSizes):
    """Rates of which at least one is found on the way.

    Args:
        rates: what is given; the other rates are measured.
        stiffness: of the method; None: its lower steps have a rate of their own.
        raises: whether the multiplier may be raised.
        unit: how many outer steps do what ten inner steps do.
        merit: checks the steps of x; None where they are given.
    """

    def __init__(
        self,
        rates: Rates,
        y: Variable,
        *,
        stiffness: Stiffness | None,
        raises: bool,
        unit: int,
        merit: MeritCheck | None,
    ) -> None:
        super().__init__(rates)
        self._stiffness = stiffness
        self._raises = raises
        self._every = LOOK_EVERY * unit
        self._unit = unit
        self._merit = merit
        measured = 0 if stiffness is None else 2
        self._curvatures = [Curvature(y, seed) for seed in range(measured)]
        self._noisy_steps = 0.0
        self._multiplier = 0.0

    def at(self, objectives: Objectives, state: Iterate) -> StepSizes:
        if state.k == 0:
            self._measure(objectives, state, POWER_STEPS)
            self._multiplier = self._start()
        elif self._due(state.k):
            self._measure(objectives, state, 2)
            if self._raises:
                self._raise_multiplier(objectives, state)
        if self._merit is not None and self._due(state.k):
            self._merit.look(objectives, state)
        # a raised multiplier is above the given one, which must not be taken for a decrease
        now = self._rates.at(state.k, 0.0 if self._raises else state.multiplier)
        multiplier = max(now.multiplier, self._multiplier) if self._raises else now.multiplier
        if self._stiffness is None:
            return self._shortened(now)
        lower = self._lower(float(multiplier))
        penalty = lower if math.isnan(now.penalty) else now.penalty
        return self._shortened(StepSizes(lower, penalty, now.upper, multiplier))

    def _due(self, k: int) -> bool:
        """Whether to look before step k."""
        steps, rest = divmod(k, self._unit)
        return rest == 0 and (steps in (0, 1, 2, 4) or k % self._every == 0)

    def _lower(self, multiplier: float) -> float:
        assert self._stiffness is not None
        g, f = (curvature.value for curvature in self._curvatures)
        stiffness = self._stiffness(g, f, multiplier)
        if not (stiffness > 0 and math.isfinite(stiffness)):
            return FALLBACK_RATE  # g is linear in y: no curvature limits the step
        return 1 / (stiffness * math.sqrt(1 + self._noisy_steps / (10 * self._unit)))

    def _start(self) -> float:
        if not self._raises or len(self._curvatures) < 2:
            return 0.0
        g, f = (curvature.value for curvature in self._curvatures)
        return 10 * f / g if g > 0 else 0.0

    def _measure(self, objectives: Objectives, state: Iterate, steps: int) -> None:
        if self._stiffness is None:
            return
        g, f = self._curvatures
        draw, mean = objectives.draw, objectives.mean
        lower = slope_of(objectives.g, state.x, [draw.lower.peek()], mean)
        upper = slope_of(objectives.f, state.x, [draw.upper.peek()], mean)
        g.refine(lower, state.solution, steps)
        f.refine(upper, state.solution, steps)
        if state.k and not draw.lower.deterministic and draw.lower.probed:
            halves = (
                slope_of(objectives.g, state.x, [batch], mean)(state.solution)
                for batch in (draw.lower.peek(), draw.lower.probe()[0])
            )
            self._noisy_steps += self._every * (1 - max(0.0, cosine(*halves)))

    def _raise_multiplier(self, objectives: Objectives, state: Iterate) -> None:
        """Make the finite difference finer where f changes its slope within it."""
        if state.penalised is None:
            return
        sample = [objectives.draw.upper.peek()]
        slope = slope_of(objectives.f, state.x, sample, objectives.mean)
        centre = slope(state.solution)
        change = float((slope(state.penalised) - centre).norm() / centre.norm())
        if not (change > SLOPE_CHANGE and math.isfinite(change)):
            return
        g, f = (curvature.value for curvature in self._curvatures)
        # beyond this the difference of two gradients is rounding
        most = 0.1 * torch.finfo(centre.dtype).eps ** -0.5 * max(1.0, f / g if g > 0 else 1.0)
        raised = min(state.multiplier * min(change / SLOPE_CHANGE, 10.0), most)
        if raised > state.multiplier:
            state.contract_copies(state.multiplier / raised)
            self._multiplier = raised

    def state_dict(self) -> dict[str, Any]:
        """Curvatures, counts and what the merit check remembers."""
        return {
            **super().state_dict(),
            "curvatures": saved(self._curvatures),
            "noisy_steps": self._noisy_steps,
            "multiplier": self._multiplier,
            "merit": {} if self._merit is None else self._merit.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if "merit" not in state or bool(state["merit"]) != (self._merit is not None):
            raise StateError(
                "the state was saved with other steps than here: given there, 'auto' here, or the "
                "other way round"
            )
        self._shares = dict(state["shares"])
        for mine, theirs in zip(self._curvatures, state["curvatures"], strict=True):
            mine.load_state_dict(theirs)
        self._noisy_steps, self._multiplier = state["noisy_steps"], state["multiplier"]
        if self._merit is not None:
            self._merit.load_state_dict(state["merit"])


StepSizePolicy: TypeAlias = GivenSizes
"""Where the step sizes of a run come from; :class:`MeasuredSizes` finds some of them."""
