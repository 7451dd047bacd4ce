"""Batches: their rows (samples), their tensors, and where these lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel.errors import ArgumentTypeError


def count_rows(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor."""
    if isinstance(batch, Tensor) and batch.ndim:
        return len(batch)
    if isinstance(batch, Mapping):
        return count_rows(next(iter(batch.values())))
    if isinstance(batch, Sequence) and not isinstance(batch, str) and batch:
        return count_rows(batch[0])
    raise ArgumentTypeError(f"cannot tell how many samples a batch holds: {batch!r}")


def take_rows(data: Any, rows: Tensor | slice) -> Any:
    """The chosen rows of a tensor, or of each tensor in a tuple or dict."""
    if isinstance(rows, slice):
        return map_tensors(lambda tensor: tensor[rows], data)
    # index_select is several times as fast as tensor[rows], which can do much more
    return map_tensors(lambda tensor: tensor.index_select(0, rows), data)


def map_tensors(function: Callable[[Tensor], Tensor], data: Any) -> Any:
    """``function`` of a tensor, or of each tensor in a tuple or dict."""
    if isinstance(data, Tensor):
        return function(data)
    if not isinstance(data, tuple | list) and isinstance(data, Mapping):  # the slow check last
        return {key: map_tensors(function, value) for key, value in data.items()}
    parts = [map_tensors(function, value) for value in data]
    return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)


def bytes_of(batch: Any) -> int:
    """The bytes of all tensors in a batch."""
    if isinstance(batch, Tensor):
        return batch.nbytes
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return sum(map(bytes_of, batch)) if isinstance(batch, list | tuple) else 0


def chunk_slices(count: int, chunk: int | None) -> Iterator[tuple[slice, float]]:
    """``count`` rows in slices of ``chunk`` (None: in one), each with its share of all."""
    chunk = count if chunk is None else chunk
    for start in range(0, count, chunk):
        stop = min(start + chunk, count)
        yield slice(start, stop), (stop - start) / count


def split_batch(batch: Any, chunk: int | None) -> Iterator[tuple[Any, float]]:
    """A batch in parts of at most ``chunk`` samples, each with its share of the whole."""
    if batch is None:
        yield None, 1.0
        return
    for rows, share in chunk_slices(count_rows(batch), chunk):
        yield (batch if share == 1 else take_rows(batch, rows)), share


def to_device(batch: Any, device: torch.device | None) -> Any:
    """The batch with arrays as tensors and every tensor on ``device`` (None: where it is)."""
    if isinstance(batch, np.ndarray):
        batch = torch.from_numpy(batch)
    if isinstance(batch, Tensor):
        return batch if device is None else batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [to_device(value, device) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
