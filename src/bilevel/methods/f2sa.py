"""F2SA, the fully first-order method for stochastic bilevel optimization (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from bilevel.errors import ArgumentError
from bilevel.errors.checks import check_choice, check_count, check_flag
from bilevel.methods.base import Iterates
from bilevel.methods.capabilities import FIRST_ORDER, ON_PHI, Ability, Properties
from bilevel.methods.evaluator import Descent, Evaluator, Move
from bilevel.methods.penalty import PaperMethod
from bilevel.methods.reference import given, gradient_x, gradient_y
from bilevel.methods.state import Info, State
from bilevel.problem import FORWARD, MIDPOINT, Objective, Phi, Problem, Stencil, central
from bilevel.sampling import Draw
from bilevel.stepping import PER_INNER_STEP, StepSizes, Update, updates_of_copies
from bilevel.variables import Form, Variable, frozen
from bilevel.variables.forms import whole

if TYPE_CHECKING:
    from bilevel import theory

SCHEMES = ("forward", "central", "midpoint")


@dataclass
class F2SAState(State):
    """What F2SA carries: x, the points of its stencil, and how each moves.

    Attributes:
        points: the copies of the lower variable; for the forward scheme the paper's (y, z). In the
            other schemes their centre comes last.
        centre: which of the points is the lower solution.
        y_updates: how each of the copies moves, and how the centre is projected into its set.
    """

    points: list[Variable]
    centre: int
    y_updates: list[Update]

    @property
    def penalised(self) -> Variable:
        return self.points[0]

    @property
    def solution(self) -> Variable:
        return self.points[self.centre]

    def contract_copies(self, share: float) -> None:
        for point in self.points:
            if point is not self.solution:
                point.contract_towards(self.solution, share)

    def _known_forms(self) -> dict[str, Form]:
        return super()._known_forms() | {"centre": whole(self.centre, self.centre)}


@dataclass(frozen=True)
class F2SA(PaperMethod[F2SAState]):
    """F2SA: bilevel optimization with gradients of f and g alone.

    With z following y*(x) = argmin_y g(x, y) and y following
    y*_lam(x) = argmin_y f(x, y) + lam * g(x, y), outer step k is

        repeat T times, at fixed x_k and lam_k:
            z <- z - gamma_k * grad_y g(x_k, z)
            y <- y - beta_k * ( grad_y g(x_k, y) + grad_y f(x_k, y) / lam_k )
        x <- x_k - s_k * ( grad_x f(x_k, y) + lam_k * ( grad_x g(x_k, y) - grad_x g(x_k, z) ) )

    which is the paper's Algorithm 1 with beta_k = alpha_k * lam_k and s_k = xi * alpha_k. The x
    direction differs from the gradient of F(x) = f(x, y*(x)) by O(1/lam). All directions are parts
    of the gradient of one scalar (see :mod:`bilevel.problem.phi`), so an inner step is one forward
    and one backward pass. Every rate is a float or a function of k.

    Args:
        lower_lr: gamma_k, the step of z; it must stay below 2 / L_g, where L_g is the curvature of
            g in y. "auto": 1 / (L_g + L_f / lam_k), measured, see :mod:`bilevel.stepping.found`;
            without sampling the steps have momentum, and are up to 3 T.
        upper_lr: s_k, the step of x. "auto": found, each step tested before it is kept, see there;
            this holds a second copy of x and of each copy of y.
        multiplier: lam_k, which must not decrease. The larger, the smaller the bias. With
            both rates "auto" it is found too, and raised where f is too strong for it; a number
            other than 10 is then the least (with coupling="independent" it stays as it is).
        inner_steps: T.
        penalty_lr: beta_k, the step of y; beta_k * (L_g + L_f / lam_k) must stay below 2. None: as
            lower_lr, which keeps y and z in lockstep. For the forward scheme only.
        scheme: which finite difference in 1/lam the x direction is. "forward", the paper's: bias
            O(1/lam). "midpoint": f once, at the midpoint of two copies y+ and y- that are pulled
            both ways; the same cost, bias O(1/lam^2), no condition on lam, and the lower solution
            is the midpoint. "central": copies pulled both ways by f itself; bias O(1/lam^order).
        order: of the central difference, 2, 4, ...; ``order`` copies are held. lam must be above
            order/2 * L_f / mu_g, or the copies that f pushes away have no minimum. Rounding, about
            lam times the precision in any scheme, is soon more than a bias of high order.
        coupling: "shared" evaluates y and z on the same samples, and with the same dropout masks,
            so that the noise of their difference cancels; "independent" draws afresh for every
            term, as the paper's analysis has it, and pays with noise that grows with lam^2.
        single_pass: take the x direction from the last inner evaluation (same samples, y and z
            from before that step) instead of evaluating it afresh at the new y and z; nothing is
            then evaluated twice.
        lower_optimizer: a factory ``params -> torch.optim.Optimizer`` for y and z instead of plain
            steps; it is given directions in the scale of g, and replaces lower_lr and penalty_lr.
            It may return a learning-rate scheduler of an optimizer, which then steps after each of
            its steps, T times for each of x. :class:`~bilevel.SharedAdamW` moves both copies in
            one metric.
        upper_optimizer: the same for x; replaces upper_lr.

    Example:
        >>> import bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> method = bilevel.F2SA(lower_lr=0.5, upper_lr=0.2, multiplier=50.0)
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=100)
        >>> bool(problem.gradient(result.x).norm() < 0.1 * problem.gradient(problem.x0).norm())
        True

    Reference:
        Kwon, Kwon, Wright, Nowak, "A Fully First-Order Method for Stochastic Bilevel
        Optimization", ICML 2023, Algorithm 1. Sharing samples: Kwon, Kwon, Lyu, ICML 2024.
    """

    _: KW_ONLY
    inner_steps: int = 10
    scheme: Literal["forward", "central", "midpoint"] = "forward"
    order: int | None = None
    single_pass: bool = False

    algorithm = "f2sa"
    follows_path = True
    properties = Properties(
        order=1,
        gradients="f: T + 1, g: 2T + 2 (single pass: T, 2T; central: order * (T + 1) of each)",
        copies=2,
        assumes="g strongly convex in y; f and g smooth",
        reference="Kwon, Kwon, Wright, Nowak 2023, Algorithm 1",
        abilities=FIRST_ORDER | ON_PHI | {Ability.PROXIMAL, Ability.FRESH_STARTS},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("inner_steps", self.inner_steps)
        check_choice("scheme", self.scheme, SCHEMES)
        check_flag("single_pass", self.single_pass)
        if self.order is not None:
            check_count("order", self.order, least=2)
            if self.scheme != "central":
                raise ArgumentError(
                    f"order={self.order!r} is for scheme='central' only, not for {self.scheme!r}"
                )
            if self.order % 2:
                raise ArgumentError(f"order={self.order!r} must be even")
        if self.penalty_lr is not None and self.scheme != "forward":
            raise ArgumentError(
                f"penalty_lr={self.penalty_lr!r} is for scheme='forward' only: with "
                f"scheme={self.scheme!r} f pulls at every copy, and all move with lower_lr"
            )

    @cached_property
    def stencil(self) -> Stencil:
        """The finite difference behind the x direction."""
        if self.scheme == "central":
            return central(self.order or 2)
        return MIDPOINT if self.scheme == "midpoint" else FORWARD

    @classmethod
    def _own_choices(cls, design: theory.Design) -> dict[str, Any]:
        return {"inner_steps": design.T}

    @property
    def most_direction_batches(self) -> int:
        # steps of x that are given were chosen for the noise of one
        found = self.rates.upper is None and not self.single_pass
        return PER_INNER_STEP * self.inner_steps if found else 1

    def check(self, problem: Problem, draw: Draw, x: Variable) -> None:
        super().check(problem, draw, x)
        if self.single_pass and draw.direction_batch_size is not None:
            raise ArgumentError(
                f"direction_batch_size={draw.direction_batch_size!r} cannot be used with "
                f"single_pass=True, which takes the x direction from an inner minibatch"
            )
        self._check_convexity(getattr(problem, "constants", None))

    def init(self, problem: Problem, x: Variable, y: Variable) -> F2SAState:
        points = self.stencil.points(y)
        copies = len(self.stencil.lower)
        return F2SAState(
            **self.carried(problem, x, y),
            points=points,
            centre=self.stencil.solution,
            y_updates=[
                *updates_of_copies(points[:copies], problem.y_projections, self.lower_optimizer),
                *(Update(centre, problem.y_projections(centre)) for centre in points[copies:]),
            ],
        )

    def step(self, evaluator: Evaluator, state: F2SAState, sizes: StepSizes) -> Info:
        phi = Phi(self.stencil, state.x, state.points, sizes.multiplier, self.shared)
        gamma = state.y_updates[0].choose(sizes.lower)
        descent = self._descent(phi, state, gamma, sizes.penalty)
        with frozen(state.x):
            for _ in range(self.inner_steps - self.single_pass):
                evaluator.descend(descent)
            while not descent.settled:
                evaluator.descend(descent)
        remaining = evaluator.direction(phi, descent if self.single_pass else None)
        return evaluator.finish(
            state,
            upper_lr=sizes.upper,
            lower_lr=gamma if descent.accelerated is None else descent.accelerated.rate,
            multiplier=sizes.multiplier,
            also=remaining,
            phi=phi,
        )

    def _descent(self, phi: Phi, state: F2SAState, gamma: Any, beta: Any) -> Descent:
        """How the copies move: each against its part of grad Phi, divided by w_i * lam."""
        weights, copies = self.stencil.lower, len(self.stencil.lower)
        moves = [
            Move(update, gamma if copy is state.solution else beta, 1 / (weight * phi.multiplier))
            for copy, update, weight in zip(phi.points, state.y_updates, weights, strict=False)
        ]
        centre = state.y_updates[copies] if len(state.points) > copies else None
        return Descent(phi, moves, centre, state.policy.accelerated)

    def reference(self, f: Objective, g: Objective, x: Tensor, y: Tensor, draw: Draw) -> Iterates:
        """Algorithm 1; for the other schemes copy i follows argmin_y g + (j_i / lam) f."""
        stencil = self.stencil
        nodes, strengths, through_centre = stencil.nodes, stencil.strengths, stencil.f_at_centre
        copies, last = [y for _ in stencil.lower], self.inner_steps - 1
        advance = self._reference_step(x)

        def centre() -> Tensor:
            return sum(
                (c * v for c, v in zip(stencil.centre, copies, strict=True)), y.new_zeros(())
            )

        def direction(samples: Any) -> Tensor:
            at_f = [*copies, centre()] if len(nodes) > len(copies) else copies
            total = x.new_zeros(())
            for u, v, s in zip(stencil.upper, at_f, samples, strict=False):
                if u:
                    total = total + u * s.upper_share * gradient_x(f, x, v, s.upper)
            for w, v, s in zip(stencil.lower, copies, samples, strict=False):
                total = total + lam * w * s.lower_share * gradient_x(g, x, v, s.lower)
            return total

        for k in count():
            gamma, beta, xi_alpha, lam = given(self.rates.at(k, 0.0))
            for t in range(self.inner_steps):
                samples = draw.inner(nodes, self.shared)
                d_x = direction(samples) if self.single_pass and t == last else None
                at_f = [centre()] * len(copies) if through_centre else copies
                on_f = [samples[-1]] * len(copies) if through_centre else samples
                copies = [
                    v
                    - (gamma if i == stencil.solution else beta)
                    * (
                        gradient_y(g, x, v, samples[i].lower)
                        + (
                            strengths[i] / lam * gradient_y(f, x, at_f[i], on_f[i].upper)
                            if strengths[i]
                            else 0.0
                        )
                    )
                    for i, v in enumerate(copies)
                ]
            if d_x is None:
                parts = draw.direction(nodes, self.shared)
                d_x = sum((direction(samples) for samples in parts), x.new_zeros(()))
            x = advance(x, xi_alpha * d_x)
            yield x, copies[stencil.solution] if stencil.solution < len(copies) else centre()

    def _reference_step(self, x0: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """How :meth:`reference` moves x from ``x0`` on: (x_k, s_k * direction) -> x_{k+1}."""
        return torch.sub

    def _check_convexity(self, constants: theory.Constants | None) -> None:
        """Refuse a multiplier with which f, pushing copies away, overcomes the convexity of g."""
        if self.scheme != "central" or constants is None:
            return
        lam, least = self.rates.multiplier(0), -min(self.stencil.strengths)
        needed = least * constants.l_f1 / constants.mu_g
        if lam <= needed:
            raise ArgumentError(
                f"multiplier={lam!r} is too small for scheme='central', order={self.order or 2}: "
                f"g - ({least:g} / multiplier) f is convex in y only above {needed:.4g}; use a "
                f"larger multiplier, or scheme='midpoint', which needs no such condition"
            )
