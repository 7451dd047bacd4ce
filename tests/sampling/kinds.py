"""Data of every kind that can be drawn from, and what is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
)

import bilevel
from bilevel.sampling import Draw, Stream, stream_of

ROWS = 10
CPU = torch.device("cpu")


class Batch(NamedTuple):
    index: Any
    square: Any


class Squares(Dataset[dict[str, Tensor]]):
    """Row i is {"index": i, "square": i^2}."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(float(i)), "square": torch.tensor(float(i * i))}


class Frame:
    """What tells a DataFrame: going through it gives the names of its columns."""

    iloc = None

    def __iter__(self) -> Iterator[str]:
        return iter("ab")


class NoLength(Dataset[Tensor]):
    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor(float(i))


class Flow(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(rows())


class Again:
    """A re-iterable that is no sequence."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(chunks())


def rows() -> Tensor:
    """Row i is the number i."""
    return torch.arange(float(ROWS))


def chunks() -> list[Tensor]:
    return [rows()[:4], rows()[4:8], rows()[8:]]


def squares() -> Tensor:
    return rows() ** 2


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(generator: torch.Generator) -> Tensor:
    return torch.randn(3, generator=generator)


def endless() -> Iterator[Tensor]:
    return (torch.tensor([float(i % 7)]) for i in range(10**6))


class Kind(NamedTuple):
    """One way to give data: the data, the batch size that goes with it, whether 'all' works."""

    make: Callable[[], Any]
    batch_size: int | None = None
    sweeps: bool = True


KINDS = {
    "none": Kind(lambda: None, None),
    "tensor": Kind(rows, 3),
    "tensor, full": Kind(rows),
    "array": Kind(lambda: rows().numpy(), 3),
    "tuple": Kind(lambda: (rows(), squares().numpy()), 3),
    "dict": Kind(lambda: {"index": rows(), "square": squares()}, 3),
    "namedtuple": Kind(lambda: Batch(rows(), squares()), 3),
    "dataset": Kind(Squares, 3),
    "dataset, full": Kind(Squares),
    "iterable dataset": Kind(Flow, 3, sweeps=False),
    "loader": Kind(lambda: DataLoader(Squares(), batch_size=3)),
    "shuffled loader": Kind(lambda: DataLoader(Squares(), batch_size=3, shuffle=True)),
    "loader with a generator": Kind(
        lambda: DataLoader(Squares(), batch_size=3, shuffle=True, generator=seeded())
    ),
    "sampler with a generator": Kind(
        lambda: DataLoader(
            Squares(), batch_size=3, sampler=RandomSampler(Squares(), generator=seeded())
        )
    ),
    "list": Kind(chunks),
    "iterable": Kind(Again, sweeps=False),
    "generator": Kind(endless, sweeps=False),
    "function": Kind(lambda: noise, sweeps=False),
}
SAMPLED_HERE = ["tensor", "array", "tuple", "dict", "namedtuple", "dataset", "function"]


def stream(data: Any, batch_size: int | None = None, seed: int = 0, **options: Any) -> Stream:
    direction = options.pop("direction_batch_size", None)
    return stream_of(
        "lower_data",
        data,
        batch_size=batch_size,
        direction_batch_size=direction,
        seed=seed,
        device=options.pop("device", None),
        home=CPU,
    )


def stream_of_kind(name: str, seed: int = 0) -> Stream:
    kind = KINDS[name]
    return stream(kind.make(), kind.batch_size, seed)


def draws(source: Stream, count: int) -> list[Any]:
    return [source.next() for _ in range(count)]


def parts_of(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch) if isinstance(batch, list | tuple) else [batch]


def first(batch: Any) -> Tensor:
    part = parts_of(batch)[0]
    assert isinstance(part, Tensor)
    return part


def same(mine: Any, theirs: Any) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    pairs = zip(parts_of(mine), parts_of(theirs), strict=True)
    return type(mine) is type(theirs) and all(torch.equal(a, b) for a, b in pairs)


def all_same(mine: list[Any], theirs: list[Any]) -> bool:
    return all(same(a, b) for a, b in zip(mine, theirs, strict=True))


def problem_on_batches() -> bilevel.Problem:
    def mean(batch: Any) -> Tensor:
        return torch.tensor(0.5) if batch is None else first(batch).mean() / ROWS

    return bilevel.Problem(
        upper=lambda x, y, batch: ((y - mean(batch)) ** 2).sum(),
        lower=lambda x, y, batch: ((y - (1 + mean(batch)) * x) ** 2).sum(),
    )


def draw_of(upper: Any, lower: Any, batch_size: int | None = None, **options: Any) -> Draw:
    size = options.get("direction_batch_size")
    return Draw(
        stream(upper, batch_size, seed=0, direction_batch_size=size),
        stream(lower, batch_size, seed=1, direction_batch_size=size),
        **options,
    )
