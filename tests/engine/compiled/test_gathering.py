"""A second thread gathers minibatches while the first computes: always the right rows."""

from __future__ import annotations

import faulthandler
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bilevel.engine.compiled import gathering
from bilevel.engine.compiled.gathering import Block, doubling

COLUMN = torch.arange(300.0).reshape(100, 3)
GROUPS, PARTS = 2, 5
PLACES = [(group, part) for group in range(GROUPS) for part in range(PARTS)]


class Minibatches:
    """Numbers that change from step to step, and a block that gathers the rows of them."""

    def __init__(self) -> None:
        self.numbers = torch.zeros(GROUPS, PARTS, 4, dtype=torch.int64)
        self.rows = torch.zeros(PARTS, 4, 3)
        self.block = Block(
            [
                [
                    ((COLUMN, numbers, rows),)
                    for numbers, rows in zip(of_group, self.rows, strict=True)
                ]
                for of_group in self.numbers
            ]
        )
        self._generator = torch.Generator().manual_seed(0)

    def draw(self) -> None:
        self.numbers.copy_(torch.randint(100, self.numbers.shape, generator=self._generator))

    def provide(self, start: int, stop: int) -> None:
        """Ask for parts, counted through all groups."""
        for group, part in PLACES[start:stop]:
            self.block.provide(group, part)

    def assert_step(self) -> None:
        self.draw()
        for group, part in PLACES:
            self.block.provide(group, part)
            assert torch.equal(self.rows[part], COLUMN[self.numbers[group, part]])


@pytest.fixture(autouse=True)
def at_most_minutes() -> Iterator[None]:
    """A thread that waits for ever is told from one that is slow."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> dict[bool, float]:
    """How many seconds it takes the helper (True), and whoever asks for a part, to gather one."""
    takes = {True: 0.0, False: 0.0}
    fast = gathering.gather

    def gather(copies: Any) -> None:
        time.sleep(takes[threading.current_thread().name == "bilevel-gathering"])
        fast(copies)

    monkeypatch.setattr(gathering, "gather", gather)
    return takes


@pytest.mark.parametrize("count", range(1, 40))
def test_parts_double_and_leave_nothing_out(count: int) -> None:
    parts = doubling(count)
    assert [place for a, b in parts for place in range(a, b)] == list(range(count))
    lengths = [b - a for a, b in parts]
    assert lengths[:-1] == [1, 1, 2, 4, 8, 16, 32][: len(parts) - 1]
    assert 0 < lengths[-1] <= 32


@pytest.mark.parametrize("helper", [0.0, 0.002])
@pytest.mark.parametrize("asking", [0.0, 0.002])
def test_every_part_has_its_rows(slow: dict[bool, float], helper: float, asking: float) -> None:
    slow.update({True: helper, False: asking})
    minibatches = Minibatches()
    for _ in range(5 if helper or asking else 300):
        minibatches.assert_step()


def test_the_helper_gathers_meanwhile(slow: dict[bool, float]) -> None:
    minibatches = Minibatches()
    minibatches.draw()
    minibatches.provide(0, 1)
    deadline = time.monotonic() + 30
    while not torch.equal(minibatches.rows, COLUMN[minibatches.numbers[0]]):
        assert time.monotonic() < deadline, "nobody gathered the parts that nobody asked for"
        time.sleep(0.001)


def test_without_the_helper_whoever_asks_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = SimpleNamespace(blocks=SimpleQueue())
    monkeypatch.setattr(gathering, "_helper", lambda: asleep)
    minibatches = Minibatches()
    for _ in range(3):
        minibatches.assert_step()


def test_where_no_thread_can_be_started_whoever_asks_gathers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(gathering, "_helper_here", None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    minibatches = Minibatches()
    for _ in range(3):
        minibatches.assert_step()
    assert gathering._helper_here is None


@pytest.mark.parametrize("asked", range(1, GROUPS * PARTS))
def test_a_step_that_was_left_does_not_disturb_the_next(
    slow: dict[bool, float], asked: int
) -> None:
    slow[True] = 0.002
    minibatches = Minibatches()
    for _ in range(10):
        minibatches.draw()
        minibatches.provide(0, asked)
        minibatches.assert_step()
        last = minibatches.rows.clone()
        time.sleep(0.005)
        assert torch.equal(minibatches.rows, last), "written to after the step"


@pytest.mark.parametrize("by_helper", [False, True])
def test_an_error_reaches_whoever_asks_and_the_next_step_is_sound(
    slow: dict[bool, float], by_helper: bool
) -> None:
    minibatches = Minibatches()
    minibatches.draw()
    minibatches.numbers[0, 2, 1] = 100
    slow[not by_helper] = 0.02
    minibatches.provide(0, 1)
    time.sleep(0.01 if by_helper else 0.0)
    with pytest.raises((IndexError, RuntimeError), match="index out of range"):
        minibatches.provide(1, PARTS)
    slow[not by_helper] = 0.0
    minibatches.assert_step()


def test_the_helper_has_one_thread_and_those_that_others_start_as_many_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_helper: list[int] = []
    fast = gathering.gather

    def gather(copies: Any) -> None:
        fast(copies)
        if threading.current_thread().name == "bilevel-gathering":
            by_helper.append(torch.get_num_threads())
        else:
            time.sleep(0.01)

    monkeypatch.setattr(gathering, "gather", gather)
    monkeypatch.setattr(gathering, "_helper_here", None)  # so that one is started here
    before = torch.get_num_threads()
    seen: list[int] = []
    torch.set_num_threads(2)
    try:
        Minibatches().assert_step()
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        seen.append(torch.get_num_threads())
        assert gathering._helper_here is not None
        gathering._helper_here.end()
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 2]
    assert set(by_helper) == {1}


def test_the_helper_keeps_no_data() -> None:
    column = torch.zeros(100, 3)
    gone = weakref.ref(column)
    numbers, rows = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1, 3)
    block = Block([[((column, numbers[i], rows[i]),) for i in range(2)]])
    block.provide(0, 0)
    block.provide(0, 1)
    Minibatches().assert_step()  # by now the helper is done with the first
    del block, column
    gc.collect()
    deadline = time.monotonic() + 30
    while gone() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_a_helper_of_its_own() -> None:
    minibatches = Minibatches()
    minibatches.assert_step()
    minibatches.block._helping.acquire()  # as if the helper had not come to its end yet
    child = os.fork()
    if not child:  # nothing of pytest must run here
        code = 1
        try:
            minibatches.assert_step()
            code = 0 if gathering._helper_here is not None else 2
        finally:
            sys.stderr.flush()
            os._exit(code)
    minibatches.block._helping.release()
    deadline = time.monotonic() + 60
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the forked process waits for ever")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 20], ids=["in the middle", "after all"])
def test_a_process_may_end_at_any_time(parts: int) -> None:
    code = f"""
import torch
from bilevel.engine.compiled.gathering import Block

column, numbers = torch.zeros(100_000, 100), torch.randint(100_000, (20, 1000))
rows = torch.zeros(20, 1000, 100)
block = Block([[((column, numbers[i], rows[i]),) for i in range(20)]])
for part in range({parts}):
    block.provide(0, part)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_data_that_require_gradients_are_gathered_as_they_are() -> None:
    column = COLUMN.clone().requires_grad_()
    numbers, rows = torch.tensor([[3], [5], [7]]), torch.zeros(3, 1, 3)
    block = Block([[((column, numbers[i], rows[i]),) for i in range(3)]])
    with torch.no_grad():
        for part in range(3):
            block.provide(0, part)
    assert torch.equal(rows[:, 0], COLUMN[[3, 5, 7]])
