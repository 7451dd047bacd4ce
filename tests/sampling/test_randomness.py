"""Randomness: a run has its own, neither disturbs the program around it nor is disturbed by it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from bilevel.sampling import PrivateRandomness
from tests.marks import slow_except

METHODS: dict[str, Any] = {
    "f2sa": bilevel.F2SA(inner_steps=3),
    "independent": bilevel.F2SA(inner_steps=3, coupling="independent"),
    "single pass": bilevel.F2SA(inner_steps=3, single_pass=True),
    "f3sa": bilevel.F3SA(momentum=0.5),
}
DATA = torch.linspace(-1, 1, 12).reshape(6, 2)
CPU = torch.device("cpu")


def noisy_problem() -> bilevel.Problem:
    """Objectives that drop entries and add noise, both from torch's global generator."""

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return (dropout(y - 1, 0.5) ** 2).sum() + 0.1 * (x * torch.randn(2)).sum()

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return ((y - dropout(x, 0.3)) ** 2).sum() + (0 if batch is None else (batch[0] @ y).mean())

    return bilevel.Problem(upper, lower)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(DATA), batch_size=2, shuffle=True)


def solver(method: Any = METHODS["f2sa"], seed: int = 0) -> bilevel.Solver:
    return bilevel.Solver(
        noisy_problem(),
        torch.ones(2),
        torch.zeros(2),
        method=method,
        lower_data=loader(),
        seed=seed,
    )


def steps(run: bilevel.Solver, count: int, between: Callable[[], Any] = lambda: None) -> Tensor:
    for _ in range(count):
        between()
        run.step()
    x = run.x
    assert isinstance(x, Tensor)
    return x


def disturb() -> None:
    torch.manual_seed(1234)
    torch.randn(17)


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_the_global_generators_are_left_alone(method: Any) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    run = solver(method)
    steps(run, 3)
    run.load_state_dict(run.state_dict())
    bilevel.minimize(
        noisy_problem(), torch.ones(2), torch.zeros(2), method=method, steps=3, select="random"
    )
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert repr(np.random.get_state()) == repr(before[2])


def test_the_global_generators_are_left_alone_after_an_error() -> None:
    def fail(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        torch.randn(3)
        raise ZeroDivisionError

    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        bilevel.minimize(bilevel.Problem(fail, fail), torch.ones(1), torch.ones(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_on_the_cpu_does_not_seed_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[Any] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    PrivateRandomness(0, CPU)
    assert seeded == []


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_what_happens_outside_does_not_matter(method: Any) -> None:
    quiet = steps(solver(method), 5)
    disturb()
    assert torch.equal(steps(solver(method), 5, between=disturb), quiet)


@pytest.mark.parametrize("name", slow_except(["independent"], METHODS))
def test_the_seed_decides_what_objectives_draw(name: str) -> None:
    mine, again, other = (steps(solver(METHODS[name], seed), 30) for seed in (1, 1, 2))
    assert torch.equal(mine, again)
    assert not torch.equal(mine, other)


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_resumed_run_draws_the_same(method: Any, stop: int) -> None:
    whole = solver(method)
    steps(whole, stop)
    state = whole.state_dict()
    expected = steps(whole, 6 - stop)
    resumed = solver(method, seed=5)
    disturb()
    resumed.load_state_dict(state)
    assert torch.equal(steps(resumed, 6 - stop), expected)


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_saving_does_not_change_the_run(method: Any) -> None:
    run = solver(method)
    assert torch.equal(steps(run, 5, between=run.state_dict), steps(solver(method), 5))


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_measuring_does_not_change_the_run(method: Any) -> None:
    often, seldom = (
        bilevel.minimize(
            noisy_problem(), torch.ones(2), torch.zeros(2), method=method, steps=6,
            record_every=every,
        )
        for every in (1, 6)
    )  # fmt: skip
    assert torch.equal(often.x, seldom.x)


def test_inside_is_a_stream_of_its_own() -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    private = PrivateRandomness(3, CPU)
    disturb()
    outside = torch.get_rng_state()
    with private:
        first = torch.randn(2)
    assert torch.equal(torch.get_rng_state(), outside)
    disturb()
    with private:
        second = torch.randn(2)
    assert torch.equal(torch.cat([first, second]), expected)


def test_a_saved_state_is_a_copy_and_goes_on_from_there() -> None:
    private = PrivateRandomness(3, CPU)
    state = private.state_dict()
    with private:
        first = torch.randn(4)
    private.load_state_dict(state)
    state["cpu"].zero_()
    with private:
        assert torch.equal(torch.randn(4), first)


@pytest.mark.parametrize("method", ["f2sa", "f3sa", bilevel.F2SA(scheme="midpoint")])
def test_copies_that_share_samples_share_dropout_masks(method: Any) -> None:
    """With y = z and one mask the two g-terms are equal, so that f alone moves x: not at all."""

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return (x.sigmoid() * torch.nn.functional.dropout(y, 0.5) ** 2).sum()

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return 1e-9 * (y**2).sum()  # so weak that the copies stay together

    solver = bilevel.Solver(
        bilevel.Problem(upper, lower), torch.ones(50), torch.ones(50), method=method
    )
    for _ in range(5):
        info = solver.step()
    assert info.direction_norm is not None
    assert info.direction_norm < 1e-6
