"""F2SA, the fully first-order method for stochastic bilevel optimization (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from bilevel import theory
from bilevel.engine.loss_scale import LossScale, Scaling
from bilevel.engine.watch import Watch
from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import check_choice, check_count, check_flag
from bilevel.methods.base import Info, Properties, State, Tally
from bilevel.methods.penalty import PaperMethod
from bilevel.problem import (
    FORWARD,
    MIDPOINT,
    Problem,
    Stencil,
    Weights,
    accumulate,
    central,
    evaluate,
)
from bilevel.sampling import Draw, Sample
from bilevel.stepping.policy import Pace
from bilevel.stepping.updates import Now, Update, updates_of_copies
from bilevel.variables import Variable, buffers_kept, frozen

SCHEMES = ("forward", "central", "midpoint")


@dataclass
class F2SAState(State):
    """What F2SA carries: x, the points of its stencil, and how each moves.

    Attributes:
        points: the copies of the lower variable; for the forward scheme the paper's (y, z). In the
            other schemes their centre comes last.
        centre: which of the points is the lower solution.
        x_update: how x moves.
        y_updates: how each of the points moves; the centre only into its set.
        scaling: of Phi, when it is differentiated.
    """

    points: list[Variable]
    centre: int
    x_update: Update
    y_updates: list[Update]
    scaling: Scaling = field(default_factory=Scaling)

    @property
    def penalised(self) -> Variable:
        return self.points[0]

    @property
    def solution(self) -> Variable:
        return self.points[self.centre]

    @property
    def may_be_late(self) -> bool:
        """Whether a step on a GPU may be left before it is known to be sound.

        Then updates must be able to leave everything as it is, and no rate may depend on where
        the step led.
        """
        return (
            self.x.device.type == "cuda"
            and type(self.pace) is Pace
            and all(type(u) is Update and u.can_stay for u in (self.x_update, *self.y_updates))
        )

    def draw_together(self, share: float) -> None:
        for point in self.points:
            if point is not self.solution:
                point.contract_towards(self.solution, share)


@dataclass(frozen=True)
class Moves:
    """What the inner steps at one k have in common.

    Attributes:
        lengths: each copy, and how far it goes per unit of its gradient.
        steps: the update of each, its rate and the factor on its gradient.
    """

    lengths: list[tuple[Variable, float]]
    steps: list[tuple[Update, float, float]]


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
    of the gradient of one scalar (see :mod:`bilevel.problem`), so an inner step is one forward and
    one backward pass. Every rate is a float or a function of k.

    Args:
        lower_lr: gamma_k, the step of z; it must stay below 2 / L_g, where L_g is the curvature of
            g in y. "auto": 1 / (L_g + L_f / lam_k), measured, see :mod:`bilevel.stepping.policy`.
        upper_lr: s_k, the step of x. "auto": from the path of x, see
            :mod:`bilevel.stepping.adaptive`; this keeps one more copy of y and two of x.
        multiplier: lam_k, which must not decrease. The larger, the smaller the bias. With
            lower_lr="auto" a number is where it starts, and it is raised where f is too strong
            for it (not with coupling="independent").
        inner_steps: T.
        penalty_lr: beta_k, the step of y; beta_k * (L_g + L_f / lam_k) must stay below 2. None: as
            lower_lr, which keeps y and z in lockstep. For the forward scheme only.
        scheme: which finite difference in 1/lam the x direction is. "forward", the paper's: bias
            O(1/lam). "midpoint": f once, at the midpoint of two copies y+ and y- that are pulled
            both ways; the same cost, bias O(1/lam^2), no condition on lam, and the lower solution
            is the midpoint. "central": copies pulled both ways by f itself; bias O(1/lam^order).
        order: of the central difference, 2, 4, ...; ``order`` copies are held. lam must be above
            order/2 * L_f / mu_g, or the copies that f pushes away have no minimum.
        coupling: "shared" evaluates y and z on the same samples, and with the same dropout masks,
            so that the noise of their difference cancels; "independent" draws afresh for every
            term, as the paper's analysis has it, and pays with noise that grows with lam^2.
        single_pass: take the x direction from the last inner evaluation (same samples, y and z
            from before that step) instead of evaluating it afresh at the new y and z; nothing is
            then evaluated twice.
        accumulate: differentiate the terms of Phi one after another, so that the activations of
            only one of them are alive, and where f is not evaluated between the copies, one
            gradient: for large models. A dtype such as ``torch.bfloat16``: and keep the gradient
            of f in it, where that is large, while that of g is computed (objectives compiled
            with ``mode="reduce-overhead"`` write over what is not copied, and need a dtype, if
            only ``torch.float32``). False: all at once, in one backward pass.
        loss_scale: for objectives in float16, see :class:`~bilevel.LossScale`. None: Phi is
            differentiated as it is. With it the gradients of all copies are held at a time.
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
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=300)
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
    accumulate: bool | torch.dtype = False
    loss_scale: LossScale | None = None

    algorithm = "f2sa"
    takes_chunks = True
    data_parallel = True
    properties = Properties(
        order=1,
        gradients="f: T + 1, g: 2T + 2 (single pass: T, 2T; central: order * (T + 1) of each)",
        copies=2,
        assumes="g strongly convex in y; f and g smooth",
        reference="Kwon, Kwon, Wright, Nowak 2023, Algorithm 1",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("inner_steps", self.inner_steps)
        check_choice("scheme", self.scheme, SCHEMES)
        check_flag("single_pass", self.single_pass)
        if not isinstance(self.accumulate, torch.dtype):
            if not isinstance(self.accumulate, bool):
                raise ArgumentTypeError(
                    f"accumulate must be True, False or a floating point type such as "
                    f"torch.bfloat16, not {self.accumulate!r}"
                )
        elif not self.accumulate.is_floating_point:
            raise ArgumentTypeError(
                f"accumulate must be True, False or a floating point type, not {self.accumulate!r}"
            )
        if not isinstance(self.loss_scale, LossScale | None):
            raise ArgumentTypeError(
                f"loss_scale must be None or bilevel.LossScale(...), not {self.loss_scale!r}"
            )
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

    def check(self, problem: Problem, draw: Draw, x: Variable) -> None:
        super().check(problem, draw, x)
        if self.single_pass and draw.direction_batch_size is not None:
            raise ArgumentError(
                f"direction_batch_size={draw.direction_batch_size!r} cannot be used with "
                f"single_pass=True, which takes the x direction from an inner minibatch"
            )
        self._check_convexity(problem)

    def init(self, problem: Problem, x: Variable, y: Variable) -> F2SAState:
        points = self.stencil.points(y)
        copies = len(self.stencil.lower)
        x_update = self.x_update(problem, x)
        return F2SAState(
            x=x,
            k=0,
            multiplier=0.0,
            pace=self.pace(problem, x, y, x_update),
            points=points,
            centre=self.stencil.solution,
            x_update=x_update,
            y_updates=[
                *updates_of_copies(points[:copies], problem.y_projections, self.lower_optimizer),
                *(Update(centre, problem.y_projections(centre)) for centre in points[copies:]),
            ],
            scaling=Scaling(self.loss_scale),
        )

    def step(self, problem: Problem, state: F2SAState, draw: Draw, *, measure: bool = True) -> Info:
        now = state.pace.at(problem, state, draw)
        return self.step_after(0, now, problem, state, draw, measure=measure)

    def step_after(
        self,
        done: int,
        now: Now,
        problem: Problem,
        state: F2SAState,
        draw: Draw,
        *,
        measure: bool = True,
    ) -> Info:
        """The rest of an outer step of which ``done`` inner steps were taken."""
        x, points = state.x, state.points
        nodes, shared = self.stencil.nodes, self.shared
        lam, gamma = now.multiplier, state.y_updates[0].choose(now.lower)
        moves, weights = self.moves(state, now), Weights(1.0, lam)
        late = state.may_be_late
        one_by_one = self._one_by_one and not draw.chunked
        watch = problem.watch(state.k, x.device, before=state.unread)

        with frozen(x):
            for _ in range(done, self.inner_steps - self.single_pass):
                if one_by_one:
                    samples = draw.inner(nodes, shared)
                    self._one_after_another(problem, state, weights, samples, moves, watch, True)
                else:
                    for samples in draw.inner_parts(nodes, shared):
                        self._differentiate(problem, state, weights, samples, watch)
                    self._move_copies(state, moves, watch)

        tally = Tally(problem, state, measure, watch)
        if self.single_pass and one_by_one:
            samples = draw.inner(nodes, shared)
            tally.evaluate(_reported(samples), self._names(x, points, samples))
            terms = self._one_after_another(problem, state, weights, samples, moves, watch, late)
            tally.take(terms)
        elif self.single_pass:
            parts = draw.inner_parts(nodes, shared)
            self._direction(problem, state, weights, parts, tally, watch)
        else:
            with frozen(*points), buffers_kept(x, *points):
                self._direction(
                    problem, state, weights, draw.direction(nodes, shared), tally, watch
                )
        watch.complete(x)
        upper_lr = state.x_update.choose(now.upper)
        watch.gradients([(x, upper_lr)], averaged=True)
        info = tally.info(x.grads(), gamma, upper_lr, lam)
        if self.single_pass and not one_by_one:
            self._move_copies(state, moves, watch, late=late)
        elif not late:
            watch.read()
        state.x_update.apply(upper_lr, bad=watch.bad)
        state.settle()  # what the step before left: the device is past it
        state.taken(lam, watch if late else None)
        return info

    @property
    def _one_by_one(self) -> bool:
        """Whether each copy moves when its own gradient is there, and before that of the next.

        So there is one gradient at a time. Where f is evaluated between the copies, all of them
        depend on its gradient; and where a gradient may have to be computed again, no copy moves
        before all are there.
        """
        return bool(self.accumulate) and not self.stencil.f_at_centre and self.loss_scale is None

    def _one_after_another(
        self,
        problem: Problem,
        state: F2SAState,
        weights: Weights,
        samples: list[Sample],
        moves: Moves,
        watch: Watch,
        late: bool,
    ) -> dict[str, Tensor]:
        """Differentiate the terms of each copy and move it; leave grad_x Phi on x."""
        by_copy = {
            id(copy): ((copy, length), step)
            for (copy, length), step in zip(moves.lengths, moves.steps, strict=True)
        }

        def move(copy: Variable) -> None:
            length, (update, rate, gain) = by_copy[id(copy)]
            watch.gradients([length])
            if not late:
                watch.read()
            update.apply(rate, gain, bad=watch.bad)

        terms = self._accumulated(problem, state, weights, samples, watch, move)
        self._recentre(state, len(moves.steps))
        return terms

    def _names(
        self, x: Variable, points: Sequence[Variable], samples: Sequence[Sample]
    ) -> list[str]:
        """What the terms of Phi are called."""
        return [
            f"{level}({x.name}, {y.name})"
            for y, there, sample in zip(points, self.stencil.nodes, samples, strict=False)
            for level, evaluated, share in zip(
                ("upper", "lower"), there, (sample.upper_share, sample.lower_share), strict=True
            )
            if evaluated and share
        ]

    def _direction(
        self,
        problem: Problem,
        state: F2SAState,
        weights: Weights,
        parts: Iterable[list[Sample]],
        tally: Tally,
        watch: Watch,
    ) -> None:
        """Leave grad_x Phi on x, added up over the parts of its samples."""
        for samples in parts:
            terms = self._differentiate(problem, state, weights, samples, watch)
            tally.add(_reported(samples), terms)

    def _differentiate(
        self,
        problem: Problem,
        state: F2SAState,
        weights: Weights,
        samples: list[Sample],
        watch: Watch,
    ) -> dict[str, Tensor]:
        """Leave the gradient of Phi on the leaves; its terms."""

        def attempt(scale: float) -> dict[str, Tensor]:
            if self.accumulate:
                return self._accumulated(problem, state, weights, samples, watch, scale=scale)
            phi = evaluate(problem, self.stencil, state.x, state.points, samples)
            phi.backward(weights, watch, scale)
            return phi.terms

        return state.scaling.differentiate(attempt, [state.x, *state.points])

    def _accumulated(
        self,
        problem: Problem,
        state: F2SAState,
        weights: Weights,
        samples: list[Sample],
        watch: Watch,
        done: Callable[[Variable], None] | None = None,
        scale: float = 1.0,
    ) -> dict[str, Tensor]:
        kept_as = self.accumulate if isinstance(self.accumulate, torch.dtype) else None
        return accumulate(
            problem,
            self.stencil,
            state.x,
            state.points,
            samples,
            weights,
            watch,
            done,
            kept_as,
            scale,
        )

    def moves(self, state: F2SAState, now: Now) -> Moves:
        """How the copies move: each against its part of grad Phi, divided by w_i * lam."""
        lam, gamma, beta = now.multiplier, state.y_updates[0].choose(now.lower), now.penalty
        moves = [
            (copy, update, gamma if copy is state.solution else beta, 1 / (weight * lam))
            for copy, update, weight in zip(
                state.points, state.y_updates, self.stencil.lower, strict=False
            )
        ]
        return Moves(
            lengths=[(copy, rate * gain) for copy, _, rate, gain in moves],
            steps=[(update, rate, gain) for _, update, rate, gain in moves],
        )

    def _move_copies(self, state: F2SAState, moves: Moves, watch: Watch, late: bool = True) -> None:
        """One step of every copy, and of their centre where it is not one of them."""
        self.stencil.spread(state.points)
        watch.gradients(moves.lengths)
        if not late:
            watch.read()
        bad = watch.bad
        for update, rate, gain in moves.steps:
            update.apply(rate, gain, bad=bad)
        self._recentre(state, len(moves.steps))

    def _recentre(self, state: F2SAState, copies: int) -> None:
        self.stencil.recentre(state.points)
        for update in state.y_updates[copies:]:
            update.project()

    def _check_convexity(self, problem: Problem) -> None:
        """Refuse a multiplier with which f, pushing copies away, overcomes the convexity of g."""
        if self.scheme != "central" or problem.constants is None:
            return
        lam, least = self.rates.multiplier(0), -min(self.stencil.strengths)
        needed = least * problem.constants.l_f1 / problem.constants.mu_g
        if lam <= needed:
            raise ArgumentError(
                f"multiplier={lam!r} is too small for scheme='central', order={self.order or 2}: "
                f"g - ({least:g} / multiplier) f is convex in y only above {needed:.4g}; use a "
                f"larger multiplier, or scheme='midpoint', which needs no such condition"
            )


def _reported(samples: list[Sample]) -> Sample:
    """Of independent samples the first with a part for f, and the first with a part for g."""
    f = next((s for s in samples if s.upper_share), samples[0])
    g = next((s for s in samples if s.lower_share), samples[0])
    return f if f is g else Sample(f.upper, g.lower, f.upper_share, g.lower_share)
