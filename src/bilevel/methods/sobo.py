"""SOBO, the second-order baseline of the paper: stocBiO, the adjoint by a Neumann series."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from itertools import count

from torch import Tensor

from bilevel.errors.checks import check_count
from bilevel.methods.base import Iterates
from bilevel.methods.capabilities import SECOND_ORDER, Ability, Properties
from bilevel.methods.implicit import ImplicitMethod, Point, one_copy
from bilevel.methods.reference import given, gradient_x, gradient_y, hessian_y, mixed_product
from bilevel.methods.state import OneCopyState
from bilevel.problem import LOWER, Objective, Problem
from bilevel.sampling import Draw
from bilevel.stepping import Rate, StepSizes
from bilevel.variables import Variable


@dataclass(frozen=True)
class SOBO(ImplicitMethod[OneCopyState]):
    """SOBO (stocBiO): inner steps on y, and the Hessian inverted by a Neumann series.

    With y following y*(x) = argmin_y g(x, y), outer step k is

        repeat T times:  y <- y - gamma_k * grad_y g(x, y)
        v = eta * sum_{q=0..Q} prod_{j=1..q} ( I - eta * grad^2_yy g(x, y; j) ) grad_y f(x, y)
        x <- x - eta_k * ( grad_x f(x, y) - grad^2_xy g(x, y) v )

    where every factor j has a fresh minibatch of g. The x direction differs from the gradient of
    F(x) = f(x, y*(x)) by a relative (1 - eta * mu_g)^(Q + 1) of its implicit part, however well y
    is solved; eta must stay below 2 / L_g, where mu_g and L_g bound the curvature of g in y.

    Use it to compare with the literature, the paper's own experiment first of all. It needs
    products with second derivatives: with none at hand, or with memory short, use
    :class:`~bilevel.F2SA`; without noise :class:`AID` solves the same system far better for the
    same products.

    Args:
        lower_lr: gamma_k, the step of y. "auto": 1 / L_g, measured.
        upper_lr: eta_k, the step of x. "auto": as in :class:`~bilevel.F2SA`.
        inner_steps: T.
        neumann_steps: Q, the degree of the series, and the Hessian-vector products of a step.
        neumann_lr: eta, a float or a function of k. None: as lower_lr ("auto" where
            lower_optimizer takes its place).
        lower_optimizer: a factory ``params -> torch.optim.Optimizer`` for y instead of plain steps;
            replaces lower_lr.
        upper_optimizer: the same for x; replaces upper_lr.

    With ``direction_batch_size`` the gradients of f and the mixed product are over that many
    samples; each factor of the series has one minibatch.

    Example:
        >>> import bilevel
        >>> from bilevel.methods.sobo import SOBO
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> method = SOBO(lower_lr=1.8, upper_lr=1.0, neumann_steps=30)
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=30)
        >>> bool(problem.gradient(result.x).norm() < 0.01 * problem.gradient(problem.x0).norm())
        True

    Reference:
        Ji, Yang, Liang, "Bilevel Optimization: Convergence Analysis and Enhanced Design",
        ICML 2021, Algorithm 2. Kwon, Kwon, Wright, Nowak 2023 compare with it as SOBO.
    """

    _: KW_ONLY
    neumann_steps: int = 5
    neumann_lr: Rate | None = None

    auxiliary_rate = "neumann_lr"
    properties = Properties(
        order=2,
        gradients="f: 1, g: T + Q + 1; products with second derivatives of g: Q + 1",
        copies=1,
        assumes="g strongly convex in y and twice differentiable; f and g smooth",
        reference="Ji, Yang, Liang 2021, Algorithm 2 (stocBiO)",
        abilities=SECOND_ORDER | {Ability.FRESH_STARTS},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("neumann_steps", self.neumann_steps, least=0)

    def init(self, problem: Problem, x: Variable, y: Variable) -> OneCopyState:
        return OneCopyState(**one_copy(self, problem, x, y))

    def _adjoint(self, point: Point, state: OneCopyState, f_y: Tensor, sizes: StepSizes) -> Tensor:
        eta = self.auxiliary_at(state.k, sizes.lower)
        term = total = f_y
        for _ in range(self.neumann_steps):
            term = term - eta * point.next_slope().hessian_product(term)
            total = total + term
        return eta * total

    def reference(self, f: Objective, g: Objective, x: Tensor, y: Tensor, draw: Draw) -> Iterates:
        """T steps of y, the Neumann series with a fresh Hessian per factor, one step of x."""
        for k in count():
            gamma, _, eta_x, _ = given(self.rates.at(k, 0.0))
            eta = self.auxiliary_at(k, gamma)
            for _ in range(self.inner_steps):
                (sample,) = draw.inner(LOWER.nodes, False)
                y = y - gamma * gradient_y(g, x, y, sample.lower)
            ((zeta, _),) = draw.upper.parts(None, None)
            term = total = gradient_y(f, x, y, zeta)
            for _ in range(self.neumann_steps):
                term = term - eta * hessian_y(g, x, y, draw.lower.next()) @ term
                total = total + term
            ((phi, _),) = draw.lower.parts(None, None)
            x = x - eta_x * (gradient_x(f, x, y, zeta) - mixed_product(g, x, y, phi, eta * total))
            yield x, y
