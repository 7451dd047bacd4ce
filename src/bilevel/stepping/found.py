"""``"auto"``: step sizes that are found on the way, and steps of x that are tested.

*The step of y* is 1/L, where L is the curvature that the copies meet: of g, or for a penalised copy
of g + f/lam. It is found by power iterations on differences of gradients, eight before the first
step, and one at every *look*. Where nothing is sampled, the steps of F2SA's copies follow from
their path (:mod:`bilevel.stepping.accelerated`), unless they hardly ever settle because g has
kinks: then y and x go on as under noise. Where the gradients of two samples disagree, the step of y
is divided by sqrt(1 + n/10), where n counts the steps in that condition. It is halved for good, and
y goes back, where g rises at the lower solution while x rests.

*The step of x is kept only if it passes a test.* After a window of outer steps (one, where nothing
is sampled) the policy looks at the merit: Phi, whose x gradient the direction is, or f at the lower
solution for methods without a Phi, for which y is solved further where nothing is sampled
(:mod:`bilevel.stepping.settling`). Under noise the merit is the mean over a fixed probe of up to
eight batches, larger than minibatches where that takes no longer. The test is failed where

- the merit rose by more than a tenth of what the direction had promised (but of no more than the
  merit itself), beyond three standard errors and what it drifts by while x rests;
- y met a curvature more than four times that at the reference;
- the copies of y could not settle (f at a y that was solved further did not fall, though the slopes
  at both ends of the step say so; or the gap fell below zero), or a number was not finite;
- f at the lower solution rose, by a tenth and for sure, away from f at the penalised copy, or did
  not fall where nothing is sampled and the merit fell by a tenth: then the multiplier is raised.

The reference is where the merit was last seen to fall. After a failure x and all copies of y go
back there, and the merit is measured anew. A step that fails against that too is shortened: to the
minimum of the parabola through the two values and the slope, between a tenth and a half.

After a window that passed, x takes the secant step ||s||^2 / <s, d' - d> over the way s between the
directions d and d', at most twice as long as the last; each entry of x has its own unit
(:mod:`bilevel.stepping.metric`). Under noise the step doubles where the merit fell by more than its
standard error, and else shrinks, by a fifth in 64 steps. Windows double up to 64 steps, but up to 8
while the step grows or x rests.

The first step promises a tenth of the merit and is at most a tenth as long as x. Under noise no
entry of x moves by more in a step than four times the median of all, or four units if that is more:
what would is cut off, or, where the set of x ties entries together, the whole step is shortened.
The end of a run is in :mod:`bilevel.stepping.ending`, how many minibatches a direction is of in
:mod:`bilevel.stepping.reach`, and the multiplier in :mod:`bilevel.stepping.curvature`.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from bilevel.errors import StateError
from bilevel.problem import Level, Objectives, Phi
from bilevel.sampling import Rewind
from bilevel.stepping.accelerated import AcceleratedSteps
from bilevel.stepping.curvature import (
    Curvature,
    Slope,
    cosine,
    first_multiplier,
    has_kinks,
    mean_of,
    mean_slope,
    probed_slopes,
    raised_multiplier,
)
from bilevel.stepping.ending import conclude
from bilevel.stepping.flat import warn_if_flat
from bilevel.stepping.memory import LATER_RESTS, MOST_RESTS, Numbers, Reference, reference_at
from bilevel.stepping.merit import (
    SURE,
    TOLERATED,
    Merits,
    is_noisy,
    lower_rose,
    merits_at,
    standard_error,
)
from bilevel.stepping.metric import Metric
from bilevel.stepping.policy import GivenSizes, Iterate
from bilevel.stepping.rates import Rates, StepSizes
from bilevel.stepping.settling import settle
from bilevel.stepping.traits import Traits
from bilevel.variables import Variable, flatten, length, saved

FIRST_POWER_STEPS = 8
REFERENCE_INNER_STEPS = 10
"""Windows are counted in outer steps of so many inner steps: fewer do not let y follow x."""

STEEPER = 4.0


class FoundSizes(GivenSizes):
    """Step sizes of which at least one is found on the way.

    Args:
        rates: what is given; the others are found.
        y: the lower variable.
        traits: how the method moves y.
    """

    def __init__(self, rates: Rates, y: Variable, traits: Traits) -> None:
        super().__init__(rates)
        finds, inner_steps = traits.stiffness is not None, traits.inner_steps
        self._traits = traits
        self._unit = -(-REFERENCE_INNER_STEPS // inner_steps)
        self._curvatures = [Curvature(y, seed) for seed in range(2 if finds else 0)]
        self._tests = rates.upper is None
        self._path = AcceleratedSteps(inner_steps) if traits.follows_path and finds else None
        self._settles = traits.settles and self._path is None and finds and self._tests
        self._metric = Metric()
        self._settled: tuple[Merits, bool] | None = None
        self._noisy: bool | None = None
        self._numbers = Numbers(window=self._unit)
        self._start: Tensor | None = None
        self._reference: Reference | None = None
        self._rested: list[float] = []
        self._signal, self._closing = 0.0, False
        self._slope_of_f: Slope | None = None

    def without_acceleration(self) -> None:
        self._path = self.accelerated = None

    def forget_path(self) -> None:
        self._numbers.resting = False

    @property
    def longest_move(self) -> float:  # type: ignore[override]
        return self._numbers.longest_move

    # Before an outer step

    def looks_next(self, state: Iterate) -> bool:
        return self._noisy is None or self._look_is_due(state)

    def _look_is_due(self, state: Iterate) -> bool:
        return self._closing or state.k == 0 or self._numbers.look_is_due(self._unit)

    def at(self, objectives: Objectives, state: Iterate) -> StepSizes:
        n = self._numbers
        look, self.returned, self.undecided = self._look_is_due(state), False, False
        if self._noisy is None:
            self._noisy = self._numbers.kinked or is_noisy(objectives, state)
            # tasks of episodes are gone before combined steps have paid for themselves
            self.accelerated = None if self._noisy or objectives.draw.renewed else self._path
            each = self._unit == 1 and state.x_update.entrywise  # every step of x is tested
            self._metric.active = each and not self._noisy
        if self._start is None:
            self._start = flatten(state.x.leaves).detach().clone()
            if self._noisy and self._tests and self._curvatures:
                found, none = merits_at(objectives, state, None), torch.zeros_like(self._start)
                self._reference = reference_at(state, none, found, 0.0, self._curvatures, False)
                self._rested = found.lower
        n.since += 1
        self.due = look and self._tests
        if look:
            rewind = Rewind(state.x.device)
            self._measure(objectives, state)
            rewind()
            if not self._tests:
                n.begin_window_of_given_steps(self._unit, renewed=objectives.draw.renewed)
        if look or self._changes or self._follows_k or self.accelerated is not None:
            self._set_sizes(state)
        assert self.current is not None
        self._settled = None
        if look and self._settles and not self._noisy:
            before = None if n.measuring else self._reference
            self._settled = settle(objectives, state, float(self.current.lower), before)
        return self.current

    def _set_sizes(self, state: Iterate) -> None:
        n = self._numbers
        # a raised multiplier is above the given one, which must not be taken for a decrease
        now = self._rates.at(state.k, 0.0 if self._traits.raises else state.multiplier)
        multiplier = n.multiplier or now.multiplier
        lower, penalty = now.lower, now.penalty
        if self._traits.stiffness is not None:
            g, f = (curvature.value for curvature in self._curvatures)
            n.steepness = self._traits.stiffness(g, f, float(multiplier))
            lower = n.lower_step(self._unit)
            penalty = lower if math.isnan(now.penalty) else now.penalty
        upper = now.upper
        if self._tests:
            moving = not n.measuring and not n.rests and math.isnan(n.failed)
            upper = n.upper if moving and not self.due else 0.0
        sizes = self._shortened(StepSizes(lower, penalty, upper, multiplier))
        self._changes = False
        if self.accelerated is not None:
            pull = self._signal / float(multiplier)
            self.accelerated.begin(float(sizes.lower), pull, goes_on=n.resting)

    def _measure(self, objectives: Objectives, state: Iterate) -> None:
        """The curvatures, the multiplier that they ask for, and how noisy the lower level is."""
        if self._traits.stiffness is None:
            return
        n, y, noisy = self._numbers, state.solution, bool(self._noisy)
        upper = self._slope_of_f = mean_slope(objectives, state.x, Level.UPPER, n.looks)
        g, f = self._curvatures
        if not n.looks:
            lower = mean_slope(objectives, state.x, Level.LOWER, 0)
            here, of_f = lower(y), upper(y)
            g.refine(lower, y, FIRST_POWER_STEPS, here=here)
            f.refine(upper, y, FIRST_POWER_STEPS, here=of_f)
            if self._traits.raises and g.value > 0:
                own = first_multiplier(g.value, f.value, y, here, of_f)
                n.multiplier = max(own, self._traits.least_multiplier)
            if self.accelerated is None:  # which tests its steps
                update = next(update for update in state.updates() if update.variable is y)
                g.hold_for_a_step(lower, update, here)
        else:
            of_g = probed_slopes(objectives, state.x, Level.LOWER, n.looks)
            slopes = [slope(y) for slope in of_g]
            if len(slopes) > 1:
                n.noisy += n.since * (1 - max(0.0, cosine(*slopes)))
            # the same slopes again, since another would draw other numbers at random
            g.refine(mean_of(of_g), y, 1, noisy=noisy, here=torch.stack(slopes).mean(dim=0))
            if n.looks & (n.looks - 1) == 0:  # a power of two
                f.refine(upper, y, 2, noisy=noisy)
        if self.accelerated is not None:
            self._signal = length(upper(state.penalised or y))
        n.steady = self._traits.steady(state.k) if noisy else 1.0
        if not self._tests:
            n.looks += 1

    def _raise_multiplier(self, state: Iterate, *, least: float = 1.0) -> bool:
        """Make the finite difference finer where f changes its slope within it; whether it did."""
        z, y = state.solution, state.penalised
        if not self._traits.raises or y is None:
            return False
        # on the samples of the last look: to peek at others now would change what is saved
        slope = self._slope_of_f
        assert slope is not None, "a look comes before every test"
        now = float(self.current.multiplier) if self.current is not None else state.multiplier
        raised = raised_multiplier(now, slope, y, z, self._curvatures, least)
        if not raised > now:
            return False
        self._contract(state, now / raised)
        self._numbers.multiplier = raised
        self._numbers.measure_anew()
        return True

    def _contract(self, state: Iterate, share: float) -> None:
        state.contract_copies(share)
        self.forget_path()

    # At the end of an outer step: the test

    @torch.no_grad()
    def judge(self, objectives: Objectives, state: Iterate, phi: Phi | None, gain: float) -> float:
        n = self._numbers
        n.since, n.looks, self._changes = 0, n.looks + 1, True
        found = self._settled[0] if self._settled else merits_at(objectives, state, phi)
        direction = gain * flatten(state.x.grads())
        if not all(map(math.isfinite, found.values)):
            return self._go_back(state, math.inf)
        # y rests or follows x by steps that are not tested one by one: are they too long?
        untested = self._traits.stiffness is not None and not (self.accelerated or self._settled)
        if untested and lower_rose(found, self._rested, 0.0 if math.isnan(n.last) else n.last):
            n.brake *= 2
            if not self._put_back(state):
                self._rested = found.lower
            n.measure_anew()
            return 0.0
        if self._meets_kinks(objectives, state):
            self._noisy = None  # which is known anew, and otherwise, in the next step
            n.measure_anew()
            return 0.0
        n.resting = True
        upper = self._tested(state, direction, found)
        if not self.returned:
            self._rested = [] if upper else found.lower
        n.resting = n.resting and not (upper or self.returned)
        return upper

    def _tested(self, state: Iterate, direction: Tensor, found: Merits) -> float:
        """The step of x after the test of the last window; 0: x rests."""
        n, merits, value, noisy = self._numbers, found.values, found.mean, bool(self._noisy)
        # z is the minimiser of g: a gap below zero is an error of z, or noise in minibatches
        near = found.gap >= -TOLERATED * abs(found.upper) - found.noise
        rests = self.accelerated is None or self.accelerated.settled
        settled = near and (self._settled[1] if self._settled else rests)
        before = self._reference
        if n.measuring or before is None:
            return self._measured(state, direction, found, settled)
        if not math.isnan(n.failed):
            return self._measured_again(state, direction, found, settled, before)
        steeper = self._met() > STEEPER * before.steepness > 0
        # at a kink the copies never settle, and the gap may be below zero from the start
        lags = before.settled and not settled
        lags = lags or (not near and found.gap < 2 * min(0.0, before.gap))
        way = flatten(state.x.leaves) - before.x
        rises = [here - there for here, there in zip(merits, before.merits, strict=False)]
        rise = statistics.fmean(rises) if rises else 0.0
        error = standard_error(rises)
        n.promised = max(0.0, -float(way @ before.direction))
        rounding = 10 * torch.finfo(way.dtype).eps * abs(value)
        slope = float(way @ direction)
        if self._settled and rise > 0.5 * TOLERATED * (slope - n.promised) + rounding < 0:
            lags = True  # the slopes at both ends say that F fell: y has not followed
        # a promise of more than the merit itself is made by a slope that does not last
        tolerated = TOLERATED * min(n.promised, abs(value - rise))
        rose = rise > tolerated + n.drift + SURE * error + rounding
        rose = rose or min(rises, default=0.0) > abs(value - rise) + n.drift + rounding
        most = MOST_RESTS if self._settled else LATER_RESTS
        self.undecided = lags and not steeper and n.rests < most
        if self.undecided:
            if not near:
                self._contract(state, 0.0)  # y solves g better than z; both go on from one place
            n.rests += 1
            return 0.0
        # what y may have left to fall is of the order of the gap
        excused = min(n.promised, abs(found.gap) if found.multiplier else math.inf)
        follows = not self._settled and slope <= 0.8 * n.promised and rise <= excused
        # the slope at the end says that the rise is an error of y (Hager, Zhang)
        rose = rose and not (len(rises) == 1 and follows)
        if rose or steeper or lags:
            n.uncertain = SURE * error
            return self._go_back(state, value if rose and not (lags or steeper) else math.inf)
        if self._traits.raises and before.misled(found, noisy=noisy):
            self._put_back(state)
            if not self._raise_multiplier(state, least=2.0):
                self._go_back(state, math.inf)
            return 0.0
        if noisy:
            latest = [here - there for here, there in zip(merits, before.latest, strict=False)]
            n.learn_from_merits(latest, self._unit, n.longest_step(direction))
        else:
            n.learn_from_secant(way, before.direction, direction, self._metric.units)
        n.returns, n.drift = 0, n.drift / 2
        if not noisy and -rise < TOLERATED * found.gap and self._raise_multiplier(state, least=2.0):
            return 0.0
        return self._go_on(state, direction, found, settled, keep=bool(rises) and rise >= -error)

    def _meets_kinks(self, objectives: Objectives, state: Iterate) -> bool:
        """Whether the copies hardly ever settle because g has kinks."""
        n, path = self._numbers, self.accelerated
        known = self._settled[1] if self._settled else path is None or path.settled
        if not self._noisy and n.seldom_settles(known):
            n.kinked = has_kinks(mean_slope(objectives, state.x, Level.LOWER, 0), state.solution)
        return n.kinked and not self._noisy

    def _measured(self, state: Iterate, direction: Tensor, found: Merits, settled: bool) -> float:
        """The step of x where the merit is measured anew: none until it stays as it is."""
        n, before, value = self._numbers, self._reference, found.mean
        n.drift = 0.0 if not found.values else abs(value - n.last)
        n.last = value
        if n.rests < MOST_RESTS and not (settled and n.drift <= TOLERATED * abs(value)):
            n.rests += 1
            if before is not None and math.isnan(n.upper):  # y goes back no further than here
                here = self._met(), self._curvatures, settled
                self._reference = reference_at(state, direction, found, *here)
            return 0.0
        # a rise by as much as the merit itself is not excused by what y does meanwhile
        n.drift = min(n.drift, abs(value)) if math.isfinite(n.drift) else 0.0
        return self._go_on(state, direction, found, settled)

    def _measured_again(
        self, state: Iterate, direction: Tensor, found: Merits, settled: bool, before: Reference
    ) -> float:
        """The step of x where a window began that failed: is that so by the merit as it is now?"""
        n, value = self._numbers, found.mean
        n.drift = abs(value - statistics.fmean(before.merits or [value]))
        if n.drift > TOLERATED * abs(value):
            n.shorten(math.inf, n.longest_step(direction), noisy=bool(self._noisy))
            n.measure_anew()
            return 0.0
        rise = n.failed - value
        if not rise <= TOLERATED * min(n.promised, abs(value)) + n.drift + n.uncertain:
            n.shorten(rise, n.longest_step(direction), noisy=bool(self._noisy))
        n.failed = math.nan
        return self._go_on(state, direction, found, settled)

    def _met(self) -> float:
        """The curvature that the lower steps met; infinite where a gradient overflowed."""
        rate = self.accelerated.rate if self.accelerated else math.inf
        return max(self._numbers.steepness, 1 / rate if rate else math.inf)

    def _go_on(
        self, state: Iterate, direction: Tensor, found: Merits, settled: bool, keep: bool = False
    ) -> float:
        """Begin a window here; the step of x. ``keep``: what is tested against stays as it is."""
        n = self._numbers
        if self._closing:
            return 0.0
        norm, first = length(direction), math.isnan(n.upper)
        x, towards = flatten(state.x.leaves), self._metric.turned(direction, state.x)
        if first and norm:
            n.begin_at(x, direction, towards, found.mean, self._unit)
        # in minibatches the looks at which y was fitted are over: x must not set out too coarsely
        coarse = n.looks & (n.looks - 1) == 0 or (first and self._noisy and norm)
        if coarse and self._raise_multiplier(state):
            return 0.0
        before, fresh = self._reference, n.measuring
        n.rests, n.measuring = 0, False
        if keep and before is not None:
            before.latest = found.values
        else:
            here = self._met(), self._curvatures, settled
            self._reference = reference_at(state, direction, found, *here)
            if before is not None and not fresh:
                self._reference.remember_lowest(before)
        if not norm:
            warn_if_flat(state, self._slope_of_f, n)
            return 0.0
        if self._noisy:
            n.limit_moves(x, direction, first=first)
        self._metric.turn_grads(state.x, towards)
        return n.upper

    def _go_back(self, state: Iterate, merit: float) -> float:
        """Put everything back to where the window began, where x rests for a step."""
        n = self._numbers
        if self._put_back(state):
            n.failed, n.rests, n.window, n.returns = merit, 0, self._unit, n.returns + 1
        return 0.0

    def _put_back(self, state: Iterate) -> bool:
        """Move x and all copies of y to where the window began; whether there was one."""
        before = self._reference
        if before is None:
            return False
        self.returned = True
        before.restore(state, self._curvatures)
        state.reset_estimators()
        self.forget_path()
        self._rested = before.lower
        return True

    def slow_down(self, level: Level) -> None:
        super().slow_down(level)
        self._numbers.upper /= 2 if level is Level.UPPER else 1

    def close(self) -> None:
        self._closing = self._tests

    def conclude(self, objectives: Objectives, state: Iterate) -> tuple[float, float] | None:
        start, now, noisy = self._start, self.current, bool(self._noisy)
        ends = self._curvatures and self._tests and self._traits.approaches
        if not ends or start is None or now is None:
            return None
        return conclude(objectives, state, float(now.lower), start, self._traits.inner_steps, noisy)

    def moved(self, state: Iterate) -> bool:
        x, start = flatten(state.x.leaves), self._start
        if start is None or self._numbers.early:
            return True
        return bool(length(x - start) > torch.finfo(x.dtype).eps ** 0.5 * length(x))

    def step_of(self, state: Iterate) -> int:
        there, start, x = self._reference, self._start, flatten(state.x.leaves)
        rests = self._numbers.measuring and start is not None and torch.equal(x, start)
        return there.k if there and not rests and torch.equal(x, there.x) else state.k

    @torch.no_grad()
    def take_back(self, state: Iterate) -> bool:
        n = self._numbers
        if self._reference is None or n.stuck:
            return False
        n.since, self._changes = 0, True
        self._go_back(state, math.inf)
        if self._curvatures:  # it may have been y that went too far
            self._curvatures[0].value *= STEEPER
            self._reference.curvatures = saved(self._curvatures)
        return True

    # Saving

    def state_dict(self) -> dict[str, Any]:
        n, there = self._numbers, self._reference
        return {
            **super().state_dict(),
            "tests": self._tests,
            "found": asdict(n),
            "curvatures": saved(self._curvatures),
            "start": saved(self._start),
            "reference": None if there is None else saved(vars(there)),
            "rested": self._rested,
            "metric": saved(self._metric),
            "path": saved(self._path.state_dict()) if self._path and n.resting else None,
            "signal": self._signal,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("tests") != self._tests or len(state["curvatures"]) != len(self._curvatures):
            raise StateError(
                "the state was saved with other steps than here: given there, 'auto' here, or the "
                "other way round"
            )
        self._shares, self._changes = dict(state["shares"]), True
        self._numbers = Numbers.checked(state["found"])
        for mine, theirs in zip(self._curvatures, state["curvatures"], strict=True):
            mine.load_state_dict(theirs)
        self._start = saved(state["start"])
        reference = state["reference"]
        self._reference = None if reference is None else Reference(**saved(reference))
        self._rested = list(state["rested"])
        self._metric.load_state_dict(state["metric"])
        if self._path is not None and state["path"] is not None:
            self._path.load_state_dict(saved(state["path"]))
        self._signal, self._closing = state["signal"], False
