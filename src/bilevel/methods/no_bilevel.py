"""NoBilevel: the lower level alone, with x as it was given."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import count

from torch import Tensor

from bilevel.errors.checks import check_count
from bilevel.methods.base import Iterates, Method
from bilevel.methods.capabilities import Ability, Properties
from bilevel.methods.evaluator import Descent, Evaluator, Move
from bilevel.methods.reference import given, gradient_y
from bilevel.methods.state import Info, OneCopyState
from bilevel.problem import LOWER, Number, Objective, Phi, Problem
from bilevel.sampling import Draw
from bilevel.stepping import (
    Constant,
    FoundRate,
    FoundSizes,
    GivenSizes,
    NoUpdate,
    OptimizerFactory,
    Rates,
    StepSizePolicy,
    StepSizes,
    Traits,
    Update,
    rate_or_optimizer,
)
from bilevel.variables import Variable, frozen


def train(evaluator: Evaluator, x: Variable, update: Update, rate: Number, steps: int) -> None:
    """Gradient steps of one copy on g(x, .), each on a sample of its own."""
    phi = Phi(LOWER, x, [update.variable], 1.0, shared=False)
    descent = Descent(phi, [Move(update, rate)])
    with frozen(x):
        for _ in range(steps):
            evaluator.descend(descent)


@dataclass(frozen=True)
class NoBilevel(Method[OneCopyState]):
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
        abilities=frozenset(
            {
                Ability.SPARSE_STEPS,
                Ability.LOWER_OPTIMIZER,
                Ability.CONSTRAINED_LOWER,
                Ability.PROXIMAL,
                Ability.TASKS,
                Ability.FRESH_STARTS,
            }
        ),
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

    def init(self, problem: Problem, x: Variable, y: Variable) -> OneCopyState:
        return OneCopyState(
            x=x,
            k=0,
            multiplier=math.nan,
            policy=self._policy(y),
            x_update=NoUpdate(x, problem.x_projections(x)),
            y=y,
            y_update=Update(y, problem.y_projections(y), self.lower_optimizer),
        )

    def _policy(self, y: Variable) -> StepSizePolicy:
        if self.rates.lower is not None:
            return GivenSizes(self.rates)
        traits = Traits(lambda lower, upper, multiplier: lower, inner_steps=self.inner_steps)
        return FoundSizes(self.rates, y, traits)

    def step(self, evaluator: Evaluator, state: OneCopyState, sizes: StepSizes) -> Info:
        gamma = state.y_update.choose(sizes.lower)
        train(evaluator, state.x, state.y_update, gamma, self.inner_steps)
        for samples in evaluator.draw.direction(LOWER.nodes, shared=True):  # f is only reported
            evaluator.report(samples[0])
        return evaluator.finish(state, upper_lr=0.0, lower_lr=gamma)

    def reference(self, f: Objective, g: Objective, x: Tensor, y: Tensor, draw: Draw) -> Iterates:
        """T steps of y on g; x stays."""
        for k in count():
            gamma, *_ = given(self.rates.at(k, 0.0))
            for _ in range(self.inner_steps):
                (sample,) = draw.inner(LOWER.nodes, False)
                y = y - gamma * gradient_y(g, x, y, sample.lower)
            list(draw.direction(LOWER.nodes, True))
            yield x, y
