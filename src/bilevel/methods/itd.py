"""ITD: iterative differentiation, reverse mode through the unrolled inner steps."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from itertools import count

import torch
from torch import Tensor

from bilevel.errors import ArgumentError
from bilevel.errors.checks import check_count
from bilevel.methods.base import Iterates
from bilevel.methods.capabilities import Ability, Properties
from bilevel.methods.descent import DescentMethod
from bilevel.methods.evaluator import Evaluator
from bilevel.methods.implicit import Point, Slope, one_copy, pull_back
from bilevel.methods.reference import given
from bilevel.methods.state import Info, OneCopyState
from bilevel.problem import LOWER, Level, Number, Objective, Problem, Term
from bilevel.sampling import Draw, Sample
from bilevel.stepping import StepSizes
from bilevel.variables import Variable, buffers_copied, buffers_kept, substituted, unflatten_like


@dataclass(frozen=True)
class ITD(DescentMethod[OneCopyState]):
    """ITD: the gradient through the inner steps themselves.

    Outer step k takes T steps on y from where the last ones ended, as functions of x,

        y_{t+1}(x) = P( y_t(x) - gamma_k * grad_y g(x, y_t(x)) ),    t = 0..T-1,   y_0 constant

    with P the projection onto the problem's y_set, and differentiates through all of them:

        x <- x - eta_k * d/dx f(x, y_T(x))

    Without noise the direction tends to the gradient of F(x) = f(x, y*(x)) as (1 - gamma * mu_g)^T,
    where mu_g is the least curvature of g in y; y_0 being held constant, it falls short of it for
    small T even when y is solved.

    Use it for a lower level that is run for a few steps only and is meant to be judged after just
    these. Memory grows with T, because every inner step is kept until the backward pass; for a long
    inner run :class:`AID` and :class:`~bilevel.F2SA` need none of it.

    Args:
        lower_lr: gamma_k, the step of y. "auto": 1 / L_g, measured.
        upper_lr: eta_k, the step of x. "auto": as in :class:`~bilevel.F2SA`.
        inner_steps: T.
        upper_optimizer: a factory ``params -> torch.optim.Optimizer`` for x instead of plain steps;
            replaces upper_lr.
        lower_optimizer: refused, because the steps of an optimizer cannot be differentiated.

    With ``direction_batch_size`` the gradients of f are over that many samples; each inner step has
    one minibatch.

    Example:
        >>> import bilevel
        >>> from bilevel.methods.itd import ITD
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> method = ITD(lower_lr=1.0, upper_lr=1.0, inner_steps=60)
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=30)
        >>> bool(problem.gradient(result.x).norm() < 0.01 * problem.gradient(problem.x0).norm())
        True

    Reference:
        Maclaurin, Duvenaud, Adams, ICML 2015; Franceschi, Donini, Frasconi, Pontil, "Forward and
        Reverse Gradient-Based Hyperparameter Optimization", ICML 2017.
    """

    _: KW_ONLY
    inner_steps: int = 10

    properties = Properties(
        order=2,
        gradients="f: 1, g: T; products with second derivatives of g: 2T, in one pass",
        copies=1,
        assumes="g twice differentiable; memory for T inner steps",
        reference="Maclaurin, Duvenaud, Adams 2015; Franceschi, Donini, Frasconi, Pontil 2017",
        abilities=frozenset({Ability.UPPER_OPTIMIZER, Ability.CONSTRAINED_LOWER, Ability.TASKS}),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("inner_steps", self.inner_steps)
        if self.lower_optimizer is not None:
            raise ArgumentError(
                f"lower_optimizer={self.lower_optimizer!r} cannot be used with ITD, which "
                f"differentiates through the steps of y and so takes plain ones; give lower_lr"
            )

    def init(self, problem: Problem, x: Variable, y: Variable) -> OneCopyState:
        return OneCopyState(**one_copy(self, problem, x, y))

    def step(self, evaluator: Evaluator, state: OneCopyState, sizes: StepSizes) -> Info:
        x, y, user = state.x, state.y, type(self).__name__
        unrolled, last_batch = self._unroll(evaluator, state, sizes.lower)
        with torch.no_grad():
            torch._foreach_copy_(y.leaves, unrolled)
        with buffers_kept(x, y):
            point = Point(evaluator, x, y, user)
            f_y = point.leave_upper_gradient(evaluator.draw.parts(upper=True))
            evaluator.report(Sample(None, last_batch, 0.0, 1.0))
            pull_back(unrolled, unflatten_like(f_y, unrolled), x, user=user)
        return evaluator.finish(state, upper_lr=sizes.upper, lower_lr=sizes.lower)

    def _unroll(
        self, evaluator: Evaluator, state: OneCopyState, gamma: Number
    ) -> tuple[list[Tensor], object]:
        """y_T as a function of x, and the batch of the last step."""
        x, y = state.x, state.y
        projections = evaluator.problem.y_projections(y)
        name = Term(Level.LOWER, y).name(x)
        # copies, because y itself moves before the graph is used
        now = [leaf.detach().clone().requires_grad_() for leaf in y.leaves]
        batch = None
        for t in range(self.inner_steps):
            batch = evaluator.draw.lower.next()
            with substituted(y, now), buffers_copied(x, y):
                value = evaluator.g(x, y, batch)
                evaluator.require_finite([name], [value])
                slope = Slope.of(value, now, type(self).__name__, check=state.k == 0 and t == 0)
            slopes = unflatten_like(slope.vector, now)
            evaluator.require_finite(y.gradient_names, [s.detach() for s in slopes])
            moved = [point - gamma * s for point, s in zip(now, slopes, strict=True)]
            now = [
                point if project is None else project(point)
                for point, project in zip(moved, projections, strict=True)
            ]
        return now, batch

    def reference(self, f: Objective, g: Objective, x: Tensor, y: Tensor, draw: Draw) -> Iterates:
        """T steps of y as a function of x, differentiated as a whole by autograd."""
        for k in count():
            gamma, _, eta, _ = given(self.rates.at(k, 0.0))
            at, point = x.detach().requires_grad_(), y.detach().requires_grad_()
            for _ in range(self.inner_steps):
                (sample,) = draw.inner(LOWER.nodes, False)
                value = g(at, point, sample.lower)
                (slope,) = torch.autograd.grad(value, point, create_graph=True)
                point = point - gamma * slope
            ((zeta, _),) = draw.upper.parts(None, None)
            (d_x,) = torch.autograd.grad(f(at, point, zeta), at)
            x, y = x - eta * d_x, point.detach()
            yield x, y
