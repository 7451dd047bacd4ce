"""F2SA, the fully first-order method for stochastic bilevel optimization (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from bilevel import theory
from bilevel.checks import check_choice, check_count
from bilevel.errors import ArgumentError
from bilevel.methods.base import Info, Properties, State, Tally
from bilevel.methods.penalty import PenaltyMethod
from bilevel.methods.updates import Update
from bilevel.problem import FORWARD, Problem, Stencil, evaluate
from bilevel.streams import Draw, Sample
from bilevel.variables import Variable, buffers_kept, held

SCHEMES: dict[str, Stencil] = {"forward": FORWARD}


@dataclass
class F2SAState(State):
    """What F2SA carries: x, one copy of the lower variable per node, and how each moves.

    Attributes:
        copies: the copies y_j in the order of the stencil's nodes; for F2SA the paper's (y, z).
        multiplier: lam of the last step taken, 0 before the first.
        x_update: how x moves.
        y_updates: how each of the copies moves.
    """

    copies: list[Variable]
    multiplier: float
    x_update: Update
    y_updates: list[Update]

    @property
    def penalised(self) -> Variable:
        return self.copies[0]

    @property
    def solution(self) -> Variable:
        return self.copies[1]


@dataclass(frozen=True)
class F2SA(PenaltyMethod[F2SAState]):
    """F2SA: bilevel optimization with gradients of f and g alone.

    With z following y*(x) = argmin_y g(x, y) and y following
    y*_lam(x) = argmin_y f(x, y) + lam * g(x, y), outer step k is

        repeat T times, at fixed x_k and lam_k:
            z <- z - gamma_k * grad_y g(x_k, z)
            y <- y - beta_k * ( grad_y g(x_k, y) + grad_y f(x_k, y) / lam_k )
        x <- x_k - eta_k * ( grad_x f(x_k, y) + lam_k * ( grad_x g(x_k, y) - grad_x g(x_k, z) ) )

    which is the paper's Algorithm 1 with beta_k = alpha_k * lam_k and eta_k = xi * alpha_k. The x
    direction differs from the gradient of F(x) = f(x, y*(x)) by O(1/lam). All directions are parts
    of the gradient of one scalar (see :mod:`bilevel.problem`), so an inner step is one forward and
    one backward pass. Every rate is a float or a function of k.

    Args:
        lower_lr: gamma_k, the step of z; it must stay below 2 / L_g, where L_g is the curvature of
            g in y. None: 0.1.
        upper_lr: eta_k, the step of x. None: 0.1.
        multiplier: lam_k, which must not decrease. The larger, the smaller the bias.
        inner_steps: T.
        penalty_lr: beta_k, the step of y; beta_k * (L_g + L_f / lam_k) must stay below 2. None: as
            lower_lr, which keeps y and z in lockstep.
        scheme: "forward", the paper's.
        coupling: "shared" evaluates y and z on the same samples, so that the noise of their
            difference cancels; "independent" draws afresh for every term, as the paper's analysis
            has it, and pays with noise that grows with lam^2.
        single_pass: take the x direction from the last inner evaluation (same samples, y and z
            from before that step) instead of evaluating it afresh at the new y and z; nothing is
            then evaluated twice.
        lower_optimizer: a factory ``params -> torch.optim.Optimizer`` for y and z instead of plain
            steps; it is given directions in the scale of g, and replaces lower_lr and penalty_lr.
        upper_optimizer: the same for x; replaces upper_lr.

    Example:
        >>> import bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> method = bilevel.F2SA(lower_lr=0.5, upper_lr=0.2, multiplier=50.0)
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=300)
        >>> bool(problem.gradient(result.x).norm() < 0.1 * problem.gradient(problem.x0).norm())
        True

    Reference:
        Kwon, Kwon, Wright, Nowak, "A Fully First-Order Method for Stochastic Bilevel
        Optimization", ICML 2023, Algorithm 1. Sharing samples: Kwon, Kwon, Lyu, ICML 2024.
    """

    _: KW_ONLY
    inner_steps: int = 10
    scheme: Literal["forward"] = "forward"
    single_pass: bool = False

    algorithm = "f2sa"
    properties = Properties(
        order=1,
        gradients="f: T + 1, g: 2T + 2 (single pass: f: T, g: 2T)",
        copies=2,
        assumes="g strongly convex in y; f and g smooth",
        reference="Kwon, Kwon, Wright, Nowak 2023, Algorithm 1",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("inner_steps", self.inner_steps)
        check_choice("scheme", self.scheme, SCHEMES)

    @property
    def stencil(self) -> Stencil:
        return SCHEMES[self.scheme]

    @classmethod
    def _own_choices(cls, design: theory.Design) -> dict[str, Any]:
        return {"inner_steps": design.T}

    def init(self, problem: Problem, x: Variable, y: Variable) -> F2SAState:
        copies = [y, y.clone("z")]
        return F2SAState(
            x=x,
            k=0,
            copies=copies,
            multiplier=0.0,
            x_update=Update(x, problem.x_projections(x), self.upper_optimizer),
            y_updates=[
                Update(copy, problem.y_projections(copy), self.lower_optimizer) for copy in copies
            ],
        )

    def step(self, problem: Problem, state: F2SAState, draw: Draw, *, measure: bool = True) -> Info:
        if self.single_pass and draw.direction_batch_size is not None:
            raise ArgumentError(
                f"direction_batch_size={draw.direction_batch_size!r} cannot be used with "
                f"single_pass=True, which takes the x direction from an inner minibatch"
            )
        k, x, copies = state.k, state.x, state.copies
        nodes, shared = self.stencil.nodes, self.shared
        lam = self.rates.multiplier_at(k, before=state.multiplier)
        gamma, beta = self.rates.lower_at(k), self.rates.penalty_at(k)
        upper_lr = self.rates.upper_at(k)

        with held(x):
            for _ in range(self.inner_steps - self.single_pass):
                phi = evaluate(problem, self.stencil, x, copies, draw.inner(nodes, shared))
                phi.backward(lam, k)
                self._move_copies(state, lam, gamma, beta)

        tally = Tally(problem, state, measure)
        if self.single_pass:
            self._direction(problem, state, lam, [draw.inner(nodes, shared)], tally)
            info = tally.info(x.grads(), lam)
            self._move_copies(state, lam, gamma, beta)
        else:
            with held(*copies), buffers_kept(x, *copies):
                self._direction(problem, state, lam, draw.direction(nodes, shared), tally)
            info = tally.info(x.grads(), lam)
        state.x_update.apply(upper_lr)

        state.k, state.multiplier = k + 1, lam
        return info

    def _direction(
        self,
        problem: Problem,
        state: F2SAState,
        lam: float,
        parts: Iterable[list[Sample]],
        tally: Tally,
    ) -> None:
        """Leave grad_x Phi on x, added up over the parts of its samples."""
        for samples in parts:
            phi = evaluate(problem, self.stencil, state.x, state.copies, samples)
            phi.backward(lam, state.k)
            tally.add(samples[0], phi.terms)
        state.x.require_finite_grads(state.k)

    def _move_copies(self, state: F2SAState, lam: float, gamma: float, beta: float) -> None:
        """Each copy against its own direction: its part of grad Phi, divided by a_j * lam."""
        for copy in state.copies:
            copy.require_finite_grads(state.k)
        for node, weight, update in zip(
            self.stencil.nodes, self.stencil.weights, state.y_updates, strict=True
        ):
            update.apply(rate=beta if node else gamma, gain=1 / (weight * lam))
