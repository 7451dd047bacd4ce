"""BOME: descent on f with a dynamic barrier that keeps the gap in g falling."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from itertools import count
from typing import Literal

from torch import Tensor

from bilevel.errors.checks import check_choice, check_count, checked_number
from bilevel.methods.base import Iterates
from bilevel.methods.capabilities import FIRST_ORDER, Properties
from bilevel.methods.descent import DescentMethod
from bilevel.methods.evaluator import Descent, Evaluator, Move
from bilevel.methods.no_bilevel import train
from bilevel.methods.penalty import COUPLINGS
from bilevel.methods.reference import given, gradient_x, gradient_y
from bilevel.methods.state import Info, TwoCopyState
from bilevel.problem import FORWARD, LOWER, Level, Objective, Phi, Problem
from bilevel.sampling import Draw
from bilevel.stepping import Rate, StepSizes
from bilevel.variables import GradientSum, Variable, add_gradients, buffers_kept, frozen, inner


@dataclass(frozen=True)
class BOME(DescentMethod[TwoCopyState]):
    """BOME: the multiplier is found anew in every step, from two gradients.

    Outer step k is

        z <- y_k;  repeat T times:  z <- z - alpha_k * grad_y g(x_k, z)
        q(x, y) = g(x, y) - g(x, z),  z held fixed
        lam_k = max( 0, ( phi - <grad f, grad q> ) / ||grad q||^2 )            at (x_k, y_k)
        x <- x_k - eta_k * ( grad_x f + lam_k * grad_x q )
        y <- y_k - beta_k * ( grad_y f + lam_k * grad_y q )

    where gradients without a letter are in (x, y) together, and phi is eta * ||grad q||^2 or
    eta * q. lam_k is the smallest multiplier with which the step takes q down at the rate phi; it
    is what is reported as the multiplier, and it grows as the gap closes.

    Because z starts at y, T is not a matter of speed alone: the x direction is wrong by a share of
    (1 - alpha mu)^T, mu being the curvature of g, however long the run. Use it as the rival that
    the paper names, or where no multiplier is to be chosen; it is made for exact gradients, and
    noise in grad q makes lam_k wrong. Where a set binds at the solution, what grad f has left there
    holds lam_k at a multiple of eta instead of letting it grow, and a bias of O(1 / eta) stays:
    choose a larger eta.

    Args:
        lower_lr: beta_k, the step of y in the joint step. "auto": as in :class:`~bilevel.F2SA`,
            but 1 / (L_g + L_f).
        upper_lr: eta_k, the step of x in the joint step. "auto": as in :class:`~bilevel.F2SA`.
        inner_lr: alpha_k, the step of z, below 2 / L_g. None: as lower_lr ("auto" beside a
            lower_optimizer, which moves y only).
        inner_steps: T.
        barrier: phi: "gradient" is eta * ||grad q||^2, "gap" is eta * q.
        eta: the weight of the barrier. The larger, the closer y stays to the lower solution.
        coupling: "shared" evaluates g at y and at z on the same samples in the joint step;
            "independent" draws for each. The T steps of z have samples of their own.
        lower_optimizer: a factory ``params -> torch.optim.Optimizer`` for the joint step of y;
            replaces lower_lr. The steps of z are plain always.
        upper_optimizer: the same for x; replaces upper_lr.

    Example:
        >>> import bilevel
        >>> from bilevel.methods.bome import BOME
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> method = BOME(lower_lr=0.05, upper_lr=0.1, inner_lr=1.0, inner_steps=20)
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=200)
        >>> bool(problem.gradient(result.x).norm() < 0.1 * problem.gradient(problem.x0).norm())
        True

    Reference:
        Ye, Liu, Wright, Stone, Liu, "BOME! Bilevel Optimization Made Easy: A Simple First-Order
        Approach", NeurIPS 2022.
    """

    _: KW_ONLY
    inner_lr: Rate | None = None
    inner_steps: int = 10
    barrier: Literal["gradient", "gap"] = "gradient"
    eta: float = 0.5
    coupling: Literal["shared", "independent"] = "shared"

    auxiliary_rate = "inner_lr"
    properties = Properties(
        order=1,
        gradients="f: 1, g: T + 2",
        copies=2,
        assumes="g satisfies the PL inequality in y; exact gradients",
        reference="Ye, Liu, Wright, Stone, Liu 2022",
        abilities=FIRST_ORDER,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("inner_steps", self.inner_steps)
        check_choice("barrier", self.barrier, ("gradient", "gap"))
        checked_number("eta", self.eta, above=True)
        check_choice("coupling", self.coupling, COUPLINGS)

    def stiffness(self, lower: float, upper: float, multiplier: float) -> float:
        return lower + upper

    def init(self, problem: Problem, x: Variable, y: Variable) -> TwoCopyState:
        return TwoCopyState(**self.two_copies(problem, x, y, "z", plain_z=True))

    def step(self, evaluator: Evaluator, state: TwoCopyState, sizes: StepSizes) -> Info:
        x, y, z = state.x, state.y, state.z
        lower_lr = state.y_update.choose(sizes.lower)
        z.assign(y)
        alpha = self.auxiliary_at(state.k, sizes.lower)
        train(evaluator, x, state.z_update, alpha, self.inner_steps)

        phi = Phi(FORWARD, x, [y, z], 1.0, self.coupling == "shared")
        grad_f, grad_q, gap = self._gradients(evaluator, phi)
        lam = self._multiplier(grad_f, grad_q, gap)
        direction = add_gradients(grad_f, grad_q, alpha=lam)
        x.set_grads(direction[: len(x.leaves)])
        y.set_grads(direction[len(x.leaves) :])
        return evaluator.finish(
            state,
            upper_lr=sizes.upper,
            lower_lr=lower_lr,
            multiplier=lam,
            also=Descent(phi, [Move(state.y_update, lower_lr)]),
        )

    def _gradients(
        self, evaluator: Evaluator, phi: Phi
    ) -> tuple[list[Tensor], list[Tensor], float]:
        """The gradients of f and of q in x and y together, and q; z is held fixed."""
        x, (y, z) = phi.x, phi.points
        totals, gap = (GradientSum(), GradientSum()), 0.0
        with frozen(z), buffers_kept(x, z):  # the evaluation is a step of y: its buffers move
            for samples in evaluator.draw.direction(phi.stencil.nodes, phi.shared):
                evaluation = evaluator.evaluate(phi, samples)
                for total, weights in zip(totals, ((1.0, None), (None, 1.0)), strict=True):
                    evaluator.backward(evaluation, *weights)
                    total.add([*x.take_grads(), *y.take_grads()])
                lower = evaluation.sum(Level.LOWER)
                gap += 0.0 if lower is None else float(lower.detach())
                evaluator.report(samples[0], evaluation.parts)
        grad_f, grad_q = (total.gradients() for total in totals)
        return grad_f, grad_q, gap

    def _multiplier(self, grad_f: list[Tensor], grad_q: list[Tensor], gap: float) -> float:
        """The smallest lam >= 0 with <grad f + lam grad q, grad q> >= phi; 0 where grad q is 0."""
        size, along = sum(map(inner, grad_q, grad_q)), sum(map(inner, grad_f, grad_q))
        if size == 0:
            return 0.0
        barrier = self.eta * (size if self.barrier == "gradient" else gap)
        return max(0.0, (barrier - along) / size)

    def reference(self, f: Objective, g: Objective, x: Tensor, y: Tensor, draw: Draw) -> Iterates:
        """T steps of z from y, the multiplier from two gradients, one joint step."""
        for k in count():
            beta, _, eta_k, _ = given(self.rates.at(k, 0.0))
            alpha, z = self.auxiliary_at(k, beta), y
            for _ in range(self.inner_steps):
                (sample,) = draw.inner(LOWER.nodes, False)
                z = z - alpha * gradient_y(g, x, z, sample.lower)
            ((at_y, at_z),) = draw.direction(FORWARD.nodes, self.coupling == "shared")
            f_x, f_y = gradient_x(f, x, y, at_y.upper), gradient_y(f, x, y, at_y.upper)
            q_x = gradient_x(g, x, y, at_y.lower) - gradient_x(g, x, z, at_z.lower)
            q_y = gradient_y(g, x, y, at_y.lower)
            q = g(x, y, at_y.lower) - g(x, z, at_z.lower)
            size = (q_x**2).sum() + (q_y**2).sum()
            barrier = self.eta * (size if self.barrier == "gradient" else q)
            along = (f_x * q_x).sum() + (f_y * q_y).sum()
            lam = ((barrier - along) / size).clamp_min(0.0) if size > 0 else 0.0
            x, y = x - eta_k * (f_x + lam * q_x), y - beta * (f_y + lam * q_y)
            yield x, z
