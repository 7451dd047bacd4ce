"""A step with several tasks over a step with one: few-shot learning with small networks.

Three convolutions with batch normalisation and a last layer for five characters, on random images
of Omniglot's two usual sizes. F2SA adapts all layers (iMAML) or the last one (ANIL), or ITD unrolls
the adaptation of all (MAML), as in the gallery's Omniglot, whose network has 16 strided channels.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import report
from bilevel import F2SA, ITD, Episodes, Problem, Solver
from bilevel.errors.checks import check_count

WAYS, ASKED, PULL = 5, 5, 0.05
RATES: dict[str, Any] = {
    "lower_lr": 0.4,
    "inner_steps": 3,
    "upper_optimizer": partial(torch.optim.Adam, lr=1e-2),
}
METHODS: dict[str, Any] = {
    "iMAML": F2SA(multiplier=3.0, **RATES),
    "ANIL": F2SA(multiplier=3.0, **RATES),
    "MAML": ITD(**RATES),
}
LAYERS, CHANNELS, SIDES, SHOTS = ("strided", "pooled"), (16, 32), (14, 28), (1, 5)


@dataclass(frozen=True)
class Row:
    """One way to learn one network.

    Attributes:
        way: "iMAML", "ANIL" or "MAML".
        layers: what halves an image, "strided" convolutions or "pooled" ones.
        channels: of each convolution.
        side: of an image, in pixels.
        shots: the drawings of a character to adapt to.
        threads: the number of torch's threads.
        one_ms: the time of a step with one task, the median of the repeats.
        many_ms: the same with several tasks.
        ratio: the median over the repeats of ``many_ms / one_ms``; the two times of a repeat are
            measured directly after each other.
    """

    way: str
    layers: str
    channels: int
    side: int
    shots: int
    threads: int
    one_ms: float
    many_ms: float
    ratio: float


def run(
    *,
    tasks: int = 8,
    repeats: int = 9,
    device: str = "cpu",
    small: bool = False,
    seed: int = 0,
    track: report.Track = iter,
) -> list[Row]:
    """Measure every way with every network, with one thread and with as many as torch now has.

    Args:
        tasks: how many tasks the larger steps have.
        repeats: the number of repeats, in each of which both steps take turns.
        device: where to compute.
        small: measure the smallest network alone.
        seed: the seed of the images and of the weights.
        track: wraps a sequence to show progress.
    """
    for name, value in (("tasks", tasks), ("repeats", repeats)):
        check_count(name, value)
    sizes: list[Any] = [LAYERS, CHANNELS, SIDES, SHOTS]
    kinds = itertools.product(METHODS, *(part[: 1 if small else None] for part in sizes))
    before, rows = torch.get_num_threads(), []
    cases: list[Any] = [*itertools.product(kinds, sorted({1, before}))]
    for kind, threads in track(cases):
        torch.set_num_threads(threads)
        try:
            solvers = [solver(*kind, tasks=count, device=device, seed=seed) for count in (1, tasks)]
            times = [[_seconds(one, device) for one in solvers] for _ in range(repeats + WARM_UP)]
        finally:
            torch.set_num_threads(before)
        alone, several = zip(*times[WARM_UP:], strict=True)
        ratio = median(many / one for one, many in times[WARM_UP:])
        found: list[Any] = [threads, 1e3 * median(alone), 1e3 * median(several), ratio]
        rows.append(Row(*[*kind, *found]))
    return rows


def table(rows: Sequence[Row]) -> Table:
    """Lay the rows out for printing."""
    return report.table(
        "a step with several tasks over a step with one",
        rows,
        {
            "way": lambda row: row.way,
            "layers": lambda row: row.layers,
            "channels": lambda row: row.channels,
            "side": lambda row: row.side,
            "shots": lambda row: row.shots,
            "threads": lambda row: row.threads,
            "one task, ms": lambda row: row.one_ms,
            "several, ms": lambda row: row.many_ms,
            "ratio": lambda row: row.ratio,
        },
    )


WARM_UP = 2
"""Steps that are not measured: the first one allocates, and chooses how g is evaluated."""


def network(layers: str, channels: int, side: int) -> nn.ModuleDict:
    """Three convolutions that halve an image, and a layer for the characters of a task."""
    body, pooled = nn.Sequential(), layers == "pooled"
    for before in (1, channels, channels):
        body.append(nn.Conv2d(before, channels, 3, stride=1 if pooled else 2, padding=1))
        body.append(nn.BatchNorm2d(channels, track_running_stats=False)).append(nn.ReLU())
        if pooled:
            body.append(nn.MaxPool2d(2))
        side = side // 2 if pooled else (side + 1) // 2
    body.append(nn.Flatten())
    return nn.ModuleDict({"body": body, "head": nn.Linear(channels * side**2, WAYS)})


def loss(x: nn.ModuleDict, y: Any, batch: Any) -> Tensor:
    """The loss on a batch; y is a network or its last layer."""
    body, head = (x["body"], y) if isinstance(y, nn.Linear) else (y["body"], y["head"])
    return cross_entropy(head(body(batch[0])), batch[1])


def pulled(x: nn.ModuleDict, y: Any, batch: Any) -> Tensor:
    """The loss with a pull of y back to x."""
    start = x["head"] if isinstance(y, nn.Linear) else x
    from_x, to_y = (nn.utils.parameters_to_vector(part.parameters()) for part in (start, y))
    return loss(x, y, batch) + PULL * ((to_y - from_x) ** 2).sum()


def solver(
    way: str,
    layers: str,
    channels: int,
    side: int,
    shots: int,
    *,
    tasks: int,
    device: str,
    seed: int,
) -> Solver:
    """A solver that takes steps with so many tasks."""

    def task(generator: torch.Generator) -> Any:
        counts = [WAYS * each for each in (shots, ASKED)]
        images = torch.randn(
            sum(counts), 1, side, side, generator=generator, device=generator.device
        ).to(device)
        labels = [torch.arange(WAYS, device=device).repeat(count // WAYS) for count in counts]
        return [*zip(torch.split(images, counts), labels, strict=True)]

    torch.manual_seed(seed)
    x = network(layers, channels, side).to(device)
    start: Any = itemgetter("head") if way == "ANIL" else lambda x: x
    problem = Problem(loss, loss if way == "MAML" else pulled)
    data = Episodes(task, tasks, start)
    return Solver(problem, x, start(x), method=METHODS[way], data=data, seed=seed)


def _seconds(one: Solver, device: str) -> float:
    """The time of a step; with one thread that of the processor, whatever else it does."""
    gpu = torch.device(device).type == "cuda"
    clock = time.process_time if torch.get_num_threads() == 1 and not gpu else time.perf_counter
    start = clock()
    one.step()
    if gpu:
        torch.cuda.synchronize()
    return clock() - start
