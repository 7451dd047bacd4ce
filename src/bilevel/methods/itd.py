"""ITD: iterative differentiation, reverse mode through the unrolled inner steps."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from bilevel.errors import ArgumentError
from bilevel.errors.checks import check_count
from bilevel.methods.base import Info, Properties, Tally
from bilevel.methods.descent import DescentMethod
from bilevel.methods.implicit import (
    OneCopyState,
    Slope,
    leave_upper_gradient,
    pull_back,
)
from bilevel.problem import Problem
from bilevel.sampling import Draw, Sample
from bilevel.stepping.updates import Update
from bilevel.variables import (
    Variable,
    buffers_copied,
    buffers_kept,
    require_finite,
    substituted,
    unflatten_like,
)


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
        x_update = self.x_update(problem, x)
        return OneCopyState(
            x=x,
            k=0,
            multiplier=math.nan,
            pace=self.pace(problem, x, y, x_update),
            y=y,
            x_update=x_update,
            y_update=Update(y, problem.y_projections(y)),
        )

    def step(
        self, problem: Problem, state: OneCopyState, draw: Draw, *, measure: bool = True
    ) -> Info:
        x, y, k = state.x, state.y, state.k
        now = state.pace.at(problem, state, draw)
        gamma = now.lower

        unrolled, last_batch = self._unroll(problem, state, draw, gamma)
        with torch.no_grad():
            torch._foreach_copy_(y.leaves, unrolled)

        tally = Tally(problem, state, measure)
        with buffers_kept(x, y):
            f_y = leave_upper_gradient(problem, state, draw, tally)
            tally.add(Sample(None, last_batch, 0.0, 1.0), {})
            pull_back(unrolled, unflatten_like(f_y, unrolled), x, user=type(self).__name__)
        x.require_finite_grads(k)
        upper_lr = state.x_update.choose(now.upper)
        info = tally.info(x.grads(), gamma, upper_lr)
        state.x_update.apply(upper_lr)

        state.k = k + 1
        return info

    def _unroll(
        self, problem: Problem, state: OneCopyState, draw: Draw, gamma: float
    ) -> tuple[list[Tensor], object]:
        """y_T as a function of x, and the batch of the last step."""
        x, y, k = state.x, state.y, state.k
        projections = problem.y_projections(y)
        names = [f"the gradient of {name}" for name in y.names]
        # copies, because y itself moves before the graph is used
        now = [leaf.detach().clone().requires_grad_() for leaf in y.leaves]
        batch = None
        for t in range(self.inner_steps):
            batch = draw.lower.next()
            with substituted(y, now), buffers_copied(x, y):
                value = problem.g(x, y, batch)
                require_finite(k, [f"lower({x.name}, {y.name})"], [value])
                slope = Slope.of(value, now, type(self).__name__, check=k == 0 and t == 0)
            slopes = unflatten_like(slope.vector, now)
            require_finite(k, names, [s.detach() for s in slopes])
            now = [
                moved if project is None else project(moved)
                for moved, project in zip(
                    (point - gamma * s for point, s in zip(now, slopes, strict=True)),
                    projections,
                    strict=True,
                )
            ]
        return now, batch
