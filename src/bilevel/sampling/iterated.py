"""Iterables of batches, such as a DataLoader."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bilevel.errors import ArgumentError, DataExhaustedError, StateError
from bilevel.sampling.randomness import global_generators_kept
from bilevel.sampling.rows import count_rows, to_device
from bilevel.sampling.stream import DirectionSize, Stream


class Iterated(Stream):
    """A DataLoader or any other iterable of batches, begun again whenever it ends.

    An iterator or generator cannot be begun again; its end raises
    :class:`~bilevel.errors.DataExhaustedError`. The position is the state of the random generators
    at the start of the epoch and a count of batches, so resuming replays the epoch up to there.
    """

    rewinds = False

    def __init__(self, data: Iterable[Any], name: str, device: torch.device | None) -> None:
        self._data = data
        self._name = name
        self._device = device
        self._iterator: Iterator[Any] | None = None
        self._once = isinstance(data, Iterator)
        self._generators = _generators_of(data)
        self._epoch_state = self._random_state()
        self._position = 0
        self._ahead: list[Any] = []  # the batch that was peeked at, if any

    @property
    def probed(self) -> bool:
        return False  # a batch that was drawn may never come again

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
            yield to_device(batch, self._device), count_rows(batch) / total

    def _samples(self) -> int:
        if isinstance(self._data, DataLoader) and self._data.batch_size is not None:
            with suppress(TypeError):  # an IterableDataset without a length
                if self._data.drop_last:
                    return len(self._data) * self._data.batch_size
                return len(self._data.sampler)  # type: ignore[arg-type]
        elif isinstance(self._data, Sequence):
            return sum(map(count_rows, self._data))
        raise ArgumentError(
            f"direction_batch_size='all' needs to know how many samples {self._name} holds: give "
            f"tensors, a Dataset, a DataLoader or a list of batches, not {self._data!r}"
        )

    def _pull(self) -> Any:
        iterator = self._begin() if self._iterator is None else self._iterator
        try:
            return to_device(next(iterator), self._device)
        except StopIteration:
            if self._once:
                raise DataExhaustedError(
                    f"{self._name} ended after {self._position} batches and cannot be begun again; "
                    f"give a DataLoader, a list or an endless iterator"
                ) from None
        try:
            return to_device(next(self._begin()), self._device)
        except StopIteration:
            raise DataExhaustedError(f"{self._name} gave no batch at all") from None

    def _begin(self) -> Iterator[Any]:
        self._epoch_state = self._random_state()
        self._iterator = iter(self._data)
        self._position = 0
        return self._iterator

    def _random_state(self) -> dict[str, Any]:
        return {"global": torch.get_rng_state(), "own": [g.get_state() for g in self._generators]}

    def _set_own(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Iterated:
        """A stream of its own that is at the same place; the epoch is replayed up to there."""
        instead = (
            "make another Solver, with data of its own, and give it the state of this one by "
            "load_state_dict"
        )
        if self._once:
            raise StateError(f"{self._name} is an iterator, which cannot be copied; {instead}")
        try:
            data = copy.deepcopy(self._data, memo)
        except Exception as error:  # what the user's own data raises may be anything
            raise StateError(
                f"{self._name} ({type(self._data).__name__}) cannot be copied "
                f"({type(error).__name__}: {error}); {instead}"
            ) from error
        copied = Iterated(data, self._name, self._device)
        memo[id(self)] = copied
        with global_generators_kept():
            copied.load_state_dict(self.state_dict())
        return copied

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": dict(self._epoch_state),
            "own": self._random_state()["own"],
            "position": self._position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        most = math.inf
        with suppress(TypeError):  # it does not say how many batches it has
            most = len(self._data)  # type: ignore[arg-type]
        if not 0 <= state["position"] <= most:
            raise StateError(
                f"the saved position in {self._name} is {state['position']!r}, of {most} batches"
            )
        if self._once:
            behind = state["position"] - self._position
            if behind < 0:
                raise StateError(
                    f"{self._name} is an iterator that is {-behind} batches past the saved "
                    f"position and cannot go back; give a fresh one"
                )
            for _ in range(behind):
                self.next()
            return
        torch.set_rng_state(state["epoch"]["global"])
        self._set_own(state["epoch"]["own"])
        self._ahead.clear()
        self._begin()
        self.peek()  # an epoch draws its order with its first batch
        for _ in range(state["position"]):
            self.next()
        self._set_own(state["own"])  # others may have drawn from them since


def _generators_of(data: Any) -> list[torch.Generator]:
    """The generators that a DataLoader and its samplers own."""
    owners = [data, getattr(data, "sampler", None), getattr(data, "batch_sampler", None)]
    owners.append(getattr(owners[-1], "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list(dict.fromkeys(g for g in found if isinstance(g, torch.Generator)))
