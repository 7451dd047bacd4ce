"""minimize_many: a grid of settings and seeds, as one computation where that can be."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bilevel.engine.stacked.streams import UnbatchableError
from bilevel.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingExtraError,
    NonFiniteError,
    RunError,
    UnbatchedWarning,
    warn,
)
from bilevel.errors.checks import check_choice, check_count, check_flag, checked_device
from bilevel.methods import Method, method_of
from bilevel.problem import Problem
from bilevel.run.batched import Choices, Ending, Run, run_together, structure, why_broken
from bilevel.run.minimize import Result, minimize
from bilevel.run.solver import Sampling
from bilevel.sampling import DirectionSize, to_device
from bilevel.variables import Variable

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class Results(Sequence[Result]):
    """What a grid of runs found: a sequence of :class:`Result`, seeds running fastest.

    The run of ``methods[i]`` with ``seeds[j]`` is number ``i * len(seeds) + j``.

    Attributes:
        methods: the settings.
        seeds: the seeds.
        reasons: for each run what ended it before its time; None where nothing did.
        seconds: how long all of them took.
    """

    methods: list[Method[Any]]
    seeds: list[int]
    reasons: list[str | None]
    seconds: float
    _results: list[Result]

    @overload
    def __getitem__(self, index: int) -> Result: ...

    @overload
    def __getitem__(self, index: slice) -> list[Result]: ...

    def __getitem__(self, index: int | slice) -> Result | list[Result]:
        return self._results[index]

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        broken = sum(reason is not None for reason in self.reasons)
        return (
            f"Results({len(self.methods)} methods x {len(self.seeds)} seeds, "
            f"seconds={self.seconds:.3g}, broken={broken})"
        )

    @property
    def x(self) -> Any:
        """All x, in the structure of x0, with the runs along a new first dimension.

        A module becomes a dictionary of its parameters.
        """
        return _stacked([result.x for result in self])

    @property
    def y(self) -> Any:
        """The same for y."""
        return _stacked([result.y for result in self])

    def curves(self, name: str) -> npt.NDArray[np.float64]:
        """One column of the history, such as "upper", of shape (methods, seeds, recorded steps).

        It is NaN after a run broke.
        """
        check_choice("name", name, self[0].history)
        columns = [result.history[name] for result in self]
        curves = np.full((len(columns), max(map(len, columns))), np.nan)
        for curve, column in zip(curves, columns, strict=True):
            curve[: len(column)] = column
        return curves.reshape(len(self.methods), len(self.seeds), -1)

    def best(self) -> Result:
        """The completed run with the lowest f at the last recorded step."""
        number = int(np.argmin(self._final()))
        if self.reasons[number] is not None:
            raise RunError(f"no run was completed; the first of {len(self)}: {self.reasons[0]}")
        return self[number]

    def best_method(self) -> Method[Any]:
        """The setting whose mean over its seeds of the last recorded f is lowest.

        One that broke for any seed comes after all that did not.
        """
        return self.methods[int(np.argmin(self._final().mean(1)))]

    def _final(self) -> npt.NDArray[np.float64]:
        """The last f of each run, infinite where it broke or there is none."""
        final = [
            result.history["upper"][-1] if reason is None and result.steps else np.inf
            for result, reason in zip(self, self.reasons, strict=True)
        ]
        return np.array(final).reshape(len(self.methods), len(self.seeds))

    def to_frame(self) -> pd.DataFrame:
        """All histories in one pandas DataFrame, with the columns "method" and "seed".

        "method" is the number of the setting.
        """
        try:
            import pandas as pd
        except ImportError:
            raise MissingExtraError("pandas", "pandas") from None
        frames = []
        for number, result in enumerate(self):
            method, seed = divmod(number, len(self.seeds))
            keys = {"method": method, "seed": self.seeds[seed]}
            frames.append(pd.DataFrame({**keys, **result.history}))
        return pd.concat(frames, ignore_index=True)


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
    minibatches and up to rounding, but the runs are one computation: their variables are stacked,
    the objectives are evaluated by ``torch.vmap``, and one backward pass serves all. This takes a
    fraction of the time where a run alone is too small to keep the machine busy, and the memory of
    all runs.

    What can be one computation are runs of :class:`~bilevel.F2SA`, and of :class:`~bilevel.F2BA`
    without acceleration, with given rates and no optimizers; they may differ in their rates and
    multipliers (runs that differ in more form several groups). Steps that are "auto", as they are
    by default, each run finds for itself: give numbers instead, such as the last in
    ``history["lower_lr"]`` and ``history["upper_lr"]`` of one run. The objectives must be functions
    of (x, y, batch) alone that ``torch.vmap`` can evaluate: without random numbers (dropout),
    without buffers that change (BatchNorm in training), without Python that depends on the values
    of tensors. Other runs, and those on data that comes as an iterable of batches, are taken one
    after another, and an :class:`~bilevel.errors.UnbatchedWarning` says why.

    A run that meets a number that is not finite does not stop the others: its outcome is BROKEN,
    its x and y are those of the last finite state, and ``reasons`` says what happened.

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
        >>> results = bilevel.minimize_many(
        ...     problem,
        ...     problem.x0,
        ...     problem.y0,
        ...     methods=[bilevel.F2SA(lower_lr=0.5, upper_lr=lr) for lr in (0.02, 0.2)],
        ...     seeds=8,
        ...     steps=50,
        ...     upper_data=problem.upper_noise,
        ...     lower_data=problem.lower_noise,
        ... )
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
    chosen = _methods_of(methods)
    numbers = _seeds_of(seeds)
    place = None if device is None else checked_device("device", device)
    sampling = Sampling(
        _moved(upper_data, place),
        _moved(lower_data, place),
        batch_size,
        direction_batch_size,
        chunk_size,
    )
    pairs = [(method, seed) for method in chosen for seed in numbers]
    for name, data in (("upper_data", upper_data), ("lower_data", lower_data)):
        if isinstance(data, Iterator) and len(pairs) > 1:
            raise ArgumentError(
                f"{name} is an iterator, {data!r}, which can be gone through only once and so by "
                f"only one of {len(pairs)} runs; give tensors, a Dataset or a list of batches"
            )
    starts = _starts(x0, y0, own_starts, len(numbers), len(pairs))
    runs = [
        Run(number, method, seed, *start)
        for number, ((method, seed), start) in enumerate(zip(pairs, starts, strict=True))
    ]
    choices = Choices(problem, sampling, steps, record_every, place, progress)
    begun = time.perf_counter()
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
    ordered = [endings[number] for number in range(len(runs))]
    return Results(
        methods=chosen,
        seeds=numbers,
        reasons=[ending.reason for ending in ordered],
        seconds=time.perf_counter() - begun,
        _results=[ending.result for ending in ordered],
    )


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


def _stacked(values: Sequence[Any]) -> Any:
    """Values of one structure as one, in which the leaves are stacked."""
    variables = [Variable(value, "the variable") for value in values]
    columns = zip(*(variable.leaves for variable in variables), strict=True)
    return variables[0].structured([torch.stack(column).detach() for column in columns])
