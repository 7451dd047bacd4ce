"""NoBilevel: the lower level alone, with x as it was given."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

from bilevel.engine.watch import Watch
from bilevel.errors.checks import check_count
from bilevel.methods.base import Info, Method, Properties, State, Tally
from bilevel.problem import Problem, Stencil, Weights, evaluate
from bilevel.sampling import Draw
from bilevel.stepping.policy import REFERENCE_INNER_STEPS, MeasuredPace, Pace
from bilevel.stepping.schedules import Constant
from bilevel.stepping.updates import (
    FoundRate,
    OptimizerFactory,
    Rates,
    Update,
    rate_or_optimizer,
)
from bilevel.variables import Variable, frozen

LOWER = Stencil(upper=(0.0,), lower=(1.0,), centre=(1.0,))
"""Phi = lam * g(x, y): one copy, which solves the lower level."""


def train(
    problem: Problem, x: Variable, y: Variable, update: Update, draw: Draw, k: int, rate: float
) -> None:
    """One gradient step of y on g(x, .), on a sample of its own."""
    with frozen(x):
        phi = evaluate(problem, LOWER, x, [y], draw.inner(LOWER.nodes, shared=False))
        phi.backward(Weights(None, 1.0), Watch(k, at_once=True))
    y.require_finite_grads(k, rate)
    update.apply(rate)


@dataclass
class NoBilevelState(State):
    """What NoBilevel carries.

    Attributes:
        y: the lower variable.
        y_update: how it moves.
    """

    y: Variable
    y_update: Update

    @property
    def solution(self) -> Variable:
        return self.y


@dataclass(frozen=True)
class NoBilevel(Method[NoBilevelState]):
    """No bilevel optimization: y is trained on g at the x that was given, and x never moves.

    One outer step is

        repeat T times:  y <- y - gamma_k * grad_y g(x_0, y)

    the paper's "Without BO": what any bilevel method has to beat. f is evaluated only to be
    reported, on the samples that would be behind an x direction; ``direction_norm`` is 0.

    Args:
        lower_lr: gamma_k, the step of y, a float or a function of k; below 2 / L_g. "auto":
            1 / L_g, measured.
        inner_steps: T.
        lower_optimizer: a factory ``params -> torch.optim.Optimizer`` for y instead of plain steps;
            replaces lower_lr.

    Example:
        >>> import bilevel, torch
        >>> from bilevel.methods.no_bilevel import NoBilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> result = bilevel.minimize(
        ...     problem, problem.x0, problem.y0, method=NoBilevel(lower_lr=1.0), steps=50)
        >>> torch.equal(result.x, problem.x0)
        True
        >>> torch.allclose(result.y, problem.lower_solution(problem.x0))
        True

    Reference:
        Kwon, Kwon, Wright, Nowak 2023, Section 5, "Without BO".
    """

    lower_lr: FoundRate = "auto"
    _: KW_ONLY
    inner_steps: int = 10
    lower_optimizer: OptimizerFactory | None = None

    properties = Properties(
        order=1,
        gradients="f: 0, g: T",
        copies=1,
        assumes="as much as training on g does",
        reference="Kwon, Kwon, Wright, Nowak 2023, 'Without BO'",
    )

    def __post_init__(self) -> None:
        _ = self.rates  # a bad rate is refused at construction
        check_count("inner_steps", self.inner_steps)

    @cached_property
    def rates(self) -> Rates:
        """The step of y as a function of k; that of x is not used."""
        lower = rate_or_optimizer(
            "lower_lr", self.lower_lr, "lower_optimizer", self.lower_optimizer
        )
        return Rates(lower, Constant(1.0))

    def init(self, problem: Problem, x: Variable, y: Variable) -> NoBilevelState:
        Update(x, problem.x_projections(x))  # it starts in its set, as with every method
        y_update = Update(y, problem.y_projections(y), self.lower_optimizer)
        return NoBilevelState(
            x=x, k=0, multiplier=math.nan, pace=self._pace(y), y=y, y_update=y_update
        )

    def _pace(self, y: Variable) -> Pace:
        if self.rates.lower is not None:
            return Pace(self.rates)
        return MeasuredPace(
            self.rates,
            y,
            stiffness=lambda lower, upper, multiplier: lower,
            raises=False,
            unit=-(-REFERENCE_INNER_STEPS // self.inner_steps),
            watch=None,
        )

    def step(
        self, problem: Problem, state: NoBilevelState, draw: Draw, *, measure: bool = True
    ) -> Info:
        gamma = state.y_update.choose(state.pace.at(problem, state, draw).lower)
        for _ in range(self.inner_steps):
            train(problem, state.x, state.y, state.y_update, draw, state.k, gamma)

        tally = Tally(problem, state, measure)
        for samples in draw.direction(LOWER.nodes, shared=True):  # drawn, measured or not
            tally.add(samples[0], {})
        info = tally.info(state.x.take_grads(), gamma, 0.0)  # it has no direction
        state.k += 1
        return info
