"""A check of F itself, now and then, that takes x back where F has risen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from bilevel.problem import Objectives, Problem, Projection
from bilevel.stepping.adaptive import AdaptiveUpdate
from bilevel.stepping.curvature import Slope, difference, size, slope_of, value_of
from bilevel.variables import Variable, conjugate_gradients, unflatten_like

SOLVE_STEPS = 8
TOLERANCE = 0.1


class Iterate(Protocol):
    """What step-size policies see of a method's state."""

    x: Variable
    k: int
    multiplier: float

    @property
    def solution(self) -> Variable:
        """The copy of the lower variable that solves the lower level."""

    @property
    def penalised(self) -> Variable | None:
        """The copy that follows f as well as g."""

    def contract_copies(self, share: float) -> None:
        """Leave only a share of the distances between the copies and the lower solution."""

    def reset_estimators(self) -> None:
        """Forget what was estimated along the path of x, which was put elsewhere."""


class MeritCheck:
    """Looks at F itself now and then, and takes x back where it has become worse.

    Where the lower level is ill-conditioned the copies of y lag behind x, and the x direction shows
    too late that x has gone too far. This check keeps a copy of y of its own and moves it, at each
    look, by a few steps of conjugate gradients on differences of gradients, on one fixed sample.
    With it,

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

    def look(self, objectives: Objectives, state: Iterate) -> None:
        """Compare, and take x back if need be; data that cannot be sampled again is not judged."""
        draw = objectives.draw
        if self._update.resting or not (draw.lower.probed and draw.upper.probed):
            return
        x, exact = state.x, draw.lower.deterministic and draw.upper.deterministic
        value = self._value(objectives, x, state.solution)
        if math.isnan(self._first):
            self._first = value
        if not value <= self._limit(exact):
            # the copy was less exact when the lowest value was seen: compute that value again
            here = [tensor.detach().clone() for tensor in (*x.leaves, *x.buffers)]
            x.assign(self._best)
            self._lowest = self._value(objectives, x, self._copy)
            if not value <= self._limit(exact):
                self._update.back_off()
                state.reset_estimators()
                return
            with torch.no_grad():
                torch._foreach_copy_([*x.leaves, *x.buffers], here)
        if value <= self._lowest:
            self._lowest = value
            self._best.assign(x)
            self._update.confirmed()

    def _value(self, objectives: Objectives, x: Variable, near: Variable) -> float:
        """F(x), from a few steps of the copy, or of ``near`` if that solves g better."""
        sample = objectives.draw.lower.probe()
        lower = value_of(objectives.g, x, sample, objectives.mean)
        if lower(near) < lower(self._copy):
            self._copy.assign(near)
        self._solve(slope_of(objectives.g, x, sample, objectives.mean), lower)
        upper = objectives.draw.upper.probe()
        return value_of(objectives.f, x, upper, objectives.mean)(self._copy)

    def _limit(self, exact: bool) -> float:
        """Above which F is worse."""
        gain = abs(self._first - self._lowest)
        if exact:
            return self._lowest + TOLERANCE * gain
        return self._first + 0.5 * max(abs(self._first), gain)

    @torch.no_grad()
    def _solve(self, slope: Slope, value: Callable[[Variable], float]) -> None:
        """One truncated Newton step, shortened until g falls."""
        y = self._copy
        here = slope(y)
        scale = size(y) or math.sqrt(len(here))
        step = conjugate_gradients(
            lambda v: difference(slope, y, here, v, scale), here, steps=SOLVE_STEPS
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
