"""The compiled evaluator: outer steps on Phi as compiled programs.

A method's step is recorded as a plan. One inner step of it (gathering the rows, Phi, its gradients
and the updates) is traced and compiled once and run T times; the x direction is another such piece.
Rates and multiplier are read from a tensor, so nothing is compiled again as they change, and all
that a step writes stays at one place for the whole run, so that on a GPU the step is captured as
one graph.

The guards of ``torch.compile`` are asked once per outer step: a Python number that the objectives
use may change between two steps, and is then compiled anew. Where nothing but steps happens, they
are asked once (:meth:`CompiledEvaluator.assume_unchanged`). Python that runs beside the computation
(printing, counting calls) runs when it is traced and not again.

Whether a number is not finite is decided on the device. From the first bad number on nothing moves,
and at the end of the step eager code takes the rest of it, and says what the number was. A GPU is
asked only every few steps, so that it never idles; then the data are drawn again up to the step in
question. Eager code also takes over where something turns out not to be compilable: no run depends
on the compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import torch

from bilevel.engine.compiled.feed import Feed, RedrawnSamples
from bilevel.engine.compiled.pieces import Pieces
from bilevel.engine.compiled.plan import Plan, record
from bilevel.engine.compiled.tracing import Ready, Traced
from bilevel.engine.eager import EagerEvaluator, can_defer
from bilevel.engine.execution import Execution, NotCompiledError, warn_not_compiled
from bilevel.engine.report import info_of
from bilevel.errors import NonFiniteError
from bilevel.methods import Info, State
from bilevel.methods.evaluator import Step
from bilevel.sampling import Sample
from bilevel.stepping import StepSizes
from bilevel.variables import buffers_kept, frozen

MOST_BEGUN = 16
"""Steps that may be under way on a GPU before it is waited for."""

Samples: TypeAlias = list[Sample] | None
"""For each point its sample; None: compiled code finds them itself."""

Phases: TypeAlias = tuple[Iterable[Ready], Iterable[Ready], Iterable[Ready]]
"""The inner steps, the x direction, and the last inner step of a single pass."""


def may_return_early(state: State) -> bool:
    """Whether a step may return before it is computed.

    The steps of an optimizer on x are not compiled, and wait for the direction.
    """
    return can_defer(state) and state.x_update.plain


class _Begun(NamedTuple):
    """A step that may not be done yet: where it began, its plan, and whether it is reported."""

    k: int
    multiplier: float
    plan: Plan
    measure: bool


class CompiledEvaluator(EagerEvaluator):
    """Runs recorded outer steps on one state as compiled code.

    Args:
        evaluator: of the same run, without compiled steps.
        execution: of the run.
        step: the step of its method.
        state: it is moved in place, and anyone else may move it between two steps.
        defers: as in :class:`EagerEvaluator`.
    """

    def __init__(
        self,
        evaluator: EagerEvaluator,
        execution: Execution,
        step: Step,
        state: State,
        *,
        defers: bool,
    ) -> None:
        super().__init__(evaluator.problem, evaluator.draw, execution, defers=defers)
        self._step = step
        self._state = state
        state.policy.without_acceleration()
        self._unchanged = False
        self._prepare()

    def _prepare(self) -> None:
        """What is compiled for the samples that are behind an x direction now."""
        draw, state = self.draw, self._state
        self._batches = draw.batches
        # the structure of a step depends on no rate, so any will do to record it
        plan = self._plan = record(self, self._step, state, StepSizes(1.0, 1.0, 1.0, 1.0))
        self._phi = phi = plan.descent.phi
        one_batch = draw.one_batch and not plan.single_pass
        wide = self._gathers_wide(plan)
        self._one_part = one_batch or wide
        # whether every step runs the same code on the same tensors
        self._planned = Feed.possible(draw) and (
            self._one_part or draw.direction_batch_size == "all" or plan.single_pass
        )
        self._feed: Feed | None = None
        self._wide: Feed | None = None
        if Feed.possible(draw):
            feed = partial(Feed, draw, phi.stencil.nodes, phi.shared, device=state.x.device)
            self._feed = feed(plan.evaluations + one_batch, ahead=self._planned)
            if wide:
                self._wide = feed(1, ahead=True, sizes=draw.direction_samples)
        # the parts of a sweep over rows are views of them: the same ones every time
        self._sweep: list[list[Sample]] | None = None
        if self._feed is not None and draw.direction_batch_size == "all":
            self._sweep = list(draw.direction(phi.stencil.nodes, phi.shared))
        in_parts = not self._one_part and not plan.single_pass
        pieces = self._pieces = Pieces(self, plan.descent, state, self._feed, in_parts=in_parts)
        traced = partial(Traced, device=state.x.device)
        self._inner = traced(pieces.inner)
        self._last = traced(pieces.last)
        self._whole = traced(pieces.whole)
        self._part = traced(pieces.part)
        self._end = traced(pieces.end)
        self._reporting = traced(pieces.report)

        self._works = True
        # an optimizer may do anything
        self._simple = state.x_update.plain
        self._asks = True
        self._written: tuple[StepSizes, float] | None = None
        self._given: list[list[Sample]] = []
        self._place: dict[str, Any] | None = None
        self._first: Ready | None = None
        self._phases_by_measure: dict[bool, Phases] = {}
        self._graphs: dict[bool, torch.cuda.CUDAGraph | None] = {}
        self._most_begun = MOST_BEGUN if self._planned and may_return_early(state) else 1
        self._begun: list[_Begun] = []
        self._start: dict[str, Any] = {}
        self._sound = False

    def _gathers_wide(self, plan: Plan) -> bool:
        """Whether an x direction is one evaluation on the rows of several minibatches."""
        draw, on_cpu = self.draw, self._state.x.device.type == "cpu"
        chosen = draw.batches != (1, 1) and not plan.single_pass
        return chosen and on_cpu and draw.in_one_part and Feed.possible(draw)

    @property
    def compilations(self) -> int:
        """How many times something was compiled."""
        pieces = self._inner, self._last, self._whole, self._part, self._end, self._reporting
        return sum(piece.compilations for piece in pieces)

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """Whether the next step runs compiled code alone, which draws nothing at random."""
        looks = self._state.policy.looks_next(self._state)
        return self._simple and self._works and not self._asks and not looks

    @contextmanager
    def assume_unchanged(self) -> Iterator[None]:
        """Inside, the guards are asked before the first step only."""
        before, self._unchanged, self._asks = self._unchanged, True, True
        try:
            yield
        finally:
            self._unchanged, self._asks = before, True

    def outer_step(self, step: Step, state: State, *, measure: bool) -> Info:
        """One outer step; on a GPU it may return before it is computed, see :meth:`settle`."""
        try:
            return self._outer_step(step, state, measure=measure)
        except NonFiniteError as error:
            return self.taken_back(state, error, measure=measure)

    def _outer_step(self, step: Step, state: State, *, measure: bool) -> Info:
        if self.draw.batches != self._batches:  # those of a state that was loaded
            self._prepare()
        phases = None
        if self._works and self._planned:
            try:
                phases = self._compiled(measure)
            except NotCompiledError as error:
                self._give_up(error)
        if len(self._begun) >= self._most_begun or not self._works:
            self.settle(state)
        if not self._works:
            return super().outer_step(step, state, measure=measure)
        self._write_sizes(state.policy.at(self, state))
        plan = self._plan
        sound, self._sound = self._sound, False  # until the step has come to its end
        if not self._begun and not sound:
            self._pieces.restart_checks()
            if self._most_begun > 1:
                self._start = self.draw.state_dict()
        self._begun.append(_Begun(state.k, state.multiplier, plan, measure))
        complete = self._run_step(phases, measure)
        self._sound = complete and self._most_begun == 1
        if not complete:
            return self._take_rest(self._begun.pop())
        upper_lr = plan.upper_lr
        if state.policy.due or not state.x_update.plain:
            state.x.set_grads([part.clone() for part in self._pieces.slope])
            if state.policy.due:
                upper_lr = state.policy.judge(self, state, plan.descent.phi, 1.0)
            longest = state.policy.longest_move
            upper_lr = state.x_update.choose(upper_lr, 1.0, longest)
            state.x_update.cut_off(upper_lr, longest)
            state.x_update.apply(upper_lr)
        info = self._info(plan, upper_lr, measure)
        state.k, state.multiplier = state.k + 1, plan.multiplier  # type: ignore[assignment]
        if self._most_begun == 1:
            self._begun.clear()
        return info

    def _run_step(self, phases: Phases | None, measure: bool) -> bool:
        """Run the compiled code of a step; whether it came to its end, as far as is known."""
        self._given.clear()
        self._place = None
        if self._feed is not None:
            self._feed.fill()
        if self._wide is not None:
            self._wide.fill()
        try:
            if phases is not None:
                self._run(phases, measure)
            else:
                self._go(self._phases(measure))
        except NotCompiledError as error:
            self._give_up(error)
            return False
        return self._most_begun > 1 or bool(self._pieces.fine)

    def settle(self, state: State) -> None:
        """Wait for the steps that were begun; where one met a number that is not finite, say so."""
        begun, self._begun = self._begun, []
        if begun and not bool(self._pieces.fine):
            taken = int(self._pieces.steps_taken)
            broken = begun[taken]
            state.k, state.multiplier = broken.k, broken.multiplier
            assert self._feed is not None
            self.draw.load_state_dict(self._start)
            for _ in range(taken + 1):
                self._feed.fill()
            self._take_rest(broken)
            for later in begun[taken + 1 :]:  # eager code found nothing wrong, and went on
                super().outer_step(self._step, state, measure=later.measure)
        super().settle(state)

    def _write_sizes(self, sizes: StepSizes) -> None:
        """Put this step's numbers where compiled code reads them: lam, and the steps."""
        longest = self._state.policy.longest_move
        if (sizes, longest) == self._written:
            return
        plan = self._plan = record(self, self._step, self._state, sizes)
        upper_lr = plan.upper_lr if self._state.x_update.plain else 1.0
        lengths = [move.length for move in plan.descent.moves]
        on_gpu = self._state.x.device.type == "cuda"
        numbers = [plan.multiplier, upper_lr, longest, *lengths]
        written = torch.tensor(numbers, dtype=torch.float64, pin_memory=on_gpu, device="cpu")
        self._pieces.sizes.copy_(written, non_blocking=True)
        self._written = sizes, longest

    def _compiled(self, measure: bool) -> Phases:
        """All that a step runs, compiled anew if the guards say so."""
        if not self._asks and measure in self._phases_by_measure:
            return self._phases_by_measure[measure]
        self._asks = not self._unchanged
        first = self._first_evaluation()
        if not first.same(self._first):
            self._first = first
            self._phases_by_measure.clear()
            self._graphs.clear()
        if measure not in self._phases_by_measure:
            inner, direction, last = map(list, self._phases(measure))
            if not any(variable.buffers for variable in (self._phi.x, *self._phi.points)):
                inner, direction, last = [*inner, *direction, *last], [], []  # one go
            self._phases_by_measure[measure] = inner, direction, last
        return self._phases_by_measure[measure]

    def _run(self, phases: Phases, measure: bool) -> None:
        """Run it; on a GPU the second time as a graph, the first having loaded what it needs."""
        if self._state.x.device.type != "cuda" or measure not in self._graphs:
            self._go(phases)
            self._graphs.setdefault(measure, None)
            return
        graph = self._graphs[measure]
        if graph is None:
            graph = self._graphs[measure] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._go(phases)
        graph.replay()

    @torch.no_grad()
    def _go(self, phases: Phases) -> None:
        """Run everything, one after the other."""
        inner, direction, last = phases
        self._pieces.reset()
        _run_all(inner)
        if direction:
            with buffers_kept(self._phi.x, *self._phi.points):
                _run_all(direction)
        if last:
            _run_all(last)

    def _phases(self, measure: bool) -> Phases:
        return self._inner_steps(), self._direction(measure), self._last_step()

    def _inner_steps(self) -> Iterator[Ready]:
        count = self._plan.inner_steps
        if self._feed is not None and not self._feed.evaluations and count:
            yield from repeat(self._inner_step(0), count)
            return
        for step in range(count):
            yield from self._gathering(step)
            yield self._inner_step(step)

    def _inner_step(self, step: int) -> Ready:
        samples = self._samples_of(step)
        with frozen(self._phi.x):
            return self._inner(samples)

    def _direction(self, measure: bool) -> Iterator[Ready]:
        reported = measure and bool(self._pieces.missing)
        if self._plan.single_pass:
            last = self._plan.inner_steps
            yield from self._gathering(last)
            if reported:
                yield self._reporting(self._samples_of(last))
            return
        if self._wide is not None:
            ready = self._wide.gathering(0, beside=False)
            assert ready is not None, "rows are gathered ahead on a CPU"
            yield ready
        elif self._one_part:
            yield from self._gathering(self._plan.inner_steps)
        traced = self._whole if self._one_part else self._part
        for samples in self._parts():
            if reported:
                yield self._reporting(samples)
            with frozen(*self._phi.points):
                ready = traced(samples)
            yield ready
        if not self._one_part:
            yield self._end()

    def _last_step(self) -> Iterator[Ready]:
        if self._plan.single_pass:
            yield self._last(self._samples_of(self._plan.inner_steps))

    def _first_evaluation(self) -> Ready:
        """The first evaluation of a step, whose guards decide for the whole step."""
        if self._plan.inner_steps:
            return self._inner_step(0)
        return next(self._last_step())

    def _parts(self) -> Iterable[Samples]:
        if self._wide is not None:
            return [self._wide.gathered(0)]
        if self._one_part:
            return [self._samples_of(self._plan.inner_steps)]
        if self._sweep is not None:
            return self._sweep
        if self.draw.direction_batch_size != "all":
            self._place = self.draw.state_dict()
        return self.draw.direction(self._phi.stencil.nodes, self._phi.shared)

    def _gathering(self, step: int) -> Iterator[Ready]:
        """What has to be gathered before an evaluation."""
        if self._feed is None:
            return
        # what gathers ahead knows its first evaluation
        alone = self._first is not None and self._first.alone
        ready = self._feed.gathering(step, beside=alone and torch.get_num_threads() > 1)
        if ready is not None:
            yield ready

    def _samples_of(self, step: int) -> Samples:
        """The samples of an evaluation, kept in case eager code has to take over."""
        if self._feed is not None:
            return self._feed.gathered(step) if self._feed.evaluations else None
        if step == len(self._given):
            self._given.append(self.draw.inner(self._phi.stencil.nodes, self._phi.shared))
        return self._given[step]

    def _give_up(self, error: NotCompiledError) -> None:
        self._works = False
        warn_not_compiled(error)

    def _take_rest(self, begun: _Begun) -> Info:
        """Take the rest of a step eagerly, after a bad number or what could not be compiled."""
        done = int(self._pieces.inner_done)
        before = self._given[done:]
        if self._feed is not None:
            before = self._feed.rest(done)
        if self._wide is not None:
            before += self._wide.rest(0)
        if self._place is not None:
            self.draw.load_state_dict(self._place)
        draw, self.draw = self.draw, RedrawnSamples(self.draw, before)
        try:
            self.begin(self._state, measure=begun.measure)
            with torch.enable_grad():
                return begun.plan.run(self, self._state, done)
        finally:
            self.draw = draw

    def _info(self, plan: Plan, upper_lr: Any, measure: bool) -> Info:
        if not measure:
            return Info(self._state.k, plan.multiplier, plan.lower_lr, upper_lr)
        return info_of(
            self._state,
            {term.key: value[0].clone() for term, value in self._pieces.reported},
            self._pieces.norm[0].clone(),
            lower_lr=plan.lower_lr,
            upper_lr=upper_lr,
            multiplier=plan.multiplier,
        )


def _run_all(readies: Iterable[Ready]) -> None:
    """One after the other, each with as many threads as are good for it."""
    every = torch.get_num_threads()
    compiled_before = isinstance(readies, list)
    now = every
    try:
        for code, arguments, alone in readies:
            wanted = 1 if alone else every
            if wanted != now:
                torch.set_num_threads(wanted)
                now = wanted
            code(arguments)
            if not compiled_before:  # what comes next may be compiled first
                torch.set_num_threads(every)
                now = every
    finally:
        if now != every:
            torch.set_num_threads(every)
