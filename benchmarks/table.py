"""Time and memory of an F2SA step with one weight per sample, against the number of samples.

Softmax regression with weights sigmoid(x_i), on 10,000 images that serve any number of samples
(sample i is image i modulo 10,000), so that nothing but x grows. x is a :class:`~bilevel.Table`
or, for comparison, a plain tensor.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from rich.table import Table as Shown
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks import report
from bilevel.errors.checks import check_count
from bilevel.methods import F2SA
from bilevel.problem import Problem
from bilevel.run import Solver
from bilevel.variables import Table

Kind = Literal["table", "tensor"]

BATCHES = (50, 500)
LEAST = 10_000
TENSOR_LIMIT = 10_000_000
"""A plain tensor of more entries would take seconds for every step."""

_IMAGES, _PIXELS, _CLASSES = 10_000, 784, 10


@dataclass(frozen=True)
class Row:
    """One size.

    Attributes:
        batch: samples in a minibatch.
        kind: what x is, a "table" or a "tensor".
        rows: how many samples there are.
        seconds: of one outer step, the median of the repeats.
        ratio: to the smallest number of rows, for the same batch and kind; the median of the
            repeats, each of which compares what ran within moments of each other.
        bytes: by which the solver and its first step made the process larger, or what it holds of
            the GPU; None where the system does not tell.
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
    """Powers of ten from 10^4 to ``largest``, for each batch size and kind of x.

    Args:
        largest: number of samples for a table; for a tensor they end at 10^7.
        inner_steps: T.
        steps: outer steps that are timed together.
        repeats: how often; all sizes take turns within each repeat.
        device: where.
        seed: of the data and the minibatches.
        track: shows progress.
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
    _solver("table", LEAST, 1, 1, data, seed).step()  # what a process loads only once

    rows: list[Row] = []
    solvers: list[Solver] = []
    for batch, repeat in track([(batch, repeat) for batch in BATCHES for repeat in range(repeats)]):
        if repeat == 0:
            solvers.clear()
            grown: list[int | None] = []
            seconds: list[list[float]] = [[] for _ in sizes]
            for kind, count in sizes:
                before = _memory(device)
                solvers.append(_solver(kind, count, batch, inner_steps, data, seed))
                solvers[-1].step()
                after = _memory(device)
                grown.append(None if before is None or after is None else after - before)
        for turn in range(len(sizes)):
            place = (turn + repeat) % len(sizes)  # none always comes after the same other
            seconds[place].append(_seconds(solvers[place], steps))
        if repeat == repeats - 1:
            for (kind, count), size, times in zip(sizes, grown, seconds, strict=True):
                first = seconds[sizes.index((kind, LEAST))]
                ratio = median(t / f for t, f in zip(times, first, strict=True))
                rows.append(Row(batch, kind, count, median(times), ratio, size))
    return rows


def table(rows: Sequence[Row]) -> Shown:
    """The rows to read."""
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
    solver.step()  # what the others drove out of the caches comes back, as in a run of its own
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
    """What the process holds in memory, or of the GPU."""
    gc.collect()
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated()
    return report.resident_bytes()
