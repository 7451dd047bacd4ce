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

``upper_lr="auto"`` is in :mod:`bilevel.stepping.adaptive`; here is what watches over it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bilevel.errors import StateError
from bilevel.problem import Problem, Projection
from bilevel.sampling import Draw, Rewind
from bilevel.stepping.adaptive import AdaptiveUpdate
from bilevel.stepping.updates import Now, Rates
from bilevel.variables import (
    Variable,
    buffers_kept,
    conjugate_gradients,
    differentiate,
    flatten,
    frozen,
    unflatten_like,
)
from bilevel.variables.state import saved

if TYPE_CHECKING:
    from bilevel.methods.base import State

POWER_STEPS = 8
LOOK_EVERY = 8
REFERENCE_INNER_STEPS = 10
"""What is meant by a step where the constants here count in outer steps."""

FALLBACK_RATE = 0.1
SLOPE_CHANGE = 0.2
WATCH_STEPS = 8
TOLERANCE = 0.1

Slopes = Callable[[Variable], Tensor]
"""The gradient in a variable's leaves of one objective on one sample, flat."""

Stiffness = Callable[[float, float, float], float]
"""From the curvatures of g and f and the multiplier to the curvature that the lower steps meet."""


class Pace:
    """The rates of one run, as they were given."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._shares = {"lower": 1.0, "upper": 1.0}
        self._changes = True
        self.now: Now | None = None
        """The step sizes of the last step."""

    def at(self, problem: Problem, state: State, draw: Draw) -> Now:
        """The step sizes of the step that the state is about to take."""
        if self.now is None or self._changes:
            self._shortened(self._rates.at(state.k, state.multiplier))
            self._changes = not self._rates.constant
        assert self.now is not None
        return self.now

    def slow_down(self, level: str) -> None:
        """Halve the steps of x ("upper") or of y ("lower") from now on."""
        self._shares[level] /= 2
        self._changes = True

    def _shortened(self, now: Now) -> Now:
        lower, upper = self._shares["lower"], self._shares["upper"]
        if lower * upper < 1:
            now = Now(lower * now.lower, lower * now.penalty, upper * now.upper, now.multiplier)
        self.now = now
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


class MeasuredPace(Pace):
    """Rates of which at least one is found on the way.

    Args:
        rates: what is given; the others are measured.
        stiffness: of the method; None: its lower steps have a rate of their own.
        raises: whether the multiplier may be raised.
        unit: how many outer steps do what ten inner steps do.
        watch: over the steps of x; None where they are given.
    """

    def __init__(
        self,
        rates: Rates,
        y: Variable,
        *,
        stiffness: Stiffness | None,
        raises: bool,
        unit: int,
        watch: Lookout | None,
    ) -> None:
        super().__init__(rates)
        self._stiffness = stiffness
        self._raises = raises
        self._every = LOOK_EVERY * unit
        self._unit = unit
        self._watch = watch
        measured = 0 if stiffness is None else 2
        self._curvatures = [Curvature(y, seed) for seed in range(measured)]
        self._noisy_steps = 0.0
        self._multiplier = 0.0

    def at(self, problem: Problem, state: State, draw: Draw) -> Now:
        if state.k == 0:
            self._measure(problem, state, draw, POWER_STEPS)
            self._multiplier = self._start()
        elif self._due(state.k):
            self._measure(problem, state, draw, 2)
            if self._raises:
                self._raise_multiplier(problem, state, draw)
        if self._watch is not None and self._due(state.k):
            self._watch.look(problem, state, draw)
        # one that was raised is above what is given, and must not pass for one that falls
        now = self._rates.at(state.k, 0.0 if self._raises else state.multiplier)
        multiplier = max(now.multiplier, self._multiplier) if self._raises else now.multiplier
        if self._stiffness is None:
            return self._shortened(now)
        lower = self._lower(multiplier)
        penalty = lower if math.isnan(now.penalty) else now.penalty
        return self._shortened(Now(lower, penalty, now.upper, multiplier))

    def _due(self, k: int) -> bool:
        """Whether to look before step k."""
        steps, rest = divmod(k, self._unit)
        return rest == 0 and (steps in (0, 1, 2, 4) or k % self._every == 0)

    def _lower(self, multiplier: float) -> float:
        assert self._stiffness is not None
        g, f = (curvature.value for curvature in self._curvatures)
        stiffness = self._stiffness(g, f, multiplier)
        if not (
            stiffness > 0 and math.isfinite(stiffness)
        ):  # g is linear in y: any step is as good
            return FALLBACK_RATE
        return 1 / (stiffness * math.sqrt(1 + self._noisy_steps / (10 * self._unit)))

    def _start(self) -> float:
        if not self._raises or len(self._curvatures) < 2:
            return 0.0
        g, f = (curvature.value for curvature in self._curvatures)
        return 10 * f / g if g > 0 else 0.0

    def _measure(self, problem: Problem, state: State, draw: Draw, steps: int) -> None:
        if self._stiffness is None:
            return
        g, f = self._curvatures
        lower = slope_of(problem.g, state.x, [draw.lower.peek()], problem.mean)
        upper = slope_of(problem.f, state.x, [draw.upper.peek()], problem.mean)
        g.refine(lower, state.solution, steps)
        f.refine(upper, state.solution, steps)
        if state.k and not draw.lower.deterministic and draw.lower.probed:
            halves = (
                slope_of(problem.g, state.x, [batch], problem.mean)(state.solution)
                for batch in (draw.lower.peek(), draw.lower.probe()[0])
            )
            self._noisy_steps += self._every * (1 - max(0.0, _cosine(*halves)))

    def _raise_multiplier(self, problem: Problem, state: State, draw: Draw) -> None:
        """Make the finite difference finer where f changes its slope within it."""
        if state.penalised is None:
            return
        slope = slope_of(problem.f, state.x, [draw.upper.peek()], problem.mean)
        centre = slope(state.solution)
        change = float((slope(state.penalised) - centre).norm() / centre.norm())
        if not (change > SLOPE_CHANGE and math.isfinite(change)):
            return
        g, f = (curvature.value for curvature in self._curvatures)
        # beyond this the difference of two gradients is rounding
        most = 0.1 * torch.finfo(centre.dtype).eps ** -0.5 * max(1.0, f / g if g > 0 else 1.0)
        raised = min(state.multiplier * min(change / SLOPE_CHANGE, 10.0), most)
        if raised > state.multiplier:
            state.draw_together(state.multiplier / raised)
            self._multiplier = raised

    def state_dict(self) -> dict[str, Any]:
        """Curvatures, counts and what the watch remembers."""
        return {
            **super().state_dict(),
            "curvatures": saved(self._curvatures),
            "noisy_steps": self._noisy_steps,
            "multiplier": self._multiplier,
            "watch": {} if self._watch is None else self._watch.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if "watch" not in state or bool(state["watch"]) != (self._watch is not None):
            raise StateError(
                "the state was saved with other steps than here: given there, 'auto' here, or the "
                "other way round"
            )
        self._shares = dict(state["shares"])
        for mine, theirs in zip(self._curvatures, state["curvatures"], strict=True):
            mine.load_state_dict(theirs)
        self._noisy_steps, self._multiplier = state["noisy_steps"], state["multiplier"]
        if self._watch is not None:
            self._watch.load_state_dict(state["watch"])


class Curvature:
    """The largest curvature of an objective in y, by power iterations that go on through a run."""

    def __init__(self, y: Variable, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = sum(leaf.numel() for leaf in y.leaves)
        like = flatten(y.leaves)
        self.value = 0.0
        self._vector = torch.randn(size, generator=generator).to(like)

    def refine(self, slope: Slopes, y: Variable, steps: int) -> None:
        """Take a few more iterations at ``y``."""
        here = slope(y)
        found = self.value
        for _ in range(steps):
            # at the start the scale of y is not known, and the first guess of L gives it
            scale = max(_size(y), float(here.norm()) / found if found else 0.0)
            image = difference(slope, y, here, self._vector, scale or math.sqrt(len(here)))
            found = float(image.norm() / self._vector.norm())
            if not (found > 0 and math.isfinite(found)):
                return
            self._vector = image / image.norm()
        self.value = max(found, 0.9 * self.value)

    def state_dict(self) -> dict[str, Any]:
        """The estimate and its vector."""
        return {"value": self.value, "vector": self._vector.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.value = state["value"]
        self._vector = state["vector"].to(self._vector, copy=True)


class Lookout:
    """Looks at F itself now and then, and takes x back where it has become worse.

    The copies that a run follows lag behind x where the lower level is ill-conditioned, and then
    the x direction does not say in time that x has gone too far. The watch keeps a copy of y of its
    own and moves it, at each look, by a few steps of conjugate gradients on differences of
    gradients, on one fixed sample. With it,

        F(x) ~ f(x, that copy).

    If this is above the lowest value seen by more than a tenth of what was gained, and still is
    when the lowest is computed anew, x goes back to where it was lowest, rests there until the
    copies have caught up, and goes on with half the step. With minibatches the sample is eight of
    them, which is not all there is; then only a value half as much again as the first counts as
    worse.
    """

    def __init__(self, x: Variable, y: Variable, update: AdaptiveUpdate, problem: Problem) -> None:
        self._best = x.clone()
        self._copy = y.clone()
        self._projections: list[Projection | None] = problem.y_projections(y)
        self._update = update
        self._first = math.nan
        self._lowest = math.inf

    def look(self, problem: Problem, state: State, draw: Draw) -> None:
        """Compare, and take x back if need be; without a sample to come back to, do nothing."""
        if not (draw.lower.probed and draw.upper.probed):
            return
        if self._update.resting:
            return
        x, exact = state.x, draw.lower.deterministic and draw.upper.deterministic
        value = self._value(problem, x, state.solution, draw)
        if math.isnan(self._first):
            self._first = value
        if not value <= self._limit(exact):
            # the copy was less exact when the lowest value was seen: once more, with this one
            here = [tensor.detach().clone() for tensor in (*x.leaves, *x.buffers)]
            x.assign(self._best)
            self._lowest = self._value(problem, x, self._copy, draw)
            if not value <= self._limit(exact):
                self._update.back_off()
                state.displaced()
                return
            with torch.no_grad():
                torch._foreach_copy_([*x.leaves, *x.buffers], here)
        if value <= self._lowest:
            self._lowest = value
            self._best.assign(x)
            self._update.confirmed()

    def _value(self, problem: Problem, x: Variable, near: Variable, draw: Draw) -> float:
        """F(x), from a few steps of the copy, or of what is near if that solves g better."""
        sample = draw.lower.probe()
        lower = _value_of(problem.g, x, sample, problem.mean)
        if lower(near) < lower(self._copy):
            self._copy.assign(near)
        self._solve(slope_of(problem.g, x, sample, problem.mean), lower)
        return _value_of(problem.f, x, draw.upper.probe(), problem.mean)(self._copy)

    def _limit(self, exact: bool) -> float:
        """Above which F is worse."""
        gain = abs(self._first - self._lowest)
        if exact:
            return self._lowest + TOLERANCE * gain
        return self._first + 0.5 * max(abs(self._first), gain)

    @torch.no_grad()
    def _solve(self, slope: Slopes, value: Callable[[Variable], float]) -> None:
        """One truncated Newton step, shortened until g falls."""
        y = self._copy
        here = slope(y)
        scale = _size(y) or math.sqrt(len(here))
        step = conjugate_gradients(
            lambda v: difference(slope, y, here, v, scale), here, steps=WATCH_STEPS
        )
        before, start = value(y), [leaf.clone() for leaf in y.leaves]
        for length in (1.0, 0.25, 0.0625):
            for leaf, origin, part, project in zip(
                y.leaves, start, unflatten_like(step, y.leaves), self._projections, strict=True
            ):
                moved = origin - length * part
                leaf.copy_(moved if project is None else project(moved))
            if value(y) <= before:
                return
        torch._foreach_copy_(y.leaves, start)

    def state_dict(self) -> dict[str, Any]:
        """Where x was best, the copy of y, and the values seen."""
        return {
            "best": self._best.state_dict(),
            "copy": self._copy.state_dict(),
            "first": self._first,
            "lowest": self._lowest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._best.load_state_dict(state["best"])
        self._copy.load_state_dict(state["copy"])
        self._first, self._lowest = state["first"], state["lowest"]


def slope_of(
    objective: Callable[[Variable, Variable, Any], Tensor],
    x: Variable,
    sample: list[Any],
    mean: Callable[[Tensor], Tensor] = torch.clone,
) -> Slopes:
    """The gradient in y of an objective at fixed x and sample, with the same draws each time.

    It leaves nothing behind: no gradient, no changed buffer.
    """
    rewind = Rewind(x.device)

    def slope(y: Variable) -> Tensor:
        rewind()
        with torch.enable_grad(), frozen(x), buffers_kept(x, y):
            for batch in sample:
                value = objective(x, y, batch) / len(sample)
                if value.requires_grad:
                    differentiate([value], y.leaves, y.wrappers)
        return mean(flatten(y.take_grads()))

    return slope


def _value_of(
    objective: Callable[[Variable, Variable, Any], Tensor],
    x: Variable,
    sample: list[Any],
    mean: Callable[[Tensor], Tensor],
) -> Callable[[Variable], float]:
    rewind = Rewind(x.device)

    def value(y: Variable) -> float:
        rewind()
        with torch.no_grad(), buffers_kept(x, y):
            here = sum(float(objective(x, y, batch)) for batch in sample) / len(sample)
            return float(mean(torch.tensor(here, dtype=torch.float64)))

    return value


@torch.no_grad()
def difference(slope: Slopes, y: Variable, here: Tensor, v: Tensor, scale: float) -> Tensor:
    """The Hessian's product with v from a difference of gradients, ``here`` being that at y.

    y is moved by a fraction of ``scale``, a length that y may be expected to change by; the cube
    root of the precision balances rounding and curvature.
    """
    size = float(v.norm())
    if not size:  # of a variable without numbers
        return torch.zeros_like(here)
    length = torch.finfo(here.dtype).eps ** (1 / 3) * scale / size
    step, factor = v, length
    if length > min(torch.finfo(leaf.dtype).max for leaf in y.leaves):
        step, factor = v * length, 1.0  # the length is no number of that type, the step is one
    start = [leaf.clone() for leaf in y.leaves]
    torch._foreach_add_(y.leaves, unflatten_like(step, y.leaves), alpha=factor)
    there = slope(y)
    torch._foreach_copy_(y.leaves, start)
    return there.sub_(here).div_(length)


def _size(y: Variable) -> float:
    return float(torch.linalg.vector_norm(flatten(y.leaves).detach()))


def _cosine(a: Tensor, b: Tensor) -> float:
    lengths = float(a.norm() * b.norm())
    return float(a @ b) / lengths if lengths > 0 else 1.0
