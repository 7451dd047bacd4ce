"""Time and memory of an F2SA step with one weight per sample, against the number of samples.

The problem is softmax regression with weights sigmoid(x_i). Sample i is image i modulo 10,000, so
that x alone grows with the number of samples. x is a :class:`~bilevel.Table` or, for comparison, a
plain tensor.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from rich.table import Table as RichTable
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks import report
from bilevel import F2SA, Problem, Solver, Table
from bilevel.errors.checks import check_count

Kind = Literal["table", "tensor"]

BATCHES = (50, 500)
LEAST = 10_000
TENSOR_LIMIT = 10_000_000
"""The largest plain tensor; with a larger one every step would take seconds."""

_IMAGES, _PIXELS, _CLASSES = 10_000, 784, 10


@dataclass(frozen=True)
class Row:
    """One number of samples.

    Attributes:
        batch: the number of samples in a batch.
        kind: the type of x, "table" or "tensor".
        rows: the number of samples.
        seconds: the time of one outer step, the median of the repeats.
        ratio: the median over the repeats of the ratio of that time to the one with the fewest
            rows, for the same batch and kind, in the same repeat.
        bytes: the growth of resident memory, or of allocated GPU memory, by the solver and its
            first step; None where the system does not report it.
    """

    batch: int
    kind: Kind
    rows: int
    seconds: float
    ratio: float
    bytes: int | None


def run(
    *,
    largest: int = 10**8,
    inner_steps: int = 10,
    steps: int = 2,
    repeats: int = 31,
    device: str = "cpu",
    seed: int = 0,
    track: report.Track = iter,
) -> list[Row]:
    """Measure powers of ten from 10^4 to ``largest`` samples, for each batch size and kind of x.

    Args:
        largest: the largest number of samples of a table; a tensor has at most 10^7.
        inner_steps: T.
        steps: the number of outer steps that are timed together.
        repeats: the number of repeats; within each, all sizes take turns.
        device: where to compute.
        seed: the seed of the data and the batches.
        track: wraps a sequence to show progress.
    """
    for name, value, least in (
        ("largest", largest, LEAST),
        ("steps", steps, 1),
        ("repeats", repeats, 1),
    ):
        check_count(name, value, least)
    counts = [LEAST * 10**power for power in range(len(str(largest // LEAST)))]
    sizes: list[tuple[Kind, int]] = [("table", count) for count in counts]
    sizes += [("tensor", count) for count in counts if count <= TENSOR_LIMIT]
    generator = torch.Generator(device).manual_seed(seed)
    data = (
        torch.rand(_IMAGES, _PIXELS, generator=generator, device=device),
        torch.randint(_CLASSES, (_IMAGES,), generator=generator, device=device),
    )
    _solver("table", LEAST, 1, 1, data, seed).step()  # Warm-up: imports are not measured.

    rows: list[Row] = []
    solvers: list[Solver] = []
    for batch, repeat in track([(batch, repeat) for batch in BATCHES for repeat in range(repeats)]):
        if repeat == 0:
            solvers.clear()
            growth: list[int | None] = []
            seconds: list[list[float]] = [[] for _ in sizes]
            for kind, count in sizes:
                before = _memory(device)
                solvers.append(_solver(kind, count, batch, inner_steps, data, seed))
                solvers[-1].step()
                after = _memory(device)
                growth.append(None if before is None or after is None else after - before)
        for turn in range(len(sizes)):
            # The order rotates, so that no size always follows the same other one.
            place = (turn + repeat) % len(sizes)
            seconds[place].append(_seconds(solvers[place], steps))
        if repeat == repeats - 1:
            for (kind, count), size, times in zip(sizes, growth, seconds, strict=True):
                first = seconds[sizes.index((kind, LEAST))]
                ratio = median(t / f for t, f in zip(times, first, strict=True))
                rows.append(Row(batch, kind, count, median(times), ratio, size))
    return rows


def table(rows: Sequence[Row]) -> RichTable:
    """Lay the rows out for printing."""
    return report.table(
        "one outer step with a weight per sample",
        rows,
        {
            "batch": lambda row: row.batch,
            "x": lambda row: row.kind,
            "rows": lambda row: row.rows,
            "ms": lambda row: 1e3 * row.seconds,
            "ratio": lambda row: row.ratio,
            "MB": lambda row: "-" if row.bytes is None else f"{row.bytes / 1e6:.1f}",
        },
    )


def _solver(
    kind: Kind, count: int, batch: int, inner_steps: int, data: tuple[Tensor, Tensor], seed: int
) -> Solver:
    images, labels = data
    device = images.device

    def weighted_loss(x: Any, y: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, labels, index = batch
        losses = cross_entropy(images @ y, labels, reduction="none")
        return (torch.sigmoid(x[index]) * losses).mean() + 0.001 * (y * y).sum()

    def trusted_loss(x: Any, y: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return cross_entropy(images @ y, labels)

    def samples(source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.randint(count, (batch,), generator=source, device=device)
        image = index % _IMAGES
        return images[image], labels[image], index

    def trusted(source: torch.Generator) -> tuple[Tensor, Tensor]:
        image = torch.randint(_IMAGES, (batch,), generator=source, device=device)
        return images[image], labels[image]

    start = torch.zeros(count, device=device)
    return Solver(
        Problem(trusted_loss, weighted_loss),
        Table(start) if kind == "table" else start,
        torch.zeros(_PIXELS, _CLASSES, device=device),
        method=F2SA(lower_lr=0.01, upper_lr=1.0, inner_steps=inner_steps),
        upper_data=trusted,
        lower_data=samples,
        seed=seed,
    )


def _seconds(solver: Solver, steps: int) -> float:
    solver.step()  # Refills the caches that the other solvers emptied.
    _synchronise(solver)
    start = time.perf_counter()
    for _ in range(steps):
        solver.step()
    _synchronise(solver)
    return (time.perf_counter() - start) / steps


def _synchronise(solver: Solver) -> None:
    if solver.state.x.device.type == "cuda":
        torch.cuda.synchronize()


def _memory(device: str) -> int | None:
    """Return the resident memory of the process, or its allocated memory on the GPU."""
    gc.collect()
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated()
    return report.resident_bytes()
