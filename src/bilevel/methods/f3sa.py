"""F3SA: F2SA with recursive momentum in every gradient (Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from bilevel.errors.checks import check_choice
from bilevel.methods.base import Iterates
from bilevel.methods.capabilities import FIRST_ORDER, Ability, Properties
from bilevel.methods.evaluator import Evaluator, Move
from bilevel.methods.penalty import PaperMethod
from bilevel.methods.reference import given, gradient_x, gradient_y
from bilevel.methods.state import Info, TwoCopyState
from bilevel.problem import FORWARD, Evaluation, Objective, Phi, Problem, Stencil
from bilevel.sampling import Draw, Rewind, Sample
from bilevel.stepping import (
    Power,
    Rate,
    Schedule,
    StepSizes,
    as_share,
    share_at,
    updates_of_copies,
)
from bilevel.variables import Variable, add_gradients, buffers_kept, frozen, stored_values, to_dense

if TYPE_CHECKING:
    from bilevel import theory

DEFAULT_MOMENTUM = Power(1.0, offset=1.0, exponent=-0.8)
"""eta_k = (k + 1)^(-4/5), the paper's for noise in both levels."""

Gradients: TypeAlias = list[list[Tensor]]
"""For each estimator the gradient of its term, one tensor per leaf."""


@dataclass
class F3SAState(TwoCopyState):
    """What F3SA carries beside its two copies of y.

    Attributes:
        before: (x, y, z) where the estimators were last evaluated.
        y_estimates: of grad_y f and grad_y g at y; combined: of their sum with the multiplier.
        z_estimate: of grad_y g at z.
        x_estimates: of grad_x f and grad_x (g at y - g at z); combined: of their sum.
        midway: whether a step was begun and not finished; the estimators then start afresh.
    """

    before: list[Variable]
    y_estimates: Gradients
    z_estimate: list[Tensor]
    x_estimates: Gradients
    midway: bool

    def contract_copies(self, share: float) -> None:
        super().contract_copies(share)
        self.reset_estimators()

    def reset_estimators(self) -> None:
        self.midway = True


@dataclass(frozen=True)
class F3SA(PaperMethod[F3SAState]):
    """F3SA: F2SA with one inner step and variance-reduced gradients.

    Every gradient q of :class:`~bilevel.F2SA` is replaced by a recursive estimator h that evaluates
    each fresh sample at the current and at the previous point,

        h^k = q_k(sample_k) + (1 - eta_k) * ( h^{k-1} - q_{k-1}(sample_k) ),

    for grad_y g at z; grad_y f and grad_y g at y; grad_x f and grad_x g at y and grad_x g at z, the
    last two on the same sample. With these,

        z <- z - gamma_k * h_z
        y <- y - beta_k * ( h_gy + h_fy / lam_k )
        x <- x - s_k * ( h_fx + lam_k * ( h_gxy - h_gxz ) )       (s_k: upper_lr)

    where the x estimators are taken at the new y and z. Because h_gxy and h_gxz obey one linear
    recursion on one sample, their difference is kept instead of both.

    Args:
        lower_lr, upper_lr, multiplier, penalty_lr, coupling, lower_optimizer, upper_optimizer: as
            in :class:`~bilevel.F2SA`. With "independent", the paper's sampling, y and z draw their
            own samples; the two g-terms of x share theirs in either case.
        momentum: eta_k in (0, 1], a float or a function of k; eta_0 = eta_1 = 1 always, as the
            theorem wants. 1 is no momentum.
        recursion: "separate", the paper's Algorithm 2, or "combined", what its proof analyses:
            one estimator of f + lam * g, evaluated with lam_{k-1} at the previous point. They are
            the same when the multiplier is constant; "combined" holds fewer tensors.

    Example:
        >>> import torch, bilevel
        >>> problem = bilevel.problems.Quadratic(sigma_f=0.1, sigma_g=0.1, seed=0)
        >>> method = bilevel.F3SA(lower_lr=0.5, upper_lr=0.02, momentum=0.1)
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=300,
        ...     upper_data=problem.upper_noise, lower_data=problem.lower_noise)
        >>> bool(problem.gradient(result.x).norm() < 0.2 * problem.gradient(problem.x0).norm())
        True

    Reference:
        Kwon, Kwon, Wright, Nowak 2023, Algorithm 2.
    """

    _: KW_ONLY
    momentum: Rate = DEFAULT_MOMENTUM
    recursion: Literal["separate", "combined"] = "separate"

    algorithm = "f3sa"
    properties = Properties(
        order=1,
        gradients="f: 4, g: 8 (half of them at the previous point)",
        copies=4,
        assumes="as F2SA, and smooth in y for every sample",
        reference="Kwon, Kwon, Wright, Nowak 2023, Algorithm 2",
        abilities=FIRST_ORDER - {Ability.SPARSE_STEPS}
        | {Ability.RANKS, Ability.SHARDS, Ability.TASKS, Ability.PROXIMAL}
        | {Ability.FRESH_STARTS},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("recursion", self.recursion, ("separate", "combined"))
        _ = self.eta  # a bad momentum is refused at construction

    @cached_property
    def stencil(self) -> Stencil:
        """The finite difference behind the x direction."""
        return FORWARD

    @classmethod
    def _own_choices(cls, design: theory.Design) -> dict[str, Any]:
        return {"momentum": design.momentum}

    @cached_property
    def eta(self) -> Schedule:
        """The momentum weight as a function of k, before eta_0 = eta_1 = 1 is imposed."""
        return as_share("momentum", self.momentum)

    def steady_share(self, k: int) -> float:
        """sqrt(eta_k), which is the order of the paper's steps too.

        With a step of a / L the variance of an estimate changes from step to step by the factor
        (1 - eta)^2 + (a s / L)^2, where s is the spread of the samples' curvatures, about L.
        """
        return math.sqrt(self._eta_at(k))

    def init(self, problem: Problem, x: Variable, y: Variable) -> F3SAState:
        z = y.clone("z")
        carried = self.carried(problem, x, y)
        y_update, z_update = updates_of_copies([y, z], problem.y_projections, self.lower_optimizer)
        terms = 2 if self.recursion == "separate" else 1
        return F3SAState(
            **carried,
            y=y,
            z=z,
            before=[x.clone(), y.clone(), z.clone()],
            y_estimates=_zeros(y, terms),
            z_estimate=_zeros(z, 1)[0],
            x_estimates=_zeros(x, terms),
            midway=False,
            y_update=y_update,
            z_update=z_update,
        )

    def step(self, evaluator: Evaluator, state: F3SAState, sizes: StepSizes) -> Info:
        x, y, z, lam = state.x, state.y, state.z, sizes.multiplier
        x_before, y_before, z_before = state.before
        now = Phi(self.stencil, x, [y, z], lam, self.shared)
        before = Phi(self.stencil, x_before, [y_before, z_before], state.multiplier, self.shared)
        gamma = state.z_update.choose(sizes.lower)
        eta = 1.0 if state.midway else self._eta_at(state.k)

        # y and z: the estimators at (x_k, y_k, z_k), then the step to y_{k+1}, z_{k+1}
        self._estimate_lower(evaluator, state, now, before, eta)
        y.set_grads(self._direction(state.y_estimates, lam))
        z.set_grads([h.clone() for h in state.z_estimate])
        y_before.assign(y)
        z_before.assign(z)
        moves = [Move(state.y_update, sizes.penalty, 1 / lam), Move(state.z_update, gamma)]
        evaluator.move(moves, averaged=True)

        # x: the estimators at (x_k, y_{k+1}, z_{k+1}); the previous point is (x_{k-1}, y_k, z_k)
        self._estimate_upper(evaluator, state, now, before, eta)
        x.set_grads(self._direction(state.x_estimates, lam))
        x_before.assign(x)
        info = evaluator.finish(
            state, upper_lr=sizes.upper, lower_lr=gamma, multiplier=lam, averaged=True
        )
        state.midway = state.policy.returned  # then x and its copies are where they were before
        return info

    def _estimate_lower(
        self, evaluator: Evaluator, state: F3SAState, now: Phi, before: Phi, eta: float
    ) -> None:
        """Bring the estimates for y and z to the present point, on one fresh sample."""
        samples = evaluator.draw.inner(now.stencil.nodes, now.shared)
        rewind = Rewind(state.x.device)
        fresh = self._lower_gradients(evaluator, now, samples, rewind)
        stale = None
        if eta < 1:
            with buffers_kept(*state.before):
                stale = self._lower_gradients(evaluator, before, samples, rewind)
        copies = [*(state.y for _ in state.y_estimates), state.z]
        evaluator.average(
            [*zip(copies, fresh, strict=True), *zip(copies, stale or (), strict=False)]
        )
        state.midway = True  # until here a step that ends early has changed nothing
        _recur([*state.y_estimates, state.z_estimate], fresh, stale, eta)

    def _estimate_upper(
        self, evaluator: Evaluator, state: F3SAState, now: Phi, before: Phi, eta: float
    ) -> None:
        """Bring the estimates for x to the present point, on the samples behind its direction."""
        x, points = state.x, [*now.points, *before.points]
        fresh = _zeros(x, len(state.x_estimates))
        stale = _zeros(x, len(state.x_estimates)) if eta < 1 else None
        with frozen(*points), buffers_kept(x, before.x, *points):
            for samples in evaluator.draw.direction(now.stencil.nodes, shared=True):
                rewind = Rewind(x.device)
                evaluation = evaluator.evaluate(now, samples, rewind)
                self._add_gradients(fresh, evaluator, evaluation)
                evaluator.report(samples[0], evaluation.parts)
                if stale is not None:
                    evaluation = evaluator.evaluate(before, samples, rewind)
                    self._add_gradients(stale, evaluator, evaluation)
        evaluator.average([(x, gradient) for gradient in (*fresh, *(stale or ()))])
        _recur(state.x_estimates, fresh, stale, eta)

    def _eta_at(self, k: int) -> float:
        return 1.0 if k < 2 else share_at("momentum", self.eta, k)

    def _weights(self, phi: Phi) -> Sequence[tuple[Any, Any]]:
        """The weights of f and of g in each gradient that has an estimator."""
        if self.recursion == "separate":
            return (1.0, None), (None, 1.0)
        return ((1.0, phi.multiplier),)

    def _direction(self, estimates: Gradients, lam: Any) -> list[Tensor]:
        """The estimate of the gradient of f + lam * g."""
        if self.recursion == "separate":
            f, g = estimates
            return add_gradients([h.clone() for h in f], g, alpha=lam)
        return [h.clone() for h in estimates[0]]

    def _lower_gradients(
        self, evaluator: Evaluator, phi: Phi, samples: Sequence[Sample], rewind: Rewind
    ) -> Gradients:
        """For y the gradient of each term, then for z that of g."""
        y, z = phi.points
        gradients = []
        with frozen(phi.x):
            evaluation = evaluator.evaluate(phi, samples, rewind)
            for upper, lower in self._weights(phi):
                evaluator.backward(evaluation, upper, lower)
                gradients.append(to_dense(y.take_grads()))
        # in Phi, z has the weight -1 or -lam; its estimator is of grad g itself
        weight = -1.0 if self.recursion == "separate" else -phi.multiplier
        gradients.append(to_dense(z.take_grads()))
        torch._foreach_div_(stored_values(gradients[-1]), weight)
        return gradients

    def _add_gradients(
        self, totals: Gradients, evaluator: Evaluator, evaluation: Evaluation
    ) -> None:
        """Add to ``totals`` the gradient in x of each term."""
        for total, (upper, lower) in zip(totals, self._weights(evaluation.phi), strict=True):
            evaluator.backward(evaluation, upper, lower)
            torch._foreach_add_(total, evaluation.phi.x.take_grads())

    def reference(self, f: Objective, g: Objective, x: Tensor, y: Tensor, draw: Draw) -> Iterates:
        """Algorithm 2 with its six estimators, or the three sums that its proof analyses."""
        z, x_, y_, z_, lam_ = y, x, y, y, 0.0
        combined = self.recursion == "combined"
        hz = hy = hf = hg = hx = hfx = hgx = x.new_zeros(())
        for k in count():
            gamma, beta, xi_alpha, lam = given(self.rates.at(k, 0.0))
            keep = 0.0 if k < 2 else 1 - float(self.eta(k))
            at_y, at_z = draw.inner(FORWARD.nodes, self.shared)
            zeta, phi_y, phi_z = at_y.upper, at_y.lower, at_z.lower
            hz = gradient_y(g, x, z, phi_z) + keep * (hz - gradient_y(g, x_, z_, phi_z))
            new_f, old_f = gradient_y(f, x, y, zeta), gradient_y(f, x_, y_, zeta)
            new_g, old_g = gradient_y(g, x, y, phi_y), gradient_y(g, x_, y_, phi_y)
            hf = new_f + keep * (hf - old_f)
            hg = new_g + keep * (hg - old_g)
            hy = new_f + lam * new_g + keep * (hy - old_f - lam_ * old_g)
            y_, z_ = y, z
            z = z - gamma * hz
            y = y - beta / lam * (hy if combined else hf + lam * hg)
            ((at_x, _),) = draw.direction(FORWARD.nodes, shared=True)
            zeta, phi = at_x.upper, at_x.lower
            new_f, old_f = gradient_x(f, x, y, zeta), gradient_x(f, x_, y_, zeta)
            new_g = gradient_x(g, x, y, phi) - gradient_x(g, x, z, phi)
            old_g = gradient_x(g, x_, y_, phi) - gradient_x(g, x_, z_, phi)
            hfx = new_f + keep * (hfx - old_f)
            hgx = new_g + keep * (hgx - old_g)
            hx = new_f + lam * new_g + keep * (hx - old_f - lam_ * old_g)
            x_, lam_ = x, lam
            x = x - xi_alpha * (hx if combined else hfx + lam * hgx)
            yield x, z


def _recur(estimates: Gradients, fresh: Gradients, stale: Gradients | None, eta: float) -> None:
    """In place, h <- fresh + (1 - eta) * (h - stale); without ``stale`` the past has no weight."""
    for index, (whole, new) in enumerate(zip(estimates, fresh, strict=True)):
        h = stored_values(whole)
        if stale is None:
            torch._foreach_copy_(h, stored_values(new))
        else:
            torch._foreach_sub_(h, stored_values(stale[index]))
            torch._foreach_mul_(h, 1 - eta)
            torch._foreach_add_(h, stored_values(new))


def _zeros(variable: Variable, count: int) -> Gradients:
    return [[torch.zeros_like(leaf) for leaf in variable.leaves] for _ in range(count)]
