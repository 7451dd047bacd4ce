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

LONGEST_SHORTENING = 60
"""So many times in a row a step may meet a number that is not finite and be shortened."""

FIRST_LOOK = 10
"""Evaluations after which the map is first looked at again; a look in vain doubles them."""

FAR = 10.0
"""Times the size of the solution: from there, what is rounding at the start hides it."""

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

    def renew(self, y: Tensor, seen: Tensor, *, at_end: bool) -> bool:
        """Forget what was learnt far from y; whether P has become another map.

        ``at_end``: y looks like the fixed point, which a map that fits y has to confirm.
        """
        return False


@dataclass
class GivenMap(Map):
    """A map that is given as it is."""

    function: Callable[[Tensor], Tensor]

    def evaluate(self, y: Tensor) -> Tensor:
        return self.function(y)

    def image(self, y: Tensor, seen: Tensor) -> Tensor:
        return seen


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
def fixed_point_of(
    map_: Map, start: Tensor, *, tolerance: float, steps: int, confirmed: bool = False
) -> FixedPointResult:
    """The point y = P(y), from ``start``.

    Args:
        map_: P.
        start: where to start.
        tolerance: of the residual, relative to the size of y; 0: down to rounding.
        steps: the most evaluations.
        confirmed: whether what ends the search has to hold as well for the map that
            :meth:`Map.renew` finds there, and beside the y that was found if it began far from it.
    """
    eps = torch.finfo(start.dtype).eps
    y = map_.into(start)
    seen = map_.evaluate(y)
    past, progress = Past(), _Progress(eps)
    spoilt, evaluations, look, wait = 0, 1, FIRST_LOOK, FIRST_LOOK
    first, unit = math.nan, length(start)
    while True:
        image = map_.image(y, seen)
        residual = image - y
        scale = max(length(image), unit) or 1.0
        size = length(residual) / scale
        stalled = progress.stalls_at(size, scale)
        done = size <= max(tolerance, eps) or stalled
        first = size * scale if math.isnan(first) else first
        if done and first > 0 and scale > eps**-0.75 * (length(start) + first):
            # The steps are short only beside a y that goes to infinity, as there is no solution.
            return FixedPointResult(image, size, evaluations, converged=False)
        if confirmed and (done or evaluations >= look):
            renewed = map_.renew(y, seen, at_end=done)
            wait = FIRST_LOOK if renewed else 2 * wait
            look = evaluations + wait
            if done and not renewed and unit > FAR * length(image):
                progress.rounding, unit, renewed = eps * scale, length(image), True
            if renewed:
                past.clear()
                progress.begin()
                if evaluations < steps:
                    continue
                done = False
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
            progress.grown += 1
        y, seen, spoilt = other, seen_there, 0


@dataclass
class _Progress:
    """Whether what is left of the residual is rounding.

    Attributes:
        eps: the precision.
        rounding: a residual, not divided by the size of y, that is rounding where it stalls.
        grown: the plain steps that lengthened the residual.
    """

    eps: float
    rounding: float = 0.0

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Afresh, as the map is another one."""
        self.least, self.since, self.grown = math.inf, 0, 0

    def stalls_at(self, size: float, scale: float) -> bool:
        """Whether the search ends at a residual of ``size``, in units of ``scale``."""
        self.since = 0 if size < 0.9 * self.least else self.since + 1
        self.least = min(self.least, size)
        small = self.least <= self.eps**0.75 or self.least * scale <= self.rounding
        grows = self.grown >= GROWN and self.least <= self.eps**0.5
        return ((self.since >= STALLED and small) or grows) and size <= 2 * self.least


def _size(map_: Map, y: Tensor, seen: Tensor) -> float:
    return length(map_.image(y, seen) - y)
