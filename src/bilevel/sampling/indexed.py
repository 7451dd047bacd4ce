"""Data that can be indexed: minibatches are uniform, with replacement.

Sampling with replacement makes each minibatch an independent, unbiased draw, which is what the
paper assumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bilevel.errors import StateError
from bilevel.sampling.rows import bytes_of, chunk_slices, take_rows
from bilevel.sampling.stream import PROBES, DirectionSize, Stream

_BLOCK = 1 << 16  # indices in a block: one call to the generator serves many minibatches
_FIRST = 1 << 12  # indices that a CPU draws first of a block: short runs need no more

WIDEST = 512
"""Rows of a batch in a wide probe: eight of them tell a rise of a few per cent from noise."""

CHEAP = 1 << 15
"""Numbers in a batch below which its size hardly counts: calling the operations takes longer."""

PART_BYTES = 1 << 22
"""Of several minibatches that are evaluated at once: more of them do not stay in a CPU's caches."""

KEPT_BYTES = 1 << 26
"""Of a probe; a larger one is taken again each time."""


class Indexed(Stream):
    """Data with a length and a way to take rows.

    Indices are drawn in blocks, on the device of the rows. The state is that of the generator
    before the current block, and how many indices of the block are used.
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
        self.length = length
        self.batch_size = batch_size
        self._take = take
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._block_state = self._generator.get_state()
        self._refill(0)
        self._everything: Any = None
        self._probes: dict[int, list[Any]] = {}

    def next(self) -> Any:
        if self.batch_size is None:
            if self._everything is None:
                self._everything = self._take(slice(0, self.length))
            return self._everything
        return self._take(self._indices(self.batch_size))

    @property
    def deterministic(self) -> bool:
        return self.batch_size is None

    @property
    def _cheap(self) -> int:
        """As many rows as a batch may have to take no longer than one that has fewer."""
        return 0

    @property
    def _widest(self) -> int:
        """The rows of the batches of a wide probe."""
        return max(self.batch_size or self.length, self._cheap)

    @property
    def _part_bytes(self) -> float:
        """The bytes of one minibatch; infinite where that is not known."""
        return math.inf

    def batches_in(self, most: int) -> int:
        return 1 if self.batch_size is None else max(1, min(most, self.length // self.batch_size))

    def rows_of(self, batches: int) -> tuple[int | None, int | None]:
        if self.batch_size is None or batches == 1:
            return None, None
        # equal parts, so that a sum over a batch has the same weight in each
        equal = (count for count in range(batches, 1, -1) if batches % count == 0)
        together = next((n for n in equal if n * self._part_bytes <= PART_BYTES), 1)
        return batches * self.batch_size, together * self.batch_size

    def peek(self) -> Any:
        return self._take(slice(0, self.batch_size or self.length))

    def probe(self) -> list[Any]:
        return self._spread(self.batch_size or self.length)

    def joined_probe(self, places: Sequence[int]) -> Any | None:
        if self.batch_size is None or len(places) * self._part_bytes > PART_BYTES:
            return None
        parts = self._rows_spread(self.batch_size)
        return self._take(torch.cat([parts[place] for place in places]))

    def wide_probe(self) -> list[Any]:
        return self._spread(self._widest)

    def whole(self) -> tuple[Any, float] | None:
        cost = max(1.0, self.length / self._widest)
        if self.batch_size is None or cost > PROBES:  # as large as a wide probe
            return super().whole()
        return self._take(slice(0, self.length)), cost

    def _spread(self, size: int) -> list[Any]:
        """Batches of so many rows, spread over all of them, because these may be sorted."""
        if self.batch_size is None:
            return [self.next()]
        if size in self._probes:
            return self._probes[size]
        probe = [self._take(rows) for rows in self._rows_spread(size)]
        if bytes_of(probe) <= KEPT_BYTES:
            self._probes[size] = probe
        return probe

    def _rows_spread(self, size: int) -> list[Tensor]:
        batches = max(1, min(PROBES, self.length // (self.batch_size or self.length)))
        count = min(batches * size, self.length)
        rows = torch.arange(count, device=self._block.device) * self.length // count
        return [rows[first::batches] for first in range(batches)]

    def parts(self, size: DirectionSize, chunk: int | None) -> Iterator[tuple[Any, float]]:
        if size is None:
            yield self.next(), 1.0
            return
        count = self.length if size == "all" else size
        indices = None if size == "all" else self._indices(count)
        for part, share in chunk_slices(count, chunk):
            yield self._take(part if indices is None else indices[part]), share

    def _indices(self, count: int) -> Tensor:
        self._advance(count)
        return self._block[self._used - count : self._used]

    def _advance(self, count: int) -> None:
        """Use the next ``count`` indices, which then end at ``_used`` in the block."""
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
        """Draw the block up to index ``count`` or further.

        A CPU draws one by one, so parts of a block have the same numbers as the block at once.
        """
        if self._block.device.type == "cpu":
            count = min(max(count, 2 * self._drawn, _FIRST), self._size)
        else:
            count = self._size
        # .data: autograd should not see a change of the indices that were given out before
        new = self._block.data[self._drawn : count]
        if len(new):
            new.random_(self.length, generator=self._generator)
        self._drawn = count

    def mark(self) -> dict[str, Any]:
        return {"generator": self._block_state, "block": self._size, "used": self._used}

    def go_back(self, mark: dict[str, Any]) -> None:
        self.load_state_dict(mark)

    def state_dict(self) -> dict[str, Any]:
        return {**self.mark(), "generator": self._block_state.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not 0 <= state["used"] <= state["block"]:
            raise StateError(
                f"the saved data says that {state['used']!r} of {state['block']!r} indices are used"
            )
        self._block_state = state["generator"].clone()
        self._generator.set_state(self._block_state)
        self._refill(state["block"])  # the same state gives the same block again
        self._used = state["used"]


class TensorRows(Indexed):
    """Tensors with one first dimension, which an engine may also gather from by itself.

    Attributes:
        rows: a tensor, or a tuple or dict of tensors.
        length: the number of rows.
        size: the number of entries in all rows.
        row_bytes: the number of bytes in a row.
        batch_size: rows per minibatch; None: all of them every time.
        device: where they lie.
    """

    def __init__(self, rows: Any, tensors: list[Tensor], batch_size: int | None, seed: int) -> None:
        self.rows = rows
        self.device = tensors[0].device
        length = len(tensors[0])
        super().__init__(length, partial(take_rows, rows), batch_size, seed, self.device)
        self.size = sum(tensor.numel() for tensor in tensors)
        self.row_bytes = sum(tensor.nbytes for tensor in tensors) // length

    @property
    def _cheap(self) -> int:
        return min(WIDEST, CHEAP * self.length // max(1, self.size))

    @property
    def _part_bytes(self) -> float:
        return float(self.row_bytes * (self.batch_size or self.length))

    def next_indices(self, batches: int, size: int) -> Tensor:
        """The indices of the next minibatches, each of ``size``, one after the other.

        The stream moves as if they had been taken one by one.
        """
        if self._used + batches * size <= self._size:
            return self._indices(batches * size)
        return torch.cat([self._indices(size) for _ in range(batches)])


class StackedIndices:
    """The indices that several streams give out, as one tensor with a row for each stream.

    The streams, which are all at the same position, move as if each had given out its own.
    """

    def __init__(self, streams: Sequence[Indexed]) -> None:
        self._streams = streams
        self._blocks = self._drawn()

    def _drawn(self) -> Tensor:
        return torch.stack([stream._block[: stream._drawn] for stream in self._streams])

    def next(self, count: int) -> Tensor:
        """The next ``count`` indices of each stream."""
        first = self._streams[0]
        if first._used + count <= first._drawn:
            for stream in self._streams:
                stream._used += count
        else:
            for stream in self._streams:
                stream._advance(count)
            self._blocks = self._drawn()
        return self._blocks[:, first._used - count : first._used]
