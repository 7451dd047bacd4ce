"""ITD: iterative differentiation, reverse mode through the unrolled inner steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import check_count, check_flag
from bilevel.methods.base import Iterates
from bilevel.methods.capabilities import SECOND_ORDER, Ability, Properties
from bilevel.methods.descent import DescentMethod
from bilevel.methods.evaluator import Evaluator
from bilevel.methods.implicit import Point, one_copy
from bilevel.methods.reference import given
from bilevel.methods.state import Info, OneCopyState
from bilevel.methods.unrolling import Unrolled
from bilevel.problem import LOWER, Objective, Problem
from bilevel.sampling import Draw, Sample
from bilevel.stepping import Constant, InnerRule, Schedule, StepSizes
from bilevel.variables import Variable, buffers_kept, unflatten_like


@dataclass(frozen=True)
class ITD(DescentMethod[OneCopyState]):
    """ITD: the gradient through the inner steps themselves.

    Outer step k takes T steps on y, as functions of x,

        y_{t+1}(x) = P( y_t(x) - gamma_k * grad_y g(x, y_t(x)) ),    t = 0..T-1,

    with P the projection onto the problem's y_set, and differentiates through all of them:

        x <- x - eta_k * d/dx f(x, y_T(x))

    y_0 is a constant, where the last step ended, or a function of x that is differentiated too:
    MAML, with x for the initial weights, is ``start=lambda x: x`` and an objective g without x.

    Without noise the direction tends to the gradient of F(x) = f(x, y*(x)) as (1 - gamma * mu_g)^T,
    where mu_g is the least curvature of g in y; with y_0 held constant, it falls short of it for
    small T even when y is solved.

    Use it for a lower level that is run for a few steps only and is meant to be judged after just
    these. Memory grows with T, because every inner step is kept until the backward pass (see
    ``keep_every``); for a long inner run :class:`AID` and :class:`~bilevel.F2SA` need none of it.

    Args:
        lower_lr: gamma_k, the step of y. "auto": 1 / L_g, measured.
        upper_lr: eta_k, the step of x. "auto": as in :class:`~bilevel.F2SA`.
        inner_steps: T.
        start: y_0. "warm": where the last step ended (in :class:`~bilevel.Episodes`, where these
            say). A function of x: what it returns, in the structure of y.
        learned_lr: a function of x that gives the steps of y, so that x learns them (Meta-SGD): a
            tensor for all of y, or a tree of tensors in its structure, each of the shape of the
            parameter or a scalar; a part without one rests. Replaces lower_lr.
        first_order: take the gradients of g for constants, as first-order MAML does: x is reached
            through ``start``, ``learned_lr`` and f alone, and g is differentiated once.
        keep_every: keep only every that many-th inner step, and compute those between once more in
            the backward pass; the square root of T needs the least memory. None: keep all.
        lower_optimizer: a factory of ``torch.optim.SGD``, ``Adam`` or ``AdamW``, whose formulas and
            options the steps of y follow, with moments that start from zero in every outer step;
            replaces lower_lr.
        upper_optimizer: a factory ``params -> torch.optim.Optimizer`` for x instead of plain steps;
            replaces upper_lr.

    With ``direction_batch_size`` the gradients of f are over that many samples; each inner step has
    one minibatch.

    Example:
        >>> import bilevel
        >>> from bilevel.methods.itd import ITD
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> method = ITD(lower_lr=1.0, upper_lr=1.0, inner_steps=60)
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=20)
        >>> bool(problem.gradient(result.x).norm() < 0.01 * problem.gradient(problem.x0).norm())
        True

    Reference:
        Maclaurin, Duvenaud, Adams, ICML 2015; Franceschi, Donini, Frasconi, Pontil, "Forward and
        Reverse Gradient-Based Hyperparameter Optimization", ICML 2017; the start: Finn, Abbeel,
        Levine, "Model-Agnostic Meta-Learning", ICML 2017; learned steps: Li and others,
        "Meta-SGD", 2017.
    """

    _: KW_ONLY
    inner_steps: int = 10
    start: Literal["warm"] | Callable[[Any], Any] = "warm"
    learned_lr: Callable[[Any], Any] | None = None
    first_order: bool = False
    keep_every: int | None = None

    functions_of_x = ("start", "learned_lr")
    settles = False
    properties = Properties(
        order=2,
        gradients="f: 1, g: T; products with second derivatives of g: 2T, in one pass",
        copies=1,
        assumes="g twice differentiable; memory for T inner steps",
        reference="Maclaurin, Duvenaud, Adams 2015; Franceschi, Donini, Frasconi, Pontil 2017",
        abilities=SECOND_ORDER
        | {Ability.CONSTRAINED_LOWER, Ability.PROXIMAL, Ability.TASKS, Ability.FRESH_STARTS},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("inner_steps", self.inner_steps)
        if self.start != "warm" and not callable(self.start):
            raise ArgumentError(f"start must be 'warm' or a function of x, not {self.start!r}")
        if self.learned_lr is not None and not callable(self.learned_lr):
            raise ArgumentTypeError(
                f"learned_lr must be a function of x that gives the steps of y, not "
                f"{self.learned_lr!r}"
            )
        if self.learned_lr is not None and self.lower_lr != "auto":
            raise ArgumentError(
                f"lower_lr={self.lower_lr!r} would be ignored beside learned_lr; give one of them"
            )
        check_flag("first_order", self.first_order)
        if self.keep_every is not None:
            check_count("keep_every", self.keep_every)

    @property
    def approaches(self) -> bool:
        return self.start == "warm" and self.learned_lr is None

    def _lower_schedule(self) -> Schedule | None:
        return super()._lower_schedule() if self.learned_lr is None else Constant(1.0)

    def check(self, problem: Problem, draw: Draw, x: Variable) -> None:
        super().check(problem, draw, x)
        if callable(self.start) and draw.start is not None:
            raise ArgumentError(
                f"start={self.start!r} of ITD and start={draw.start!r} of Episodes both say where "
                f"y starts; give one of them"
            )
        if self.first_order and not self.acts_on_y(draw):
            raise ArgumentError(
                "first_order=True leaves no way from y to x but start and learned_lr; give one of "
                "them as a function of x"
            )

    def acts_on_y(self, draw: Draw) -> bool:
        return callable(self.start) or draw.start is not None or self.learned_lr is not None

    def init(self, problem: Problem, x: Variable, y: Variable) -> OneCopyState:
        state = OneCopyState(**one_copy(self, problem, x, y))
        InnerRule.of(state.y_update)  # an optimizer that cannot be differentiated is refused here
        return state

    def step(self, evaluator: Evaluator, state: OneCopyState, sizes: StepSizes) -> Info:
        x, y, user = state.x, state.y, type(self).__name__
        unrolled = Unrolled(
            evaluator,
            x,
            y,
            InnerRule.of(state.y_update),
            sizes.lower,
            user,
            start=self.start if callable(self.start) else evaluator.draw.start,
            learned=self.learned_lr,
            first_order=self.first_order,
            check=state.k == 0,
        )
        end = unrolled.run(self.inner_steps, self.keep_every or self.inner_steps)
        with torch.no_grad():
            torch._foreach_copy_(y.leaves, end)
        with buffers_kept(x, y):
            point = Point(evaluator, x, y, user)
            f_y = point.leave_upper_gradient(evaluator.draw.parts(upper=True))
            evaluator.report(Sample(None, unrolled.batches[-1], 0.0, 1.0))
            unrolled.pull_back(unflatten_like(f_y, end))
        gamma = state.y_update.choose(sizes.lower)
        return evaluator.finish(state, upper_lr=sizes.upper, lower_lr=gamma)

    def reference(self, f: Objective, g: Objective, x: Tensor, y: Tensor, draw: Draw) -> Iterates:
        """T plain steps of y as a function of x, differentiated as a whole by autograd."""
        for k in count():
            gamma, _, eta, _ = given(self.rates.at(k, 0.0))
            at = x.detach().requires_grad_()
            point = self.start(at) if callable(self.start) else y.detach().requires_grad_()
            for _ in range(self.inner_steps):
                (sample,) = draw.inner(LOWER.nodes, False)
                value = g(at, point, sample.lower)
                (slope,) = torch.autograd.grad(value, point, create_graph=not self.first_order)
                rate = gamma if self.learned_lr is None else self.learned_lr(at)
                point = point - rate * slope
            ((zeta, _),) = draw.upper.parts(None, None)
            (d_x,) = torch.autograd.grad(f(at, point, zeta), at)
            x, y = x - eta * d_x, point.detach()
            yield x, y
