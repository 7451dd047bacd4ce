"""MEHA: the Moreau envelope in place of the lower minimum, for lower levels that are not convex."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from itertools import count

import torch
from torch import Tensor

from bilevel.errors.checks import checked_number
from bilevel.methods.base import Iterates
from bilevel.methods.capabilities import FIRST_ORDER, Properties
from bilevel.methods.evaluator import Descent, Evaluator, Move
from bilevel.methods.penalty import PenaltyMethod
from bilevel.methods.reference import given, gradient_x, gradient_y
from bilevel.methods.state import Info, TwoCopyState
from bilevel.methods.vpbgd import gap_gradients
from bilevel.problem import FORWARD, LOWER, Number, Objective, Phi, Problem
from bilevel.sampling import Draw
from bilevel.stepping import Power, Rate, StepSizes
from bilevel.variables import Variable, add_gradients, frozen

DEFAULT_MULTIPLIER = Power(10.0, offset=1.0, exponent=0.25)
"""c_k = c0 * (k + 1)^p with c0 = 10 and p = 1/4."""


@dataclass(frozen=True)
class MEHA(PenaltyMethod[TwoCopyState]):
    """MEHA: a single loop on the gap between g and its Moreau envelope.

    The lower level is replaced by g(x, y) <= v(x, y) with the envelope
    v(x, y) = min_theta g(x, theta) + ||theta - y||^2 / (2 gam), whose minimiser theta follows y.
    Outer step k is

        theta <- theta - gamma_k * ( grad_y g(x, theta) + (theta - y) / gam )
        x <- x - eta_k * ( grad_x f(x, y) / c_k + grad_x g(x, y) - grad_x g(x, theta) )
        y <- y - beta_k * ( grad_y f(x, y) / c_k + grad_y g(x, y) - (y - theta) / gam )

    with the new theta, and x and y moving together by one backward pass at the old x and y. What
    is reported as the direction of x is c_k times the one above, an estimate of grad F as that of
    every method. Its bias is O(1 / (c * gam)) for a small gam and O(1 / c) for a large one.

    Use it where the lower level is not strongly convex, or not convex: only g + ||.||^2 / (2 gam)
    has to be. theta is held near y, so where the lower level has many minimisers it is next to the
    one that is best for f. What is returned as the lower solution is theta: it has seen g alone
    and, being one proximal step further, g(x, theta) <= g(x, y); y is the penalised copy.

    Args:
        lower_lr: gamma_k, the step of theta, below 2 / (L_g + 1/gam). "auto": as in
            :class:`~bilevel.F2SA`.
        upper_lr: eta_k, the step of x; with the step of y it must stay below 2 / L_g for the
            curvature L_g of g in x and y together. "auto": as in :class:`~bilevel.F2SA`.
        multiplier: c_k, a float or a function of k; ``Power(c0, 1, p)`` is c0 * (k + 1)^p, for
            which the theory wants 0 <= p < 1/2. The default has c0 = 10 and p = 1/4.
        proximal: gam. For a g that is convex in y any, and the larger the smaller the bias; where
            its curvature goes down to -rho, below 1 / (2 rho).
        penalty_lr: beta_k, the step of y, below 2 / (L_g + L_f / c_k). None: as lower_lr.
        coupling: "shared" evaluates g at y and at theta on the same samples in the joint step;
            "independent" draws for each. The step of theta has a sample of its own.
        lower_optimizer: a factory ``params -> torch.optim.Optimizer`` for y and theta instead of
            plain steps; replaces lower_lr and penalty_lr.
        upper_optimizer: the same for x; replaces upper_lr.

    Example:
        >>> import bilevel
        >>> from bilevel.methods.meha import MEHA
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> method = MEHA(lower_lr=0.5, upper_lr=1.0, multiplier=30.0, proximal=10.0)
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=500)
        >>> bool(problem.gradient(result.x).norm() < 0.1 * problem.gradient(problem.x0).norm())
        True

    Reference:
        Liu, Liu, Yao, Zeng, Zhang, "Moreau Envelope for Nonconvex Bi-Level Optimization: A
        Single-loop and Hessian-free Solution Strategy", ICML 2024.
    """

    multiplier: Rate = DEFAULT_MULTIPLIER
    _: KW_ONLY
    proximal: float = 10.0

    properties = Properties(
        order=1,
        gradients="f: 1, g: 3",
        copies=2,
        assumes="g weakly convex in y; f and g smooth",
        reference="Liu, Liu, Yao, Zeng, Zhang 2024",
        abilities=FIRST_ORDER,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_number("proximal", self.proximal, above=True)

    def stiffness(self, lower: float, upper: float, multiplier: float) -> float:
        return lower + max(upper / multiplier, 1 / self.proximal)

    def init(self, problem: Problem, x: Variable, y: Variable) -> TwoCopyState:
        return TwoCopyState(**self.two_copies(problem, x, y, "theta"))

    def step(self, evaluator: Evaluator, state: TwoCopyState, sizes: StepSizes) -> Info:
        x, y, theta = state.x, state.y, state.z
        c, gamma = sizes.multiplier, state.z_update.choose(sizes.lower)

        envelope = Phi(LOWER, x, [theta], 1.0, shared=False)
        with frozen(x):
            samples = evaluator.draw.inner(LOWER.nodes, envelope.shared)
            evaluator.backward(evaluator.evaluate(envelope, samples), None, 1.0)
        self._add_pull(theta, y, 1.0)
        evaluator.move([Move(state.z_update, gamma)])

        phi = Phi(FORWARD, x, [y, theta], c, self.shared)
        gap_gradients(evaluator, phi)
        self._add_pull(y, theta, -c)
        return evaluator.finish(
            state,
            upper_lr=sizes.upper,
            lower_lr=gamma,
            multiplier=c,
            gain=1 / c,
            also=Descent(phi, [Move(state.y_update, sizes.penalty, 1 / c)]),
        )

    @torch.no_grad()
    def _add_pull(self, of: Variable, towards: Variable, weight: Number) -> None:
        """Add weight * (of - towards) / gam to the gradients of ``of``."""
        difference = torch._foreach_sub(of.leaves, towards.leaves)
        of.set_grads(add_gradients(of.grads(), difference, alpha=float(weight) / self.proximal))

    def reference(self, f: Objective, g: Objective, x: Tensor, y: Tensor, draw: Draw) -> Iterates:
        """One step of theta on the envelope, then one joint step of x and y."""
        theta, gam = y, self.proximal
        for k in count():
            gamma, beta, eta, c = given(self.rates.at(k, 0.0))
            (sample,) = draw.inner(LOWER.nodes, False)
            theta = theta - gamma * (gradient_y(g, x, theta, sample.lower) + (theta - y) / gam)
            ((at_y, at_z),) = draw.direction(FORWARD.nodes, self.shared)
            d_x = gradient_x(f, x, y, at_y.upper) / c + gradient_x(g, x, y, at_y.lower)
            d_x = d_x - gradient_x(g, x, theta, at_z.lower)
            d_y = gradient_y(f, x, y, at_y.upper) / c + gradient_y(g, x, y, at_y.lower)
            d_y = d_y - (y - theta) / gam
            x, y = x - eta * d_x, y - beta * d_y
            yield x, theta
