"""Draw: the samples of both levels, as an algorithm asks for them.

An algorithm asks for the samples of an inner step, and for the samples behind an x direction,
which may be many more and then come in parts.

Sharing. With ``shared=True`` all copies of the lower variable are evaluated on the same samples,
so that the noise of lam * (g(x, y) - g(x, z)) cancels instead of growing with lam^2; with
``shared=False`` every term has its own, as in the paper's Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeAlias

from bilevel.errors import StateError
from bilevel.sampling.rows import split_batch
from bilevel.sampling.stream import DirectionSize, Stream
from bilevel.variables import Form
from bilevel.variables.forms import each, record, whole

Nodes: TypeAlias = Sequence[tuple[bool, bool]]
"""For each copy of the lower variable whether f, and whether g, is evaluated at it."""


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


class Draw:
    """The samples of both levels.

    Args:
        upper: the stream behind f.
        lower: the stream behind g.
        direction_batch_size: how many samples are behind an x direction; None: one batch.
        chunk_size: the largest part in which those are evaluated.
        chunked: whether minibatches too may be larger than that and are split.

    Attributes:
        batches: how many minibatches of f and of g are behind an x direction where the size is not
            given.
        tasks: how many lower levels an outer step has, each with samples and a copy of y of its
            own; more than one only in episodes.
        renewed: whether each outer step has a lower level of its own, held for all its inner steps,
            which may count on that.
    """

    tasks = 1
    renewed = False

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
        self.batches = (1, 1)

    def begin(self) -> None:
        """Called before each outer step; episodes draw their tasks."""

    @property
    def start(self) -> Callable[[Any], Any] | None:
        """From x to where y starts in each outer step; None: it is no function of x."""
        return None

    @property
    def one_batch(self) -> bool:
        """Whether an x direction is of one minibatch of each level."""
        return self.direction_batch_size is None and self.batches == (1, 1)

    @property
    def direction_samples(self) -> tuple[int | None, int | None]:
        """How many samples of f and of g were chosen to be behind an x direction; None: a batch."""
        upper, lower = self.batches
        return self.upper.rows_of(upper)[0], self.lower.rows_of(lower)[0]

    @property
    def in_one_part(self) -> bool:
        """Whether the samples chosen to be behind an x direction are evaluated all at once."""
        pairs = zip((self.upper, self.lower), self.batches, strict=True)
        return all(size == part for size, part in (s.rows_of(count) for s, count in pairs))

    @property
    def sweeps(self) -> bool:
        """Whether all samples are behind every x direction."""
        full = self.upper.deterministic and self.lower.deterministic
        return full or self.direction_batch_size == "all"

    def peek(self) -> tuple[Any, Any]:
        """What f and g could be evaluated on next, without moving the streams."""
        upper, lower = self.upper.peek(), self.lower.peek()
        if not self.chunked:
            return upper, lower
        first = next(self._split(Sample(upper, lower)))
        return first.upper, first.lower

    def inner(self, nodes: Nodes, shared: bool) -> list[Sample]:
        """For each copy its sample for one inner step."""
        if shared:
            return [Sample(self.upper.next(), self.lower.next())] * len(nodes)
        return [
            Sample(self.upper.next() if f else None, self.lower.next() if g else None)
            for f, g in nodes
        ]

    def inner_parts(self, nodes: Nodes, shared: bool) -> list[list[Sample]]:
        """:meth:`inner` in parts, for each part one sample per copy."""
        samples = self.inner(nodes, shared)
        if not self.chunked:
            return [samples]
        # Copies with one sample get the same objects as parts, because sharing is told by identity.
        parts = {id(sample): list(self._split(sample)) for sample in samples}
        of_copies = (parts[id(sample)] for sample in samples)
        return [list(part) for part in zip_longest(*of_copies, fillvalue=_ABSENT)]

    def _split(self, sample: Sample) -> Iterator[Sample]:
        chunk = self.chunk_size
        return _paired(split_batch(sample.upper, chunk), split_batch(sample.lower, chunk))

    def direction(self, nodes: Nodes, shared: bool) -> Iterator[list[Sample]]:
        """The samples behind one x direction: in parts, for each part one sample per copy."""
        if self.direction_batch_size is None and self.chunked:
            yield from self.inner_parts(nodes, shared)
        elif shared:
            for sample in self.parts(upper=True, lower=True):
                yield [sample] * len(nodes)
        else:
            of_copies = (self.parts(upper=f, lower=g) for f, g in nodes)
            for part in zip_longest(*of_copies, fillvalue=_ABSENT):
                yield list(part)

    def parts(self, *, upper: bool = False, lower: bool = False) -> Iterator[Sample]:
        """The samples behind one x direction, of one level or of both, in parts."""
        streams = zip((self.upper, self.lower), self.batches, (upper, lower), strict=True)
        return _paired(*(self._parts_of(*each) for each in streams))

    def _parts_of(self, stream: Stream, batches: int, asked: bool) -> Iterable[tuple[Any, float]]:
        if not asked:
            return ()
        if self.direction_batch_size is None:
            return stream.parts(*stream.rows_of(batches))
        return stream.parts(self.direction_batch_size, self.chunk_size)

    def mark(self) -> Any:
        """The present positions, at little cost; see :meth:`bilevel.sampling.Stream.mark`."""
        return self.upper.mark(), self.lower.mark()

    def go_back(self, mark: Any) -> None:
        """Return to where :meth:`mark` was called, as far as the streams can."""
        for stream, place in zip((self.upper, self.lower), mark, strict=True):
            stream.go_back(place)

    def state_dict(self) -> dict[str, Any]:
        """The positions of both streams, and what was chosen to be behind an x direction."""
        return {
            "upper": self.upper.state_dict(),
            "lower": self.lower.state_dict(),
            "batches": list(self.batches),
        }

    def state_form(self) -> Form:
        """What saved positions must look like."""
        return record(
            {
                "upper": self.upper.state_form(),
                "lower": self.lower.state_form(),
                "batches": each([whole(1), whole(1)]),
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved positions."""
        self.upper.load_state_dict(state["upper"])
        self.lower.load_state_dict(state["lower"])
        upper, lower = state["batches"]
        fits = self.upper.batches_in(upper) == upper and self.lower.batches_in(lower) == lower
        if not fits:
            raise StateError(f"the data has no x directions of {state['batches']!r} minibatches")
        self.batches = upper, lower


def _paired(
    uppers: Iterable[tuple[Any, float]], lowers: Iterable[tuple[Any, float]]
) -> Iterator[Sample]:
    """Parts of both levels side by side; where one level has fewer, its term is absent."""
    for (upper, upper_share), (lower, lower_share) in zip_longest(
        uppers, lowers, fillvalue=(None, 0.0)
    ):
        yield Sample(upper, lower, upper_share, lower_share)
