"""VPBGD: one joint step on the penalised problem, for lower levels that are only PL."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import count
from typing import Literal

from torch import Tensor

from bilevel.errors.checks import check_choice, check_count
from bilevel.methods.base import Iterates
from bilevel.methods.capabilities import FIRST_ORDER, Properties
from bilevel.methods.evaluator import Descent, Evaluator, Move
from bilevel.methods.no_bilevel import train
from bilevel.methods.penalty import PenaltyMethod
from bilevel.methods.reference import given, gradient_x, gradient_y
from bilevel.methods.state import Info, TwoCopyState
from bilevel.problem import FORWARD, LOWER, Objective, Phi, Problem, Stencil
from bilevel.sampling import Draw
from bilevel.stepping import StepSizes
from bilevel.variables import Variable, buffers_kept, frozen


def gap_gradients(evaluator: Evaluator, phi: Phi) -> None:
    """Leave on x and y the gradient of f(x, y) + lam * ( g(x, y) - g(x, z) ) at fixed z.

    It is added up over the parts of its samples. The evaluation is a step of y, so the buffers of y
    move with it, and only these.
    """
    _, z = phi.points
    with frozen(z), buffers_kept(phi.x, z):
        for samples in evaluator.draw.direction(phi.stencil.nodes, phi.shared):
            evaluation = evaluator.evaluate(phi, samples)
            evaluator.backward(evaluation, 1.0, phi.multiplier)
            evaluator.report(samples[0], evaluation.parts)


@dataclass(frozen=True)
class VPBGD(PenaltyMethod[TwoCopyState]):
    """V-PBGD: joint descent in (x, y) on f plus a multiple of the gap in g.

    With gam_k the multiplier, outer step k is

        repeat T times:  z <- z - gamma_k * grad_y g(x, z)
        s = min(1, 1 / gam_k)
        x <- x - eta_k * s * ( grad_x f(x, y) + gam_k * ( grad_x g(x, y) - grad_x g(x, z) ) )
        y <- y - beta_k * s * ( grad_y f(x, y) + gam_k * grad_y g(x, y) )

    where x and y move together, by one backward pass at the old x and y; the paper has one step
    eta_k = beta_k for both. The scale s keeps the joint step stable when gam grows, at the price
    that x moves with 1 / gam. At the end y and the x direction are those of F2SA, with a bias of
    O(1 / gam).

    Use it where the lower level is not strongly convex but only satisfies the PL inequality (more
    parameters than data, say): there min_y g(x, y) is smooth even though its minimiser is not
    unique, and y is free to choose the best minimiser for f. What is returned as the lower solution
    is z. Where minimisers are many, z is the best of them for f only with ``start="y"``.

    Args:
        lower_lr: gamma_k, the step of z, below 2 / L_g. "auto": as in :class:`~bilevel.F2SA`.
        upper_lr: eta_k, the step of x; with the step of y it must stay below 2 / L_g for the
            curvature L_g of g in x and y together. x moves by eta_k * s times the direction that is
            reported. "auto": as in :class:`~bilevel.F2SA`.
        multiplier: gam_k, a float or a function of k, such as ``bilevel.schedules.Ramp``, with
            which x comes near the solution while gam is small and its steps are long.
        inner_steps: T.
        penalty_lr: beta_k, the step of y; beta_k * (L_g + L_f / gam_k) must stay below 2. None: as
            lower_lr.
        start: where z starts in each outer step: "z", where it ended, so that a small T is enough;
            or "y", so that z is the minimiser of g next to y, for which T must be large enough to
            reach it (otherwise the x direction is wrong by a share of (1 - gamma mu)^T).
        coupling: "shared" evaluates g at y and at z on the same samples in the joint step;
            "independent" draws for each. The T steps of z have samples of their own.
        lower_optimizer: a factory ``params -> torch.optim.Optimizer`` for y and z instead of plain
            steps; replaces lower_lr and penalty_lr.
        upper_optimizer: the same for x; replaces upper_lr.

    Example:
        >>> import bilevel
        >>> from bilevel.methods.vpbgd import VPBGD
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> method = VPBGD(lower_lr=0.5, upper_lr=1.0, multiplier=30.0, inner_steps=1)
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=500)
        >>> bool(problem.gradient(result.x).norm() < 0.1 * problem.gradient(problem.x0).norm())
        True

    Reference:
        Shen, Chen, "On Penalty-based Bilevel Gradient Descent Method", ICML 2023, Algorithm 1.
    """

    _: KW_ONLY
    inner_steps: int = 10
    start: Literal["z", "y"] = "z"

    properties = Properties(
        order=1,
        gradients="f: 1, g: T + 2",
        copies=2,
        assumes="g satisfies the PL inequality in y; f and g smooth",
        reference="Shen, Chen 2023, Algorithm 1",
        abilities=FIRST_ORDER,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("inner_steps", self.inner_steps)
        check_choice("start", self.start, ("z", "y"))

    @cached_property
    def stencil(self) -> Stencil:
        """The finite difference behind the x direction."""
        return FORWARD

    def init(self, problem: Problem, x: Variable, y: Variable) -> TwoCopyState:
        return TwoCopyState(**self.two_copies(problem, x, y, "z"))

    def step(self, evaluator: Evaluator, state: TwoCopyState, sizes: StepSizes) -> Info:
        lam, gamma = sizes.multiplier, state.z_update.choose(sizes.lower)
        if self.start == "y":
            state.z.assign(state.y)
        train(evaluator, state.x, state.z_update, gamma, self.inner_steps)

        phi = Phi(FORWARD, state.x, [state.y, state.z], lam, self.shared)
        gap_gradients(evaluator, phi)
        scale = min(1.0, 1 / lam)
        return evaluator.finish(
            state,
            upper_lr=sizes.upper,
            lower_lr=gamma,
            multiplier=lam,
            gain=scale,
            also=Descent(phi, [Move(state.y_update, sizes.penalty, scale)]),
        )

    def reference(self, f: Objective, g: Objective, x: Tensor, y: Tensor, draw: Draw) -> Iterates:
        """T steps of z on g, then one joint step of x and y."""
        z = y
        for k in count():
            gamma, beta, eta, lam = given(self.rates.at(k, 0.0))
            z = y if self.start == "y" else z
            for _ in range(self.inner_steps):
                (sample,) = draw.inner(LOWER.nodes, False)
                z = z - gamma * gradient_y(g, x, z, sample.lower)
            ((at_y, at_z),) = draw.direction(FORWARD.nodes, self.shared)
            d_g = gradient_x(g, x, y, at_y.lower) - gradient_x(g, x, z, at_z.lower)
            d_x = gradient_x(f, x, y, at_y.upper) + lam * d_g
            d_y = gradient_y(f, x, y, at_y.upper) + lam * gradient_y(g, x, y, at_y.lower)
            scale = min(1.0, 1 / lam)
            x, y = x - eta * scale * d_x, y - beta * scale * d_y
            yield x, z
