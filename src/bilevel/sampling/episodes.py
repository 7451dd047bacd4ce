"""Episodes: lower levels that change with every outer step, each with a batch of its own.

A task s has its own f_s and g_s, given by a pair of batches, and F(x) is the mean over tasks of
f_s(x, y_s*(x)). An outer step draws its tasks; all its inner steps and its x direction see the
same pairs.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import check_count, check_function
from bilevel.sampling.draw import Draw
from bilevel.sampling.stream import Stream
from bilevel.variables import Form
from bilevel.variables.forms import record

LOWER, UPPER = 0, 1
"""The places of the two batches in a pair."""


@dataclass(frozen=True)
class Episodes:
    """Tasks whose lower and upper batches belong together, drawn anew for every outer step.

    Args:
        source: what the tasks are drawn from: a function of a ``torch.Generator``, or an iterable
            such as a list or a DataLoader, that gives pairs ``(lower_batch, upper_batch)``. A step
            keeps its pairs for all inner steps and for the direction of x.
        tasks: how many tasks a step has, each with a y of its own; x moves along the mean of their
            directions. They are one computation where ``torch.vmap`` can evaluate the objectives
            and the batches have one shape, and else are taken one after another. With several,
            ``result.y`` and ``solver.y`` are lists, one for each task of the last step.
        start: where y starts in each step. "fresh": at y0, with a fresh optimizer. "warm": where
            the step before ended, for tasks that return. A function of x: at what it returns, in
            the structure of y (the iMAML of x for the initial weights of y is ``lambda x: x``);
            :class:`bilevel.ITD` differentiates it, the other methods follow y*(x), which does not
            depend on the start.

    Objectives, seeds and checkpoints are as without episodes; ``data`` takes the place of
    ``upper_data``, ``lower_data`` and ``batch_size``. On several ranks each has tasks of its own.
    ``upper_lr="auto"`` is ``torch.optim.Adam`` with a learning rate of 1e-3 here: whether a step of
    x was good cannot be tested on tasks that are gone. ``lower_lr="auto"`` measures the curvature
    of each step's tasks, and takes T plain steps. F3SA takes one inner step per outer step; its
    momentum needs start="warm", and starts afresh with every new y. BOME, MEHA, VPBGD, SOBA and
    MASOBA fit y over many outer steps, and take start="warm" alone.

    Example:
        >>> import torch, bilevel
        >>> def task(generator):  # regress to a line through 0 whose slope is near 2
        ...     slope = 2 + 0.1 * torch.randn((), generator=generator)
        ...     inputs = torch.randn(2, 5, generator=generator)
        ...     return (inputs[0], slope * inputs[0]), (inputs[1], slope * inputs[1])
        >>> def loss(x, y, batch):
        ...     return ((y * batch[0] - batch[1]) ** 2).mean()
        >>> problem = bilevel.Problem(loss, lambda x, y, batch: loss(x, y, batch) + (y - x) ** 2)
        >>> result = bilevel.minimize(
        ...     problem, torch.tensor(0.0), torch.tensor(0.0), steps=60,
        ...     method=bilevel.F2SA(lower_lr=0.1, upper_lr=0.5),
        ...     data=bilevel.Episodes(task, tasks=4, start=lambda x: x))
        >>> bool(abs(result.x - 2) < 0.2)
        True
    """

    source: Any
    tasks: int = 1
    start: Literal["fresh", "warm"] | Callable[[Any], Any] = "fresh"

    def __post_init__(self) -> None:
        given = isinstance(self.source, Iterable) and not isinstance(
            self.source, Tensor | Mapping | str | tuple
        )
        if not given and not callable(self.source):
            raise ArgumentTypeError(
                f"source must be a function of a torch.Generator or an iterable that gives pairs "
                f"(lower_batch, upper_batch), not {self.source!r}"
            )
        if isinstance(self.source, Sequence) and not self.source:
            raise ArgumentError(f"source is empty: {self.source!r}")
        check_count("tasks", self.tasks)
        if callable(self.start):
            check_function("start", self.start, "x")
        elif self.start not in ("fresh", "warm"):
            raise ArgumentError(
                f"start must be 'fresh', 'warm' or a function of x, not {self.start!r}"
            )


class TaskBatches:
    """The batches of one level, one for each task of a step.

    Attributes:
        batches: as the source gave them.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = list(batches)

    @cached_property
    def stacked(self) -> list[Tensor] | None:
        """The tensors of all batches, stacked; None: the batches are not alike."""
        parts = [list(_tensors_in(batch)) for batch in self.batches]
        columns = list(zip(*parts, strict=False))
        alike = all(_outline(batch) == _outline(self.batches[0]) for batch in self.batches)
        return [torch.stack(column) for column in columns] if alike else None

    @cached_property
    def stacked_twice(self) -> list[Tensor] | None:
        """:attr:`stacked` for two copies of y, those of the second after those of the first."""
        return None if self.stacked is None else [torch.cat([t, t]) for t in self.stacked]

    def with_tensors(self, tensors: Iterator[Tensor]) -> Any:
        """A batch in the structure of the first, made of these tensors."""
        return _rebuilt(self.batches[0], tensors)


def _tensors_in(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors_in(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors_in(part)


def _outline(batch: Any) -> Any:
    """What batches must have in common to be stacked: everything but the numbers in tensors."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype, batch.device
    if isinstance(batch, Mapping):
        return {key: _outline(part) for key, part in batch.items()}
    if isinstance(batch, list | tuple):
        return [_outline(part) for part in batch]
    return batch if isinstance(batch, str | int | float | None) else id(batch)


def _rebuilt(batch: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return next(tensors)
    if isinstance(batch, Mapping):
        return {key: _rebuilt(part, tensors) for key, part in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [_rebuilt(part, tensors) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


class _Held(Stream):
    """One level of the pairs that a draw holds."""

    def __init__(self, draw: EpisodicDraw, place: int) -> None:
        self._draw = draw
        self._place = place

    def next(self) -> Any:
        return self._draw.held[self._place]

    @property
    def constant_in_step(self) -> bool:
        return self._draw.renewed

    def in_step(self) -> Any:
        return self.next()

    def peek(self) -> Any:
        return self._draw.joined([self._draw.peeked()] * self._draw.tasks)[self._place]

    @property
    def probed(self) -> bool:
        return self._draw.source.probed

    def probe(self) -> list[Any]:
        tasks = self._draw.tasks
        pairs = [checked_pair(pair) for pair in self._draw.source.probe()]
        return [self._draw.joined([pair] * tasks)[self._place] for pair in pairs]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass  # the position is that of the source


class EpisodicDraw(Draw):
    """Pairs of batches, held from one :meth:`begin` to the next.

    Args:
        source: a stream of pairs.
        episodes: how many tasks a step has, and where y starts.
        stacked: whether a batch is a :class:`TaskBatches`, which it always is for several tasks.

    Attributes:
        source: the stream.
        held: the present batches of g and of f.
    """

    def __init__(self, source: Stream, episodes: Episodes, *, stacked: bool) -> None:
        super().__init__(_Held(self, UPPER), _Held(self, LOWER))
        self.source = source
        self.episodes = episodes
        self.tasks = int(episodes.tasks)
        self.stacked = stacked
        self._held: tuple[Any, Any] | None = None

    @property
    def start(self) -> Callable[[Any], Any] | None:
        start = self.episodes.start
        return start if callable(start) else None

    @property
    def held(self) -> tuple[Any, Any]:
        """The batches of g and of f of the present tasks."""
        if self._held is None:
            self.begin()
        assert self._held is not None
        return self._held

    def begin(self) -> None:
        self._held = self.joined([checked_pair(self.source.next()) for _ in range(self.tasks)])

    def joined(self, pairs: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        """The batches of g and of f of several tasks."""
        if not self.stacked:
            return pairs[0]
        lower, upper = zip(*pairs, strict=True)
        return TaskBatches(lower), TaskBatches(upper)

    def peeked(self) -> tuple[Any, Any]:
        """The pair of one task, without moving the source."""
        return checked_pair(self.source.peek())

    def peek(self) -> tuple[Any, Any]:
        lower, upper = self.peeked()
        return upper, lower

    def mark(self) -> Any:
        return self.source.mark()

    def go_back(self, mark: Any) -> None:
        self.source.go_back(mark)

    def state_dict(self) -> dict[str, Any]:
        return {"episodes": self.source.state_dict()}

    def state_form(self) -> Form:
        return record({"episodes": self.source.state_form()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state["episodes"])
        self._held = None


def checked_pair(given: Any) -> tuple[Any, Any]:
    """What a source gave for a task, as (lower_batch, upper_batch)."""
    if not isinstance(given, list | tuple) or len(given) != 2:
        shown = f"{len(given)} parts" if isinstance(given, list | tuple) else reprlib.repr(given)
        if isinstance(given, Tensor):
            shown = f"a tensor of shape {tuple(given.shape)}"
        raise ArgumentTypeError(
            f"the source of Episodes must give pairs (lower_batch, upper_batch), but gave {shown}"
        )
    lower, upper = given
    return lower, upper
