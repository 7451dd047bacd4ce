"""Runs beside each other, in one thread and in several: none disturbs another or the program."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

import bilevel
from tests.marks import slow_except

ROWS = torch.linspace(-1, 1, 40).reshape(20, 2)


def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return (dropout(y - 1, 0.5) ** 2).sum()


def lower(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    noise = (x * torch.randn(2)).sum()
    return ((y - dropout(x, 0.3)) ** 2).sum() + 0.1 * (batch @ y).mean() + noise


def make(seed: int, method: Any = "f2sa") -> bilevel.Solver:
    return bilevel.Solver(
        bilevel.Problem(upper, lower),
        torch.ones(2),
        torch.zeros(2),
        method=method,
        lower_data=ROWS,
        batch_size=4,
        seed=seed,
    )


def run(seed: int, method: Any = "f2sa", steps: int = 6) -> Tensor:
    solver = make(seed, method)
    for _ in range(steps):
        solver.step()
    x = solver.x
    assert isinstance(x, Tensor)
    return x


METHODS = ["f2sa", "f3sa", "soba", "bome"]


@pytest.mark.parametrize("method", slow_except(["f2sa"], METHODS))
def test_runs_in_threads_give_the_bits_of_runs_alone(method: str) -> None:
    alone = [run(seed, method) for seed in range(4)]
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: run(seed, method), range(4)))
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_turns_threads_would_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is worth: it fails where there are no turns."""

    class Nobody:
        acquire = release = __enter__ = __exit__ = lambda self, *exception: None

    meeting = threading.Barrier(2, timeout=30)

    def drawn(seed: int, together: bool) -> Callable[[], list[Tensor]]:
        masks: list[Tensor] = []
        steps = False

        def meets(x: Tensor, y: Tensor, batch: Any) -> Tensor:
            # At the first draw both have taken the generators, so one of them for nothing; at the
            # second neither is done, which would give them back.
            if steps and together and len(masks) < 2:
                meeting.wait()
            mask = dropout(torch.ones(50), 0.5)
            if steps:
                masks.append(mask)
            return (mask * (y - 1) ** 2).sum() + 0 * x.sum()

        solver = bilevel.Solver(
            bilevel.Problem(meets, meets), torch.ones(50), torch.zeros(50), method="f2sa", seed=seed
        )

        def step() -> list[Tensor]:
            nonlocal steps
            steps = True
            solver.step()
            return masks

        return step

    alone = [drawn(seed, together=False)() for seed in (0, 1)]
    runs = [drawn(seed, together=True) for seed in (0, 1)]
    monkeypatch.setattr("bilevel.sampling.randomness._turn", Nobody())
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda run: run(), runs))
    assert not torch.equal(alone[0][0], together[0][0]) or not torch.equal(
        alone[1][0], together[1][0]
    )


@pytest.mark.slow
def test_runs_that_take_turns_in_one_thread_give_the_same_bits() -> None:
    alone = [run(seed) for seed in (0, 1)]
    first, second = make(0), make(1)
    for _ in range(6):
        first.step()
        torch.randn(3)
        second.step()
    assert torch.equal(first.x, alone[0])
    assert torch.equal(second.x, alone[1])


def test_a_run_within_an_objective_is_possible() -> None:
    method = bilevel.F2SA(lower_lr=0.1, upper_lr=0.1, inner_steps=2)
    alone = run(0, method, steps=2)

    def also(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        run(1, method, steps=1)
        return lower(x, y, batch)

    solver = bilevel.Solver(
        bilevel.Problem(upper, also), torch.ones(2), torch.zeros(2), method=method,
        lower_data=ROWS, batch_size=4, seed=0,
    )  # fmt: skip
    for _ in range(2):
        solver.step()
    assert torch.equal(solver.x, alone)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_users_modes_are_kept_and_change_nothing(
    mode: Callable[[], Any], dtype: torch.dtype
) -> None:
    alone = run(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with mode():
            wanted = torch.is_grad_enabled()
            found = run_in_float32()
            assert torch.is_grad_enabled() is wanted
        assert torch.get_default_dtype() is dtype
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, alone) or dtype is not torch.float32
    assert found.dtype is torch.float32


def run_in_float32() -> Tensor:
    solver = bilevel.Solver(
        bilevel.Problem(upper, lower),
        torch.ones(2, dtype=torch.float32),
        torch.zeros(2, dtype=torch.float32),
        method="f2sa",
        lower_data=ROWS,
        batch_size=4,
        seed=3,
    )
    for _ in range(6):
        solver.step()
    x = solver.x
    assert isinstance(x, Tensor)
    return x


def test_grad_modes_of_threads_are_their_own() -> None:
    seen: list[bool] = []

    def other() -> None:
        with torch.no_grad():
            run(1)
            seen.append(torch.is_grad_enabled())

    thread = threading.Thread(target=other)
    thread.start()
    run(0)
    thread.join()
    assert seen == [False]
    assert torch.is_grad_enabled()


def test_an_error_in_one_thread_gives_the_turn_back() -> None:
    def fail(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        raise ZeroDivisionError

    def broken() -> None:
        with pytest.raises(ZeroDivisionError):
            bilevel.Solver(bilevel.Problem(fail, fail), torch.ones(1), torch.ones(1), method="f2sa")

    thread = threading.Thread(target=broken)
    thread.start()
    thread.join()
    run(0, steps=1)  # would wait for ever


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_that_was_forked_in_the_middle_of_a_step_has_turns_of_its_own() -> None:
    inside, done = threading.Event(), threading.Event()

    def waits(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        inside.set()
        done.wait(30)
        return lower(x, y, ROWS)

    def step() -> None:
        bilevel.Solver(bilevel.Problem(upper, waits), torch.ones(2), torch.zeros(2), method="f2sa")

    thread = threading.Thread(target=step)
    thread.start()
    inside.wait(30)
    child = os.fork()
    if child == 0:
        from bilevel.sampling import randomness

        os._exit(0 if randomness._turn.acquire(timeout=5) else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


def test_one_solver_in_two_threads_takes_whole_steps() -> None:
    solver = make(0)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: solver.step(measure=False), range(6)))
    assert solver.k == 6
    assert torch.equal(solver.x, run(0))


def test_minimize_in_threads_gives_the_same_bits() -> None:
    known = bilevel.problems.Quadratic(seed=0)
    method = bilevel.F2SA(lower_lr=0.5, upper_lr=0.1, inner_steps=2)

    def minimized(_: int) -> Tensor:
        x = bilevel.minimize(known, known.x0, known.y0, method=method, steps=10).x
        assert isinstance(x, Tensor)
        return x

    alone = minimized(0)
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(minimized, range(3)):
            assert torch.equal(found, alone)


def test_a_step_within_a_step_of_the_same_solver_is_refused() -> None:
    solvers: list[bilevel.Solver] = []

    def again(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        if solvers:
            solvers[0].step()
        return lower(x, y, batch)

    solver = bilevel.Solver(
        bilevel.Problem(upper, again), torch.ones(2), torch.zeros(2), lower_data=ROWS
    )
    solvers.append(solver)
    with pytest.raises(bilevel.errors.ObjectiveError, match=r"solver\.step\(\) was called by"):
        solver.step()
    solvers.clear()
    solver.step()
    assert solver.k == 1


def test_an_objective_may_read_the_run_that_evaluates_it() -> None:
    """It must not change the random numbers of the run, nor those of the program around it."""
    solvers: list[bilevel.Solver] = []
    drawn: list[float] = []

    def reading(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        before = torch.rand(())
        for solver in solvers:
            assert solver.x.shape == (2,)
            assert "randomness" in solver.state_dict()
        drawn.extend([before.item(), torch.rand(()).item()])
        return lower(x, y, batch)

    torch.manual_seed(3)
    outside = torch.get_rng_state()
    method = bilevel.F2SA(lower_lr=0.1, upper_lr=0.1, inner_steps=1)
    both = []
    for reads in (False, True):
        drawn.clear()
        solvers.clear()
        solver = bilevel.Solver(
            bilevel.Problem(upper, reading), torch.ones(2), torch.zeros(2), method=method,
            lower_data=ROWS,
        )  # fmt: skip
        if reads:
            solvers.append(solver)
        solver.step()
        both.append(list(drawn))
    assert both[0] == both[1]
    assert len(set(both[0])) > 2
    assert torch.equal(torch.get_rng_state(), outside)
