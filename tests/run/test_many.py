"""minimize_many: every run is that of minimize, also where others break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import bilevel
from bilevel.engine.stacked import stack as stacked
from bilevel.errors import RunError, UnbatchedWarning
from bilevel.problem.sets import Ball, Box, Rows, Simplex
from tests.marks import slow_except
from tests.run.many_runs import (
    F2SA,
    C,
    D,
    N,
    Task,
    assert_as_one_by_one,
    assert_same,
    cleaning,
    deterministic,
    f2sa,
    leaves,
    many,
    networks,
    noisy_quadratic,
    one,
)

SCHEMES: dict[str, Any] = {
    "forward": [f2sa(0.5, 2.0), f2sa(0.1, 5.0, 30.0)],
    "own step of y": [f2sa(0.5, 2.0, penalty_lr=0.3), f2sa(0.5, 2.0)],
    "schedules": [
        f2sa(lambda k: 0.5 / (k + 1) ** 0.3, 2.0, lambda k: 10.0 + k),
        f2sa(0.2, lambda k: 3.0 / (k + 1), 20.0),
    ],
    "midpoint": [f2sa(0.5, lr, scheme="midpoint") for lr in (1.0, 3.0)],
    "central": [f2sa(0.5, lr, 20.0, scheme="central", order=4) for lr in (1.0, 3.0)],
    "single pass": [f2sa(0.5, lr, single_pass=True) for lr in (1.0, 3.0)],
    "independent": [f2sa(0.5, lr, coupling="independent") for lr in (0.1, 0.3)],
    "independent midpoint": [
        f2sa(0.5, lr, coupling="independent", scheme="midpoint") for lr in (0.1, 0.3)
    ],
    "f2ba": [bilevel.F2BA(0.5, lr, 50.0, inner_steps=2) for lr in (1.0, 3.0)],
}


@pytest.mark.parametrize("methods", SCHEMES.values(), ids=list(SCHEMES))
def test_every_scheme_gives_the_runs_of_minimize(methods: Any) -> None:
    assert_as_one_by_one(cleaning(), methods, 2, steps=6)


SAMPLING: dict[str, dict[str, Any]] = {
    "all data": {"batch_size": None},
    "a sweep for x": {"direction_batch_size": "all"},
    "a sweep in parts": {"direction_batch_size": "all", "chunk_size": 11},
    "more samples for x": {"direction_batch_size": 23},
    "all data, fewer for x": {"batch_size": None, "direction_batch_size": 9},
    "a Dataset": {"upper_data": TensorDataset(*cleaning().options["upper_data"])},
}


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["shared", "independent"])
@pytest.mark.parametrize("options", SAMPLING.values(), ids=list(SAMPLING))
def test_every_sampling_gives_the_runs_of_minimize(options: Any, coupling: Any) -> None:
    methods = [F2SA(0.5, lr, coupling=coupling, inner_steps=3) for lr in (0.2, 0.4)]
    assert_as_one_by_one(cleaning(), methods, [3, 8], steps=15, record_every=4, **options)


@pytest.mark.slow
@pytest.mark.parametrize("task", [noisy_quadratic, deterministic, networks])
def test_every_structure_gives_the_runs_of_minimize(task: Callable[[], Task]) -> None:
    methods = [f2sa(0.3, 0.1, 20.0), f2sa(0.3, 0.1, 40.0)]
    assert_as_one_by_one(task(), methods, 2, steps=15)


@pytest.mark.slow
def test_batches_drawn_from_the_global_generator_are_each_runs_own() -> None:
    task = noisy_quadratic()

    def noise(generator: torch.Generator) -> Tensor:
        return 0.1 * torch.randn(10, dtype=torch.float64)  # not from the generator

    options = {"upper_data": noise, "lower_data": noise}
    assert_as_one_by_one(task, F2SA(0.3, 0.1), 3, steps=10, **options)


SETS: dict[str, dict[str, Any]] = {
    "box": {"x_set": Box(-0.5, 0.5), "y_set": Box(*(torch.full((D, C), v) for v in (-0.05, 0.05)))},
    "ball": {"x_set": Ball(2.0), "y_set": Ball(0.3)},
    "simplex": {"x_set": Simplex(), "y_set": Rows(Ball(0.1))},
    "a function": {"x_set": lambda x: x / x.abs().max().clamp_min(1.0)},
}


@pytest.mark.parametrize("scheme", ["forward", "midpoint"])
@pytest.mark.parametrize("sets", SETS.values(), ids=list(SETS))
def test_each_run_stays_in_its_set(sets: Any, scheme: Any) -> None:
    methods = [F2SA(0.5, lr, scheme=scheme, inner_steps=3) for lr in (3.0, 10.0)]
    assert_as_one_by_one(cleaning(**sets), methods, 2, steps=8)


@pytest.mark.slow
@pytest.mark.parametrize("sets", [SETS["box"], SETS["a function"]])
def test_the_parts_of_vmap_give_what_it_gives(sets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> bilevel.Results:
        return many(cleaning(**sets), methods=F2SA(0.5, 3.0), seeds=3, steps=10)

    assert stacked._HAS_PARTS
    mine = found()
    monkeypatch.setattr(stacked, "_HAS_PARTS", False)  # as with a torch that has others
    theirs = found()
    assert torch.equal(mine.x, theirs.x)
    assert torch.equal(mine.y, theirs.y)


def test_every_evaluation_is_of_all_runs() -> None:
    calls = []

    def counted(scores: Tensor) -> Tensor:
        calls.append(scores)
        return scores

    task = cleaning(counted)
    many(task, methods=F2SA(0.5, 1.0, inner_steps=4), seeds=2, steps=3)
    few = len(calls)
    calls.clear()
    many(task, methods=F2SA(0.5, 1.0, inner_steps=4), seeds=11, steps=3)
    assert len(calls) == few
    # g at both copies in each of 4 inner steps and for x, in 3 steps and the one that fits y at
    # the last x, and what is checked before the first
    assert few == (3 + 1) * 5 * 2 + 2


@pytest.mark.slow
def test_single_precision() -> None:
    task = cleaning()
    task.options["lower_data"] = (
        task.options["lower_data"][0].float(),
        *task.options["lower_data"][1:],
    )
    task.options["upper_data"] = (
        task.options["upper_data"][0].float(),
        task.options["upper_data"][1],
    )
    task = task._replace(x0=task.x0.float(), y0=task.y0.float())
    results = many(task, methods=F2SA(0.5, 2.0), seeds=3, steps=20)
    assert results.x.dtype == results.y.dtype == torch.float32
    for seed, result in enumerate(results):
        assert_same(result, one(task, method=F2SA(0.5, 2.0), seed=seed, steps=20), 1e-5)


# The grid


def test_settings_come_first_and_seeds_run_fastest() -> None:
    methods = [F2SA(0.5, 2.0), F2SA(0.1, 1.0)]
    results = many(cleaning(), methods=methods, seeds=[5, 0, 9], steps=2)
    assert (results.methods, results.seeds) == (methods, [5, 0, 9])
    assert len(results) == len(list(results)) == 6
    alone = one(cleaning(), method=methods[1], seed=5, steps=2)
    assert_same(results[3], alone)
    assert [r.history["lower_lr"][0] for r in results] == [0.5] * 3 + [0.1] * 3
    assert [r.x[0].item() for r in results[1:3]] == [results[1].x[0].item(), results[2].x[0].item()]


@pytest.mark.parametrize("at_once", slow_except(["1", "4"], [1, 2, 4, 100]))
def test_runs_in_several_computations_are_the_same(at_once: int) -> None:
    options: dict[str, Any] = {"methods": [F2SA(0.5, 2.0), F2SA(0.1, 1.0)], "seeds": 3, "steps": 4}
    whole, parts = many(cleaning(), **options), many(cleaning(), at_once=at_once, **options)
    for a, b in zip(whole, parts, strict=True):
        assert_same(a, b)


@pytest.mark.slow
def test_methods_of_several_structures_form_groups() -> None:
    methods = [
        F2SA(0.5, 2.0, inner_steps=2),
        F2SA(0.5, 2.0, scheme="midpoint"),
        F2SA(0.1, 2.0, inner_steps=2),
        bilevel.F2BA(0.1, 2.0, inner_steps=2),
    ]
    results = many(cleaning(), methods=methods, seeds=2, steps=3)
    assert len({result.seconds for result in results}) == 3
    for number, result in enumerate(results):
        setting, seed = divmod(number, 2)
        assert_same(result, one(cleaning(), method=methods[setting], seed=seed, steps=3))


@pytest.mark.slow
@pytest.mark.parametrize("per", ["seed", "run"])
def test_each_run_can_have_its_own_start(per: str) -> None:
    task = cleaning()
    methods = [F2SA(0.5, 2.0), F2SA(0.1, 2.0)]
    count = 3 if per == "seed" else 6
    y0 = torch.randn(count, D, C, dtype=torch.float64)
    x0 = [torch.full((N,), float(i), dtype=torch.float64) for i in range(count)]
    results = many(task._replace(x0=x0, y0=y0), methods=methods, seeds=3, steps=4, own_starts=True)
    assert len({result.seconds for result in results}) == 1
    for number, result in enumerate(results):
        setting, seed = divmod(number, 3)
        start = task._replace(x0=x0[number % count], y0=y0[number % count])
        assert_same(result, one(start, method=methods[setting], seed=seed, steps=4))


def test_nothing_is_taken_from_or_done_to_the_users_things() -> None:
    task = networks()
    before = [leaf.clone() for leaf in leaves((task.x0, task.y0))]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    results = many(task, methods=F2SA(0.3, 0.1), seeds=2, steps=2)
    assert torch.equal(torch.get_rng_state(), state)
    for leaf, was in zip(leaves((task.x0, task.y0)), before, strict=True):
        assert torch.equal(leaf, was)
        assert leaf.grad is None
    assert isinstance(results[0].y, nn.Sequential)
    assert not results[0].x["bias"].requires_grad
    mine, other = (leaves(result.y)[0] for result in results)
    before_zero = other.clone()
    mine.zero_()
    assert torch.equal(other, before_zero)


def test_no_steps_give_the_starts() -> None:
    task = cleaning()
    results = many(task, methods=F2SA(0.5, 2.0), seeds=2, steps=0)
    for result in results:
        assert torch.equal(result.x, task.x0)
        assert result.outcome is bilevel.Outcome.COMPLETED
        assert len(result.history["step"]) == 0


# Runs that break


BREAKING = {
    "the lower step": F2SA(1e8, 2.0, 20.0),
    "the upper step": F2SA(0.5, 1e307, 20.0),
    "a schedule": F2SA(lambda k: 0.5 if k < 3 else 1e300, 2.0, 20.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["forward", "midpoint", "single pass"])
@pytest.mark.parametrize("bad", BREAKING.values(), ids=list(BREAKING))
def test_a_run_that_breaks_leaves_the_others_alone(bad: F2SA, scheme: str) -> None:
    from dataclasses import replace

    task = deterministic()
    good = F2SA(0.5, 0.1, 20.0)
    choice: dict[str, Any] = (
        {"single_pass": True} if scheme == "single pass" else {"scheme": scheme}
    )
    methods = [replace(method, **choice) for method in (good, bad, replace(good, upper_lr=0.2))]
    results = many(task, methods=methods, seeds=2, steps=12)
    for number in (0, 1, 4, 5):
        assert_same(
            results[number], one(task, method=methods[number // 2], steps=12, seed=number % 2)
        )
        assert results.reasons[number] is None
    with pytest.raises(bilevel.errors.NonFiniteError) as caught:
        one(task, method=methods[1], steps=12)
    for number in (2, 3):
        assert_same(results[number], caught.value.result)
        assert all(
            bool(torch.isfinite(leaf).all())
            for leaf in leaves((results[number].x, results[number].y))
        )
        assert results.reasons[number] == (
            f"{caught.value.quantity} is not finite at step {caught.value.step}"
        )


@pytest.mark.slow
def test_a_frozen_run_stays_where_it_was_in_its_set() -> None:
    problem, x0, y0, _ = deterministic()
    steep = bilevel.Problem(
        problem.upper,
        lambda x, y, batch: 1e3 * problem.lower(x, y, batch),
        x_set=Simplex(),
        y_set=Ball(0.01),
    )
    task = Task(steep, x0, y0, {})
    bad = F2SA(lambda k: 5e-4 if k < 2 else 1.7e308, 2.0)
    results = many(task, methods=[bad, F2SA(5e-4, 2.0)], seeds=2, steps=30)
    with pytest.raises(bilevel.errors.NonFiniteError) as caught:
        one(task, method=bad, steps=30)
    assert_same(results[0], caught.value.result)
    assert results[0].steps == 2


def test_what_is_only_reported_must_be_finite_too() -> None:
    problem = bilevel.Problem(
        upper=lambda x, y, batch: -(y - x).abs().log().sum(),  # infinite at x, where z goes
        lower=lambda x, y, batch: 0.5 * ((y - x) ** 2).sum() + 0.0 * x.sum(),
    )
    task = Task(problem, torch.zeros(1), torch.ones(1), {})
    methods = [F2SA(lr, 1e-3, 2.0**14, inner_steps=1) for lr in (1.0, 0.5)]
    results = many(task, methods=methods, seeds=1, steps=3)
    with pytest.raises(bilevel.errors.NonFiniteError) as caught:
        one(task, method=methods[0], steps=3)
    assert caught.value.quantity == "upper(x, z)"
    assert results.reasons == ["upper(x, z) is not finite at step 0", None]
    assert_same(results[0], caught.value.result, 1e-6)
    assert_same(results[1], one(task, method=methods[1], steps=3), 1e-6)


def test_when_all_have_broken_there_is_nothing_left_to_do() -> None:
    calls = []

    def counted(scores: Tensor) -> Tensor:
        calls.append(scores)
        return scores

    methods = [F2SA(1e200, 1.0, inner_steps=1), F2SA(1e250, 1.0, inner_steps=1)]
    results = many(cleaning(counted), methods=methods, seeds=1, steps=10_000)
    assert len(calls) < 20
    assert all(reason is not None for reason in results.reasons)
    assert "broken=2" in repr(results)
    with pytest.raises(RunError, match=r"no run was completed.*not finite at step"):
        results.best()


def test_runs_that_break_one_after_another_survive_too() -> None:
    methods = [
        F2SA(0.5, 0.1, lower_optimizer=None),
        F2SA(upper_lr=0.1, lower_optimizer=lambda p: torch.optim.SGD(p, lr=1e150)),
    ]
    task = deterministic()
    with pytest.warns(UnbatchedWarning, match="2 of 4 runs"):
        results = many(task, methods=methods, seeds=2, steps=10)
    assert [reason is None for reason in results.reasons] == [True, True, False, False]
    assert results[2].outcome is bilevel.Outcome.BROKEN
    assert "not finite at step" in str(results.reasons[2])
