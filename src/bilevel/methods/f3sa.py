"""F3SA: F2SA with recursive momentum in every gradient (Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from bilevel import theory
from bilevel.engine.watch import Watch
from bilevel.errors import ArgumentError
from bilevel.errors.checks import check_choice
from bilevel.methods.base import Info, Properties, State, Tally
from bilevel.methods.penalty import PaperMethod
from bilevel.problem import FORWARD, Phi, Problem, Stencil, Weights, evaluate, separately
from bilevel.sampling import Draw, Rewind, Sample
from bilevel.stepping.schedules import Power, Rate, Schedule, as_schedule, positive_at
from bilevel.stepping.updates import Update, updates_of_copies
from bilevel.variables import Variable, add_gradients, buffers_kept, frozen, stored_values, to_dense

DEFAULT_MOMENTUM = Power(1.0, offset=1.0, exponent=-0.8)
"""eta_k = (k + 1)^(-4/5), the paper's for noise in both levels."""

Gradients = list[list[Tensor]]
"""For each estimator the gradient of its term, one tensor per leaf."""


@dataclass
class F3SAState(State):
    """What F3SA carries.

    Attributes:
        y, z: the copy that follows y*_lam(x), and the one that follows y*(x).
        before: (x, y, z) where the estimators were last evaluated.
        y_estimates: of grad_y f and grad_y g at y; combined: of their sum with the multiplier.
        z_estimate: of grad_y g at z.
        x_estimates: of grad_x f and grad_x (g at y - g at z); combined: of their sum.
        midway: whether a step was begun and not finished; the estimators then start afresh.
        x_update, y_update, z_update: how each variable moves.
    """

    y: Variable
    z: Variable
    before: list[Variable]
    y_estimates: Gradients
    z_estimate: list[Tensor]
    x_estimates: Gradients
    midway: bool
    x_update: Update
    y_update: Update
    z_update: Update

    @property
    def solution(self) -> Variable:
        return self.z

    @property
    def penalised(self) -> Variable:
        return self.y

    def draw_together(self, share: float) -> None:
        self.y.contract_towards(self.z, share)
        self.displaced()

    def displaced(self) -> None:
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
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=500,
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
    data_parallel = True
    properties = Properties(
        order=1,
        gradients="f: 4, g: 8 (half of them at the previous point)",
        copies=4,
        assumes="as F2SA, and smooth in y for every sample",
        reference="Kwon, Kwon, Wright, Nowak 2023, Algorithm 2",
    )
    lacks = MappingProxyType(
        {
            "inner_steps": (
                "its recursive momentum goes from one outer step to the next, with one inner step "
                "of y and z in each (T = 1); to give them more time lower upper_lr, or use F2SA, "
                "which has inner_steps and no momentum"
            )
        }
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("recursion", self.recursion, ("separate", "combined"))
        _ = self.eta  # a bad momentum is refused at construction
        if isinstance(self.momentum, int | float) and self.momentum > 1:
            raise ArgumentError(f"momentum must be at most 1, not {self.momentum!r}")

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
        return as_schedule("momentum", self.momentum)

    def init(self, problem: Problem, x: Variable, y: Variable) -> F3SAState:
        z = y.clone("z")
        x_update = self.x_update(problem, x)
        y_update, z_update = updates_of_copies([y, z], problem.y_projections, self.lower_optimizer)
        terms = 2 if self.recursion == "separate" else 1
        return F3SAState(
            x=x,
            k=0,
            multiplier=0.0,
            pace=self.pace(problem, x, y, x_update),
            y=y,
            z=z,
            before=[x.clone(), y.clone(), z.clone()],
            y_estimates=_zeros(y, terms),
            z_estimate=_zeros(z, 1)[0],
            x_estimates=_zeros(x, terms),
            midway=False,
            x_update=x_update,
            y_update=y_update,
            z_update=z_update,
        )

    def step(self, problem: Problem, state: F3SAState, draw: Draw, *, measure: bool = True) -> Info:
        k, x, y, z = state.k, state.x, state.y, state.z
        x_before, y_before, z_before = state.before
        lam_before = state.multiplier
        now = state.pace.at(problem, state, draw)
        lam, gamma, beta = now.multiplier, state.z_update.choose(now.lower), now.penalty
        eta = 1.0 if state.midway else self._eta_at(k)
        state.midway = True
        watch = problem.watch(k, x.device, at_once=True)

        # y and z: the estimators at (x_k, y_k, z_k), then the step to y_{k+1}, z_{k+1}
        samples = draw.inner(self.stencil.nodes, self.shared)
        rewind = Rewind(x.device)
        fresh = self._lower_gradients(problem, watch, lam, (x, y, z), samples, rewind)
        stale = None
        if eta < 1:
            with buffers_kept(x_before, y_before, z_before):
                stale = self._lower_gradients(
                    problem, watch, lam_before, state.before, samples, rewind
                )
        copies = [*(y for _ in state.y_estimates), z]
        watch.average([*zip(copies, fresh, strict=True), *zip(copies, stale or (), strict=False)])
        _recur([*state.y_estimates, state.z_estimate], fresh, stale, eta)
        y.set_grads(self._direction(state.y_estimates, lam))
        z.set_grads([h.clone() for h in state.z_estimate])
        watch.gradients([(y, beta / lam), (z, gamma)], averaged=True)
        y_before.assign(y)
        z_before.assign(z)
        state.y_update.apply(beta, gain=1 / lam)
        state.z_update.apply(gamma)

        # x: the estimators at (x_k, y_{k+1}, z_{k+1}); the previous point is (x_{k-1}, y_k, z_k)
        tally = Tally(problem, state, measure, watch)
        fresh = _zeros(x, len(state.x_estimates))
        stale = _zeros(x, len(state.x_estimates)) if eta < 1 else None
        variables = (x, y, z, *state.before)
        with frozen(y, z, y_before, z_before), buffers_kept(*variables):
            for part in draw.direction(self.stencil.nodes, shared=True):
                rewind = Rewind(x.device)
                phi = evaluate(problem, self.stencil, x, [y, z], part, rewind)
                self._add_x_gradients(fresh, phi, watch, lam, x)
                tally.add(part[0], phi.terms)
                if stale is not None:
                    before = [y_before, z_before]
                    phi = evaluate(problem, self.stencil, x_before, before, part, rewind)
                    self._add_x_gradients(stale, phi, watch, lam_before, x_before)
        watch.average([(x, gradient) for gradient in (*fresh, *(stale or ()))])
        _recur(state.x_estimates, fresh, stale, eta)
        x.set_grads(self._direction(state.x_estimates, lam))
        upper_lr = state.x_update.choose(now.upper)
        watch.gradients([(x, upper_lr)], averaged=True)
        info = tally.info(x.grads(), gamma, upper_lr, lam)
        x_before.assign(x)
        state.x_update.apply(upper_lr)

        state.k, state.multiplier, state.midway = k + 1, lam, False
        return info

    def _eta_at(self, k: int) -> float:
        if k < 2:
            return 1.0
        eta = positive_at("momentum", self.eta, k)
        if eta > 1:
            raise ArgumentError(f"momentum({k}) must be at most 1, not {eta!r}")
        return eta

    def _weights(self, lam: float) -> Sequence[Weights]:
        """Of the parts of Phi, for each gradient with an estimator."""
        return separately() if self.recursion == "separate" else [Weights(1.0, lam)]

    def _direction(self, estimates: Gradients, lam: float) -> list[Tensor]:
        """The estimate of the gradient of f + lam * g."""
        if self.recursion == "separate":
            f, g = estimates
            return add_gradients([h.clone() for h in f], g, alpha=lam)
        return [h.clone() for h in estimates[0]]

    def _lower_gradients(
        self,
        problem: Problem,
        watch: Watch,
        lam: float,
        point: Sequence[Variable],
        samples: Sequence[Sample],
        rewind: Rewind,
    ) -> Gradients:
        """For y the gradient of each term, then for z that of g, at a point (x, y, z)."""
        x, y, z = point
        with frozen(x):
            phi = evaluate(problem, self.stencil, x, [y, z], samples, rewind)
            gradients = []
            for weights in self._weights(lam):
                phi.backward(weights, watch)
                gradients.append(to_dense(y.take_grads()))
        # in Phi, z has the weight -1 or -lam; its estimator is of grad g itself
        weight = -1.0 if self.recursion == "separate" else -lam
        gradients.append(to_dense(z.take_grads()))
        torch._foreach_div_(stored_values(gradients[-1]), weight)
        return gradients

    def _add_x_gradients(
        self, totals: Gradients, phi: Phi, watch: Watch, lam: float, x: Variable
    ) -> None:
        """Add to ``totals`` the gradient in x of each term."""
        for total, weights in zip(totals, self._weights(lam), strict=True):
            phi.backward(weights, watch)
            torch._foreach_add_(total, x.take_grads())


def _recur(estimates: Gradients, fresh: Gradients, stale: Gradients | None, eta: float) -> None:
    """H <- fresh + (1 - eta) * (h - stale), in place; without ``stale`` the past has no weight."""
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
