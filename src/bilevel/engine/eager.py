"""The eager evaluator: operations run one by one, as PyTorch does by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bilevel.engine.execution import Execution
from bilevel.engine.finite import FiniteCheck
from bilevel.engine.joining import JoinsCopies
from bilevel.engine.loss_scale import Scaling
from bilevel.engine.report import Report, rested
from bilevel.engine.restart import Restart
from bilevel.errors import NonFiniteError, ObjectiveError
from bilevel.methods import Descent, Evaluator, Info, Move, State
from bilevel.methods.evaluator import Step
from bilevel.problem import Evaluation, Level, Metrics, Number, Phi, Problem, Term, scaled
from bilevel.problem.phi import objective_of
from bilevel.sampling import Draw, Rewind, Sample
from bilevel.stepping import GivenSizes, Update
from bilevel.variables import (
    Form,
    Variable,
    add_gradients,
    buffers_kept,
    cast_large_gradients,
    differentiate,
    form_of,
    frozen,
    require_finite,
    stored_values,
)
from bilevel.variables.forms import record


def can_defer(state: State) -> bool:
    """Whether a step on a GPU may be left before it is known to be finite.

    Then updates must be able to skip a bad step without waiting for the device, and no step size
    may depend on where the step led.
    """
    return (
        state.x.device.type == "cuda"
        and type(state.policy) is GivenSizes
        and all(type(u) is Update and u.can_skip_without_sync for u in state.updates())
    )


class _Pending(NamedTuple):
    """A step that was left before it was known to be finite."""

    check: FiniteCheck
    k: int
    multiplier: float


class EagerEvaluator(Evaluator):
    """Evaluates a run in one process.

    Args:
        problem: the objectives and their sets.
        draw: the samples.
        execution: how the terms of Phi are differentiated.
        defers: whether the method can leave a step before it is known to be finite.

    Attributes:
        metric_names: the names of the metrics that the objectives return beside the losses.
        restart: puts the copies of y where they start in each outer step; None: they go on.
    """

    closed = False
    """Whether the next step runs compiled code alone, without random numbers and autograd."""

    metric_names: tuple[str, ...] = ()
    restart: Restart | None = None

    def __init__(
        self,
        problem: Problem,
        draw: Draw,
        execution: Execution | None = None,
        *,
        defers: bool = False,
    ) -> None:
        self.problem = problem
        self.draw = draw
        self._execution = execution or Execution()
        self._scaling = Scaling(self._execution.loss_scale)
        self._defers = defers
        self._deferred = False
        self._pending: _Pending | None = None
        self._check = FiniteCheck(0, at_once=True)
        self._report: Report | None = None
        self._metrics: dict[tuple[Level, int], Metrics] = {}

    def use(self, draw: Draw) -> None:
        """Take the samples from there from now on."""
        self.draw = draw

    # One outer step

    def outer_step(self, step: Step, state: State, *, measure: bool) -> Info:
        try:
            self.draw.begin()
            if self.restart is not None:
                self.restart(state)
            sizes = state.policy.at(self, state)
            self.begin(state, measure=measure)
            return step(self, state, sizes)
        except NonFiniteError as error:
            return self.taken_back(state, error, measure=measure)

    def taken_back(self, state: State, error: NonFiniteError, *, measure: bool) -> Info:
        """The report of a step in which x and y went back; raises the error if they cannot."""
        if not state.policy.take_back(state):
            raise error
        clear_gradients(state)
        info = rested(state, self.metric_names, measure=measure)
        state.k += 1
        return info

    def begin(self, state: State, *, measure: bool) -> None:
        """Prepare the checks and the report of the state's next step."""
        at_once = state.x.device.type == "cpu" or not self._defers
        self._deferred = self._defers and can_defer(state)
        before = None if self._pending is None else self._pending.check
        self._check = self._new_check(state.k, at_once=at_once, before=before)
        self._report = Report(self, state, self._check, self._metrics) if measure else None

    def _new_check(self, k: int, *, at_once: bool, before: FiniteCheck | None) -> FiniteCheck:
        return FiniteCheck(k, at_once=at_once, before=before)

    def descend(self, descent: Descent) -> None:
        phi = descent.phi
        if self._moves_one_by_one(phi) and descent.accelerated is None:
            samples = self.draw.inner(phi.stencil.nodes, phi.shared)
            self._accumulate(phi, samples, done=self._mover(descent, read=False))
            descent.recentre()
            return
        try:
            for samples in self.draw.inner_parts(phi.stencil.nodes, phi.shared):
                self._differentiate(phi, samples)
            self._move_copies(descent, read=False)
        except NonFiniteError:
            if not descent.step_again():
                raise

    def direction(self, phi: Phi, descent: Descent | None = None) -> Descent | None:
        nodes, shared = phi.stencil.nodes, phi.shared
        if descent is None:
            with frozen(*phi.points), buffers_kept(phi.x, *phi.points):
                self._add_direction(phi, self.draw.direction(nodes, shared))
            return None
        if not self._moves_one_by_one(phi) or descent.accelerated is not None:
            self._add_direction(phi, self.draw.inner_parts(nodes, shared))
            return descent
        samples = self.draw.inner(nodes, shared)
        if self._report is not None:  # before the copies move
            self._report.evaluate(_reported(samples), {t.key for t in phi.terms(samples)})
        done = self._mover(descent, read=not self._deferred)
        parts = self._accumulate(phi, samples, done=done)
        if self._report is not None:
            self._report.take(parts)
        descent.recentre()
        return None

    def finish(
        self,
        state: State,
        *,
        upper_lr: Number,
        lower_lr: Number,
        multiplier: Number = math.nan,
        gain: Number = 1.0,
        also: Descent | None = None,
        averaged: bool = False,
        phi: Phi | None = None,
    ) -> Info:
        x, check = state.x, self._check
        if self.draw.tasks > 1:  # the gradients on the leaves are sums over the tasks
            gain = gain / self.draw.tasks
        if not averaged:
            check.complete(x)
        if state.policy.due:
            check.gradients([(x, gain)], averaged=True)
            check.read()
            if also is not None and also.phi is phi:
                # the last of the inner steps; what is tested, and may be returned to, is their end
                self._move_copies(also, read=True)
                also = None
            upper_lr = state.policy.judge(self, state, phi, float(gain))
            if state.policy.returned:  # the gradients of the copies were taken elsewhere
                also = None
        longest = state.policy.longest_move
        upper_lr = state.x_update.choose(upper_lr, gain, longest)
        check.gradients([(x, upper_lr * gain)], averaged=True)
        info = Info(state.k, multiplier, lower_lr, upper_lr)
        if self._report is not None:
            info = self._report.info(
                x.grads(), lower_lr=lower_lr, upper_lr=upper_lr, multiplier=multiplier
            )
        if also is not None:
            self._move_copies(also, read=not self._deferred)
        elif not self._deferred:
            check.read()
        state.x_update.cut_off(upper_lr * gain, longest)
        state.x_update.apply(upper_lr, gain, bad=check.bad)
        if state.policy.returned:
            clear_gradients(state)
        self.settle(state)  # the step before: the device is past it
        if self._deferred:
            check.post()
            self._pending = _Pending(check, state.k, state.multiplier)
        state.k, state.multiplier = state.k + 1, multiplier  # type: ignore[assignment]
        return info

    def assume_unchanged(self) -> AbstractContextManager[None]:
        """For a loop in which only the steps change what the objectives use; for compiled code."""
        return nullcontext()

    def settle(self, state: State) -> None:
        """Wait for steps that were left early; a bad number raises, with k of the step that met it.

        Nothing has moved since that step.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.check.read()
        except NonFiniteError:
            state.k, state.multiplier = pending.k, pending.multiplier
            raise

    # The parts that steps are made of

    def f(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        return self._with_metrics(self.problem.f, Level.UPPER, x, y, batch)

    def g(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        return self._with_metrics(self.problem.g, Level.LOWER, x, y, batch)

    def _with_metrics(
        self, objective: Callable[..., Tensor], level: Level, x: Variable, y: Variable, batch: Any
    ) -> Tensor:
        """An objective; its metrics are kept until it is evaluated at the same copy again."""
        metrics: Metrics = {}
        value = objective(x, y, batch, metrics)
        if metrics or self.metric_names:
            self._metrics[level, id(y)] = metrics
            mine = [name for name in self.metric_names if name.startswith(level.value)]
            if sorted(metrics) != sorted(mine):
                raise ObjectiveError(
                    f"{level.value}(x, y, batch) returned the metrics {sorted(metrics)}, but "
                    f"{sorted(mine)} when the run began; return the same ones every time"
                )
        return value

    def mean(self, value: Tensor) -> Tensor:
        return value

    def evaluate(
        self, phi: Phi, samples: Sequence[Sample], rewind: Callable[[], None] | None = None
    ) -> Evaluation:
        return Evaluation(phi, list(self._terms(phi, samples, rewind)))

    def backward(
        self, evaluation: Evaluation, upper: Number | None, lower: Number | None, scale: float = 1.0
    ) -> None:
        # Phi is not added up to be differentiated: the backward pass begins at every term at once,
        # each with its weight, which takes fewer operations and gives the same gradient
        phi, weighted = evaluation.phi, []
        for term, value in evaluation.parts:
            weight = upper if term.level is Level.UPPER else lower
            if weight is not None:
                weighted.append((term, value, weight * term.weight * scale))
        if not weighted:
            return
        self._check.scalars(
            [value for _, value, _ in weighted], lambda: [t.name(phi.x) for t, *_ in weighted]
        )
        # a part of a larger batch may hold no term in which x occurs
        begun = [(value, seed(value, w)) for _, value, w in weighted if value.requires_grad]
        if begun:
            values, seeds = zip(*begun, strict=True)
            self._backward_pass(values, phi.leaves(), phi.wrappers(), seeds)

    def _backward_pass(
        self,
        values: Sequence[Tensor],
        leaves: Sequence[Tensor],
        wrappers: Sequence[Any],
        seeds: Sequence[Tensor],
    ) -> None:
        """As :func:`bilevel.variables.differentiate`."""
        differentiate(values, leaves, wrappers, seeds)

    def move(self, moves: Sequence[Move], *, averaged: bool = False) -> None:
        self._check.gradients([(m.variable, m.length) for m in moves], averaged=averaged)
        for m in moves:
            m.update.apply(m.rate, m.gain, bad=self._check.bad)

    def average(self, parts: Sequence[tuple[Variable, list[Tensor]]]) -> None:
        self._check.average(parts)

    def require_finite(self, names: list[str], tensors: list[Tensor]) -> None:
        require_finite(self._check.step, names, stored_values(tensors))

    def report(self, sample: Sample, known: Sequence[tuple[Term, Tensor]] = ()) -> None:
        if self._report is not None:
            self._report.add(sample, known)

    def state_dict(self) -> dict[str, Any]:
        """What the engine carries from step to step: the loss scale, and where y starts."""
        carried = {"loss_scale": self._scaling.state_dict()}
        return carried if self.restart is None else carried | {"start": self.restart.state_dict()}

    def state_form(self) -> Form:
        """What a saved state must look like."""
        forms = {"loss_scale": self._scaling.state_form()}
        if self.restart is not None:
            forms["start"] = form_of(self.restart.state_dict())
        return record(forms)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._scaling.load_state_dict(state["loss_scale"])
        if self.restart is not None:
            self.restart.load_state_dict(state["start"])

    # How gradients of Phi come about

    def _terms(
        self, phi: Phi, samples: Sequence[Sample], rewind: Callable[[], None] | None = None
    ) -> Iterator[tuple[Term, Tensor]]:
        """Each term of Phi and its value, weighted by the share of its sample."""
        if rewind is None:
            rewind = Rewind(phi.x.device)
        else:
            rewind()
        terms = phi.terms(samples)
        shared = all(sample is samples[0] for sample in samples)
        values = iter(self._values(phi.x, terms, rewind if shared else None))
        for term in terms:  # no reference to a value is kept here: its graph may be large
            yield term, scaled(term.share, next(values))

    def _values(
        self, x: Variable, terms: Sequence[Term], rewind: Callable[[], None] | None
    ) -> Iterable[Tensor]:
        """The objectives at several points, each evaluated when it is asked for.

        With ``rewind`` all of them draw the same at random.
        """
        of_g = None if rewind is None else self._of_g_at_once(x, terms)
        for number, term in enumerate(terms):
            if number and rewind is not None:
                rewind()
            if of_g is not None and term.level is Level.LOWER:
                yield next(of_g)
                continue
            yield objective_of(term.level, self)(x, term.y, term.batch)

    def _of_g_at_once(self, x: Variable, terms: Sequence[Term]) -> Iterator[Tensor] | None:
        if self._execution.accumulate or not isinstance(self.problem, JoinsCopies):
            return None
        told = any(name.startswith(Level.LOWER.value) for name in self.metric_names)
        return None if told else self.problem.of_g(x, terms)

    def _add_direction(self, phi: Phi, parts: Iterable[list[Sample]]) -> None:
        """Leave grad_x Phi on x, added up over the parts of its samples."""
        for samples in parts:
            self.report(_reported(samples), self._differentiate(phi, samples))

    def _differentiate(self, phi: Phi, samples: list[Sample]) -> list[tuple[Term, Tensor]]:
        """Add the gradient of Phi to the leaves; returned are its terms."""

        def attempt(scale: float) -> list[tuple[Term, Tensor]]:
            if self._execution.accumulate:
                return self._accumulate(phi, samples, scale=scale)
            evaluation = self.evaluate(phi, samples)
            self.backward(evaluation, 1.0, phi.multiplier, scale)
            return evaluation.parts

        return self._scaling.differentiate(attempt, [phi.x, *phi.points])

    def _moves_one_by_one(self, phi: Phi) -> bool:
        """Whether each copy moves as soon as its own gradient is there, before that of the next.

        Then one gradient is held at a time. Where f is evaluated between the copies all of them
        need its gradient, and where a gradient may have to be computed again no copy may move
        before all gradients are there.
        """
        return (
            bool(self._execution.accumulate)
            and not phi.stencil.f_at_centre
            and self._execution.loss_scale is None
            and not self.draw.chunked
        )

    def _accumulate(
        self,
        phi: Phi,
        samples: Sequence[Sample],
        *,
        done: Callable[[Variable], None] | None = None,
        scale: float = 1.0,
    ) -> list[tuple[Term, Tensor]]:
        """What one backward pass of Phi leaves on the leaves, from one term after another.

        The activations of only one term are alive at a time. ``done`` is called with each point
        when its gradient is complete; it may move the point.
        """
        found: list[tuple[Term, Tensor]] = []
        kept: list[Tensor] | None = None
        for term, value in self._terms(phi, samples):
            self._check.scalars([value], lambda: [term.name(phi.x)])  # noqa: B023
            found.append((term, value.detach()))
            if value.requires_grad:
                weight = 1.0 if term.level is Level.UPPER else phi.multiplier
                seeds = [seed(value, weight * term.weight * scale)]
                self._backward_pass([value], phi.leaves(term.y), phi.wrappers(term.y), seeds)
            del value  # the last reference to the activations
            if not term.last:
                # set aside: added to on the leaves, each gradient of the next term is a kernel
                kept = self._set_aside(term.y)
                continue
            if kept is not None:
                with torch.no_grad():
                    term.y.set_grads(add_gradients(term.y.grads(), kept))
                kept = None
            if done is not None:
                done(term.y)
        return found

    def _set_aside(self, point: Variable) -> list[Tensor] | None:
        """The gradients, taken off the leaves, large ones in the type asked for."""
        if not any(leaf.requires_grad for leaf in point.leaves):
            return None
        grads, dtype = point.take_grads(), self._execution.accumulate
        return cast_large_gradients(grads, dtype) if isinstance(dtype, torch.dtype) else grads

    def _mover(self, descent: Descent, *, read: bool) -> Callable[[Variable], None]:
        """What moves one copy of a descent, given the copy."""
        by_copy = {id(m.variable): m for m in descent.moves}

        def move(copy: Variable) -> None:
            m = by_copy[id(copy)]
            self._check.gradients([(m.variable, m.length)])
            if read:
                self._check.read()
            m.update.apply(m.rate, m.gain, bad=self._check.bad)

        return move

    def _move_copies(self, descent: Descent, *, read: bool) -> None:
        """One step of every copy, and of their centre where it is held apart."""
        descent.spread()
        self._check.gradients([(m.variable, m.length) for m in descent.moves])
        if read:
            self._check.read()
        if descent.accelerated is not None:
            descent.accelerated.move(descent.moves)
        else:
            for m in descent.moves:
                m.update.apply(m.rate, m.gain, bad=self._check.bad)
        descent.recentre()


def clear_gradients(state: State) -> None:
    """Forget every gradient on the leaves of a run."""
    for variable in state.variables():
        variable.clear_grads()


def seed(value: Tensor, weight: Number) -> Tensor:
    """Where the gradient of weight * value begins.

    It is a new tensor every time, because it may become the gradient of a leaf of one entry.
    """
    if isinstance(weight, Tensor):
        return weight.to(value.dtype)
    # half precision may not hold the weight; torch converts what reaches the graph
    dtype = torch.promote_types(value.dtype, torch.float32)
    if abs(weight) > torch.finfo(dtype).max:
        weight = math.copysign(math.inf, weight)
    begin = torch.full((), weight, dtype=dtype, device=value.device)
    return begin.expand_as(value) if value.ndim else begin


def _reported(samples: list[Sample]) -> Sample:
    """Of independent samples the first with a part for f, and the first with a part for g."""
    f = next((s for s in samples if s.upper_share), samples[0])
    g = next((s for s in samples if s.lower_share), samples[0])
    return f if f is g else Sample(f.upper, g.lower, f.upper_share, g.lower_share)
