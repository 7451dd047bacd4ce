"""Ctrl-C and SIGTERM end a run that is saved after the step, and everything else as ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bilevel
from bilevel import Outcome
from bilevel.run.checkpoint import Interrupts
from tests.run.checkpoint.test_resume import assert_same, quadratic

OPTIONS = quadratic(bilevel.F2SA(0.5, 0.2))
SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def _in_the_foreground() -> Iterator[None]:
    """What a shell starts in the background ignores Ctrl-C, and so would all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


def minimize(folder: Any, callback: Any = None) -> bilevel.Result:
    return bilevel.minimize(**OPTIONS, steps=12, checkpoint=folder, callback=callback)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("step", [0, 6, 11])
def test_a_signal_ends_the_run_after_the_step(number: Any, step: int, tmp_path: Path) -> None:
    before = handlers()
    whole = minimize(None)
    result = minimize(
        tmp_path,
        lambda solver, info: signal.raise_signal(number) if info.step == step else None,
    )
    assert result.outcome is Outcome.INTERRUPTED
    assert result.steps == step + 1
    assert len(result.history["step"]) == step + 1
    assert handlers() == before
    assert (tmp_path / f"step-{step + 1:012d}.safetensors").exists()
    assert_same(minimize(tmp_path), whole)


@pytest.mark.slow
def test_a_second_one_interrupts_at_once(tmp_path: Path) -> None:
    before = handlers()

    def impatient(solver: Any, info: Any) -> None:
        if info.step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        minimize(tmp_path, impatient)
    assert handlers() == before
    assert_same(minimize(tmp_path), minimize(None))


def test_without_a_checkpoint_an_interrupt_is_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        minimize(None, lambda solver, info: signal.raise_signal(signal.SIGINT))


def test_handlers_of_the_program_stay(tmp_path: Path) -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        result = minimize(tmp_path, lambda solver, info: signal.raise_signal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.outcome is Outcome.COMPLETED
    assert seen == [signal.SIGTERM] * 12


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = minimize(tmp_path, lambda solver, info: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.outcome is Outcome.COMPLETED


def test_a_thread_leaves_signals_alone(tmp_path: Path) -> None:
    before = handlers()
    seen: list[Any] = []

    def work() -> None:
        result = minimize(tmp_path, lambda solver, info: seen.append(handlers()))
        seen.append(result.outcome)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before] * 12 + [Outcome.COMPLETED]


def test_handlers_are_put_back_after_an_error() -> None:
    before = handlers()
    with pytest.raises(ZeroDivisionError), Interrupts():  # noqa: PT012
        assert handlers() != before
        raise ZeroDivisionError
    assert handlers() == before


PROGRAM = """
import sys, time, torch, bilevel
p = bilevel.problems.Quadratic(seed=0)
data = torch.zeros(1, 10).expand(10**6, 10)

def slow(x, y, batch):
    time.sleep(0.01)
    return p.lower(x, y, batch)

result = bilevel.minimize(
    bilevel.Problem(p.upper, slow), p.x0, p.y0,
    method=bilevel.F2SA(0.5, 0.2, inner_steps=30),
    lower_data=torch.utils.data.DataLoader(data, num_workers=1, batch_size=None),
    steps=10**6,
    callback=lambda solver, info: print(info.step, flush=True),
    checkpoint=sys.argv[1],
)
print(result.outcome.name, result.steps)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="there are no such signals")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_program_that_is_told_to_end_does(number: Any, tmp_path: Path) -> None:
    """With Ctrl-C in a terminal, its workers are told too."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        time.sleep(0.1)  # into the next step
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        last = process.stdout.read().splitlines()[-1]
        assert process.wait() == 0
    name, steps = last.split()
    assert name == "INTERRUPTED"
    assert (tmp_path / f"step-{int(steps):012d}.safetensors").exists()
