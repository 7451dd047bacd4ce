"""Curvatures of the objectives in y, from differences of gradients, and the multiplier of "auto".

*The multiplier*, unless one is given, starts at 10 L_f / L_g, so that f adds a tenth to the
curvature of g, whatever the units of f and g are; of an f without curvature at 10 ||grad_y f|| /
(L_g ||y||). A number that is given is the least. It is raised where f, from the two ends of the
finite difference, is not the same slope, ||grad_y f(x, y) - grad_y f(x, z)|| > 0.2 ||grad_y f(x,
z)|| (looked at after 1, 2, 4, ... looks, and in minibatches before the first step of x); and since
y - z is proportional to 1/lam, y is moved towards z in the same proportion, so that the x direction
does not jump. Without noise it is doubled as well where x gained less than a tenth of the gap: Phi
is below F by about as much, and x has then to follow F more closely than Phi does. A multiplier
that is a function of k is followed as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bilevel.problem import Level, Objectives
from bilevel.sampling import Rewind, Stream
from bilevel.stepping.updates import Update
from bilevel.variables import (
    Variable,
    buffers_kept,
    differentiate,
    flatten,
    frozen,
    inner,
    length,
    unflatten_like,
)

WAY_OF_A_STEP = 1e-2
"""Of y: over less, a kink of g looks like a curvature without bound; steps go about as far."""

SLOPE_CHANGE = 0.2
"""Of f within the finite difference in 1/lam; more of it, and lam is too small."""

SHORTENINGS = 16
"""So many times a first step may be shortened, by ten at most: as far as double precision goes."""

Objective: TypeAlias = Callable[[Variable, Variable, Any], Tensor]

Slope: TypeAlias = Callable[[Variable], Tensor]
"""The gradient in a variable's leaves of one objective on one sample, flat."""


def slope_of(
    objective: Objective,
    x: Variable,
    sample: list[Any],
    mean: Callable[[Tensor], Tensor] = torch.clone,
) -> Slope:
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


def probed_slopes(objectives: Objectives, x: Variable, level: Level, looks: int) -> list[Slope]:
    """The gradient in y of f or g: on one batch, or on two minibatches that change each look.

    Two say how noisy they are, and that one of them holds an outlier counts for less; the first
    look sees the whole probe.
    """
    stream, objective = _of(level, objectives)
    batches = [stream.in_step()]
    if not stream.constant_in_step and stream.probed:
        probe = stream.probe()
        batches = [probe[place] for place in _places(len(probe), looks)]
    return [slope_of(objective, x, [batch], objectives.mean) for batch in batches]


def mean_slope(objectives: Objectives, x: Variable, level: Level, looks: int) -> Slope:
    """The mean of the probed slopes, by one evaluation on all their samples where that is the same.

    It is where an x direction is of several minibatches: there the objectives were seen to be means
    over their samples, see :mod:`bilevel.stepping.reach`.
    """
    stream, objective = _of(level, objectives)
    if objectives.draw.batches == (1, 1) or stream.constant_in_step:
        return mean_of(probed_slopes(objectives, x, level, looks))

    @cache  # gathered when it is asked for, which at most looks it is not
    def slopes() -> list[Slope]:
        joined = stream.joined_probe(_places(len(stream.probe()), looks))
        if joined is None:
            return probed_slopes(objectives, x, level, looks)
        return [slope_of(objective, x, [joined], objectives.mean)]

    return lambda y: mean_of(slopes())(y)


def mean_of(slopes: list[Slope]) -> Slope:
    """The mean of several gradients at the same point."""
    return lambda y: torch.stack([slope(y) for slope in slopes]).mean(dim=0)


def _of(level: Level, objectives: Objectives) -> tuple[Stream, Objective]:
    if level is Level.UPPER:
        return objectives.draw.upper, objectives.f
    return objectives.draw.lower, objectives.g


def _places(batches: int, looks: int) -> list[int]:
    """Which of the batches of a probe are looked at."""
    count = min(2, batches) if looks else batches
    return [(2 * looks + place) % batches for place in range(count)]


@torch.no_grad()
def difference(
    slope: Slope, y: Variable, here: Tensor, v: Tensor, scale: float, share: float | None = None
) -> Tensor:
    """The Hessian's product with v from a difference of gradients, ``here`` being that at y.

    y is moved by a ``share`` of ``scale``, a length that y may be expected to change by; by default
    it is the cube root of the precision, which balances rounding and curvature.
    """
    size = length(v)
    if not size:  # of a variable without numbers
        return torch.zeros_like(here)
    share = torch.finfo(here.dtype).eps ** (1 / 3) if share is None else share
    way = share * scale / size
    step, factor = v, way
    if way > min(torch.finfo(leaf.dtype).max for leaf in y.leaves):
        step, factor = v * way, 1.0  # the way overflows that type, the step does not
    start = [leaf.clone() for leaf in y.leaves]
    torch._foreach_add_(y.leaves, unflatten_like(step, y.leaves), alpha=factor)
    there = slope(y)
    torch._foreach_copy_(y.leaves, start)
    return there.sub_(here).div_(way)


def norm_of(y: Variable) -> float:
    """The Euclidean norm of a variable."""
    return length(flatten(y.leaves))


def cosine(a: Tensor, b: Tensor) -> float:
    """The cosine of the angle between two vectors; 1 where one of them is zero."""
    of_a, of_b = length(a), length(b)
    return float((a / of_a) @ (b / of_b)) if of_a and of_b else 1.0


class Curvature:
    """The largest curvature of an objective in y, by power iterations that go on through a run."""

    def __init__(self, y: Variable, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = sum(leaf.numel() for leaf in y.leaves)
        like = flatten(y.leaves)
        self.value = 0.0
        self._vector = torch.randn(size, generator=generator, device="cpu").to(like)

    def refine(
        self,
        slope: Slope,
        y: Variable,
        steps: int,
        *,
        noisy: bool = False,
        here: Tensor | None = None,
    ) -> None:
        """Take a few more iterations at ``y``, where the slope is ``here`` if that is known.

        A rise is followed at once, a fall slowly; but where the slope is that of a sample, which
        may hold an outlier, both are followed halfway.
        """
        here = slope(y) if here is None else here
        of_y, of_slope, unit = norm_of(y), length(here), math.sqrt(len(here))
        found = largest = first = self.value
        for _ in range(steps):
            # At the start the scale of y is not known; the first estimate of L gives it. Power
            # iterations do not lower an estimate, unless it is rounding, where there is no
            # curvature: then the scale would grow without limit. Nor do they raise it by more than
            # the root of n, from a random vector, unless y = 0 is at a kink: then it would vanish.
            largest, first = max(largest, found), first or found
            scale = max(of_y, of_slope / largest if largest else 0.0)
            solved = scale <= 10 * torch.finfo(here.dtype).eps * unit  # y = 0 solves the level
            if solved or (not of_y and largest > unit * first):
                scale = unit
            image = difference(slope, y, here, self._vector, scale, WAY_OF_A_STEP)
            size = length(image)
            found = size / (length(self._vector) or 1.0)  # there may be no entries
            if not (found > 0 and math.isfinite(found)):
                return
            self._vector = image / size
        if noisy and self.value:
            self.value = math.sqrt(found * self.value)
        else:
            self.value = max(found, 0.9 * self.value)

    @torch.no_grad()
    def hold_for_a_step(self, slope: Slope, update: Update, here: Tensor) -> None:
        """Raise the estimate L until the next step of y, by 1/L, meets no more than that.

        Nor may it meet a number that is not finite. Where g is like exp, it is flat at one end and
        steep at the other. A kink is as steep however short the step is: then nothing is raised.
        """
        y, known = update.variable, self.value
        start = [leaf.clone() for leaf in y.leaves]
        for _ in range(SHORTENINGS if known > 0 else 0):
            step = 1 / self.value
            torch._foreach_add_(y.leaves, unflatten_like(here, y.leaves), alpha=-step)
            update.project(y.leaves, step)
            way, turn = flatten(y.leaves) - flatten(start), slope(y) - here
            torch._foreach_copy_(y.leaves, start)
            size = length(way)
            met = inner(way, turn) / size / size if size else 0.0
            if met <= 1.01 * self.value:  # rounding apart
                return
            self.value = min(10 * self.value, met)  # the first where the other is not a number
        self.value = known

    def state_dict(self) -> dict[str, Any]:
        """The estimate and its vector."""
        return {"value": self.value, "vector": self._vector.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.value = state["value"]
        self._vector = state["vector"].to(self._vector, copy=True)


def steepest_curvature(
    slope: Slope, y: Variable, *, shift: float = 0.0, steps: int = 8, share: float | None = None
) -> float:
    """The eigenvalue of the Hessian minus ``shift`` that is largest in size, with its sign.

    It is found by power iterations from a fixed random vector, on differences over a ``share`` of
    y; 0 where there is no curvature.
    """
    here, generator = slope(y), torch.Generator().manual_seed(0)
    vector = torch.randn(len(here), generator=generator, device="cpu").to(here)
    scale = norm_of(y) or math.sqrt(len(here))
    found = 0.0
    for _ in range(steps):
        vector /= length(vector)
        image = difference(slope, y, here, vector, scale, share).sub_(vector, alpha=shift)
        size = length(image)
        if not (size > 0 and math.isfinite(size)):
            return found
        found = math.copysign(size, float(vector @ image))
        vector = image
    return found


def has_kinks(slope: Slope, y: Variable) -> bool:
    """Whether the curvature over a hundredth of y is another than over a hundredth of that.

    Over the longer way a step crosses kinks that the shorter one misses, or crosses as well: then
    it looks up to a hundred times as steep.
    """

    def steepest(way: float) -> float:  # a kink may lie on one side only
        return max(abs(steepest_curvature(slope, y, share=sign * way)) for sign in (1, -1))

    coarse, fine = steepest(WAY_OF_A_STEP), steepest(WAY_OF_A_STEP**2)
    return max(coarse, fine) > 2 * min(coarse, fine)


def first_multiplier(g: float, f: float, y: Variable, of_g: Tensor, of_f: Tensor) -> float:
    """A multiplier in the units of f over g, from their curvatures and gradients at y.

    With it f adds a tenth to the curvature of g. An f that is linear, up to rounding, takes y by a
    tenth of its length, or of a step of 1/L; where both are zero, the unit of y is 1.
    """
    rounding: float = torch.finfo(of_g.dtype).eps ** 0.5
    slope, unit, size = length(of_f), math.sqrt(len(of_g)), norm_of(y)
    way = max(size, length(of_g) / g)
    if f * max(way, size or unit) > rounding * slope:  # from y = 0, f was measured over a unit
        return 10 * f / g
    return 10 * slope / g / max(way, rounding * unit)


def largest_multiplier(now: float, y: Variable, z: Variable, g: float, f: float) -> float:
    """The multiplier beyond which the difference of two gradients, at y and z, is rounding."""
    a, b = flatten(y.leaves), flatten(z.leaves)
    rounding: float = torch.finfo(a.dtype).eps ** 0.5
    apart = length(a - b) / (length(b) or math.inf)
    closest = now * apart / rounding if apart else math.inf
    return min(closest, 0.1 / rounding * max(1.0, f / g if g > 0 else 1.0))


def raised_multiplier(
    now: float, slope: Slope, y: Variable, z: Variable, curvatures: list[Curvature], least: float
) -> float:
    """The multiplier with which f, of that slope, keeps it from z to y; raised at ``least``."""
    rewind = Rewind(y.device)
    wanted = max(change_within(slope, y, z) / SLOPE_CHANGE, least)
    rewind()
    most = largest_multiplier(now, y, z, *(curvature.value for curvature in curvatures))
    return min(now * min(wanted, 10.0), most) if math.isfinite(wanted) else now


def change_within(slope: Slope, y: Variable, z: Variable) -> float:
    """By how much a slope differs at two points, as a part of that at the second."""
    centre = slope(z)
    moved, size = length(slope(y) - centre), length(centre)
    return moved / size if size else math.inf * moved
