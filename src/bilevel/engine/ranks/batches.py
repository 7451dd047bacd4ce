"""The batches of one rank: where drawing one fails, the others are not kept waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bilevel.sampling import DirectionSize, Draw, EpisodicDraw, Stream
from bilevel.variables import Form


class RankStream(Stream):
    """A stream that gives its last batch again where the next cannot be drawn.

    With it the rank goes on to the end of the evaluation, as the others do; what was raised is put
    among the ``failures``, which the check of the step raises, once the other ranks know of it.
    """

    def __init__(self, stream: Stream, failures: list[Exception]) -> None:
        self._stream = stream
        self._failures = failures
        self._last: list[Any] = []  # one batch; before the first, errors are not caught
        self._probed = 1
        self.sampled_here = stream.sampled_here
        self.rewinds = stream.rewinds

    def _instead(self, error: Exception) -> Any:
        if not self._last:
            raise error
        self._failures.append(error)
        return self._last[0]

    def next(self) -> Any:
        try:
            self._last = [self._stream.next()]
        except Exception as error:  # raised again by the check of the step
            return self._instead(error)
        return self._last[0]

    def peek(self) -> Any:
        try:
            batch = self._stream.peek()
        except Exception as error:  # raised again by the check of the step
            return self._instead(error)
        self._last = self._last or [batch]
        return batch

    def probe(self) -> list[Any]:
        return self._tried(self._stream.probe)

    def wide_probe(self) -> list[Any]:
        return self._tried(self._stream.wide_probe)

    def _tried(self, probe: Callable[[], list[Any]]) -> list[Any]:
        try:
            batches = probe()
        except Exception as error:  # raised again by the check of the step
            return [self._instead(error)] * self._probed
        self._probed = len(batches)
        return batches

    def parts(self, size: DirectionSize, chunk: int | None) -> Iterator[tuple[Any, float]]:
        try:
            for batch, share in self._stream.parts(size, chunk):
                self._last = [batch]
                yield batch, share
        except Exception as error:  # raised again by the check of the step
            yield self._instead(error), 1.0

    @property
    def deterministic(self) -> bool:
        return self._stream.deterministic

    @property
    def probed(self) -> bool:
        return self._stream.probed

    def mark(self) -> Any:
        return self._stream.mark()

    def go_back(self, mark: Any) -> None:
        self._stream.go_back(mark)

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def state_form(self) -> Form:
        return self._stream.state_form()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state)


def on_ranks(draw: Draw, failures: list[Exception]) -> Draw:
    """The same samples, from streams that do not keep the other ranks waiting."""
    if isinstance(draw, EpisodicDraw):
        if isinstance(draw.source, RankStream):
            return draw
        return EpisodicDraw(RankStream(draw.source, failures), draw.episodes, stacked=draw.stacked)
    if isinstance(draw.upper, RankStream):
        return draw
    return Draw(
        RankStream(draw.upper, failures),
        RankStream(draw.lower, failures),
        draw.direction_batch_size,
        draw.chunk_size,
        draw.chunked,
    )
