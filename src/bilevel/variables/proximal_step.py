"""The proximal gradient step as a map, whose fixed point minimises a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bilevel.variables.anderson import Map
from bilevel.variables.vectors import length

LONGEST_LOOK = 20
"""So many times the way is lengthened by ten on which the gradient is first seen to change."""

CLEARLY_LESS = 4.0
"""Times less than known: a curvature that is followed downwards."""

FLATTER = 25.0
"""Times less again, at most, since where a gradient hardly changes, rounding hides by how much."""

POWER_ITERATIONS = 6
"""The most of a look at the curvature, which ends when it is seen not to be clearly less."""

LOCAL_SHORTENINGS = 8
"""So many times the way of a look is shortened, by ten, where it meets what is not finite."""

MOST_RENEWALS = 100
"""So many times the curvature may be lowered in one search, against going up and down forever."""


@dataclass
class ProximalStep(Map):
    """P(y) = prox(y - grad(y) / L, 1 / L): a fixed point minimises the function.

    Attributes:
        gradient: of the smooth part.
        prox: v, s -> argmin_y r(y) + ||y - v||^2 / (2 s); for a set, the projection.
        project: into the domain of r.
        curvature: L, the largest that was met since it was last measured; NaN before the first
            evaluation.
        local: the least that L is at the minimum, as seen when :meth:`renew` confirmed one; NaN
            before.
    """

    gradient: Callable[[Tensor], Tensor]
    prox: Callable[[Tensor, float], Tensor] = lambda v, step: v
    project: Callable[[Tensor], Tensor] = lambda v: v
    curvature: float = math.nan
    local: float = math.nan
    _met: float = field(default=0.0, init=False)
    _renewals: int = field(default=0, init=False)
    _vector: Tensor | None = field(default=None, init=False)

    def evaluate(self, y: Tensor) -> Tensor:
        return self.gradient(y)

    def image(self, y: Tensor, seen: Tensor) -> Tensor:
        if math.isnan(self.curvature):
            self.curvature = self._first_curvature(y, seen)
        return self.prox(y - seen / self.curvature, 1 / self.curvature)

    def into(self, y: Tensor) -> Tensor:
        return self.project(y)

    def _first_curvature(self, y: Tensor, slope: Tensor) -> float:
        """From the change of the gradient along a way downhill.

        The way is short, and grows while the gradient changes by no more than rounding, as it does
        where y is measured in large numbers and starts at 0.
        """
        steepness = length(slope)
        if not steepness > 0:
            return 1.0
        way = 1e-3 * (length(y) or 1.0) / steepness * slope
        rounding = torch.finfo(y.dtype).eps ** 0.5 * steepness
        moved = turned = 0.0
        for _ in range(LONGEST_LOOK):
            there = self.project(y - way)
            moved, before = length(there - y), moved
            if not before < moved < math.inf:  # the edge of a set, or of the numbers
                break
            turned = length(self.gradient(there) - slope)
            if not turned <= rounding:
                break
            way = 10 * way
        return turned / moved if turned > 0 and math.isfinite(turned) else 1.0

    def adapt(self, y: Tensor, seen: Tensor, other: Tensor, seen_there: Tensor) -> bool:
        moved, turned = length(other - y), length(seen_there - seen)
        if not math.isfinite(turned):
            self.curvature *= 4
            return True
        # of a shorter way the turn is mostly rounding
        rounding = torch.finfo(y.dtype).eps ** 0.5 * length(y)
        if moved > rounding:
            self._met = max(self._met, turned / moved)
        if moved > rounding and turned > 1.01 * self.curvature * moved:
            self.curvature = max(turned / moved, 1.5 * self.curvature)
            return True
        return False

    def renew(self, y: Tensor, seen: Tensor, *, at_end: bool) -> bool:
        enough, met = self.curvature / CLEARLY_LESS, self._met
        self._met = 0.0
        known = self.local >= enough if at_end else met >= enough
        if known or self._renewals >= MOST_RENEWALS:
            return False
        found = self._local_curvature(y, seen, enough)
        if not found > 0 and self._rests_at(y, seen):
            return False
        if found < enough:
            self.curvature, self.local = max(found, enough / FLATTER), math.nan
            self._renewals += 1
            return True
        if at_end:
            self.local = found
        return False

    def _rests_at(self, y: Tensor, seen: Tensor) -> bool:
        """Whether the step from y is rounding."""
        return length(self.image(y, seen) - y) <= torch.finfo(y.dtype).eps * length(y)

    def _local_curvature(self, y: Tensor, slope: Tensor, enough: float) -> float:
        """The curvature at y by power iterations, which end when it is seen to be ``enough``.

        It is not finite where the gradient is not, however short the way.
        """
        if self._vector is None:
            generator = torch.Generator().manual_seed(0)
            self._vector = torch.randn(len(y), generator=generator, device="cpu").to(y)
        found = 0.0
        for _ in range(POWER_ITERATIONS):
            moved, turn = self._turn_beside(y, slope, self._vector)
            turned = length(turn)
            if not (turned > 0 and math.isfinite(turned)):
                return turned
            before, found = found, turned / moved
            self._vector = turn / turned
            if found >= enough or found < 1.1 * before:
                break
        return found

    def _turn_beside(self, y: Tensor, slope: Tensor, vector: Tensor) -> tuple[float, Tensor]:
        """How long a short way from y along the vector is, and the change of the gradient on it."""
        share = torch.finfo(y.dtype).eps ** (1 / 3) * (length(y) or 1.0) / (length(vector) or 1.0)
        moved, turn = math.nan, torch.full_like(slope, math.nan)
        for _ in range(LOCAL_SHORTENINGS):
            ends = (self.project(y + sign * share * vector) for sign in (1, -1))
            there = max(ends, key=lambda end: length(end - y))  # at an edge, the way inside
            moved, turn = length(there - y), self.gradient(there) - slope
            if bool(torch.isfinite(turn).all()):
                break
            share /= 10
        return moved, turn
