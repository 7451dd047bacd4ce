"""BOME: descent on f with a dynamic barrier that keeps the gap in g falling."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from bilevel.engine.watch import Watch
from bilevel.errors.checks import check_choice, check_count, checked_number
from bilevel.methods.base import Info, Properties, Tally
from bilevel.methods.descent import DescentMethod
from bilevel.methods.no_bilevel import train
from bilevel.methods.penalty import COUPLINGS
from bilevel.methods.vpbgd import GapState
from bilevel.problem import FORWARD, Problem, evaluate, separately
from bilevel.sampling import Draw
from bilevel.stepping.schedules import Rate, Schedule, as_schedule, positive_at
from bilevel.stepping.updates import Update
from bilevel.variables import GradientSum, Variable, add_gradients, buffers_kept, frozen


@dataclass(frozen=True)
class BOME(DescentMethod[GapState]):
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

    properties = Properties(
        order=1,
        gradients="f: 1, g: T + 2",
        copies=2,
        assumes="g satisfies the PL inequality in y; exact gradients",
        reference="Ye, Liu, Wright, Stone, Liu 2022",
    )
    lacks = MappingProxyType(
        {
            "multiplier": (
                "it finds its multiplier anew in every step; eta says how strongly y is held to "
                "the lower solution"
            ),
            "penalty_lr": "its penalised copy y moves with lower_lr, and z with inner_lr",
        }
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.alpha
        check_count("inner_steps", self.inner_steps)
        check_choice("barrier", self.barrier, ("gradient", "gap"))
        checked_number("eta", self.eta, above=True)
        check_choice("coupling", self.coupling, COUPLINGS)

    @cached_property
    def alpha(self) -> Schedule | None:
        """The step of z as a function of k; None: as lower_lr."""
        return None if self.inner_lr is None else as_schedule("inner_lr", self.inner_lr)

    @property
    def _needs_lower(self) -> bool:
        return super()._needs_lower or (self.lower_optimizer is not None and self.alpha is None)

    def stiffness(self, lower: float, upper: float, multiplier: float) -> float:
        return lower + upper

    def init(self, problem: Problem, x: Variable, y: Variable) -> GapState:
        z = y.clone("z")
        x_update = self.x_update(problem, x)
        return GapState(
            x=x,
            k=0,
            multiplier=0.0,
            pace=self.pace(problem, x, y, x_update),
            y=y,
            z=z,
            x_update=x_update,
            y_update=Update(y, problem.y_projections(y), self.lower_optimizer),
            z_update=Update(z, problem.y_projections(z)),
        )

    def step(self, problem: Problem, state: GapState, draw: Draw, *, measure: bool = True) -> Info:
        k, x, y, z = state.k, state.x, state.y, state.z
        now = state.pace.at(problem, state, draw)
        lower_lr = state.y_update.choose(now.lower)
        inner_lr = now.lower if self.alpha is None else positive_at("inner_lr", self.alpha, k)

        z.assign(y)
        for _ in range(self.inner_steps):
            train(problem, x, z, state.z_update, draw, k, inner_lr)

        tally = Tally(problem, state, measure)
        totals = GradientSum(), GradientSum()
        gap = 0.0
        with frozen(z), buffers_kept(x, z):  # the evaluation is a step of y: its buffers move
            for samples in draw.direction(FORWARD.nodes, self.coupling == "shared"):
                phi = evaluate(problem, FORWARD, x, [y, z], samples)
                for total, weights in zip(totals, separately(), strict=True):
                    phi.backward(weights, Watch(k, at_once=True))
                    total.add([*x.take_grads(), *y.take_grads()])
                lower = phi.lower
                gap += 0.0 if lower is None else float(lower.detach())
                tally.add(samples[0], phi.terms)

        grad_f, grad_q = (total.gradients() for total in totals)
        lam = self._multiplier(grad_f, grad_q, gap)
        direction = add_gradients(grad_f, grad_q, alpha=lam)
        x.set_grads(direction[: len(x.leaves)])
        y.set_grads(direction[len(x.leaves) :])
        upper_lr = state.x_update.choose(now.upper)
        x.require_finite_grads(k, upper_lr)
        y.require_finite_grads(k, lower_lr)
        info = tally.info(x.grads(), lower_lr, upper_lr, lam)
        state.x_update.apply(upper_lr)
        state.y_update.apply(lower_lr)

        state.k, state.multiplier = k + 1, lam
        return info

    def _multiplier(self, grad_f: list[Tensor], grad_q: list[Tensor], gap: float) -> float:
        """The smallest lam >= 0 with <grad f + lam grad q, grad q> >= phi; 0 where grad q is 0."""
        size, inner = _inner(grad_q, grad_q), _inner(grad_f, grad_q)
        if size == 0:
            return 0.0
        barrier = self.eta * (size if self.barrier == "gradient" else gap)
        return max(0.0, (barrier - inner) / size)


def _inner(a: list[Tensor], b: list[Tensor]) -> float:
    """The inner product of all entries, added up in at least single precision."""
    total = 0.0
    for u, v in zip(a, b, strict=True):
        wide = torch.promote_types(u.dtype, torch.float32)
        total += float((u.to(wide) * v.to(wide)).sum())
    return total
