"""Stream: the batches of one level; and the streams of no data and of a function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from bilevel.errors import ArgumentError
from bilevel.variables import Form, form_of

DirectionSize: TypeAlias = int | Literal["all"] | None
"""How many samples are behind an x direction; None: one batch."""

PROBES = 8
"""The most minibatches in a probe, which stands for all data."""


class Stream(ABC):
    """The batches of one level.

    Attributes:
        sampled_here: whether the stream, not the data, decides the size of a batch.
        rewinds: whether going back to a saved position costs little.
    """

    sampled_here = False
    rewinds = True

    @abstractmethod
    def next(self) -> Any:
        """The next batch."""

    @property
    def deterministic(self) -> bool:
        """Whether every batch is the same."""
        return False

    @property
    def constant_in_step(self) -> bool:
        """Whether all batches of an outer step are the same."""
        return self.deterministic

    def in_step(self) -> Any:
        """The batch of the present outer step, where all its batches are the same."""
        return self.peek()

    @abstractmethod
    def peek(self) -> Any:
        """A batch such as :meth:`next` could give, without moving the stream."""

    @property
    def probed(self) -> bool:
        """Whether :meth:`probe` is available."""
        return True

    def probe(self) -> list[Any]:
        """A few batches, the same ones in every call, in a resumed run too."""
        return [self.peek()]

    def joined_probe(self, places: Sequence[int]) -> Any | None:
        """The batches at some places of the probe as one; None: that is not known to be as fast."""
        return None

    def wide_probe(self) -> list[Any]:
        """The same with larger batches, where these take no longer to evaluate."""
        return self.probe()

    def whole(self) -> tuple[Any, float] | None:
        """All samples as one batch, and how many minibatches take about as long to evaluate.

        None: they are too many, or not at hand.
        """
        return (self.peek(), 1.0) if self.deterministic else None

    def batches_in(self, most: int) -> int:
        """How many independent minibatches can be taken together, up to ``most``."""
        return 1

    def rows_of(self, batches: int) -> tuple[int | None, int | None]:
        """How many samples so many minibatches have, and in what parts to evaluate them.

        As :meth:`parts` takes them; for as many minibatches as :meth:`batches_in` says.
        """
        return None, None

    def parts(self, size: DirectionSize, chunk: int | None) -> Iterator[tuple[Any, float]]:
        """``size`` samples in parts of at most ``chunk``, each with its share of the whole."""
        if size is not None:
            raise ArgumentError(
                f"direction_batch_size={size!r} needs data that can be indexed (tensors or a "
                f"Dataset) or, for 'all', gone through again (a DataLoader or a list of batches)"
            )
        yield self.next(), 1.0

    def mark(self) -> Any:
        """The present position, at so little cost that every step can ask for it.

        None: the stream cannot go back.
        """
        return None

    def go_back(self, mark: Any) -> None:
        """Return to where :meth:`mark` was called, where that is possible."""
        return

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position in the stream."""

    def state_form(self) -> Form:
        """What a saved position must look like: as this one, with other numbers."""
        return form_of(self.state_dict())

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""


class NoData(Stream):
    """The stream of an objective without data: every batch is None."""

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


class Sampled(Stream):
    """Batches made by a function of a generator: ``sample(generator) -> batch``.

    A function that leaves the generator alone hands on batches from elsewhere, such as those of the
    loop around a run. Nobody can draw these again.
    """

    def __init__(
        self, sample: Callable[[torch.Generator], Any], seed: int, device: torch.device
    ) -> None:
        self._sample = sample
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._origin = self._generator.get_state()
        self._draws: bool | None = None

    def next(self) -> Any:
        return self._sample(self._generator)

    @property
    def probed(self) -> bool:
        if self._draws is None:
            self.peek()
        return bool(self._draws)

    def peek(self) -> Any:
        return self._sample_from(self._generator.get_state(), 1)[0]

    def probe(self) -> list[Any]:
        return self._sample_from(self._origin, PROBES)

    def _sample_from(self, state: Tensor, count: int) -> list[Any]:
        now = self._generator.get_state()
        try:
            self._generator.set_state(state)
            batches = [self._sample(self._generator) for _ in range(count)]
            self._draws = not torch.equal(self._generator.get_state(), state)
        finally:
            self._generator.set_state(now)
        return batches

    def mark(self) -> Tensor:
        return self._generator.get_state()

    def go_back(self, mark: Tensor) -> None:
        self._generator.set_state(mark)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state(), "origin": self._origin.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self._origin = state["origin"].clone()
