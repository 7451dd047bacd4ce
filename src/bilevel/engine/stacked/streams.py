"""The minibatches of several runs, each from the run's own stream, as one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from bilevel.sampling import (
    DirectionSize,
    StackedIndices,
    Stream,
    TensorRows,
    chunk_slices,
    take_rows,
)

S = TypeVar("S", bound=Stream)


class UnbatchableError(Exception):
    """Runs cannot be one computation; the message says why."""


@dataclass(frozen=True)
class Batches:
    """What the runs are evaluated on.

    Attributes:
        value: the batch.
        stacked: whether it holds a batch for each run, along the first dimension of its tensors,
            or one that all runs share.
    """

    value: Any
    stacked: bool

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that have a first dimension for the runs."""
        return list(_tensors(self.value)) if self.stacked else []

    def of_one(self, tensors: Iterator[Tensor]) -> Any:
        """The batch of one run, with what it has in place of :attr:`tensors`."""
        return _joined(lambda _: next(tensors), [self.value]) if self.stacked else self.value


class _StackedStream(Stream, Generic[S]):
    """The streams of all runs."""

    def __init__(self, streams: Sequence[S]) -> None:
        self._streams = streams

    @abstractmethod
    def next(self) -> Batches: ...

    def peek(self) -> Batches:
        return _stacked([stream.peek() for stream in self._streams])

    def state_dict(self) -> dict[str, Any]:
        """The position of every run's stream."""
        return {"streams": [stream.state_dict() for stream in self._streams]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved positions."""
        for stream, position in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(position)


class GatheredRows(_StackedStream[TensorRows]):
    """Rows of tensors: those of all runs are taken at once."""

    def __init__(self, streams: Sequence[TensorRows]) -> None:
        super().__init__(streams)
        self._first = streams[0]
        self._numbers = StackedIndices(streams)

    def next(self) -> Batches:
        size = self._first.batch_size
        if size is None:
            return Batches(self._first.next(), stacked=False)
        return self._take(self._numbers.next(size))

    def parts(self, size: DirectionSize, chunk: int | None) -> Iterator[tuple[Batches, float]]:
        if size == "all":  # a sweep over all rows: the same for every run
            for batch, share in self._first.parts(size, chunk):
                yield Batches(batch, stacked=False), share
        elif size is None:
            yield self.next(), 1.0
        else:
            numbers = self._numbers.next(size)
            for part, share in chunk_slices(size, chunk):
                yield self._take(numbers[:, part]), share

    def _take(self, numbers: Tensor) -> Batches:
        taken = take_rows(self._first.rows, numbers.reshape(-1))

        def by_run(tensors: list[Tensor]) -> Tensor:
            (rows,) = tensors
            return rows.view(*numbers.shape, *rows.shape[1:])

        return Batches(_joined(by_run, [taken]), stacked=True)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._numbers = StackedIndices(self._streams)


class StackedBatches(_StackedStream[Stream]):
    """Batches made run by run, each inside the run's own randomness, and then stacked."""

    def __init__(
        self, streams: Sequence[Stream], inside: Sequence[AbstractContextManager[None]]
    ) -> None:
        super().__init__(streams)
        self._inside = inside
        for stream, own in zip(streams, inside, strict=True):
            with own:
                stream.peek()  # as a run of its own does before its first step

    def next(self) -> Batches:
        return _stacked(self._made([stream.next for stream in self._streams]))

    def parts(self, size: DirectionSize, chunk: int | None) -> Iterator[tuple[Batches, float]]:
        parts = [stream.parts(size, chunk) for stream in self._streams]
        while True:
            found = self._made([partial(next, part, None) for part in parts])
            if found[0] is None:
                return
            yield _stacked([batch for batch, _ in found]), found[0][1]

    def _made(self, makers: Sequence[Callable[[], Any]]) -> list[Any]:
        made = []
        for make, own in zip(makers, self._inside, strict=True):
            with own:
                made.append(make())
        return made


def stacked_stream(
    streams: Sequence[Stream], inside: Sequence[AbstractContextManager[None]]
) -> Stream:
    """The streams of all runs as one, which gives :class:`Batches`.

    ``inside`` is the randomness of each run.
    """
    rows = [stream for stream in streams if isinstance(stream, TensorRows)]
    return GatheredRows(rows) if len(rows) == len(streams) else StackedBatches(streams, inside)


def _stacked(batches: Sequence[Any]) -> Batches:
    first = batches[0]
    if all(batch is first for batch in batches):
        return Batches(first, stacked=False)
    try:
        return Batches(_joined(torch.stack, batches), stacked=True)
    except RuntimeError as error:  # shapes that differ between runs
        raise UnbatchableError(f"the batches of the runs cannot be stacked ({error})") from error


def _joined(join: Callable[[list[Tensor]], Tensor], batches: Sequence[Any]) -> Any:
    """Batches of one structure as one, in which each tensor is ``join`` of theirs."""
    first = batches[0]
    if isinstance(first, Tensor):
        return join(list(batches))
    if isinstance(first, Mapping):
        return {key: _joined(join, [batch[key] for batch in batches]) for key in first}
    if isinstance(first, list | tuple):
        parts = [_joined(join, part) for part in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    raise UnbatchableError(f"a batch holds {first!r}, which is no tensor")


def _tensors(batch: Any) -> Iterator[Tensor]:
    """In the order in which :func:`_joined` comes to them."""
    if isinstance(batch, Tensor):
        yield batch
    else:
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)
