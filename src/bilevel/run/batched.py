"""Runs that differ only in their seeds, starts and rates, as one computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from bilevel.engine.stacked import (
    Runs,
    StackedEvaluator,
    StackedVariable,
    UnbatchableError,
    stacked_state,
    stacked_stream,
)
from bilevel.errors import NonFiniteError
from bilevel.methods import Ability, DescentMethod, Info, Method, State
from bilevel.problem import Problem
from bilevel.run.history import MEASURED, RATES, Recorder
from bilevel.run.minimize import meter_of
from bilevel.run.outcome import Outcome, Result
from bilevel.run.setup import Sampling, starting_point
from bilevel.run.worsening import worsening
from bilevel.sampling import Draw, Iterated
from bilevel.variables import Variable


@dataclass(frozen=True)
class Run:
    """One run of the grid: its number, method, seed and start."""

    number: int
    method: Method[Any]
    seed: int
    x0: Any
    y0: Any


@dataclass(frozen=True)
class Choices:
    """What all runs have in common; see :func:`bilevel.minimize`."""

    problem: Problem
    sampling: Sampling
    steps: int
    record_every: int
    place: torch.device | None
    progress: bool


@dataclass(frozen=True)
class Ending:
    """The result of a run, and what ended it early; None: nothing did."""

    result: Result
    reason: str | None


def structure(method: Method[Any]) -> Any:
    """What the runs of one computation have in common: all but the rates and the multiplier.

    For a method whose runs cannot be one computation it is the reason.
    """
    reason = method.why_not(Ability.STACK)
    if reason is not None or not isinstance(method, DescentMethod):
        return reason
    arguments = {field.name for field in fields(method)}
    free: dict[str, Any] = {"lower_lr": 1.0, "upper_lr": 1.0, "multiplier": 1.0}
    free["penalty_lr"] = None
    return replace(method, **{name: one for name, one in free.items() if name in arguments})


def why_broken(error: NonFiniteError) -> str:
    """What ended a run, in a few words."""
    return f"{error.quantity} is not finite at step {error.step}"


def run_together(group: Sequence[Run], choices: Choices) -> list[Ending]:
    """Runs of methods that have one structure; raises :class:`UnbatchableError` with a reason."""
    reason = group[0].method.why_not(Ability.STACK)
    if reason is not None:
        raise UnbatchableError(reason)
    if choices.problem.y_prox is not None:
        raise UnbatchableError("y_prox asks for proximal steps, of which each run has its own")
    methods = [run.method for run in group if isinstance(run.method, DescentMethod)]
    x, y = _stacked_starts(group, choices.place)
    _check(group, choices, x.template, y.template)
    draw = _stacked_draw(group, choices, x.device)
    evaluator = StackedEvaluator(choices.problem, draw, x.runs)
    state = stacked_state(methods, choices.problem, x, y)
    recorder = Recorder(choices.steps, choices.record_every, x.device, x.runs.count)
    _keep_freed_memory(x.device)
    meter = meter_of(choices.steps) if choices.progress else None
    start = time.perf_counter()
    with meter or nullcontext(), torch.enable_grad():
        for k in range(choices.steps):
            if len(x.runs.ended) == len(group):
                break
            recorded = recorder.due(k)
            info = evaluator.outer_step(methods[0].step, state, measure=recorded)
            if recorded:
                recorder.add(info, time.perf_counter() - start)
                if meter is not None:
                    meter.show(_median(info))
    seconds = time.perf_counter() - start
    ended = dict(x.runs.ended)
    steps = [ended[run].step if run in ended else choices.steps for run in range(len(group))]
    points = [x.of_run(run) for run in range(len(group))]
    solutions = _lower_solutions(state, partial(evaluator.outer_step, methods[0].step, state))
    histories = recorder.histories(steps)

    def ending(run: int) -> Ending:
        error = ended.get(run)
        worse = error is None and worsening(histories[run]) is not None
        sound = Outcome.WORSENED if worse else Outcome.COMPLETED
        outcome = sound if error is None else Outcome.BROKEN
        found = points[run], solutions[run], histories[run], steps[run], seconds, outcome
        return Ending(Result(*found, steps[run]), None if error is None else why_broken(error))

    return [ending(run) for run in range(len(group))]


def _lower_solutions(state: State, step: Callable[..., Info]) -> list[Any]:
    """The lower solution of each run at its last x, fitted by one more step of all runs.

    A run that has ended, or that ends in this step, keeps the solution that it has. See
    :meth:`bilevel.Solver.lower_solution`, which does the same for one run.
    """
    before = state.solution
    assert isinstance(before, StackedVariable)
    runs, before = before.runs, before.clone()
    going = set(range(runs.count)) - set(runs.ended) if state.k else set()
    if going:
        state.k -= 1
        with torch.enable_grad():
            step(measure=False)
    after = state.solution
    assert isinstance(after, StackedVariable)
    return [
        (after if run in going and run not in runs.ended else before).of_run(run)
        for run in range(runs.count)
    ]


def _stacked_starts(
    group: Sequence[Run], place: torch.device | None
) -> tuple[StackedVariable, StackedVariable]:
    """Where the runs start."""
    starts: dict[tuple[int, int], tuple[Variable, Variable]] = {}
    for run in group:
        key = id(run.x0), id(run.y0)
        if key not in starts:
            starts[key] = starting_point(run.x0, run.y0, place)
    ordered = [starts[id(run.x0), id(run.y0)] for run in group]
    runs = Runs(len(group), ordered[0][0].device)
    x, y = (_stack([pair[level] for pair in ordered], runs) for level in (0, 1))
    return x, y


def _stack(points: Sequence[Variable], runs: Runs) -> StackedVariable:
    first = points[0]
    for name, by_rows in zip(first.names, first.row_sparse, strict=True):
        if by_rows:
            raise UnbatchableError(f"{name} is moved row by row")
    for point in points:
        alike = point.names == first.names and all(
            a.shape == b.shape and a.dtype == b.dtype
            for a, b in zip(point.leaves, first.leaves, strict=True)
        )
        if not alike or not all(map(torch.equal, point.fixed, first.fixed)):
            raise UnbatchableError(
                f"the starts of {first.name} differ in more than the values of what is moved"
            )
    with torch.no_grad():
        columns = zip(*(point.leaves for point in points), strict=True)
        return StackedVariable(first, [torch.stack(column) for column in columns], runs)


def _check(group: Sequence[Run], choices: Choices, x: Variable, y: Variable) -> None:
    """What a run of its own checks before its first step, and that it draws nothing at random."""
    draw, randomness = choices.sampling.draw(group[0].seed, choices.place, x.device)
    for name, stream in (("upper_data", draw.upper), ("lower_data", draw.lower)):
        if isinstance(stream, Iterated):
            raise UnbatchableError(f"{name} is an iterable of batches, in an order of its own")
    for method in {id(run.method): run.method for run in group}.values():
        method.check(choices.problem, draw, x)
    with randomness:
        batches = draw.peek()
    before = randomness.state_dict()
    with randomness:
        metrics = choices.sampling.check(choices.problem, x, y, *batches)
    if metrics:
        raise UnbatchableError("the objectives return metrics, which are recorded run by run")
    after = randomness.state_dict()
    if not all(torch.equal(before[device], after[device]) for device in before):
        raise UnbatchableError("the objectives draw random numbers, which differ between runs")


def _stacked_draw(group: Sequence[Run], choices: Choices, home: torch.device) -> Draw:
    """Each run's own samples, given out for all at once."""
    draws, inside = zip(
        *(choices.sampling.draw(run.seed, choices.place, home) for run in group), strict=True
    )
    if draws[0].chunked and draws[0].direction_batch_size is None:
        raise UnbatchableError("chunk_size is to save memory, of which many runs at once take more")
    upper = stacked_stream([draw.upper for draw in draws], inside)
    lower = stacked_stream([draw.lower for draw in draws], inside)
    return Draw(upper, lower, draws[0].direction_batch_size, draws[0].chunk_size)


_KEPT = 31 << 20  # bytes; the allocator does not adapt to blocks above 32 MB


def _keep_freed_memory(device: torch.device) -> None:
    """Let the allocator keep what each step frees for the next step.

    The tensors of a stack have megabytes. In every step the C library would hand them back to the
    system and fetch them again, page by page, which takes as long as the computation. It no longer
    does so for sizes up to the largest block that it has seen freed, so one is freed here.
    """
    if device.type == "cpu":
        torch.empty(_KEPT, dtype=torch.uint8, device="cpu")


def _median(info: Info) -> Info:
    """The median of each number over the runs, for the progress bar."""
    numbers: dict[str, Any] = {
        name: torch.as_tensor(getattr(info, name), device="cpu").detach().nanmedian()
        for name in (*MEASURED, *RATES)
    }
    return replace(info, **numbers)
