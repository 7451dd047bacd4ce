"""Minibatches at fixed places in memory for compiled code, and the same again for eager code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bilevel.engine.compiled.gathering import Block, Copies, doubling, gather
from bilevel.engine.compiled.tracing import Ready
from bilevel.sampling import Draw, NoData, Nodes, Sample, Stream, TensorRows, map_tensors, take_rows

GATHERED_BYTES = 1 << 22
"""Bytes of minibatches that are gathered at a time on a CPU, so that they stay in its caches."""

LARGE = 1 << 20
"""Bytes to gather below which it does not pay to wake a second thread."""


class LevelBatches:
    """The minibatches of one level for a whole outer step.

    Args:
        stream: no data, or rows.
        steps: how many evaluations an outer step has.
        samples: how many minibatches each of them needs.
        size: the rows of a minibatch; None: as the stream has it.
    """

    def __init__(self, stream: Stream, steps: int, samples: int, size: int | None = None) -> None:
        self._stream = stream
        self._rows: Any = None
        self._length = 0
        self._numbers: Tensor | None = None
        if isinstance(stream, TensorRows):
            self._rows = stream.rows
            self._length = stream.length
            if stream.batch_size is not None:
                shape = (steps, samples, size or stream.batch_size)
                self._numbers = torch.zeros(shape, dtype=torch.int64, device=stream.device)
                self._flat = self._numbers.view(-1)
        self._slots: list[Any] = []
        self._columns: list[tuple[Tensor, Tensor]] = []

    @property
    def size(self) -> int:
        """How many bytes the minibatches of an evaluation have."""
        if self._numbers is None:
            return 0
        assert isinstance(self._stream, TensorRows)
        return self._numbers[0].numel() * self._stream.row_bytes

    def make_slots(self, count: int) -> None:
        """Make room for the minibatches of that many evaluations."""
        if self._numbers is None:
            return
        _, samples, size = self._numbers.shape

        def room(column: Tensor) -> Tensor:
            rows = column.new_empty((count * samples * size, *column.shape[1:]))
            self._columns.append((column, rows))
            return rows

        rows = map_tensors(room, self._rows)
        self._slots = [
            take_rows(rows, slice(place * size, (place + 1) * size))
            for place in range(count * samples)
        ]

    def fill(self) -> None:
        """Draw the minibatches of the next outer step."""
        if self._numbers is not None:
            assert isinstance(self._stream, TensorRows)
            steps, samples, size = self._numbers.shape
            self._flat.copy_(self._stream.next_indices(steps * samples, size))

    def copies(self, first: int, last: int, place: int) -> Copies:
        """What to gather for the evaluations from the first to before the last, from a place on."""
        if self._numbers is None:
            return ()
        numbers = self._numbers[first:last].view(-1)
        start = place * self._numbers[0].numel()
        there = slice(start, start + len(numbers))
        # .data: otherwise torch counts all minibatches as changed when one of them is
        return tuple((column, numbers, rows.data[there]) for column, rows in self._columns)

    def slot(self, place: int, sample: int) -> Any:
        """One minibatch of the evaluation that has its rows at that place."""
        if self._numbers is None:
            return self._rows
        return self._slots[place * self._numbers.shape[1] + sample]

    def batch(self, step: Tensor, sample: int) -> Any:
        """One minibatch of the evaluation whose number is in ``step``, a tensor of one element."""
        if self._numbers is None:
            return self._rows
        # the numbers are within these bounds; clamped, the compiler need not check every entry
        step = step.clamp(0, len(self._numbers) - 1)
        numbers = self._numbers[:, sample].index_select(0, step).squeeze(0)
        return take_rows(self._rows, numbers.clamp(0, self._length - 1))


class Feed:
    """The samples of the evaluations of an outer step, all drawn before it begins.

    They are those that ``draw`` would have given one after the other.

    Args:
        draw: streams of rows, or of nothing.
        nodes: for each point whether f and whether g is evaluated there.
        shared: whether all points have the same sample.
        steps: how many evaluations an outer step has.
        device: where they are evaluated.
        ahead: whether minibatches may be gathered before they are needed. On a CPU they are: whole
            rows are copied, where compiled code would look up every few numbers which row they
            belong to.
        sizes: the rows of a minibatch of f and of g; None: as the streams have it.

    Attributes:
        evaluations: of how many evaluations the minibatches are gathered at a time; 0: of none.
    """

    def __init__(
        self,
        draw: Draw,
        nodes: Nodes,
        shared: bool,
        steps: int,
        device: torch.device,
        *,
        ahead: bool,
        sizes: tuple[int | None, int | None] = (None, None),
    ) -> None:
        self._nodes = nodes
        self._shared = shared
        self._device = device
        self.steps = steps
        f, g = (1, 1) if shared else (sum(f for f, _ in nodes), sum(g for _, g in nodes))
        self._upper = LevelBatches(draw.upper, steps, f, sizes[0])
        self._lower = LevelBatches(draw.lower, steps, g, sizes[1])
        levels = (self._upper, self._lower)
        size = sum(level.size for level in levels)
        self.evaluations = 0
        if ahead and size and device.type == "cpu":
            self.evaluations = min(steps, max(1, GATHERED_BYTES // size))
            for level in levels:
                level.make_slots(self.evaluations)
        self._large = self.evaluations * size >= LARGE
        self._gathering: dict[bool, dict[int, Ready]] = {}
        self._gathered = [
            self._samples(partial(self._upper.slot, place), partial(self._lower.slot, place))
            for place in range(self.evaluations)
        ]

    @staticmethod
    def possible(draw: Draw) -> bool:
        """Whether the streams are of a kind that compiled code can read from."""
        return all(isinstance(stream, NoData | TensorRows) for stream in (draw.upper, draw.lower))

    def fill(self) -> None:
        """Draw the samples of the next outer step."""
        self._upper.fill()
        self._lower.fill()

    def gathering(self, step: int, *, beside: bool) -> Ready | None:
        """What has to be run before an evaluation so that its :meth:`gathered` samples are there.

        Those of several are gathered by all threads; ``beside``: as far as it gets by a second one,
        while the evaluations before them run. None: what is run before an earlier one will do.
        """
        if not self.evaluations:
            return None
        beside = beside and self._large
        if beside not in self._gathering:
            self._gathering[beside] = dict(self._gatherings(beside))
        return self._gathering[beside].get(step)

    def _gatherings(self, beside: bool) -> Iterator[tuple[int, Ready]]:
        """By the number of an evaluation, what has to be run before it."""
        firsts = range(0, self.steps, self.evaluations)
        counts = [min(self.evaluations, self.steps - first) for first in firsts]
        if not beside:
            for first, count in zip(firsts, counts, strict=True):
                yield first, Ready(gather, self._copies(first, first + count, 0))
            return
        parts = [doubling(count) for count in counts]
        block = Block(
            [
                [self._copies(first + start, first + end, start) for start, end in own]
                for first, own in zip(firsts, parts, strict=True)
            ]
        )
        provide = partial(_provide, block)
        for group, (first, own) in enumerate(zip(firsts, parts, strict=True)):
            for part, (start, _) in enumerate(own):
                yield first + start, Ready(provide, (group, part), alone=True)

    def _copies(self, first: int, last: int, place: int) -> Copies:
        levels = (self._upper, self._lower)
        return tuple(copy for level in levels for copy in level.copies(first, last, place))

    def gathered(self, step: int) -> list[Sample]:
        """For each point its sample in an evaluation, at a place that stays the same."""
        return self._gathered[step % self.evaluations]

    def rest(self, done: int) -> list[list[Sample]]:
        """The samples of the evaluations from the one of that number on."""
        steps = torch.arange(done, self.steps, device=self._device)
        return [self.samples(step) for step in steps[:, None]]

    def samples(self, step: Tensor) -> list[Sample]:
        """For each point its sample in an evaluation."""
        return self._samples(partial(self._upper.batch, step), partial(self._lower.batch, step))

    def _samples(self, upper: Callable[[int], Any], lower: Callable[[int], Any]) -> list[Sample]:
        if self._shared:
            return [Sample(upper(0), lower(0))] * len(self._nodes)
        uppers, lowers = iter(range(len(self._nodes))), iter(range(len(self._nodes)))
        return [
            Sample(upper(next(uppers)) if f else None, lower(next(lowers)) if g else None)
            for f, g in self._nodes
        ]


def _provide(block: Block, part: tuple[int, int]) -> None:
    block.provide(*part)


class RedrawnSamples(Draw):
    """A draw that first gives out samples that were drawn before."""

    def __init__(self, draw: Draw, before: list[list[Sample]]) -> None:
        super().__init__(draw.upper, draw.lower, draw.direction_batch_size, draw.chunk_size)
        self.batches = draw.batches
        self._before = before

    def inner(self, nodes: Nodes, shared: bool) -> list[Sample]:
        return self._before.pop(0) if self._before else super().inner(nodes, shared)

    def direction(self, nodes: Nodes, shared: bool) -> Iterator[list[Sample]]:
        if self._before:
            yield self._before.pop(0)
        else:
            yield from super().direction(nodes, shared)
