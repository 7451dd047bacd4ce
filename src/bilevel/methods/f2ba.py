"""F2BA: a constant multiplier and two time scales; accelerated in x if asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from torch import Tensor

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.methods.capabilities import Ability, Limit, Properties
from bilevel.methods.f2sa import F2SA
from bilevel.problem import Problem
from bilevel.stepping import Nesterov, NesterovUpdate, Update
from bilevel.variables import Variable

if TYPE_CHECKING:
    from bilevel import theory


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
        abilities=F2SA.properties.abilities,
    )
    limits: ClassVar[tuple[Limit, ...]] = (
        *(
            Limit(ability, lambda method: method.acceleration is not None, reason)
            for ability, reason in (
                (Ability.STACK, "acceleration keeps a state of its own for each run"),
                (
                    Ability.SHARDS,
                    "acceleration looks at whole vectors, but each rank holds a part; leave it out",
                ),
            )
        ),
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

    def _reference_step(self, x0: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """With acceleration: w_k -> w_{k+1} as :class:`Nesterov` defines it."""
        choices = self.acceleration
        if choices is None:
            return super()._reference_step(x0)
        radius, path = choices.radius, [x0]  # x of every step since the last restart, and before it

        def advance(w: Tensor, change: Tensor) -> Tensor:
            nonlocal radius
            path.append(w - change)
            travel = sum(float(((b - a) ** 2).sum()) for a, b in pairwise(path))
            if (len(path) - 1) * travel > max(radius, choices.least_radius) ** 2:
                radius *= choices.decay
                del path[:-1]
                return path[-1]
            return path[-1] + choices.momentum * (path[-1] - path[-2])

        return advance
