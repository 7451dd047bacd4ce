"""Minibatches where compiled code finds them, and the same ones again for eager code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bilevel.streams import Draw, NoData, Nodes, Rows, Sample, Stream, take_rows


class Level:
    """The minibatches of one level for a whole outer step.

    Args:
        stream: no data, or rows.
        steps: how many evaluations an outer step has.
        samples: how many minibatches each of them needs.
    """

    def __init__(self, stream: Stream, steps: int, samples: int) -> None:
        self._stream = stream
        self._rows: Any = None
        self._length = 0
        self._numbers: Tensor | None = None
        if isinstance(stream, Rows):
            self._rows = stream.rows
            self._length = stream.length
            if stream.batch_size is not None:
                size = (steps, samples, stream.batch_size)
                self._numbers = torch.zeros(size, dtype=torch.int64, device=stream.device)
                self._flat = self._numbers.view(-1)

    def fill(self) -> None:
        """Draw the minibatches of the next outer step."""
        if self._numbers is not None:
            assert isinstance(self._stream, Rows)
            steps, samples, size = self._numbers.shape
            self._flat.copy_(self._stream.ahead(steps * samples, size))

    def batch(self, step: Tensor, sample: int) -> Any:
        """One minibatch of the evaluation whose number is in ``step``, a tensor of one element."""
        if self._numbers is None:
            return self._rows
        # they are within these bounds; where a compiler sees that, it does not check every entry
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
    """

    def __init__(self, draw: Draw, nodes: Nodes, shared: bool, steps: int) -> None:
        self._nodes = nodes
        self._shared = shared
        self.steps = steps
        f, g = (1, 1) if shared else (sum(f for f, _ in nodes), sum(g for _, g in nodes))
        self._upper = Level(draw.upper, steps, f)
        self._lower = Level(draw.lower, steps, g)

    @staticmethod
    def possible(draw: Draw) -> bool:
        """Whether the streams are of a kind that compiled code can read from."""
        return all(isinstance(stream, NoData | Rows) for stream in (draw.upper, draw.lower))

    def fill(self) -> None:
        """Draw the samples of the next outer step."""
        self._upper.fill()
        self._lower.fill()

    def samples(self, step: Tensor) -> list[Sample]:
        """For each point its sample in an evaluation."""
        if self._shared:
            sample = Sample(self._upper.batch(step, 0), self._lower.batch(step, 0))
            return [sample] * len(self._nodes)
        uppers, lowers = iter(range(len(self._nodes))), iter(range(len(self._nodes)))
        return [
            Sample(
                self._upper.batch(step, next(uppers)) if f else None,
                self._lower.batch(step, next(lowers)) if g else None,
            )
            for f, g in self._nodes
        ]


class Drawn(Draw):
    """A draw that begins with samples that were drawn before."""

    def __init__(self, draw: Draw, before: list[list[Sample]]) -> None:
        super().__init__(draw.upper, draw.lower, draw.direction_batch_size, draw.chunk_size)
        self._before = before

    def inner(self, nodes: Nodes, shared: bool) -> list[Sample]:
        return self._before.pop(0) if self._before else super().inner(nodes, shared)

    def direction(self, nodes: Nodes, shared: bool) -> Iterator[list[Sample]]:
        if self._before:
            yield self._before.pop(0)
        else:
            yield from super().direction(nodes, shared)
