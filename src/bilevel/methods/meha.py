"""MEHA: the Moreau envelope in place of the lower minimum, for lower levels that are not convex."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from bilevel.engine.watch import Watch
from bilevel.errors.checks import checked_number
from bilevel.methods.base import Info, Properties, Tally
from bilevel.methods.no_bilevel import LOWER
from bilevel.methods.penalty import PenaltyMethod
from bilevel.methods.vpbgd import GapState, gap_gradients
from bilevel.problem import FORWARD, Problem, Weights, evaluate
from bilevel.sampling import Draw
from bilevel.stepping.schedules import Power, Rate
from bilevel.stepping.updates import Update
from bilevel.variables import Variable, add_gradients, frozen

DEFAULT_MULTIPLIER = Power(10.0, offset=1.0, exponent=0.25)
"""c_k = c0 * (k + 1)^p with c0 = 10 and p = 1/4."""


@dataclass(frozen=True)
class MEHA(PenaltyMethod[GapState]):
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
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_number("proximal", self.proximal, above=True)

    def stiffness(self, lower: float, upper: float, multiplier: float) -> float:
        return lower + max(upper / multiplier, 1 / self.proximal)

    def init(self, problem: Problem, x: Variable, y: Variable) -> GapState:
        theta = y.clone("theta")
        x_update = self.x_update(problem, x)
        return GapState(
            x=x,
            k=0,
            multiplier=0.0,
            pace=self.pace(problem, x, y, x_update),
            y=y,
            z=theta,
            x_update=x_update,
            y_update=Update(y, problem.y_projections(y), self.lower_optimizer),
            z_update=Update(theta, problem.y_projections(theta), self.lower_optimizer),
        )

    def step(self, problem: Problem, state: GapState, draw: Draw, *, measure: bool = True) -> Info:
        k, x, y, theta = state.k, state.x, state.y, state.z
        now = state.pace.at(problem, state, draw)
        c, gamma, beta = now.multiplier, state.z_update.choose(now.lower), now.penalty

        with frozen(x):
            phi = evaluate(problem, LOWER, x, [theta], draw.inner(LOWER.nodes, shared=False))
            phi.backward(Weights(None, 1.0), Watch(k, at_once=True))
        self._add_pull(theta, y, 1.0)
        theta.require_finite_grads(k, gamma)
        state.z_update.apply(gamma)

        tally = Tally(problem, state, measure)
        gap_gradients(problem, state, c, draw.direction(FORWARD.nodes, self.shared), tally)
        self._add_pull(y, theta, -c)
        upper_lr = state.x_update.choose(now.upper, gain=1 / c)
        x.require_finite_grads(k, upper_lr / c)
        y.require_finite_grads(k, beta / c)
        info = tally.info(x.grads(), gamma, upper_lr, c)
        state.x_update.apply(upper_lr, gain=1 / c)
        state.y_update.apply(beta, gain=1 / c)

        state.k, state.multiplier = k + 1, c
        return info

    @torch.no_grad()
    def _add_pull(self, of: Variable, towards: Variable, weight: float) -> None:
        """Add weight * (of - towards) / gam to the gradients of ``of``."""
        difference = torch._foreach_sub(of.leaves, towards.leaves)
        of.set_grads(add_gradients(of.grads(), difference, alpha=weight / self.proximal))
