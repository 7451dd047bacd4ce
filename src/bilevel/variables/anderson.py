"""Fixed points by Anderson acceleration, and minima as the fixed points of proximal gradient steps.

A point y is mapped to its image P(y), and wanted is y = P(y). The next point is the combination of
the last images whose residuals P(y) - y, combined in the same way, are smallest (Anderson 1965;
Walker and Ni 2011). Where its own residual turns out to be larger than the last, the plain image is
taken instead. Vectors are flat.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel.variables.vectors import length

MEMORY = 20
"""Past points that are combined."""

STALLED = 60
"""Steps without progress after which what is left is taken for rounding."""

GROWN = 5
"""Plain steps that lengthened the residual, which without rounding none does, before the end."""

LONGEST_LOOK = 20
"""So many times the way is lengthened by ten on which the gradient is first seen to change."""

LONGEST_SHORTENING = 60
"""So many times in a row a step may meet a number that is not finite and be shortened."""


KEPT = 2 * 10**7
"""The most numbers that are kept of past points, where y is large; two points are always."""


class Past:
    """The last steps, each from a point to its image, and their combination.

    ``memory``: how many of them before the last are combined.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory = memory
        self._steps: deque[tuple[Tensor, Tensor]] = deque()

    def clear(self) -> None:
        """Start afresh."""
        self._steps.clear()

    @property
    def last(self) -> Tensor:
        """The image of the last point."""
        return self._steps[-1][1]

    def lengthened_by(self, residual: Tensor) -> bool:
        """Whether a step is longer than the one before it."""
        return not length(residual) <= length(self._steps[-1][0])

    def add(self, residual: Tensor, image: Tensor) -> None:
        """One more step, by ``residual`` to ``image``."""
        self._steps.append((residual, image))
        most = min(self._memory, max(1, KEPT // (2 * max(1, len(image)))))
        while len(self._steps) > most + 1:
            self._steps.popleft()

    def __len__(self) -> int:
        return len(self._steps)

    def combined(self) -> Tensor:
        """The combination of the images whose residual is smallest.

        It is the last image itself where there is no other, or where rounding hides by how much the
        residuals differ.
        """
        if len(self._steps) == 1:
            return self.last
        residuals, images = (torch.stack(part) for part in zip(*self._steps, strict=True))
        turns, changes = residuals.diff(dim=0).double(), images.diff(dim=0)
        lengths = torch.linalg.vector_norm(turns, dim=1).clamp_min_(torch.finfo(torch.float64).tiny)
        turns = turns / lengths[:, None]
        matrix = turns @ turns.T
        matrix.diagonal().add_(1e-15)
        shares, failed = torch.linalg.solve_ex(matrix, turns @ residuals[-1].double())
        shares = shares / lengths
        if not bool(torch.isfinite(shares).all() & (failed == 0)):
            return self.last
        mixed: Tensor = images[-1] - shares.to(changes.dtype) @ changes
        return mixed

    def state_dict(self) -> dict[str, Any]:
        """The steps."""
        return {"steps": [list(step) for step in self._steps]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._steps = deque((residual, image) for residual, image in state["steps"])


class Map(ABC):
    """A map whose fixed point is wanted."""

    @abstractmethod
    def evaluate(self, y: Tensor) -> Tensor:
        """Whatever of the map at y costs an evaluation."""

    @abstractmethod
    def image(self, y: Tensor, seen: Tensor) -> Tensor:
        """P(y), from what :meth:`evaluate` gave."""

    def into(self, y: Tensor) -> Tensor:
        """A combination of points, put where the map may be evaluated."""
        return y

    def adapt(self, y: Tensor, seen: Tensor, other: Tensor, seen_there: Tensor) -> bool:
        """Learn from the evaluations at two points; whether P has become another map."""
        return False


@dataclass
class GivenMap(Map):
    """A map that is given as it is."""

    function: Callable[[Tensor], Tensor]

    def evaluate(self, y: Tensor) -> Tensor:
        return self.function(y)

    def image(self, y: Tensor, seen: Tensor) -> Tensor:
        return seen


@dataclass
class ProximalStep(Map):
    """P(y) = prox(y - grad(y) / L, 1 / L): a fixed point minimises the function.

    Attributes:
        gradient: of the smooth part.
        prox: v, s -> argmin_y r(y) + ||y - v||^2 / (2 s); for a set, the projection.
        project: into the domain of r.
        curvature: L, the largest that was met so far; NaN before the first evaluation.
    """

    gradient: Callable[[Tensor], Tensor]
    prox: Callable[[Tensor, float], Tensor] = lambda v, step: v
    project: Callable[[Tensor], Tensor] = lambda v: v
    curvature: float = math.nan

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
        if moved > rounding and turned > 1.01 * self.curvature * moved:
            self.curvature = max(turned / moved, 1.5 * self.curvature)
            return True
        return False


@dataclass(frozen=True)
class FixedPointResult:
    """Where a search for a fixed point has ended.

    Attributes:
        point: an image of the map.
        residual: ||P(y) - y||, relative to the size of y.
        evaluations: of the map.
        converged: whether the residual is below the tolerance, or down to rounding.
    """

    point: Tensor
    residual: float
    evaluations: int
    converged: bool


@torch.no_grad()
def fixed_point_of(map_: Map, start: Tensor, *, tolerance: float, steps: int) -> FixedPointResult:
    """The point y = P(y), from ``start``.

    Args:
        map_: P.
        start: where to start.
        tolerance: of the residual, relative to the size of y; 0: down to rounding.
        steps: the most evaluations.
    """
    eps = torch.finfo(start.dtype).eps
    y = map_.into(start)
    seen = map_.evaluate(y)
    past = Past()
    least, since, grown, spoilt, evaluations = math.inf, 0, 0, 0, 1
    first = math.nan
    while True:
        image = map_.image(y, seen)
        residual = image - y
        scale = max(length(image), length(start)) or 1.0
        size = length(residual) / scale
        since = 0 if size < 0.9 * least else since + 1
        least = min(least, size)
        stalled = (since >= STALLED and least <= eps**0.75) or (
            grown >= GROWN and least <= eps**0.5
        )
        done = size <= max(tolerance, eps) or (stalled and size <= 2 * least)
        first = size * scale if math.isnan(first) else first
        if done and first > 0 and scale > eps**-0.75 * (length(start) + first):
            # The steps are short only beside a y that goes to infinity, as there is no solution.
            return FixedPointResult(image, size, evaluations, converged=False)
        if done or evaluations >= steps or spoilt > LONGEST_SHORTENING:
            return FixedPointResult(image, size, evaluations, done)
        past.add(residual, image)
        mixed = len(past) > 1
        other = map_.into(past.combined()) if mixed else image
        seen_there = map_.evaluate(other)
        evaluations += 1
        if map_.adapt(y, seen, other, seen_there):
            past.clear()
            finite = bool(torch.isfinite(seen_there).all())
            spoilt = 0 if finite else spoilt + 1
            if not (finite and _size(map_, other, seen_there) <= _size(map_, y, seen)):
                continue
        elif not _size(map_, other, seen_there) <= size * scale:
            if mixed:
                past.clear()  # the next step is the plain one
                continue
            grown += 1
        y, seen, spoilt = other, seen_there, 0


def _size(map_: Map, y: Tensor, seen: Tensor) -> float:
    return length(map_.image(y, seen) - y)
