"""AID: approximate implicit differentiation, the adjoint by conjugate gradients."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from itertools import count

import torch
from torch import Tensor

from bilevel.errors.checks import check_count, check_flag
from bilevel.methods.base import Iterates
from bilevel.methods.capabilities import SECOND_ORDER, Ability, Properties
from bilevel.methods.implicit import ImplicitMethod, Point, one_copy
from bilevel.methods.reference import given, gradient_x, gradient_y, hessian_y, mixed_product
from bilevel.methods.state import OneCopyState
from bilevel.problem import LOWER, Objective, Problem
from bilevel.sampling import Draw
from bilevel.stepping import StepSizes
from bilevel.variables import Variable, conjugate_gradients, flatten


@dataclass
class AIDState(OneCopyState):
    """What AID carries beside its one copy of y.

    Attributes:
        adjoint: v of the last step taken, flat; 0 before the first.
    """

    adjoint: Tensor

    def restart(self, start: Variable) -> None:
        super().restart(start)
        self.adjoint.zero_()


@dataclass(frozen=True)
class AID(ImplicitMethod[AIDState]):
    """AID: inner steps on y, and the Hessian inverted by conjugate gradients.

    With y following y*(x) = argmin_y g(x, y), outer step k is

        repeat T times:  y <- y - gamma_k * grad_y g(x, y)
        solve  grad^2_yy g(x, y) v = grad_y f(x, y)  by N steps of conjugate gradients
        x <- x - eta_k * ( grad_x f(x, y) - grad^2_xy g(x, y) v )

    The solve ends early when the residual is down to rounding, with the step that brought it there
    taken. It is exact after as many steps as the Hessian has distinct eigenvalues, and otherwise
    its error falls as ((sqrt(kappa) - 1) / (sqrt(kappa) + 1))^N in the condition number kappa.
    Along a direction in which g is not convex it stops where it is.

    Use it when the lower level is deterministic (or its batches large), strongly convex and twice
    differentiable: nothing here is then closer to the exact hypergradient. The Hessian is that of
    one minibatch, and the inverse of a noisy Hessian is biased; with small minibatches use
    :class:`~bilevel.F2SA` or :class:`MASOBA`.

    Args:
        lower_lr: gamma_k, the step of y. "auto": 1 / L_g, measured.
        upper_lr: eta_k, the step of x. "auto": as in :class:`~bilevel.F2SA`.
        inner_steps: T.
        cg_steps: N, at most so many steps of conjugate gradients.
        warm_start: start these at the v of the step before, for one more product; False: at 0.
        lower_optimizer: a factory ``params -> torch.optim.Optimizer`` for y instead of plain steps;
            replaces lower_lr.
        upper_optimizer: the same for x; replaces upper_lr.

    With ``direction_batch_size`` the gradients of f and the mixed product are over that many
    samples; the solve has one minibatch.

    Example:
        >>> import bilevel
        >>> from bilevel.methods.aid import AID
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> method = AID(lower_lr=1.0, upper_lr=1.0)
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=30)
        >>> bool(problem.gradient(result.x).norm() < 0.01 * problem.gradient(problem.x0).norm())
        True

    Reference:
        Pedregosa, "Hyperparameter optimization with approximate gradient", ICML 2016; Grazzi,
        Franceschi, Pontil, Salzo, "On the Iteration Complexity of Hypergradient Computation",
        ICML 2020.
    """

    _: KW_ONLY
    cg_steps: int = 10
    warm_start: bool = True

    properties = Properties(
        order=2,
        gradients="f: 1, g: T + 2; products with second derivatives of g: N + 2 at most",
        copies=1,
        assumes="g strongly convex in y and twice differentiable, little noise; f and g smooth",
        reference="Pedregosa 2016; Grazzi, Franceschi, Pontil, Salzo 2020",
        abilities=SECOND_ORDER | {Ability.TASKS, Ability.FRESH_STARTS},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("cg_steps", self.cg_steps)
        check_flag("warm_start", self.warm_start)

    def init(self, problem: Problem, x: Variable, y: Variable) -> AIDState:
        adjoint = torch.zeros_like(flatten(y.leaves), requires_grad=False)
        return AIDState(**one_copy(self, problem, x, y), adjoint=adjoint)

    def _adjoint(self, point: Point, state: AIDState, f_y: Tensor, sizes: StepSizes) -> Tensor:
        evaluator, slope = point.evaluator, point.next_slope()

        def product(v: Tensor) -> Tensor:
            image = slope.hessian_product(v)
            # a product that is not finite would pass for a direction without curvature
            evaluator.require_finite(["a Hessian-vector product of lower(x, y)"], [image])
            return image

        start = state.adjoint.clone() if self.warm_start and state.k else None
        adjoint = conjugate_gradients(product, f_y, steps=self.cg_steps, start=start)
        evaluator.require_finite(["the adjoint v"], [adjoint])
        state.adjoint.copy_(adjoint)
        return adjoint

    def reference(self, f: Objective, g: Objective, x: Tensor, y: Tensor, draw: Draw) -> Iterates:
        """T steps of y, conjugate gradients as in textbooks, one step of x."""
        v = torch.zeros_like(y)
        for k in count():
            gamma, _, eta, _ = given(self.rates.at(k, 0.0))
            for _ in range(self.inner_steps):
                (sample,) = draw.inner(LOWER.nodes, False)
                y = y - gamma * gradient_y(g, x, y, sample.lower)
            ((zeta, _),) = draw.upper.parts(None, None)
            matrix = hessian_y(g, x, y, draw.lower.next())
            f_y = gradient_y(f, x, y, zeta)
            v = v if self.warm_start else torch.zeros_like(y)
            r = f_y - matrix @ v
            p = r
            for _ in range(self.cg_steps):
                if r.norm() <= 10 * torch.finfo(y.dtype).eps * f_y.norm():
                    break
                length = (r @ r) / (p @ matrix @ p)
                v, before = v + length * p, r
                r = r - length * matrix @ p
                p = r + (r @ r) / (before @ before) * p
            ((phi, _),) = draw.lower.parts(None, None)
            x = x - eta * (gradient_x(f, x, y, zeta) - mixed_product(g, x, y, phi, v))
            yield x, y
