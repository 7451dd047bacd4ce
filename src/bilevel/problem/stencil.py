"""Finite differences in the strength of f: the weights that Phi is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import torch

from bilevel.variables import Variable, add_gradients


@dataclass(frozen=True)
class Stencil:
    """A finite difference in the strength of f: what Phi is made of.

    Attributes:
        upper: u_i, the weight of f at each point.
        lower: w_i, the weight of lam * g at each point. The points with one are the copies: each
            moves by its own direction.
        centre: the weights with which the copies add up to the lower solution. Where the solution
            is not one of the copies, it is held as a further point after them; the midpoint scheme
            evaluates f there.
    """

    upper: tuple[float, ...]
    lower: tuple[float, ...]
    centre: tuple[float, ...]

    @cached_property
    def nodes(self) -> list[tuple[bool, bool]]:
        """For each point whether f, and whether g, is evaluated there."""
        return [(bool(u), bool(w)) for u, w in zip_longest(self.upper, self.lower, fillvalue=0.0)]

    @property
    def f_at_centre(self) -> bool:
        """Whether f is evaluated at the centre instead of at the copies."""
        return len(self.upper) > len(self.lower)

    @property
    def solution(self) -> int:
        """The place of the lower solution among the points."""
        return self.centre.index(1.0) if 1.0 in self.centre else len(self.centre)

    @property
    def strengths(self) -> tuple[float, ...]:
        """j_i of each copy: it follows argmin_y g + (j_i / lam) f."""
        through_centre = self.upper[-1] if self.f_at_centre else 0.0
        return tuple(
            (u + through_centre * c) / w
            for u, w, c in zip(self.upper, self.lower, self.centre, strict=False)
        )

    def points(self, y: Variable) -> list[Variable]:
        """The copies, all at ``y``, and the centre where it is not one of them."""
        if self.solution < len(self.centre):
            return [y, *(y.clone("z") for _ in self.centre[1:])]
        names = [f"y({strength:+g})" for strength in self.strengths]
        y.name = names[0]
        return [y, *(y.clone(name) for name in names[1:]), y.clone("y")]

    def recentre(self, points: Sequence[Variable]) -> None:
        """Move the centre to where the copies say it is."""
        if self.solution < len(self.centre):
            return
        copies, centre = points[: len(self.centre)], points[-1]
        with torch.no_grad():
            for target, *parts in zip(centre.leaves, *(c.leaves for c in copies), strict=True):
                target.zero_()
                for part, share in zip(parts, self.centre, strict=True):
                    target.add_(part, alpha=share)
        centre.reshard()

    def spread(self, points: Sequence[Variable]) -> None:
        """Pass the gradient at the centre on to the copies that it is made of."""
        if not self.f_at_centre:
            return
        gradient = points[-1].take_grads()
        for copy, share in zip(points, self.centre, strict=False):
            copy.set_grads(add_gradients(copy.grads(), gradient, alpha=share))


FORWARD = Stencil(upper=(1.0, 0.0), lower=(1.0, -1.0), centre=(0.0, 1.0))
"""F2SA: the copies are the paper's y and z; z is the lower solution. Bias O(1 / lam)."""

MIDPOINT = Stencil(upper=(0.0, 0.0, 1.0), lower=(0.5, -0.5), centre=(0.5, 0.5))
"""Phi = f(x, ybar) + lam/2 (g(x, y+) - g(x, y-)) with ybar = (y+ + y-)/2. Bias O(1 / lam^2)."""


def central(order: int) -> Stencil:
    """The central difference of an even ``order`` p: nodes j = +-1, ..., +-p/2. Bias O(1 / lam^p).

    With m = p/2 the weight of g at node j is (-1)^(j+1) (m!)^2 / (j (m-j)! (m+j)!), and that of f
    is j times it; the centre is the polynomial through the copies, at 0.
    """
    m = order // 2
    nodes = [j for size in range(1, m + 1) for j in (size, -size)]

    def weight(j: int) -> float:
        size = abs(j)
        share = math.factorial(m) ** 2 / (math.factorial(m - size) * math.factorial(m + size))
        sign = 1.0 if size % 2 else -1.0
        return sign * share / j

    def value_at_zero(j: int) -> float:
        return float(math.prod(i / (i - j) for i in nodes if i != j))

    lower = tuple(weight(j) for j in nodes)
    return Stencil(
        upper=tuple(j * w for j, w in zip(nodes, lower, strict=True)),
        lower=lower,
        centre=tuple(value_at_zero(j) for j in nodes),
    )


LOWER = Stencil(upper=(0.0,), lower=(1.0,), centre=(1.0,))
"""Phi = lam * g(x, y): one copy, which solves the lower level."""
