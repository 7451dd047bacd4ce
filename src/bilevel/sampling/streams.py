"""Minibatches: seeded, resumable, shared or independent between terms, sampled on the device.

A :class:`Stream` hands out the batches of one level. A :class:`Draw` pairs the two levels and
knows the two questions that an algorithm asks: the samples of an inner step, and the samples
behind an x direction, which may be many more and then come in parts.

Sharing. With ``shared=True`` all copies of the lower variable are evaluated on the same samples,
so that the noise of lam * (g(x, y) - g(x, z)) cancels instead of growing with lam^2; with
``shared=False`` every term has its own, as the paper's Algorithm 1 has it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from bilevel.errors import ArgumentError, ArgumentTypeError, DataExhaustedError, StateError

DirectionSize: TypeAlias = int | Literal["all"] | None

Nodes: TypeAlias = Sequence[tuple[bool, bool]]
"""For each copy of the lower variable whether f, and whether g, is evaluated at it."""

_BLOCK = 1 << 16  # indices drawn at a time: one call to the generator serves many minibatches
_FIRST = 1 << 12  # of them, on a CPU, before more are needed: short runs need no more
_PROBES = 8  # minibatches in a sample that stands for all data


@dataclass(frozen=True)
class Sample:
    """What the terms of one copy are evaluated on.

    A share below 1 marks a part of a larger batch: the term counts with that weight. A share of 0
    means that the term is absent.
    """

    upper: Any
    lower: Any
    upper_share: float = 1.0
    lower_share: float = 1.0


_ABSENT = Sample(None, None, 0.0, 0.0)


class Stream(ABC):
    """The batches of one level.

    Attributes:
        sampled_here: whether the size of a batch is decided here and not by the data.
    """

    sampled_here = False

    @abstractmethod
    def next(self) -> Any:
        """The next batch."""

    @property
    def deterministic(self) -> bool:
        """Whether every batch is the same."""
        return False

    @abstractmethod
    def peek(self) -> Any:
        """A batch as :meth:`next` could give it, without moving the stream."""

    @property
    def probed(self) -> bool:
        """Whether :meth:`probe` can be asked."""
        return True

    def probe(self) -> list[Any]:
        """A few batches that are the same whenever they are asked for, in a resumed run too."""
        return [self.peek()]

    def parts(self, size: DirectionSize, chunk: int | None) -> Iterator[tuple[Any, float]]:
        """``size`` samples in parts of at most ``chunk``, each with its share of the whole."""
        if size is not None:
            raise ArgumentError(
                f"direction_batch_size={size!r} needs data that can be indexed (tensors or a "
                f"Dataset) or, for 'all', gone through again (a DataLoader or a list of batches)"
            )
        yield self.next(), 1.0

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs to go on from here."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state`` was taken."""


class NoData(Stream):
    """A deterministic objective: the batch is None."""

    deterministic = True

    def next(self) -> None:
        return None

    def peek(self) -> None:
        return None

    def parts(self, size: DirectionSize, chunk: int | None) -> Iterator[tuple[Any, float]]:
        yield None, 1.0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Indexed(Stream):
    """Data with a length and a way to take rows; minibatches are uniform with replacement.

    Sampling with replacement makes each minibatch an independent, unbiased draw, which is what the
    paper assumes. Indices are drawn where the rows lie, many minibatches at a time.
    """

    sampled_here = True

    def __init__(
        self,
        length: int,
        take: Callable[[Tensor | slice], Any],
        batch_size: int | None,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._length = length
        self._take = take
        self._batch_size = batch_size
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._block_state = self._generator.get_state()
        self._refill(0)
        self._everything: Any = None

    def next(self) -> Any:
        if self._batch_size is None:
            if self._everything is None:
                self._everything = self._take(slice(0, self._length))
            return self._everything
        return self._take(self._indices(self._batch_size))

    @property
    def deterministic(self) -> bool:
        return self._batch_size is None

    def peek(self) -> Any:
        return self._take(slice(0, self._batch_size or self._length))

    def probe(self) -> list[Any]:
        if self._batch_size is None:
            return [self.next()]
        batches = max(1, min(_PROBES, self._length // self._batch_size))
        count = min(batches * self._batch_size, self._length)
        # spread over all rows, because these may be sorted
        rows = torch.arange(count, device=self._block.device) * self._length // count
        return [self._take(rows[first::batches]) for first in range(batches)]

    def parts(self, size: DirectionSize, chunk: int | None) -> Iterator[tuple[Any, float]]:
        if size is None:
            yield self.next(), 1.0
            return
        count = self._length if size == "all" else size
        indices = None if size == "all" else self._indices(count)
        for part, share in in_parts(count, chunk):
            yield self._take(part if indices is None else indices[part]), share

    def _indices(self, count: int) -> Tensor:
        self._advance(count)
        return self._block[self._used - count : self._used]

    def _advance(self, count: int) -> None:
        """Give out that many numbers of rows, the last used ones."""
        if self._used + count > self._size:
            self._draw(self._size)
            self._block_state = self._generator.get_state()
            self._refill(max(count, _BLOCK))
        self._used += count
        if self._used > self._drawn:
            self._draw(self._used)

    def _refill(self, size: int) -> None:
        self._size = size
        self._block = torch.empty(size, dtype=torch.int64, device=self._generator.device)
        self._drawn = self._used = 0

    def _draw(self, count: int) -> None:
        """Draw so many of the block or more; a CPU draws them one by one, in parts as at once."""
        if self._block.device.type == "cpu":
            count = min(max(count, 2 * self._drawn, _FIRST), self._size)
        else:
            count = self._size
        new = self._block.data[self._drawn : count]  # .data: what was given out has not changed
        if len(new):
            new.random_(self._length, generator=self._generator)
        self._drawn = count

    def state_dict(self) -> dict[str, Any]:
        return {
            "generator": self._block_state.clone(),
            "block": self._size,
            "used": self._used,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._block_state = state["generator"].clone()
        self._generator.set_state(self._block_state)
        self._refill(state["block"])  # the same state gives the same block again
        self._used = state["used"]


class Rows(Indexed):
    """Tensors with one first dimension; whoever knows them can gather the rows himself.

    Attributes:
        rows: a tensor, or a tuple or dict of tensors.
        length: how many rows there are.
        size: how many numbers they hold.
        row_bytes: how many bytes there are in a row.
        batch_size: rows per minibatch; None: all of them every time.
        device: where they lie.
    """

    def __init__(self, rows: Any, tensors: list[Tensor], batch_size: int | None, seed: int) -> None:
        self.rows = rows
        self.length = len(tensors[0])
        self.size = sum(tensor.numel() for tensor in tensors)
        self.row_bytes = sum(tensor.nbytes for tensor in tensors) // self.length
        self.batch_size = batch_size
        self.device = tensors[0].device
        super().__init__(self.length, partial(take_rows, rows), batch_size, seed, self.device)

    def ahead(self, batches: int, size: int) -> Tensor:
        """The numbers of the rows of the next minibatches, each of ``size``, one after the other.

        The stream moves on as if they had been taken one by one.
        """
        if self._used + batches * size <= self._size:
            return self._indices(batches * size)
        return torch.cat([self._indices(size) for _ in range(batches)])


class Numbers:
    """The numbers of rows that several streams give out, one stream per row.

    The streams move on as if each had given out its own. They have given out equally many before.
    """

    def __init__(self, streams: Sequence[Indexed]) -> None:
        self._streams = streams
        self._blocks = self._drawn()

    def _drawn(self) -> Tensor:
        return torch.stack([stream._block[: stream._drawn] for stream in self._streams])

    def next(self, count: int) -> Tensor:
        """The next ``count`` numbers of each."""
        first = self._streams[0]
        if first._used + count <= first._drawn:
            for stream in self._streams:
                stream._used += count
        else:
            for stream in self._streams:
                stream._advance(count)
            self._blocks = self._drawn()
        return self._blocks[:, first._used - count : first._used]


class Sampled(Stream):
    """Batches made by a function of a generator: ``sample(generator) -> batch``."""

    def __init__(
        self,
        sample: Callable[[torch.Generator], Any],
        seed: int,
        device: torch.device,
    ) -> None:
        self._sample = sample
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._origin = self._generator.get_state()

    def next(self) -> Any:
        return self._sample(self._generator)

    def peek(self) -> Any:
        return self._sample_from(self._generator.get_state(), 1)[0]

    def probe(self) -> list[Any]:
        return self._sample_from(self._origin, _PROBES)

    def _sample_from(self, state: Tensor, count: int) -> list[Any]:
        now = self._generator.get_state()
        self._generator.set_state(state)
        batches = [self._sample(self._generator) for _ in range(count)]
        self._generator.set_state(now)
        return batches

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state(), "origin": self._origin.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self._origin = state["origin"].clone()


class Iterated(Stream):
    """A DataLoader or any other iterable of batches, begun again whenever it ends.

    What ends for good (an iterator, a generator) raises
    :class:`~bilevel.errors.DataExhaustedError`. The position is an epoch's starting state of the
    random generators and a count of batches, so resuming replays the epoch up to there.
    """

    def __init__(self, data: Iterable[Any], name: str, device: torch.device | None) -> None:
        self._data = data
        self._name = name
        self._device = device
        self._iterator: Iterator[Any] | None = None
        self._once = isinstance(data, Iterator)
        self._generators = _generators_of(data)
        self._epoch_state = self._random_state()
        self._position = 0
        self._ahead: list[Any] = []

    @property
    def probed(self) -> bool:
        return False  # what was drawn once may never come again

    def next(self) -> Any:
        batch = self._ahead.pop() if self._ahead else self._pull()
        self._position += 1
        return batch

    def peek(self) -> Any:
        if not self._ahead:
            self._ahead.append(self._pull())
        return self._ahead[0]

    def parts(self, size: DirectionSize, chunk: int | None) -> Iterator[tuple[Any, float]]:
        if size != "all":
            yield from super().parts(size, chunk)
            return
        total = self._samples()
        for batch in iter(self._data):
            yield self._moved(batch), _rows(batch) / total

    def _samples(self) -> int:
        if isinstance(self._data, DataLoader) and self._data.batch_size is not None:
            with suppress(TypeError):  # an IterableDataset without a length
                if self._data.drop_last:
                    return len(self._data) * self._data.batch_size
                return len(self._data.sampler)  # type: ignore[arg-type]
        elif isinstance(self._data, Sequence):
            return sum(map(_rows, self._data))
        raise ArgumentError(
            f"direction_batch_size='all' needs to know how many samples {self._name} holds: give "
            f"tensors, a Dataset, a DataLoader or a list of batches, not {self._data!r}"
        )

    def _pull(self) -> Any:
        if self._iterator is None:
            self._begin()
        assert self._iterator is not None
        try:
            return self._moved(next(self._iterator))
        except StopIteration:
            if self._once:
                raise DataExhaustedError(
                    f"{self._name} ended after {self._position} batches and cannot be begun again; "
                    f"give a DataLoader, a list or an endless iterator"
                ) from None
        self._begin()
        try:
            return self._moved(next(self._iterator))
        except StopIteration:
            raise DataExhaustedError(f"{self._name} gave no batch at all") from None

    def _begin(self) -> None:
        self._epoch_state = self._random_state()
        self._iterator = iter(self._data)
        self._position = 0

    def _moved(self, batch: Any) -> Any:
        return move(batch, self._device)

    def _random_state(self) -> dict[str, Any]:
        return {"global": torch.get_rng_state(), "own": [g.get_state() for g in self._generators]}

    def _set_own(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": dict(self._epoch_state),
            "own": self._random_state()["own"],
            "position": self._position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        target = state["position"]
        if self._once:
            behind = target - self._position
            if behind < 0:
                raise StateError(
                    f"{self._name} is an iterator that is {-behind} batches past the saved "
                    f"position and cannot go back; give a fresh one"
                )
        else:
            torch.set_rng_state(state["epoch"]["global"])
            self._set_own(state["epoch"]["own"])
            self._ahead.clear()
            self._begin()
            self.peek()  # an epoch draws its order with its first batch
            behind = target
        for _ in range(behind):
            self.next()
        if not self._once:
            self._set_own(state["own"])  # others may have drawn from them since


@dataclass(frozen=True)
class Together:
    """Data of several kinds; every batch is a dict with one batch of each.

    Attributes:
        data: what each is drawn from, by name; anything that ``lower_data`` may be.
        called: from a name to what messages call that part; None: such as ``lower_data['web']``.
        prepare: makes of each batch what the objectives get, called with what messages call the
            part, and the batch. None: it stays as it is.

    Example:
        >>> import bilevel, torch
        >>> problem = bilevel.Problem(
        ...     upper=lambda x, y, batch: (y - 2) ** 2,
        ...     lower=lambda x, y, batch: x.softmax(0) @ torch.stack(
        ...         [((y - batch[name]) ** 2).mean() for name in "ab"]))
        >>> kinds = Together({"a": [torch.zeros(4)], "b": [torch.full((2,), 4.0)]})
        >>> result = bilevel.minimize(problem, torch.zeros(2), torch.tensor(0.0),
        ...                           lower_data=kinds, steps=50)
        >>> [round(w, 2) for w in result.x.softmax(0).tolist()]
        [0.5, 0.5]
    """

    data: Mapping[str, Any]
    called: Callable[[str], str] | None = None
    prepare: Callable[[str, Any], Any] | None = None


class Joint(Stream):
    """The streams of :class:`Together`, side by side."""

    def __init__(
        self, streams: Mapping[str, tuple[str, Stream]], prepare: Callable[[str, Any], Any] | None
    ) -> None:
        self._streams = streams
        self._prepare = prepare

    def _prepared(self, batches: Mapping[str, Any]) -> dict[str, Any]:
        if self._prepare is None:
            return dict(batches)
        return {name: self._prepare(self._streams[name][0], b) for name, b in batches.items()}

    def next(self) -> Any:
        return self._prepared({name: s.next() for name, (_, s) in self._streams.items()})

    @property
    def deterministic(self) -> bool:
        return all(stream.deterministic for _, stream in self._streams.values())

    def peek(self) -> Any:
        return self._prepared({name: s.peek() for name, (_, s) in self._streams.items()})

    @property
    def probed(self) -> bool:
        return all(stream.probed for _, stream in self._streams.values())

    def probe(self) -> list[Any]:
        probes = {name: stream.probe() for name, (_, stream) in self._streams.items()}
        fewest = min(map(len, probes.values()))
        return [self._prepared({n: p[i] for n, p in probes.items()}) for i in range(fewest)]

    def state_dict(self) -> dict[str, Any]:
        return {name: stream.state_dict() for name, (_, stream) in self._streams.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, (_, stream) in self._streams.items():
            stream.load_state_dict(state[name])


class Draw:
    """The samples of both levels, as an algorithm asks for them.

    Args:
        upper: the stream behind f.
        lower: the stream behind g.
        direction_batch_size: how many samples are behind an x direction; None: one batch.
        chunk_size: the largest part in which those are evaluated.
        chunked: whether minibatches too may be larger than that, and are to be taken in parts.
    """

    def __init__(
        self,
        upper: Stream,
        lower: Stream,
        direction_batch_size: DirectionSize = None,
        chunk_size: int | None = None,
        chunked: bool = False,
    ) -> None:
        self.upper = upper
        self.lower = lower
        self.direction_batch_size = direction_batch_size
        self.chunk_size = chunk_size
        self.chunked = chunked

    @property
    def sweeps(self) -> bool:
        """Whether all samples are behind every x direction."""
        full = self.upper.deterministic and self.lower.deterministic
        return full or self.direction_batch_size == "all"

    def inner(self, nodes: Nodes, shared: bool) -> list[Sample]:
        """For each point its sample for one inner step."""
        if shared:
            return [Sample(self.upper.next(), self.lower.next())] * len(nodes)
        return [
            Sample(self.upper.next() if f else None, self.lower.next() if g else None)
            for f, g in nodes
        ]

    def inner_parts(self, nodes: Nodes, shared: bool) -> list[list[Sample]]:
        """The same in parts, for each part one sample per point."""
        samples = self.inner(nodes, shared)
        if not self.chunked:
            return [samples]
        # points that share their sample share its parts, by which they are known to
        parts = {id(sample): list(self._split(sample)) for sample in samples}
        of_points = (parts[id(sample)] for sample in samples)
        return [list(part) for part in zip_longest(*of_points, fillvalue=_ABSENT)]

    def _split(self, sample: Sample) -> Iterator[Sample]:
        return _paired(
            _batch_parts(sample.upper, self.chunk_size), _batch_parts(sample.lower, self.chunk_size)
        )

    def direction(self, nodes: Nodes, shared: bool) -> Iterator[list[Sample]]:
        """The samples behind one x direction: in parts, for each part one sample per point."""
        if self.direction_batch_size is None and self.chunked:
            yield from self.inner_parts(nodes, shared)
            return
        if shared:
            for sample in self._parts(True, True):
                yield [sample] * len(nodes)
            return
        for part in zip_longest(*(self._parts(f, g) for f, g in nodes), fillvalue=_ABSENT):
            yield list(part)

    def _parts(self, with_upper: bool, with_lower: bool) -> Iterator[Sample]:
        size, chunk = self.direction_batch_size, self.chunk_size
        return _paired(
            self.upper.parts(size, chunk) if with_upper else (),
            self.lower.parts(size, chunk) if with_lower else (),
        )

    def state_dict(self) -> dict[str, Any]:
        """The positions of both streams."""
        return {"upper": self.upper.state_dict(), "lower": self.lower.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved positions."""
        self.upper.load_state_dict(state["upper"])
        self.lower.load_state_dict(state["lower"])


def stream_of(
    name: str,
    data: Any,
    *,
    batch_size: int | None,
    direction_batch_size: DirectionSize,
    seed: int,
    device: torch.device | None,
    home: torch.device,
) -> Stream:
    """The stream for whatever a user gives as ``upper_data`` or ``lower_data``.

    ``device`` is where batches are moved (None: they stay where they are); ``home`` is where x
    lies, and so where a function that makes batches is given its generator.
    """
    if data is None:
        return NoData()
    if isinstance(data, Together):
        if not data.data:
            raise ArgumentError(f"{name} is empty: {data.data!r}")
        seeds = np.random.SeedSequence(seed).generate_state(len(data.data), np.uint64)
        streams = {
            key: (
                path := data.called(key) if data.called else f"{name}[{key!r}]",
                stream_of(
                    path,
                    part,
                    batch_size=batch_size,
                    direction_batch_size=direction_batch_size,
                    seed=int(own) >> 1,
                    device=device,
                    home=home,
                ),
            )
            for (key, part), own in zip(data.data.items(), seeds, strict=True)
        }
        joint = Joint(streams, data.prepare)
        joint.sampled_here = any(stream.sampled_here for _, stream in streams.values())
        return joint
    if isinstance(data, Tensor | np.ndarray | tuple | Mapping):
        rows = move(data, device)
        tensors = _tensors(name, rows)
        length = len(tensors[0])
        _check_sizes(name, length, batch_size, direction_batch_size)
        return Rows(rows, tensors, batch_size, seed)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return _dataset_stream(name, data, batch_size, direction_batch_size, seed, device)
    if isinstance(data, IterableDataset):
        stream = Iterated(DataLoader(data, batch_size=batch_size), name, device)
        stream.sampled_here = True
        return stream
    if isinstance(data, Iterable):
        if isinstance(data, Sequence) and not data:
            raise ArgumentError(f"{name} is empty: {data!r}")
        return Iterated(data, name, device)
    if callable(data):
        return Sampled(data, seed, home)
    raise ArgumentTypeError(
        f"{name} must be a tensor, a tuple or dict of tensors, a Dataset, a DataLoader, an "
        f"iterable of batches, or a function of a torch.Generator, not {data!r}"
    )


def _dataset_stream(
    name: str,
    data: Dataset[Any],
    batch_size: int | None,
    direction_batch_size: DirectionSize,
    seed: int,
    device: torch.device | None,
) -> Stream:
    try:
        length = len(data)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(f"{name} is a Dataset without __len__: {data!r}") from None
    _check_sizes(name, length, batch_size, direction_batch_size)

    def take(rows: Tensor | slice) -> Any:
        indices = range(*rows.indices(length)) if isinstance(rows, slice) else rows.tolist()
        batch = default_collate([data[i] for i in indices])
        return move(batch, device)

    return Indexed(length, take, batch_size, seed)


def _tensors(name: str, data: Any) -> list[Tensor]:
    """The tensors of a batch of rows, checked to have one first dimension."""
    if isinstance(data, Tensor):
        named = {name: data}
    elif isinstance(data, Mapping):
        named = {f"{name}[{key!r}]": value for key, value in data.items()}
    else:
        named = {f"{name}[{index}]": value for index, value in enumerate(data)}
    if not named:
        raise ArgumentError(f"{name} is empty: {data!r}")
    for path, value in named.items():
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(
                f"{path} must be a tensor, not {type(value).__name__} {value!r}"
            )
        if value.ndim == 0:
            raise ArgumentError(f"{path} is a scalar; its first dimension must count the samples")
    lengths = {path: len(value) for path, value in named.items()}
    if len(set(lengths.values())) > 1:
        raise ArgumentError(
            "the first dimensions of the data differ: "
            + ", ".join(f"len({path}) = {length}" for path, length in lengths.items())
        )
    return list(named.values())


def _check_sizes(
    name: str, length: int, batch_size: int | None, direction_batch_size: DirectionSize
) -> None:
    if length == 0:
        raise ArgumentError(f"{name} is empty: it holds 0 samples")
    if batch_size is not None and batch_size > length:
        raise ArgumentError(f"batch_size={batch_size} is more than the {length} samples of {name}")
    if isinstance(direction_batch_size, int | np.integer) and direction_batch_size > length:
        raise ArgumentError(
            f"direction_batch_size={direction_batch_size} is more than the {length} samples of "
            f"{name}; use 'all' for every sample once"
        )


def in_parts(count: int, chunk: int | None) -> Iterator[tuple[slice, float]]:
    """``count`` rows in parts of ``chunk``, None: in one; each with its share of all."""
    chunk = count if chunk is None else chunk
    for start in range(0, count, chunk):
        stop = min(start + chunk, count)
        yield slice(start, stop), (stop - start) / count


def _paired(
    uppers: Iterable[tuple[Any, float]], lowers: Iterable[tuple[Any, float]]
) -> Iterator[Sample]:
    """Parts of both levels side by side; where one has fewer, its term is absent."""
    for (upper, upper_share), (lower, lower_share) in zip_longest(
        uppers, lowers, fillvalue=(None, 0.0)
    ):
        yield Sample(upper, lower, upper_share, lower_share)


def _batch_parts(batch: Any, chunk: int | None) -> Iterator[tuple[Any, float]]:
    """A batch in parts of at most ``chunk`` samples, each with its share of the whole."""
    if batch is None:
        yield None, 1.0
        return
    for rows, share in in_parts(_rows(batch), chunk):
        yield (batch if share == 1 else take_rows(batch, rows)), share


def take_rows(data: Any, rows: Tensor | slice) -> Any:
    """The chosen rows of a tensor, or of each tensor in a tuple or dict."""
    if isinstance(rows, slice):
        return mapped_rows(lambda tensor: tensor[rows], data)
    # several times as fast as data[rows], which can do much more
    return mapped_rows(lambda tensor: tensor.index_select(0, rows), data)


def mapped_rows(function: Callable[[Tensor], Tensor], data: Any) -> Any:
    """What a function makes of a tensor, or of each tensor in a tuple or dict."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, tuple | list):  # before Mapping, which takes longer to ask for
        parts = [mapped_rows(function, value) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    if isinstance(data, Mapping):
        return {key: mapped_rows(function, value) for key, value in data.items()}
    return tuple([mapped_rows(function, value) for value in data])


def _generators_of(data: Any) -> list[torch.Generator]:
    """The generators that a DataLoader and its samplers own."""
    owners = [data, getattr(data, "sampler", None), getattr(data, "batch_sampler", None)]
    owners.append(getattr(owners[-1], "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list(dict.fromkeys(g for g in found if isinstance(g, torch.Generator)))


def _rows(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of its first tensor."""
    if isinstance(batch, Tensor) and batch.ndim:
        return len(batch)
    if isinstance(batch, Mapping):
        return _rows(next(iter(batch.values())))
    if isinstance(batch, Sequence) and not isinstance(batch, str) and batch:
        return _rows(batch[0])
    raise ArgumentTypeError(f"cannot tell how many samples a batch holds: {batch!r}")


def move(batch: Any, device: torch.device | None) -> Any:
    """The batch with arrays as tensors and every tensor on ``device`` (None: where it is)."""
    if isinstance(batch, np.ndarray):
        batch = torch.from_numpy(batch)
    if isinstance(batch, Tensor):
        return batch if device is None else batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value, device) for value in batch)
    return batch
