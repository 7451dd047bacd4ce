"""Many seeds at once against one after another, on label cleaning.

Softmax regression with weights sigmoid(x_i) on 19,000 random images of the size of MNIST's, batches
of 50, F2SA with T = 10: a run so small that launching its operations takes most of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks import report
from bilevel import F2SA, Problem, minimize, minimize_many
from bilevel.errors.checks import check_count

SAMPLES, PIXELS, CLASSES = 19_000, 784, 10
BATCH = 50
METHOD = F2SA(lower_lr=0.01, upper_lr=1.0)


@dataclass(frozen=True)
class Row:
    """One number of runs.

    Attributes:
        runs: the number of runs, each with its own seed.
        loop_seconds: the time of all runs one after another, the median of the repeats.
        many_seconds: the time of all runs at once, the median of the repeats.
        ratio: the median over the repeats of ``many_seconds / loop_seconds``; the two times of a
            repeat are measured directly after each other.
    """

    runs: int
    loop_seconds: float
    many_seconds: float
    ratio: float


def run(
    *,
    runs: int = 32,
    steps: int = 10,
    repeats: int = 5,
    device: str = "cpu",
    seed: int = 0,
    track: report.Track = iter,
) -> list[Row]:
    """Measure an eighth, a quarter, a half and all of ``runs``.

    Args:
        runs: the largest number of runs.
        steps: the number of outer steps of each run.
        repeats: the number of repeats; within each, both ways and all numbers of runs take turns.
        device: where to compute.
        seed: the seed of the data.
        track: wraps a sequence to show progress.
    """
    for name, value in (("runs", runs), ("steps", steps), ("repeats", repeats)):
        check_count(name, value)
    counts = sorted({-(-runs // share) for share in (8, 4, 2, 1)})
    problem, start, options = cleaning(device, seed)
    options["steps"] = options["record_every"] = steps

    def one_after_another(count: int) -> None:
        for number in range(count):
            minimize(problem, *start, method=METHOD, seed=number, **options)

    def at_once(count: int) -> None:
        minimize_many(problem, *start, methods=METHOD, seeds=count, **options)

    one_after_another(1)  # Warm-up: imports and caches of the process are not measured.
    at_once(2)
    times: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    for _, count in track([(repeat, count) for repeat in range(repeats) for count in counts]):
        ways = one_after_another, at_once
        loop, many = (_seconds(way, count, device) for way in ways)
        times[count].append((loop, many))
    return [
        Row(
            runs=count,
            loop_seconds=median(loop for loop, _ in pairs),
            many_seconds=median(many for _, many in pairs),
            ratio=median(many / loop for loop, many in pairs),
        )
        for count, pairs in times.items()
    ]


def table(rows: Sequence[Row]) -> Table:
    """Lay the rows out for printing."""
    return report.table(
        f"runs with minibatches of {BATCH}",
        rows,
        {
            "runs": lambda row: row.runs,
            "one after another, s": lambda row: row.loop_seconds,
            "at once, s": lambda row: row.many_seconds,
            "ratio": lambda row: row.ratio,
        },
    )


def cleaning(device: str, seed: int) -> tuple[Problem, tuple[Tensor, Tensor], dict[str, Any]]:
    """Return the problem, its start (x0, y0) and the data keywords of :func:`bilevel.minimize`."""
    generator = torch.Generator(device).manual_seed(seed)
    images = torch.rand(SAMPLES, PIXELS, generator=generator, device=device)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator, device=device)

    def weighted_loss(x: Tensor, y: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, labels, rows = batch
        losses = cross_entropy(images @ y, labels, reduction="none")
        return (torch.sigmoid(x[rows]) * losses).mean() + 0.001 * (y * y).sum()

    def trusted_loss(x: Tensor, y: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return cross_entropy(images @ y, labels)

    start = (
        torch.zeros(SAMPLES, device=device),
        torch.zeros(PIXELS, CLASSES, device=device),
    )
    data = {
        "lower_data": (images, labels, torch.arange(SAMPLES, device=device)),
        "upper_data": (images, labels),
        "batch_size": BATCH,
    }
    return Problem(trusted_loss, weighted_loss), start, data


def _seconds(way: Callable[[int], None], count: int, device: str) -> float:
    start = time.perf_counter()
    way(count)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
