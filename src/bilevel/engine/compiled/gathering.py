"""Minibatches that a second thread gathers while the first computes with the earlier ones.

The rows of a minibatch are scattered over the data, so gathering mostly waits for memory. Where an
evaluation is too small to share among threads, a second thread is idle and can gather.
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
"""For each column of the data: the column, the indices of its rows, and their destination."""


def gather(copies: Copies) -> None:
    """Copy the rows to their destinations."""
    for column, numbers, rows in copies:
        torch.index_select(column, 0, numbers, out=rows)


def doubling(count: int) -> list[tuple[int, int]]:
    """Split range(count) into parts of 1, 1, 2, 4, 8, ... elements, each as (start, stop).

    The first minibatch is available soon, and there are few parts. Each part is gathered while
    those before it are used, which takes at least twice as long where this module is used.
    """
    starts = [0, *(1 << power for power in range(count.bit_length()) if 1 << power < count)]
    return list(zip(starts, [*starts[1:], count], strict=True))


class Block:
    """Minibatches that are gathered part by part, in the order in which they are needed.

    The next part is gathered by whichever thread comes first: the helper, or the caller, which
    would otherwise wait. So nothing depends on when the helper runs, or on whether there is one.

    Args:
        groups: for each group the copies of its parts. All groups have the same destinations: a
            group that begins overwrites the one before it.
    """

    def __init__(self, groups: Sequence[Sequence[Copies]]) -> None:
        self._groups = groups
        self._parts = groups[0]
        self._left: deque[int] = deque()  # parts that no thread has begun
        self._there: set[int] = set()  # parts that are gathered
        self._news: SimpleQueue[None] = SimpleQueue()
        self._helper: _Helper | None = None
        self._helping = threading.Lock()
        self._error: Exception | None = None

    def provide(self, group: int, part: int) -> None:
        """Return once a part of a group is gathered. Part 0 comes first, and begins the group."""
        if part == 0:
            self._begin(group)
        while part not in self._there:
            if self._error is not None:
                raise self._error
            if not self._gather_next():
                self._news.get()  # the helper has begun this part, and reports its end

    def _begin(self, group: int) -> None:
        helper = _helper()
        if helper is not self._helper:  # after a fork the old lock may never be released
            self._helper, self._helping = helper, threading.Lock()
        self._left.clear()  # an earlier step may have been abandoned
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
        """Gather in the helper's thread until nothing is left."""
        while self._left:
            with self._helping:
                try:
                    self._gather_next()
                except Exception as error:  # the thread that asks for the part raises it
                    self._error = error
                self._news.put(None)

    def _gather_next(self) -> bool:
        """Gather the next part that no thread has begun, and say whether there was one."""
        try:
            part = self._left.popleft()
        except IndexError:
            return False
        gather(self._parts[part])
        self._there.add(part)
        return True


class _Helper(threading.Thread):
    """The thread that helps with the blocks in its queue."""

    def __init__(self) -> None:
        super().__init__(name="bilevel-gathering", daemon=True)
        self.blocks: SimpleQueue[Block | None] = SimpleQueue()
        self._runs = threading.Event()
        self.start()
        self._runs.wait()
        torch.set_num_threads(torch.get_num_threads())  # or new threads would begin with 1

    def run(self) -> None:
        torch.get_num_threads()  # initializes torch's count, which would undo the next line later
        torch.set_num_threads(1)  # for this thread only
        self._runs.set()
        with torch.no_grad():
            while (block := self.blocks.get()) is not None:
                block.help()
                del block  # while the thread waits it keeps no data alive

    def end(self) -> None:
        """Wait for the thread to end: a process that exits while torch runs in a thread aborts."""
        self.blocks.put(None)
        self.join()


_helper_here: _Helper | None = None
_starting = threading.Lock()


def _helper() -> _Helper | None:
    """The helper of all runs, or None where no thread can be started."""
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
    """Threads do not survive a fork."""
    global _helper_here, _starting
    _helper_here, _starting = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
