"""The cost of an inner step of F2SA, beside the same step written by hand.

The problem is softmax regression with weights sigmoid(x_i) on 19,000 samples of 784 features and 10
classes, the sizes of label cleaning on MNIST. An inner step takes one gradient of f and two of g;
an outer step is T inner steps and a step of x. All contestants draw and gather their own batches,
take turns within each repeat, and compute the same.

    from benchmarks import overhead
    rows = overhead.run(repeats=5)
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import report
from benchmarks.overhead import by_hand
from benchmarks.overhead.task import Runner, Task
from bilevel.errors.checks import check_count

FLOOR = "JAX, one scalar"
CLOSED_FORM = "torch, closed form"
BATCHES = (50, 500)


@dataclass(frozen=True)
class Row:
    """One contestant at one batch size.

    Attributes:
        name: the name of the contestant.
        batch: the number of samples of each kind in a batch.
        microseconds: the time of an outer step divided by T, the median of the repeats.
        to_closed_form: the ratio of that time to the contestant without automatic differentiation,
            whose gradients are in closed form.
        to_floor: the ratio to one scalar that JAX differentiates and compiles; None if JAX is not
            installed. Both ratios are medians over the repeats of the ratio within a repeat.
        first: the seconds until the first outer step was done, tracing and compilation included.
    """

    name: str
    batch: int
    microseconds: float
    to_closed_form: float
    to_floor: float | None
    first: float


def run(
    *,
    batches: Sequence[int] = BATCHES,
    samples: int = 19_000,
    inner_steps: int = 10,
    steps: int | None = None,
    repeats: int = 21,
    device: str = "cpu",
    seed: int = 0,
    track: report.Track = iter,
) -> list[Row]:
    """Measure every contestant at every batch size.

    Args:
        batches: the batch sizes.
        samples: n; there are a twentieth as many trusted samples.
        inner_steps: T.
        steps: the number of outer steps that are timed together; None: 10, on a GPU 100.
        repeats: the number of repeats; within each, all contestants take turns.
        device: where to compute.
        seed: the seed of the data and the batches.
        track: wraps a sequence to show progress.
    """
    for name, value, least in (
        ("samples", samples, 20),
        ("steps", 1 if steps is None else steps, 1),
        ("repeats", repeats, 1),
    ):
        check_count(name, value, least)
    if steps is None:
        steps = 10 if torch.device(device).type == "cpu" else 100
    rows: list[Row] = []
    for batch, repeat in track([(batch, repeat) for batch in batches for repeat in range(repeats)]):
        if repeat == 0:
            task = Task.random(samples, batch, inner_steps, device, seed)
            runners: dict[str, Runner] = {}
            firsts: dict[str, float] = {}
            for name, make in contestants().items():
                start = time.perf_counter()
                runners[name] = make(task)
                runners[name](1)
                firsts[name] = time.perf_counter() - start
            seconds: dict[str, list[float]] = {name: [] for name in runners}
        for name in _rotated(list(runners), repeat):
            runners[name](1)  # Refills the caches that the other contestants emptied.
            start = time.perf_counter()
            runners[name](steps)
            seconds[name].append((time.perf_counter() - start) / steps / inner_steps)
        if repeat == repeats - 1:
            rows += [
                Row(
                    name,
                    batch,
                    1e6 * median(times),
                    _ratio(times, seconds[CLOSED_FORM]),
                    _ratio(times, seconds[FLOOR]) if FLOOR in seconds else None,
                    firsts[name],
                )
                for name, times in seconds.items()
            ]
    return rows


def table(rows: Sequence[Row]) -> Table:
    """Lay the rows out for printing."""
    return report.table(
        "microseconds of an inner step: one gradient of f and two of g",
        rows,
        {
            "batch": lambda row: row.batch,
            "": lambda row: row.name,
            "us": lambda row: row.microseconds,
            "to closed form": lambda row: row.to_closed_form,
            f"to {FLOOR}": lambda row: "-" if row.to_floor is None else f"{row.to_floor:.2f}",
            "first step, s": lambda row: row.first,
        },
    )


def contestants() -> Mapping[str, Callable[[Task], Runner]]:
    """Map names to factories of contestants; those whose library is missing are left out."""
    found: dict[str, Callable[[Task], Runner]] = {
        CLOSED_FORM: by_hand.closed_form,
        "torch, three gradients": by_hand.three_gradients,
        "torch, one scalar": by_hand.one_backward,
        "bilevel": lambda task: _solver(task, compile=False),
        "bilevel, compiled": lambda task: _solver(task, compile=True),
    }
    if importlib.util.find_spec("jax") is not None:
        from benchmarks.overhead import in_jax

        found["JAX, three gradients"] = in_jax.three_gradients
        found[FLOOR] = in_jax.one_scalar
    return found


def _solver(task: Task, *, compile: bool) -> Runner:
    """Make the library's contestant; nothing changes its objectives between the steps."""

    def stepping() -> Generator[tuple[Tensor, Tensor], int, None]:
        solver = task.solver(compile=compile)
        with solver.assume_unchanged():
            steps = yield task.problem.x0, task.problem.y0
            while True:
                for _ in range(steps):
                    solver.step(measure=False)
                task.synchronise()
                (x,), (y,) = solver.state.x.leaves, solver.state.solution.leaves
                steps = yield x, y

    run = stepping()
    next(run)
    return run.send


def _rotated(names: list[str], by: int) -> Iterator[str]:
    """Rotate the order, so that no contestant always follows the same other one."""
    place = by % len(names)
    yield from names[place:]
    yield from names[:place]


def _ratio(times: Sequence[float], floor: Sequence[float]) -> float:
    return median(mine / best for mine, best in zip(times, floor, strict=True))
