"""F2BA: a constant multiplier and two time scales; accelerated in x if asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from bilevel import theory
from bilevel.errors import ArgumentError, ArgumentTypeError, StateError
from bilevel.errors.checks import checked_number
from bilevel.methods.base import Properties
from bilevel.methods.f2sa import F2SA
from bilevel.problem import Problem, Projection
from bilevel.stepping.updates import Update
from bilevel.variables import Variable
from bilevel.variables.state import saved


@dataclass(frozen=True)
class Nesterov:
    """Accelerated steps of x that start afresh after they have travelled far.

    With d_k the x direction at the point w_k where everything is evaluated,

        x_{k+1} = w_k - eta_k * d_k
        w_{k+1} = x_{k+1} + momentum * ( x_{k+1} - x_k )

    and after n steps since the last restart, at which x_k = w_k,

        n * sum ||x_{i+1} - x_i||^2 > max(radius, least_radius)^2

    is the sign to restart: w_{k+1} = x_{k+1}, the count and the sum are 0 again, and the radius is
    multiplied by ``decay``. Far travel is where F is not convex and momentum can do harm.

    Args:
        momentum: of the extrapolation, at least 0 and below 1.
        radius: B, in the units of x. The smaller, the more often momentum is lost.
        least_radius: B0, below which the radius has no effect.
        decay: of the radius at each restart, above 0 and at most 1.
    """

    momentum: float = 0.9
    radius: float = 10.0
    least_radius: float = 0.1
    decay: float = 0.99

    def __post_init__(self) -> None:
        if checked_number("momentum", self.momentum) >= 1:
            raise ArgumentError(f"momentum must be below 1, not {self.momentum!r}")
        checked_number("radius", self.radius, above=True)
        checked_number("least_radius", self.least_radius)
        if checked_number("decay", self.decay, above=True) > 1:
            raise ArgumentError(f"decay must be at most 1, not {self.decay!r}")


class NesterovUpdate(Update):
    """How x moves with :class:`Nesterov`; its leaves hold w, the point of evaluation."""

    def __init__(
        self, variable: Variable, projections: Sequence[Projection | None], choices: Nesterov
    ) -> None:
        super().__init__(variable, projections)
        self._choices = choices
        self._before = _copies(variable.leaves)
        self._count = 0
        self._travel = 0.0
        self._radius = choices.radius

    @torch.no_grad()
    def apply(self, rate: float, gain: float = 1.0, *, bad: Tensor | None = None) -> None:
        super().apply(rate, gain, bad=bad)
        leaves = self._variable.leaves
        stepped = _copies(leaves)
        moved = torch._foreach_sub(stepped, self._before)
        self._count += 1
        self._travel += sum(float((m * m).sum()) for m in moved)
        if self._count * self._travel > max(self._radius, self._choices.least_radius) ** 2:
            self._count, self._travel = 0, 0.0
            self._radius *= self._choices.decay
        else:
            torch._foreach_add_(leaves, moved, alpha=self._choices.momentum)
            self.project()  # the point of evaluation stays in the set as well
        self._before = stepped

    def state_dict(self) -> dict[str, Any]:
        """The last x, and how far it has come since the last restart."""
        return {
            "before": saved(self._before),
            "count": self._count,
            "travel": self._travel,
            "radius": self._radius,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if not state:
            raise StateError(
                f"the state of {self._variable.name} was saved without acceleration, but here it "
                f"is accelerated"
            )
        with torch.no_grad():
            torch._foreach_copy_(self._before, state["before"])
        self._count, self._travel = state["count"], state["travel"]
        self._radius = state["radius"]


@dataclass(frozen=True)
class F2BA(F2SA):
    """F2BA: F2SA with a constant multiplier, its own step for x, and acceleration if asked.

    The step is that of :class:`~bilevel.F2SA`, at a constant lam:

        repeat T times, at fixed x:
            z <- z - gamma * grad_y g(x, z)
            y <- y - beta * ( grad_y g(x, y) + grad_y f(x, y) / lam )
        x <- x - eta * ( grad_x f(x, y) + lam * ( grad_x g(x, y) - grad_x g(x, z) ) )

    What makes it a method of its own is the fact behind the settings: min_y of
    f + lam * (g - min g) is as smooth in x for a large lam as for a small one, so eta does not have
    to shrink with lam: of the order of 1 / (kappa^3 L) for x, 1 / L for z and half of that for y,
    T of the order of kappa log(1/eps), and lam of 1/eps. With ``acceleration`` x takes
    :class:`Nesterov` steps, and x of the state, at which everything is evaluated and reported, is
    the extrapolated point w.

    Use it where the lower level is strongly convex and one multiplier is good enough, which is what
    practice does; acceleration pays where F is ill-conditioned and noise is small.

    Args:
        lower_lr: gamma, the step of z, below 2 / L_g. "auto": as in :class:`~bilevel.F2SA`.
        upper_lr: eta, the step of x; it need not change when the multiplier does. "auto": as in
            :class:`~bilevel.F2SA`, but not with acceleration.
        multiplier: lam, one number. The bias of the x direction is O(1 / lam).
        penalty_lr: beta, the step of y. None: as lower_lr.
        acceleration: None, or :class:`Nesterov`; it replaces upper_optimizer.
        inner_steps, coupling, scheme, order, single_pass, lower_optimizer, upper_optimizer: as in
            :class:`~bilevel.F2SA`.

    Example:
        >>> import bilevel
        >>> from bilevel.methods.f2ba import F2BA, Nesterov
        >>> problem = bilevel.problems.Quadratic(seed=0, rho=0.001)
        >>> left = []
        >>> for acceleration in (None, Nesterov(momentum=0.9)):
        ...     method = F2BA(1.0, 0.2, multiplier=1e3, acceleration=acceleration)
        ...     result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=200)
        ...     left.append(problem.gradient(result.x).norm())
        >>> bool(left[1] < 0.5 * left[0])
        True

    Reference:
        Chen, Ma, Zhang, "Near-Optimal Nonconvex-Strongly-Convex Bilevel Optimization with Fully
        First-Order Oracles", JMLR 2025; restarts that decay as in their code.
    """

    _: KW_ONLY
    acceleration: Nesterov | None = None

    properties = Properties(
        order=1,
        gradients="f: T + 1, g: 2T + 2 (single pass: f: T, g: 2T)",
        copies=2,
        assumes="g strongly convex in y; f and g smooth",
        reference="Chen, Ma, Zhang 2025",
    )
    lacks = MappingProxyType(
        {
            "momentum": (
                "x is accelerated by acceleration=Nesterov(momentum=...), and recursive momentum "
                "of the gradients is F3SA's"
            )
        }
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if callable(self.multiplier):
            raise ArgumentTypeError(
                f"multiplier must be one number, because F2BA keeps it constant, not "
                f"{self.multiplier!r}; for one that grows use F2SA"
            )
        if self.acceleration is None:
            return
        if not isinstance(self.acceleration, Nesterov):
            raise ArgumentTypeError(
                f"acceleration must be None or Nesterov(...), not {self.acceleration!r}"
            )
        if self.upper_optimizer is not None:
            raise ArgumentError(
                f"upper_optimizer={self.upper_optimizer!r} would be ignored, because "
                f"acceleration={self.acceleration!r} decides how x moves; give one of the two"
            )
        if self.rates.upper is None:
            raise ArgumentError(
                f"upper_lr={self.upper_lr!r} cannot be used with acceleration="
                f"{self.acceleration!r}, whose path is not that of plain steps; give a number"
            )

    @classmethod
    def from_theory(
        cls, constants: theory.Constants, regime: str = "stochastic", **choices: Any
    ) -> NoReturn:
        """Refused: the paper's design, in which the multiplier grows, is of F2SA and F3SA."""
        raise ArgumentError(
            f"F2BA has no from_theory (regime={regime!r}): the paper's step sizes come with a "
            f"multiplier that grows, and F2BA keeps it constant; use F2SA.from_theory or "
            f"F3SA.from_theory"
        )

    def x_update(self, problem: Problem, x: Variable) -> Update:
        if self.acceleration is None:
            return super().x_update(problem, x)
        return NesterovUpdate(x, problem.x_projections(x), self.acceleration)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]
