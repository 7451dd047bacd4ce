"""Time and memory of an F2SA step with one weight per sample, against the number of samples.

Softmax regression with weights sigmoid(x_i), on 10,000 images that serve any number of samples
(sample i is image i modulo 10,000), so that nothing but x grows. x is a :class:`~bilevel.Table`
or, for comparison, a plain tensor.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import bilevel

ROWS = tuple(10**p for p in range(4, 9))
TENSOR_ROWS = tuple(10**p for p in range(4, 8))
BATCHES = (50, 500)

_IMAGES, _PIXELS, _CLASSES = 10_000, 784, 10
_STATM = Path("/proc/self/statm")


def run(
    rows: Sequence[int] = ROWS,
    tensor_rows: Sequence[int] = TENSOR_ROWS,
    batches: Sequence[int] = BATCHES,
    *,
    inner_steps: int = 10,
    steps: int = 2,
    repeats: int = 31,
    device: str = "cpu",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """One row of figures for each batch size, kind of x and number of samples.

    Args:
        rows: numbers of samples for tables; the first is what ratios are to.
        tensor_rows: numbers of samples for plain tensors.
        batches: samples in a minibatch.
        inner_steps: T.
        steps: outer steps that are timed together.
        repeats: how often; all sizes take turns within each repeat, so that a ratio compares what
            ran within moments of each other.
        device: where.
        seed: of the data and the minibatches.

    Returns:
        Rows with "batch", "kind" ("table" or "tensor"), "rows", "seconds" (of one outer step, the
        median of the repeats), "ratio" (to the first number of rows of the same kind and batch,
        the median of the repeats) and "bytes" (by which the solver made the process, or the GPU's
        allocations, grow; None where that cannot be told).
    """
    sizes = [("table", count) for count in rows] + [("tensor", count) for count in tensor_rows]
    figures = []
    generator = torch.Generator(device).manual_seed(seed)
    images = torch.rand(_IMAGES, _PIXELS, generator=generator, device=device)
    labels = torch.randint(_CLASSES, (_IMAGES,), generator=generator, device=device)
    _solver("table", rows[0], batches[0], 1, (images, labels), seed).step()  # what is loaded once
    for batch in batches:
        runs: list[tuple[bilevel.Solver, int | None]] = []
        for kind, count in sizes:
            before = _memory(device)
            solver = _solver(kind, count, batch, inner_steps, (images, labels), seed)
            solver.step(measure=False)
            after = _memory(device)
            runs.append((solver, None if before is None or after is None else after - before))
        seconds: list[list[float]] = [[] for _ in sizes]
        for repeat in range(repeats):
            for turn in range(len(sizes)):
                place = (turn + repeat) % len(sizes)  # no size is always measured after the same
                seconds[place].append(_seconds(runs[place][0], steps))
        for (kind, count), (_, grown), times in zip(sizes, runs, seconds, strict=True):
            first = seconds[[k for k, _ in sizes].index(kind)]
            figures.append(
                {
                    "batch": batch,
                    "kind": kind,
                    "rows": count,
                    "seconds": statistics.median(times),
                    "ratio": statistics.median(t / f for t, f in zip(times, first, strict=True)),
                    "bytes": grown,
                }
            )
    return figures


def report(figures: Sequence[dict[str, Any]]) -> str:
    """The figures as text."""
    lines = [f"{'batch':>5}  {'x':<8}{'rows':>12}{'ms per step':>13}{'ratio':>8}{'MB':>9}"]
    for row in figures:
        memory = "-" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f}"
        lines.append(
            f"{row['batch']:>5}  {row['kind']:<8}{row['rows']:>12,}{row['seconds'] * 1e3:>13.2f}"
            f"{row['ratio']:>8.2f}{memory:>9}"
        )
    return "\n".join(lines)


def _solver(
    kind: str, count: int, batch: int, inner_steps: int, data: tuple[Tensor, Tensor], seed: int
) -> bilevel.Solver:
    images, labels = data
    device = images.device

    def weighted_loss(x: Any, y: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, labels, index = batch
        losses = cross_entropy(images @ y, labels, reduction="none")
        return (torch.sigmoid(x[index]) * losses).mean() + 0.001 * (y * y).sum()

    def loss(x: Any, y: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return cross_entropy(images @ y, labels)

    def samples(source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.randint(count, (batch,), generator=source, device=device)
        image = index % _IMAGES
        return images[image], labels[image], index

    def trusted(source: torch.Generator) -> tuple[Tensor, Tensor]:
        index = torch.randint(_IMAGES, (batch,), generator=source, device=device)
        return images[index], labels[index]

    start = torch.zeros(count, device=device)
    return bilevel.Solver(
        bilevel.Problem(loss, weighted_loss),
        bilevel.F2SA(lower_lr=0.01, upper_lr=1.0, inner_steps=inner_steps),
        bilevel.Table(start) if kind == "table" else start,
        torch.zeros(_PIXELS, _CLASSES, device=device),
        upper_data=trusted,
        lower_data=samples,
        seed=seed,
    )


def _seconds(solver: bilevel.Solver, steps: int) -> float:
    solver.step()  # back in the caches, as in a run of its own
    _synchronise(solver)
    start = time.perf_counter()
    for _ in range(steps):
        solver.step()
    _synchronise(solver)
    return (time.perf_counter() - start) / steps


def _synchronise(solver: bilevel.Solver) -> None:
    if solver.state.x.device.type == "cuda":
        torch.cuda.synchronize()


def _memory(device: str) -> int | None:
    """What the process holds in memory, or the GPU for it."""
    gc.collect()
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated()
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
