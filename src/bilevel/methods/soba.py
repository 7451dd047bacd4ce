"""SOBA and MA-SOBA: y, the adjoint and x move together, one step each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor

from bilevel.methods.base import Iterates
from bilevel.methods.capabilities import SECOND_ORDER, Properties
from bilevel.methods.descent import DescentMethod
from bilevel.methods.evaluator import Descent, Evaluator, Move
from bilevel.methods.implicit import Point, one_copy
from bilevel.methods.reference import given, gradient_x, gradient_y, hessian_y, mixed_product
from bilevel.methods.state import Info, OneCopyState
from bilevel.problem import LOWER, Objective, Phi, Problem
from bilevel.sampling import Draw, Sample
from bilevel.stepping import Rate, Schedule, StepSizes, as_share, share_at
from bilevel.variables import Variable, buffers_kept, flatten, unflatten_like


@dataclass
class SOBAState(OneCopyState):
    """What SOBA carries beside its one copy of y.

    Attributes:
        adjoint: v, flat.
        average: h, the moving average of the x directions; empty for SOBA itself.
    """

    adjoint: Tensor
    average: list[Tensor]

    def reset_estimators(self) -> None:
        for estimate in (self.adjoint, *self.average):
            estimate.zero_()

    def restart(self, start: Variable) -> None:
        """Put y there; v and h stay, because from one task to the next x goes on from them."""
        self.y_update.restart(start)
        self.policy.forget_path()


Directions: TypeAlias = tuple[list[Tensor], Tensor, Tensor]
"""The directions of x, for each leaf, and of y and v, flat."""


def directions(
    point: Point, v: Tensor, upper: Iterable[Sample], lower: Iterable[Sample]
) -> Directions:
    """The three directions at one point (x, y, v), on the parts of one pair of samples."""
    x, y = point.x, point.y
    with buffers_kept(x, y):
        f_y = point.leave_upper_gradient(upper)
    g_y = torch.zeros_like(f_y)
    # y takes its step from this evaluation, so the buffers that it moves stay moved
    for slope in point.lower_slopes(lower):
        g_y += slope.vector.detach()
        slope.backward(-v, x, y)
    return x.take_grads(), g_y, -(flatten(y.take_grads()) + f_y)


@dataclass(frozen=True)
class SOBA(DescentMethod[SOBAState]):
    """SOBA: a single loop in which y, the adjoint v and x take one step each.

    With y following y*(x) = argmin_y g(x, y) and v following [grad^2_yy g]^-1 grad_y f, the three
    directions of step k are taken at the same point (x, y, v) on the same pair of samples:

        y <- y - gamma_k * grad_y g(x, y)
        v <- v - rho_k * ( grad^2_yy g(x, y) v - grad_y f(x, y) )
        x <- x - eta_k * ( grad_x f(x, y) - grad^2_xy g(x, y) v )

    Nothing is solved on the way, so the directions are biased while y and v are behind, and no
    longer at the end: on a deterministic problem the fixed point is exact. v starts at 0. The
    rates that theory wants are of the order k^(-1/2); gamma_k and rho_k must stay below 2 / L_g,
    where L_g is the curvature of g in y, and eta_k well below gamma_k.

    Use it as the cheapest second-order method: one evaluation of f and one of g per step. It needs
    products with second derivatives; :class:`~bilevel.F2SA` does not.

    Args:
        lower_lr: gamma_k, the step of y. "auto": 1 / L_g, measured.
        upper_lr: eta_k, the step of x. "auto": as in :class:`~bilevel.F2SA`.
        adjoint_lr: rho_k, the step of v, a float or a function of k. None: as lower_lr ("auto"
            where lower_optimizer takes its place).
        lower_optimizer: a factory ``params -> torch.optim.Optimizer`` for y instead of plain steps;
            replaces lower_lr. v takes plain steps always.
        upper_optimizer: the same for x; replaces upper_lr.

    With ``direction_batch_size`` all three directions are over that many samples.

    Example:
        >>> import bilevel
        >>> from bilevel.methods.soba import SOBA
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> method = SOBA(lower_lr=1.0, upper_lr=0.1)
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=150)
        >>> bool(problem.gradient(result.x).norm() < 0.01 * problem.gradient(problem.x0).norm())
        True

    Reference:
        Dagreou, Ablin, Vaiter, Moreau, "A framework for bilevel optimization that enables
        stochastic and global variance reduction algorithms", NeurIPS 2022.
    """

    _: KW_ONLY
    adjoint_lr: Rate | None = None

    auxiliary_rate = "adjoint_lr"
    properties = Properties(
        order=2,
        gradients="f: 1, g: 1; products with second derivatives of g: 2, in one pass",
        copies=1,
        assumes="g strongly convex in y and twice differentiable; f and g smooth",
        reference="Dagreou, Ablin, Vaiter, Moreau 2022",
        abilities=SECOND_ORDER,
    )

    def init(self, problem: Problem, x: Variable, y: Variable) -> SOBAState:
        adjoint = torch.zeros_like(flatten(y.leaves), requires_grad=False)
        return SOBAState(**one_copy(self, problem, x, y), adjoint=adjoint, average=[])

    def step(self, evaluator: Evaluator, state: SOBAState, sizes: StepSizes) -> Info:
        point = Point(evaluator, state.x, state.y, type(self).__name__, check=state.k == 0)
        upper, lower = evaluator.draw.parts(upper=True), evaluator.draw.parts(lower=True)
        return self._advance(point, state, sizes, directions(point, state.adjoint, upper, lower))

    def _advance(self, point: Point, state: SOBAState, sizes: StepSizes, d: Directions) -> Info:
        """Move x, y and v, each against its direction."""
        x, y, evaluator, (d_x, d_y, d_v) = point.x, point.y, point.evaluator, d
        gamma = state.y_update.choose(sizes.lower)
        adjoint = state.adjoint - self.auxiliary_at(state.k, sizes.lower) * d_v
        evaluator.require_finite(["the adjoint v"], [adjoint])
        evaluator.require_finite(x.gradient_names, d_x)
        x.set_grads(self._smoothed(state, d_x))
        y.set_grads(unflatten_like(d_y, y.leaves))
        step_of_y = Descent(Phi(LOWER, x, [y], 1.0), [Move(state.y_update, gamma)])
        info = evaluator.finish(state, upper_lr=sizes.upper, lower_lr=gamma, also=step_of_y)
        state.adjoint.copy_(adjoint)
        return info

    def reference(self, f: Objective, g: Objective, x: Tensor, y: Tensor, draw: Draw) -> Iterates:
        """One step of y, of the adjoint and of x, from one point and one pair of samples."""
        v, h = torch.zeros_like(y), torch.zeros_like(x)
        for k in count():
            gamma, _, eta, _ = given(self.rates.at(k, 0.0))
            rho, theta = self.auxiliary_at(k, gamma), self._newest(k)
            (zeta, _), (phi, _) = (
                next(draw.upper.parts(None, None)),
                next(draw.lower.parts(None, None)),
            )
            d_y = gradient_y(g, x, y, phi)
            d_v = hessian_y(g, x, y, phi) @ v - gradient_y(f, x, y, zeta)
            d_x = gradient_x(f, x, y, zeta) - mixed_product(g, x, y, phi, v)
            h = (1 - theta) * h + theta * d_x
            x, y, v = x - eta * h, y - gamma * d_y, v - rho * d_v
            yield x, y

    def _newest(self, k: int) -> float:
        """The weight of the newest x direction in what x follows."""
        return 1.0

    def _smoothed(self, state: SOBAState, d_x: list[Tensor]) -> list[Tensor]:
        """What x is to follow, given its newest direction: that itself."""
        return d_x


@dataclass(frozen=True)
class MASOBA(SOBA):
    """MA-SOBA: :class:`SOBA` with a moving average of its x directions.

    With D_k = grad_x f(x, y) - grad^2_xy g(x, y) v, the direction of SOBA, and h starting at 0,

        h <- (1 - theta_k) * h + theta_k * D_k
        x <- x - eta_k * h

    which takes the noise out of x's path, and with it the demand on the smoothness of second
    derivatives: the rate is that of stochastic gradient descent under the usual assumptions.

    Use it instead of SOBA when gradients are noisy.

    Args:
        averaging: theta_k in (0, 1], a float or a function of k; 1 is SOBA.
        lower_lr, upper_lr, adjoint_lr, lower_optimizer, upper_optimizer: as in :class:`SOBA`.

    Example:
        >>> import bilevel
        >>> from bilevel.methods.soba import MASOBA
        >>> problem = bilevel.problems.Quadratic(sigma_f=0.1, sigma_g=0.1, seed=0)
        >>> method = MASOBA(lower_lr=0.3, upper_lr=0.05, averaging=0.1)
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=300,
        ...     upper_data=problem.upper_noise, lower_data=problem.lower_noise)
        >>> bool(problem.gradient(result.x).norm() < 0.2 * problem.gradient(problem.x0).norm())
        True

    Reference:
        Chen, Xiao, Balasubramanian, "Optimal Algorithms for Stochastic Bilevel Optimization under
        Relaxed Smoothness Conditions", JMLR 2024.
    """

    _: KW_ONLY
    averaging: Rate = 0.1

    properties = replace(SOBA.properties, reference="Chen, Xiao, Balasubramanian 2024")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.theta  # a bad rate is refused at construction

    @cached_property
    def theta(self) -> Schedule:
        """The weight of the newest direction as a function of k."""
        return as_share("averaging", self.averaging)

    def init(self, problem: Problem, x: Variable, y: Variable) -> SOBAState:
        state = super().init(problem, x, y)
        state.average = [torch.zeros_like(leaf, requires_grad=False) for leaf in x.leaves]
        return state

    def _newest(self, k: int) -> float:
        return share_at("averaging", self.theta, k)

    def _smoothed(self, state: SOBAState, d_x: list[Tensor]) -> list[Tensor]:
        theta = self._newest(state.k)
        torch._foreach_mul_(state.average, 1 - theta)
        torch._foreach_add_(state.average, d_x, alpha=theta)
        return [h.clone() for h in state.average]
