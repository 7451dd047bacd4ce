"""minimize_many: a grid of settings and seeds, as one computation where that can be.

The variables of the runs are stacked, the objectives are evaluated by ``torch.vmap``, and one
backward pass serves all. This takes a fraction of the time where a run alone is too small to keep
the machine busy, and the memory of all runs.

What can be one computation are runs of :class:`~bilevel.F2SA`, and of :class:`~bilevel.F2BA`
without acceleration, with given rates and no optimizers; they may differ in their rates and
multipliers (runs that differ in more form several groups). "auto" steps, which are the default,
each run finds for itself: give numbers instead, such as the last in ``history["lower_lr"]`` and a
part of that in ``history["upper_lr"]`` of one run. The objectives must be functions of (x, y,
batch) alone that ``torch.vmap`` can evaluate: without random numbers (dropout), without buffers
that change (BatchNorm in training), without Python that depends on the values of tensors. Data must
not come as an iterable of batches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel.engine.stacked import UnbatchableError
from bilevel.errors import (
    ArgumentError,
    ArgumentTypeError,
    NonFiniteError,
    UnbatchedWarning,
    warn,
)
from bilevel.errors.checks import check_count, check_flag, checked_device
from bilevel.methods import Method, method_of
from bilevel.problem import Problem
from bilevel.run.batched import Choices, Ending, Run, run_together, structure, why_broken
from bilevel.run.minimize import minimize
from bilevel.run.results import Results
from bilevel.run.setup import Sampling
from bilevel.sampling import DirectionSize, to_device


def minimize_many(
    problem: Problem,
    x0: Any,
    y0: Any,
    *,
    methods: str | Method[Any] | Sequence[str | Method[Any]] = "f2sa",
    seeds: int | Sequence[int] = 1,
    steps: int = 1000,
    upper_data: Any = None,
    lower_data: Any = None,
    batch_size: int | None = None,
    direction_batch_size: DirectionSize = None,
    chunk_size: int | None = None,
    own_starts: bool = False,
    at_once: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
    record_every: int = 1,
) -> Results:
    """Run every method with every seed, all at once: for error bars and for choosing settings.

    Each run is what ``minimize(..., method=methods[i], seed=seeds[j])`` gives, on the same
    minibatches and up to rounding. Runs are one computation where they can be, see
    :mod:`bilevel.run.many`; the others are taken one after another, and an
    :class:`~bilevel.errors.UnbatchedWarning` says why. A run that meets a number that is not finite
    does not stop the others: its outcome is BROKEN, its x and y are those of the last finite state,
    and ``reasons`` says what happened. One that ends with f clearly above its start or its best has
    the outcome WORSENED; of a grid some are expected to, so that only runs on their own warn.

    There is no ``tolerance`` and no ``max_seconds``: runs that are one computation take the same
    steps, so that all of them go on until the slowest has come to rest.

    Args:
        problem, x0, y0, upper_data, lower_data, batch_size, direction_batch_size, chunk_size,
            device: as :class:`bilevel.Solver` takes them.
        methods: one method or several, as :func:`bilevel.minimize` takes them.
        seeds: the seeds, or how many of them to take from 0 on.
        steps: K, how many outer steps each run takes.
        own_starts: x0 and y0 are sequences with one start for each seed, or for each run in the
            order of the results.
        at_once: the largest number of runs in one computation, to limit memory. None: all.
        progress: show a bar (needs ``bilevel[cli]``), with the medians over the runs.
        record_every: record every that many steps, and the last.

    Returns:
        :class:`Results`. "seconds" in a run's history and result are those of the computation that
        it was part of.

    Example:
        >>> import bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0, sigma_f=0.1, sigma_g=0.1)
        >>> grid = [bilevel.F2SA(lower_lr=0.5, upper_lr=lr) for lr in (0.02, 0.2)]
        >>> noise = {"upper_data": problem.upper_noise, "lower_data": problem.lower_noise}
        >>> results = bilevel.minimize_many(
        ...     problem, problem.x0, problem.y0, methods=grid, seeds=8, steps=50, **noise)
        >>> results.x.shape, results.curves("upper").shape
        (torch.Size([16, 5]), (2, 8, 50))
        >>> results.best_method().upper_lr
        0.2
    """
    check_count("steps", steps, least=0)
    check_count("record_every", record_every)
    check_flag("own_starts", own_starts)
    if at_once is not None:
        check_count("at_once", at_once)
    if not isinstance(problem, Problem):
        raise ArgumentTypeError(f"problem must be a bilevel.Problem, not {problem!r}")
    chosen, numbers = _methods_of(methods), _seeds_of(seeds)
    place = None if device is None else checked_device("device", device)
    data = _moved(upper_data, place), _moved(lower_data, place)
    sampling = Sampling(*data, batch_size, direction_batch_size, chunk_size)
    choices = Choices(problem, sampling, steps, record_every, place, progress)
    runs = _runs_of(chosen, numbers, x0, y0, own_starts)
    _refuse_iterators(upper_data, lower_data, len(runs))
    begun = time.perf_counter()
    endings = _run_all(runs, choices, at_once)
    reasons, results = [e.reason for e in endings], [e.result for e in endings]
    return Results(chosen, numbers, reasons, time.perf_counter() - begun, results)


def _runs_of(
    methods: Sequence[Method[Any]], seeds: Sequence[int], x0: Any, y0: Any, own_starts: bool
) -> list[Run]:
    """Every method with every seed, seeds running fastest."""
    pairs = [(method, seed) for method in methods for seed in seeds]
    starts = _starts(x0, y0, own_starts, len(seeds), len(pairs))
    return [
        Run(number, method, seed, *start)
        for number, ((method, seed), start) in enumerate(zip(pairs, starts, strict=True))
    ]


def _refuse_iterators(upper_data: Any, lower_data: Any, runs: int) -> None:
    for name, data in (("upper_data", upper_data), ("lower_data", lower_data)):
        if isinstance(data, Iterator) and runs > 1:
            raise ArgumentError(
                f"{name} is an iterator, {data!r}, which can be gone through only once and so by "
                f"only one of {runs} runs; give tensors, a Dataset or a list of batches"
            )


def _run_all(runs: Sequence[Run], choices: Choices, at_once: int | None) -> list[Ending]:
    """Groups of runs as one computation each, where that can be, and then the rest one by one."""
    endings: dict[int, Ending] = {}
    alone: list[Run] = []
    reasons: dict[str, None] = {}  # each once, in order
    for group in _groups(runs, at_once):
        if len(group) == 1:
            alone += group
            continue
        try:
            endings.update(
                zip((run.number for run in group), run_together(group, choices), strict=True)
            )
        except UnbatchableError as error:
            alone += group
            reasons[str(error)] = None
    if reasons:
        warn(
            UnbatchedWarning(
                f"{len(alone)} of {len(runs)} runs are taken one after another, because "
                f"{'; '.join(reasons)}"
            )
        )
    endings.update((run.number, _run_alone(run, choices)) for run in alone)
    return [endings[number] for number in range(len(runs))]


def _methods_of(methods: Any) -> list[Method[Any]]:
    if isinstance(methods, Sequence) and not isinstance(methods, str):
        if not methods:
            raise ArgumentError(f"methods is empty: {methods!r}")
        return [method_of(method) for method in methods]
    return [method_of(methods)]


def _seeds_of(seeds: Any) -> list[int]:
    if isinstance(seeds, Sequence | np.ndarray) and not isinstance(seeds, str):
        if not len(seeds):
            raise ArgumentError(f"seeds is empty: {seeds!r}")
        for seed in seeds:
            check_count("each of seeds", seed, least=0)
        return [int(seed) for seed in seeds]
    check_count("seeds (unless they are a sequence)", seeds)
    return list(range(seeds))


def _starts(x0: Any, y0: Any, own: bool, seeds: int, runs: int) -> list[tuple[Any, Any]]:
    """Where each run starts."""
    if not own:
        return [(x0, y0)] * runs
    lists = []
    for name, starts in (("x0", x0), ("y0", y0)):
        if not isinstance(starts, list | tuple | Tensor):
            raise ArgumentTypeError(
                f"with own_starts=True {name} must be a list of starts, or a tensor of them, not "
                f"{starts!r}"
            )
        if len(starts) not in (seeds, runs):
            raise ArgumentError(
                f"{name} holds {len(starts)} starts, but with own_starts=True there must be one "
                f"for each of {seeds} seeds or for each of {runs} runs"
            )
        lists.append(list(starts) * (runs // len(starts)))
    return list(zip(*lists, strict=True))


def _moved(data: Any, place: torch.device | None) -> Any:
    """Tensors where they will be drawn from, so that the runs have them in common."""
    if place is None or not isinstance(data, Tensor | np.ndarray | tuple | Mapping):
        return data
    return to_device(data, place)


def _groups(runs: Sequence[Run], at_once: int | None) -> Iterator[list[Run]]:
    """The runs that could be one computation, as far as their methods go."""
    methods = {id(run.method): run.method for run in runs}
    structures = {key: structure(method) for key, method in methods.items()}
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(structures[id(run.method)], []).append(run)
    for group in groups.values():
        size = at_once or len(group)
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _run_alone(run: Run, choices: Choices) -> Ending:
    sampling = choices.sampling
    try:
        result = minimize(
            choices.problem,
            run.x0,
            run.y0,
            method=run.method,
            steps=choices.steps,
            upper_data=sampling.upper_data,
            lower_data=sampling.lower_data,
            batch_size=sampling.batch_size,
            direction_batch_size=sampling.direction_batch_size,
            chunk_size=sampling.chunk_size,
            seed=run.seed,
            device=choices.place,
            progress=choices.progress,
            record_every=choices.record_every,
            process_group=None,
        )
    except NonFiniteError as error:
        if error.result is None:  # not of this run, but of one within an objective
            raise
        return Ending(error.result, why_broken(error))
    return Ending(result, None)
