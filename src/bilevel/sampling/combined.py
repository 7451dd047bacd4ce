"""Data of several kinds, drawn side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bilevel.sampling.stream import Stream


@dataclass(frozen=True)
class CombinedData:
    """Data of several kinds; every batch is a dict with one batch of each.

    Attributes:
        data: what each kind is drawn from, by name; anything that ``lower_data`` may be.
        called: from the name of a kind to what messages call it; None: as ``lower_data['web']``.
        prepare: makes the batch that the objectives get from what messages call the kind and the
            batch that was drawn. None: it stays as it is.

    Example:
        >>> import bilevel, torch
        >>> problem = bilevel.Problem(
        ...     upper=lambda x, y, batch: (y - 2) ** 2,
        ...     lower=lambda x, y, batch: x.softmax(0) @ torch.stack(
        ...         [((y - batch[name]) ** 2).mean() for name in "ab"]))
        >>> kinds = CombinedData({"a": [torch.zeros(4)], "b": [torch.full((2,), 4.0)]})
        >>> result = bilevel.minimize(problem, torch.zeros(2), torch.tensor(0.0),
        ...                           lower_data=kinds, steps=50)
        >>> [round(w, 2) for w in result.x.softmax(0).tolist()]
        [0.5, 0.5]
    """

    data: Mapping[str, Any]
    called: Callable[[str], str] | None = None
    prepare: Callable[[str, Any], Any] | None = None


class CombinedStream(Stream):
    """The streams of :class:`CombinedData`, by name, each with what messages call it."""

    def __init__(
        self, streams: Mapping[str, tuple[str, Stream]], prepare: Callable[[str, Any], Any] | None
    ) -> None:
        self._called = {name: called for name, (called, _) in streams.items()}
        self._streams = {name: stream for name, (_, stream) in streams.items()}
        self._prepare = prepare
        self.sampled_here = any(stream.sampled_here for stream in self._streams.values())
        self.rewinds = all(stream.rewinds for stream in self._streams.values())

    def _prepared(self, batches: dict[str, Any]) -> dict[str, Any]:
        if self._prepare is None:
            return batches
        return {name: self._prepare(self._called[name], b) for name, b in batches.items()}

    def next(self) -> Any:
        return self._prepared({name: stream.next() for name, stream in self._streams.items()})

    @property
    def deterministic(self) -> bool:
        return all(stream.deterministic for stream in self._streams.values())

    def peek(self) -> Any:
        return self._prepared({name: stream.peek() for name, stream in self._streams.items()})

    @property
    def probed(self) -> bool:
        return all(stream.probed for stream in self._streams.values())

    def probe(self) -> list[Any]:
        probes = {name: stream.probe() for name, stream in self._streams.items()}
        fewest = min(map(len, probes.values()))
        return [self._prepared({n: p[i] for n, p in probes.items()}) for i in range(fewest)]

    def mark(self) -> dict[str, Any]:
        return {name: stream.mark() for name, stream in self._streams.items()}

    def go_back(self, mark: dict[str, Any]) -> None:
        for name, stream in self._streams.items():
            stream.go_back(mark[name])

    def state_dict(self) -> dict[str, Any]:
        return {name: stream.state_dict() for name, stream in self._streams.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, stream in self._streams.items():
            stream.load_state_dict(state[name])
