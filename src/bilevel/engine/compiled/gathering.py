"""Minibatches that a second thread gathers while the first computes with those before them.

The rows of a minibatch lie all over the data, so gathering them is mostly waiting for memory. Where
an evaluation is so small that one thread is better for it than several, a second has the time.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeAlias

import torch
from torch import Tensor

Copies: TypeAlias = tuple[tuple[Tensor, Tensor, Tensor], ...]
"""Columns, the numbers of their rows, and where these go."""


def gather(copies: Copies) -> None:
    """Copy the rows to where they go."""
    for column, numbers, rows in copies:
        torch.index_select(column, 0, numbers, out=rows)


def doubling(count: int) -> list[tuple[int, int]]:
    """The parts of 0, ..., count - 1: 0, 1, 2 to 3, 4 to 7, ..., each with the one after its last.

    So what is needed first is there soon, and there are few parts. To gather a minibatch takes less
    than half as long as to compute with it, where it is to be gathered meanwhile.
    """
    starts = [0, *(1 << power for power in range(count.bit_length()) if 1 << power < count)]
    return list(zip(starts, [*starts[1:], count], strict=True))


class Block:
    """Minibatches that are gathered part by part, in the order in which they are needed.

    Whoever comes first gathers a next part: a helping thread, or the one that asks for parts and
    would have to wait. So nothing depends on when a helper gets to run, or on there being one.

    Args:
        groups: of the parts of each, what has to be gathered. All groups go to the same places:
            when one begins, that before it is needed no more.
    """

    def __init__(self, groups: Sequence[Sequence[Copies]]) -> None:
        self._groups = groups
        self._parts = groups[0]
        self._left: deque[int] = deque()
        self._there: set[int] = set()
        self._news: SimpleQueue[None] = SimpleQueue()
        self._helper: _Helper | None = None
        self._helping = threading.Lock()
        self._error: Exception | None = None

    def provide(self, group: int, part: int) -> None:
        """Have a part of a group there; the first part, to be asked for first, begins the group."""
        if part == 0:
            self._begin(group)
        while part not in self._there:
            if self._error is not None:
                raise self._error
            if not self._gather_next():
                self._news.get()  # the helper has begun with it, and will tell

    def _begin(self, group: int) -> None:
        helper = _helper()
        if helper is not self._helper:  # in a forked process what the other held is never let go
            self._helper, self._helping = helper, threading.Lock()
        self._left.clear()  # of a step that did not come to its end
        with self._helping:
            self._parts = self._groups[group]
            self._there.clear()
            self._error = None
            self._news = SimpleQueue()
        self._left.extend(range(1, len(self._parts)))
        if self._left and helper is not None:
            helper.blocks.put(self)
        gather(self._parts[0])
        self._there.add(0)

    def help(self) -> None:
        """Gather until nothing is left."""
        while self._left:
            with self._helping:
                try:
                    self._gather_next()
                except Exception as error:  # it belongs to the thread that asks for the part
                    self._error = error
                self._news.put(None)

    def _gather_next(self) -> bool:
        """Gather the next part that nobody has begun with; whether there was one."""
        try:
            part = self._left.popleft()
        except IndexError:
            return False
        gather(self._parts[part])
        self._there.add(part)
        return True


class _Helper(threading.Thread):
    """Helps with the blocks that are put into its queue."""

    def __init__(self) -> None:
        super().__init__(name="bilevel-gathering", daemon=True)
        self.blocks: SimpleQueue[Block | None] = SimpleQueue()
        self._runs = threading.Event()
        self.start()
        self._runs.wait()
        torch.set_num_threads(torch.get_num_threads())  # or threads of others would begin with one

    def run(self) -> None:
        torch.get_num_threads()  # or torch would do away with the next line when it is first used
        torch.set_num_threads(1)  # of this thread's own
        self._runs.set()
        with torch.no_grad():
            while self._help():
                pass

    def _help(self) -> bool:
        """Help with the next block, and keep nothing of it; None: this is the end."""
        block = self.blocks.get()
        if block is not None:
            block.help()
        return block is not None

    def end(self) -> None:
        """Wait until it has ended: torch aborts a process that exits while a thread is in it."""
        self.blocks.put(None)
        self.join()


_helper_here: _Helper | None = None
_starting = threading.Lock()


def _helper() -> _Helper | None:
    """One for all runs; None where no more threads may be started."""
    global _helper_here
    with _starting:
        if _helper_here is None:
            with suppress(RuntimeError):
                _helper_here = _Helper()
        return _helper_here


@atexit.register
def _end() -> None:
    if _helper_here is not None:
        _helper_here.end()


def _forget() -> None:
    """A forked process has none of the threads."""
    global _helper_here, _starting
    _helper_here, _starting = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
