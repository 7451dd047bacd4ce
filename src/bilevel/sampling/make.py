"""From what a user gives as data to a stream of batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import check_function
from bilevel.sampling.combined import CombinedData, CombinedStream
from bilevel.sampling.indexed import Indexed, TensorRows
from bilevel.sampling.iterated import Iterated
from bilevel.sampling.rows import to_device
from bilevel.sampling.stream import DirectionSize, NoData, Sampled, Stream


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
    if isinstance(data, CombinedData):
        return _combined(
            name,
            data,
            seed,
            batch_size=batch_size,
            direction_batch_size=direction_batch_size,
            device=device,
            home=home,
        )
    if isinstance(data, Tensor | np.ndarray | tuple | Mapping):
        rows = to_device(data, device)
        tensors = _tensors(name, rows)
        _check_sizes(name, len(tensors[0]), batch_size, direction_batch_size)
        return TensorRows(rows, tensors, batch_size, seed)
    if isinstance(data, IterableDataset):
        stream = Iterated(DataLoader(data, batch_size=batch_size), name, device)
        stream.sampled_here = True
        return stream
    if isinstance(data, Dataset):
        length = _length(name, data)
        _check_sizes(name, length, batch_size, direction_batch_size)

        def take(rows: Tensor | slice) -> Any:
            indices = range(*rows.indices(length)) if isinstance(rows, slice) else rows.tolist()
            return to_device(default_collate([data[i] for i in indices]), device)

        return Indexed(length, take, batch_size, seed)
    if hasattr(data, "iloc"):  # going through a DataFrame gives the names of its columns
        raise ArgumentTypeError(
            f"{name} is a {type(data).__name__} of pandas; give its numbers as a tensor, "
            f"torch.as_tensor({name}.to_numpy()), or several tensors in a tuple or dict"
        )
    if isinstance(data, Iterable) and not isinstance(data, str | bytes):
        if isinstance(data, Sequence) and not data:
            raise ArgumentError(f"{name} is empty: {data!r}")
        return Iterated(data, name, device)
    if callable(data):
        one = "a function of one argument, a torch.Generator, such as lambda generator: ..."
        check_function(name, data, "generator", expected=one)
        return Sampled(data, seed, home)
    raise ArgumentTypeError(
        f"{name} must be a tensor, a tuple or dict of tensors, a Dataset, a DataLoader, an "
        f"iterable of batches, or a function of a torch.Generator, not {data!r}"
    )


def _combined(name: str, data: CombinedData, seed: int, **options: Any) -> CombinedStream:
    if not data.data:
        raise ArgumentError(f"{name} is empty: {data.data!r}")
    seeds = np.random.SeedSequence(seed).generate_state(len(data.data), np.uint64)
    streams = {}
    for (key, part), own in zip(data.data.items(), seeds, strict=True):
        called = data.called(key) if data.called else f"{name}[{key!r}]"
        streams[key] = called, stream_of(called, part, seed=int(own) >> 1, **options)
    return CombinedStream(streams, data.prepare)


def _length(name: str, data: Any) -> int:
    try:
        return len(data)
    except TypeError:
        raise ArgumentTypeError(f"{name} is a Dataset without __len__: {data!r}") from None


def _tensors(name: str, data: Any) -> list[Tensor]:
    """The tensors of ``data``, checked to have one first dimension."""
    if isinstance(data, Tensor):
        named = {name: data}
    else:
        items = data.items() if isinstance(data, Mapping) else enumerate(data)
        named = {f"{name}[{key!r}]": value for key, value in items}
    if not named:
        raise ArgumentError(f"{name} is empty: {data!r}")
    for path, value in named.items():
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(
                f"{path} must be a tensor, not {type(value).__name__} {value!r}"
            )
        if value.ndim == 0:
            raise ArgumentError(f"{path} is a scalar; its first dimension must count the samples")
        if value.layout != torch.strided:
            raise ArgumentTypeError(
                f"{path} is of the layout {value.layout}, of which no rows can be drawn; convert "
                "it with .to_dense(), or give a DataLoader or an iterable of batches"
            )
        if value.is_meta:
            raise ArgumentError(f"{path} is on the meta device and has no values")
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
