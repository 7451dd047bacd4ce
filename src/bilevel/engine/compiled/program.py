"""F2SA's outer step as a compiled program.

One inner step (gathering the rows, Phi, its gradients and the updates) is traced and compiled once
and run T times; the x direction is another such piece. Rates and multiplier are read from a tensor,
so nothing is compiled again as they change, and all that a step writes stays at one place for the
whole run, so that on a GPU the step is captured as one graph.

The guards of ``torch.compile`` are asked once per outer step: a Python number that the objectives
use may change between two steps, and is then compiled anew. Where nothing but steps happens, they
are asked once (:meth:`Program.undisturbed`). Python that runs beside the computation (printing,
counting calls) runs when it is traced and not again.

Whether a number is not finite is decided on the device. From the first one on nothing moves any
more, and at the end of the step the method itself goes on from there, and says what it was. A GPU
is asked only every few steps, so that it has no gaps; then the data are drawn again up to the step
in question. The method also goes on where something turns out not to be compilable: no run depends
on the compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import torch

from bilevel.engine.compiled.feed import Drawn, Feed
from bilevel.engine.compiled.pieces import Pieces
from bilevel.engine.compiled.tracing import NotCompiledError, Ready, Traced
from bilevel.errors import CompileWarning, warn
from bilevel.methods import Info, Method, State
from bilevel.methods.f2sa import F2SA, F2SAState
from bilevel.problem import Problem
from bilevel.sampling import Draw, Sample
from bilevel.stepping.policy import Pace
from bilevel.stepping.updates import Now
from bilevel.variables import buffers_kept, frozen

OLDEST_TORCH = (2, 11)  # earlier ones do not trace torch.autograd.grad

MOST_BEGUN = 16
"""So many steps may be under way on a GPU before it is waited for."""

Samples: TypeAlias = list[Sample] | None
"""For each point its sample; None: compiled code finds them itself."""

Phases: TypeAlias = tuple[Iterable[Ready], Iterable[Ready], Iterable[Ready]]
"""The inner steps, the x direction, and the last inner step of a single pass."""


def program_for(problem: Problem, method: Method[Any], state: State, draw: Draw) -> Program | None:
    """The compiled program of a run; None, after a warning, where there cannot be one."""
    reason = None
    if not isinstance(method, F2SA) or type(method).step is not F2SA.step:
        reason = f"{type(method).__name__} has no compiled form"
    elif method.lower_optimizer is not None:
        reason = "lower_optimizer decides how y moves"
    elif method.accumulate:
        reason = "accumulate=True takes the terms apart, which a compiled step takes together"
    elif method.loss_scale is not None:
        reason = "loss_scale decides after each evaluation whether to repeat it"
    elif draw.chunked and draw.direction_batch_size is None:
        reason = "chunk_size takes minibatches apart, which a compiled step takes whole"
    elif any(any(variable.row_sparse) for variable in (state.x, state.solution)):
        reason = "the rows of a table are gathered and scattered by code of their own"
    elif tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        reason = f"torch is {torch.__version__}, and {'.'.join(map(str, OLDEST_TORCH))} is needed"
    elif state.x.device.type not in ("cpu", "cuda"):
        reason = f"the run is on {state.x.device}"
    if reason is not None:
        _warn(reason)
        return None
    assert isinstance(method, F2SA)
    assert isinstance(state, F2SAState)
    return Program(problem, method, state, draw)


def may_be_late(state: F2SAState) -> bool:
    """Whether a step may return before it is done.

    What an optimizer does to x is not compiled, and waits for the direction.
    """
    return state.may_be_late and state.x_update.plain


class _Begun(NamedTuple):
    """A step that may not be done yet: where it began, its rates, and whether it is reported."""

    k: int
    multiplier: float
    now: Now
    measure: bool


class Program:
    """F2SA's outer step on one state.

    Args:
        problem, method, state, draw: as ``method.step`` takes them. The state is moved in place,
            and anyone else may move it between two steps.
    """

    def __init__(self, problem: Problem, method: F2SA, state: F2SAState, draw: Draw) -> None:
        self._problem = problem
        self._method = method
        self._state = state
        self._draw = draw
        self._nodes = method.stencil.nodes
        self._one_part = draw.direction_batch_size is None and not method.single_pass
        feed = None
        # whether every step runs the same code on the same tensors
        self._planned = Feed.possible(draw) and (
            draw.direction_batch_size in (None, "all") or method.single_pass
        )
        if Feed.possible(draw):
            steps = method.inner_steps + self._one_part
            feed = Feed(
                draw, self._nodes, method.shared, steps, state.x.device, ahead=self._planned
            )
        self._feed = feed
        # all parts of a sweep over rows are views of them: the same ones every time
        self._sweep: list[list[Sample]] | None = None
        if feed is not None and draw.direction_batch_size == "all":
            self._sweep = list(draw.direction(self._nodes, method.shared))

        in_parts = not self._one_part and not method.single_pass
        pieces = self._pieces = Pieces(problem, method, state, feed, in_parts=in_parts)
        traced = partial(Traced, device=state.x.device)
        self._inner = traced(pieces.inner)
        self._last = traced(pieces.last)
        self._whole = traced(pieces.whole)
        self._part = traced(pieces.part)
        self._end = traced(pieces.end)
        self._report = traced(pieces.report)

        self._works = True
        # "auto" evaluates the objectives, and an optimizer may do anything
        self._simple = type(state.pace) is Pace and state.x_update.plain
        self._asks = True
        self._alone = False
        self._dialled: Now | None = None
        self._given: list[list[Sample]] = []
        self._place: dict[str, Any] | None = None
        self._first: Ready | None = None
        self._plans: dict[bool, Phases] = {}
        self._graphs: dict[bool, torch.cuda.CUDAGraph | None] = {}
        self._most_begun = MOST_BEGUN if self._planned and may_be_late(state) else 1
        self._begun: list[_Begun] = []
        self._start: dict[str, Any] = {}
        self._sound = False

    @property
    def compilations(self) -> int:
        """How many times something was compiled."""
        pieces = self._inner, self._last, self._whole, self._part, self._end, self._report
        return sum(piece.compilations for piece in pieces)

    @property
    def closed(self) -> bool:
        """Whether the next step runs compiled code alone, which draws nothing at random."""
        return self._simple and self._works and not self._asks

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Inside, the guards are asked before the first step only."""
        before, self._alone, self._asks = self._alone, True, True
        try:
            yield
        finally:
            self._alone, self._asks = before, True

    def step(self, *, measure: bool = True) -> Info:
        """One outer step, in place, as ``method.step``.

        On a GPU it may return before the step is computed, see :meth:`settle`.
        """
        plan = None
        if self._works and self._planned:
            try:
                plan = self._plan(measure)
            except NotCompiledError as error:
                self._give_up(error)
        if len(self._begun) >= self._most_begun or not self._works:
            self.settle()
        if not self._works:
            return self._method.step(self._problem, self._state, self._draw, measure=measure)
        state = self._state
        now = state.pace.at(self._problem, state, self._draw)
        sound, self._sound = self._sound, False  # unless it comes to its end
        if not self._begun and not sound:
            self._pieces.trust()
            if self._most_begun > 1:
                self._start = self._draw.state_dict()
        self._begun.append(_Begun(state.k, state.multiplier, now, measure))
        self._dial(now)
        self._given.clear()
        self._place = None
        if self._feed is not None:
            self._feed.fill()
        try:
            if plan is not None:
                self._run(plan, measure)
            else:
                self._go(self._phases(measure))
            complete = self._most_begun > 1 or bool(self._pieces.fine)
        except NotCompiledError as error:
            self._give_up(error)
            complete = False
        self._sound = complete and self._most_begun == 1
        if not complete:
            return self._go_on(self._begun.pop())
        upper_lr = now.upper
        if not state.x_update.plain:
            state.x.set_grads([part.clone() for part in self._pieces.slope])
            upper_lr = state.x_update.choose(now.upper)
            state.x_update.apply(upper_lr)
        info = self._info(now, upper_lr, measure)
        state.k, state.multiplier = state.k + 1, now.multiplier
        if self._most_begun == 1:
            self._begun.clear()
        return info

    def settle(self) -> None:
        """Wait for the steps that were begun; where one met a number that is not finite, say so."""
        begun, self._begun = self._begun, []
        if not begun or bool(self._pieces.fine):
            return
        taken = int(self._pieces.taken)
        broken = begun[taken]
        self._state.k, self._state.multiplier = broken.k, broken.multiplier
        assert self._feed is not None
        self._draw.load_state_dict(self._start)
        for _ in range(taken + 1):
            self._feed.fill()
        self._go_on(broken)
        for later in begun[taken + 1 :]:  # only eager code found nothing wrong, and went on
            self._method.step(self._problem, self._state, self._draw, measure=later.measure)

    def _dial(self, now: Now) -> None:
        """Put this step's numbers where compiled code reads them: lam, and the steps."""
        if now is self._dialled or now == self._dialled:
            return
        upper_lr = now.upper if self._state.x_update.plain else 1.0
        lengths = [length for _, length in self._method.moves(self._state, now).lengths]
        on_gpu = self._state.x.device.type == "cuda"
        told = torch.tensor(
            [now.multiplier, upper_lr, *lengths], dtype=torch.float64, pin_memory=on_gpu
        )
        self._pieces.dials.copy_(told, non_blocking=True)
        self._dialled = now

    def _plan(self, measure: bool) -> Phases:
        """All that a step runs, compiled anew if the guards say so."""
        if not self._asks and measure in self._plans:
            return self._plans[measure]
        self._asks = not self._alone
        first = self._first_evaluation()
        if not first.same(self._first):
            self._first = first
            self._plans.clear()
            self._graphs.clear()
        if measure not in self._plans:
            inner, direction, last = map(list, self._phases(measure))
            if not any(variable.buffers for variable in (self._state.x, *self._state.points)):
                inner, direction, last = [*inner, *direction, *last], [], []  # one go
            self._plans[measure] = inner, direction, last
        return self._plans[measure]

    def _run(self, plan: Phases, measure: bool) -> None:
        """Run it; on a GPU the second time as a graph, the first having loaded what it needs."""
        if self._state.x.device.type != "cuda" or measure not in self._graphs:
            self._go(plan)
            self._graphs.setdefault(measure, None)
            return
        graph = self._graphs[measure]
        if graph is None:
            graph = self._graphs[measure] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._go(plan)
        graph.replay()

    @torch.no_grad()
    def _go(self, phases: Phases) -> None:
        """Run everything, one after the other."""
        inner, direction, last = phases
        self._pieces.reset()
        _run_all(inner)
        if direction:
            with buffers_kept(self._state.x, *self._state.points):
                _run_all(direction)
        if last:
            _run_all(last)

    def _phases(self, measure: bool) -> Phases:
        return self._inner_steps(), self._direction(measure), self._last_step()

    def _inner_steps(self) -> Iterator[Ready]:
        count = self._method.inner_steps - self._method.single_pass
        if self._feed is not None and not self._feed.together and count:
            yield from repeat(self._inner_step(0), count)
            return
        for step in range(count):
            yield from self._gathering(step)
            yield self._inner_step(step)

    def _inner_step(self, step: int) -> Ready:
        samples = self._samples_of(step)
        with frozen(self._state.x):
            return self._inner(samples)

    def _direction(self, measure: bool) -> Iterator[Ready]:
        reported = measure and bool(self._pieces.missing)
        if self._method.single_pass:
            last = self._method.inner_steps - 1
            yield from self._gathering(last)
            if reported:
                yield self._report(self._samples_of(last))
            return
        if self._one_part:
            yield from self._gathering(self._method.inner_steps)
        traced = self._whole if self._one_part else self._part
        for samples in self._parts():
            if reported:
                yield self._report(samples)
            with frozen(*self._state.points):
                ready = traced(samples)
            yield ready
        if not self._one_part:
            yield self._end()

    def _last_step(self) -> Iterator[Ready]:
        if self._method.single_pass:
            yield self._last(self._samples_of(self._method.inner_steps - 1))

    def _first_evaluation(self) -> Ready:
        """What is evaluated first: with these guards the whole step stands or falls."""
        if self._method.inner_steps > self._method.single_pass:
            return self._inner_step(0)
        return next(self._last_step())

    def _parts(self) -> Iterable[Samples]:
        if self._one_part:
            return [self._samples_of(self._method.inner_steps)]
        if self._sweep is not None:
            return self._sweep
        if self._draw.direction_batch_size != "all":
            self._place = self._draw.state_dict()
        return self._draw.direction(self._nodes, self._method.shared)

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
        """The samples of an evaluation, kept in case the method has to go on itself."""
        if self._feed is not None:
            return self._feed.gathered(step) if self._feed.together else None
        if step == len(self._given):
            self._given.append(self._draw.inner(self._nodes, self._method.shared))
        return self._given[step]

    def _give_up(self, error: NotCompiledError) -> None:
        self._works = False
        _warn(str(error))

    def _go_on(self, begun: _Begun) -> Info:
        """The rest of a step in which something was not finite or could not be compiled."""
        done = int(self._pieces.done)
        before = self._given[done:]
        if self._feed is not None:
            before = self._feed.rest(done)
        if self._place is not None:
            self._draw.load_state_dict(self._place)
        with torch.enable_grad():
            return self._method.step_after(
                done,
                begun.now,
                self._problem,
                self._state,
                Drawn(self._draw, before),
                measure=begun.measure,
            )

    def _info(self, now: Now, upper_lr: float, measure: bool) -> Info:
        state, lam = self._state, now.multiplier
        if not measure:
            return Info(state.k, lam, now.lower, upper_lr)
        told = {name: value[0].clone() for name, value in self._pieces.told.items()}
        lower = told[f"lower(x, {state.solution.name})"]
        return Info(
            state.k,
            lam,
            now.lower,
            upper_lr,
            upper=told[f"upper(x, {state.solution.name})"],
            lower=lower,
            gap=told[f"lower(x, {state.penalised.name})"] - lower,
            direction_norm=told["norm"],
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


def _warn(reason: str) -> None:
    warn(
        CompileWarning(
            f"compile=True has no effect: {reason}. The run goes on without it, to the same result"
        )
    )
