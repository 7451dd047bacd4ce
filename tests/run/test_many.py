"""minimize_many: every run is that of minimize; what cannot be one computation says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from bilevel.engine.stacked import stack as stacked
from bilevel.errors import ArgumentError, ArgumentTypeError, RunError, UnbatchedWarning
from bilevel.problem import Ball, Box, Rows, Simplex
from tests.methods.common import OnceDifferentiable

F2SA = bilevel.F2SA
N, D, C = 40, 6, 3


class Task(NamedTuple):
    """A problem, where it starts, and how it is sampled."""

    problem: bilevel.Problem
    x0: Any
    y0: Any
    options: dict[str, Any]


def cleaning(wrap: Callable[[Tensor], Tensor] = lambda scores: scores, **choices: Any) -> Task:
    """Softmax regression with a weight per sample, in float64; ``wrap`` is put around scores."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(N, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(C, (N,), generator=generator)

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        features, labels, rows = batch
        losses = cross_entropy(wrap(features @ y), labels, reduction="none")
        return (torch.sigmoid(x[rows]) * losses).mean() + 0.01 * (y * y).sum()

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        features, labels = batch
        return cross_entropy(features @ y, labels)

    data = {
        "lower_data": (features, labels, torch.arange(N)),
        "upper_data": (features.flip(0), labels.flip(0)),
        "batch_size": 7,
    }
    return Task(
        bilevel.Problem(upper, lower, choices.pop("x_set", None), choices.pop("y_set", None)),
        torch.linspace(-1, 1, N, dtype=torch.float64),
        torch.zeros(D, C, dtype=torch.float64),
        {**data, **choices},
    )


def noisy_quadratic() -> Task:
    problem = bilevel.problems.Quadratic(seed=1, sigma_f=0.3, sigma_g=0.3)
    data = {"upper_data": problem.upper_noise, "lower_data": problem.lower_noise}
    return Task(problem, problem.x0, problem.y0, data)


def deterministic() -> Task:
    problem = bilevel.problems.Quadratic(seed=1)
    return Task(problem, problem.x0, problem.y0, {})


def networks(norm: nn.Module | None = None, seed: int = 0) -> Task:
    """A tree for x and a module for y, on dictionaries of tensors."""
    task = cleaning()
    torch.manual_seed(seed)
    layers = [nn.Linear(D, 4), nn.Tanh(), *([] if norm is None else [norm]), nn.Linear(4, C)]
    model = nn.Sequential(*layers).double()
    model[0].bias.requires_grad_(False)

    def lower(x: Any, y: nn.Module, batch: Any) -> Tensor:
        losses = cross_entropy(y(batch["features"]), batch["labels"], reduction="none")
        decay = sum(((p * p).sum() for p in y.parameters()), torch.zeros(()))
        return (torch.sigmoid(x["bias"] + x["weights"][0][batch["rows"]]) * losses).mean() + (
            x["decay"].exp() * decay
        )

    def upper(x: Any, y: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(y(batch["features"]), batch["labels"])

    features, labels, rows = task.options["lower_data"]
    x0 = {
        "weights": [torch.zeros(N, dtype=torch.float64)],
        "bias": torch.tensor(0.5, dtype=torch.float64),
        "decay": torch.tensor(-4.0, dtype=torch.float64),
    }
    data = {"features": features, "labels": labels, "rows": rows}
    return Task(
        bilevel.Problem(upper, lower, x_set={"decay": Box(-5, -3)}),
        x0,
        model,
        {"upper_data": data, "lower_data": data, "batch_size": 5},
    )


def many(task: Task, **options: Any) -> bilevel.Results:
    return bilevel.minimize_many(task.problem, task.x0, task.y0, **{**task.options, **options})


def one(task: Task, **options: Any) -> bilevel.Result:
    return bilevel.minimize(task.problem, task.x0, task.y0, **{**task.options, **options})


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module):
        return [*(p.detach() for p in value.parameters()), *value.buffers()]
    children = value.values() if isinstance(value, dict) else value
    return [leaf for child in children for leaf in leaves(child)]


def assert_same(mine: bilevel.Result, theirs: bilevel.Result, tolerance: float = 1e-10) -> None:
    assert mine.outcome == theirs.outcome
    assert (mine.steps, mine.selected_step) == (theirs.steps, theirs.selected_step)
    for name in ("x", "y"):
        for a, b in zip(leaves(getattr(mine, name)), leaves(getattr(theirs, name)), strict=True):
            assert a.dtype == b.dtype
            assert float((a - b).double().norm()) <= tolerance * float(b.double().norm()), name
    assert list(mine.history) == ["step", "seconds", *list(mine.history)[2:]]
    assert sorted(mine.history) == sorted(theirs.history)
    for name, column in theirs.history.items():
        if name != "seconds":
            # the gap is a difference of two losses, so that it is compared on their scale
            np.testing.assert_allclose(
                mine.history[name], column, rtol=tolerance, atol=tolerance, err_msg=name
            )


def assert_as_one_by_one(task: Task, methods: Any, seeds: Any, **options: Any) -> None:
    """All at once, without a warning, and each as by itself."""
    results = many(task, methods=methods, seeds=seeds, **options)
    assert all(r.seconds == results[0].seconds for r in results), "not one computation"
    for number, result in enumerate(results):
        setting, place = divmod(number, len(results.seeds))
        alone = one(task, method=results.methods[setting], seed=results.seeds[place], **options)
        assert_same(result, alone)


# Each run is that of minimize


def f2sa(*arguments: Any, **choices: Any) -> bilevel.F2SA:
    return F2SA(*arguments, inner_steps=2, **choices)


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
    assert_as_one_by_one(cleaning(), methods, 2, steps=50)


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


@pytest.mark.parametrize("task", [noisy_quadratic, deterministic, networks])
def test_every_structure_gives_the_runs_of_minimize(task: Callable[[], Task]) -> None:
    methods = [f2sa(0.3, 0.1, 20.0), f2sa(0.3, 0.1, 40.0)]
    assert_as_one_by_one(task(), methods, 2, steps=25)


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
    assert_as_one_by_one(cleaning(**sets), methods, 2, steps=20)


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


@pytest.mark.parametrize("at_once", [1, 2, 4, 100])
def test_runs_in_several_computations_are_the_same(at_once: int) -> None:
    options: dict[str, Any] = {"methods": [F2SA(0.5, 2.0), F2SA(0.1, 1.0)], "seeds": 3, "steps": 4}
    whole, parts = many(cleaning(), **options), many(cleaning(), at_once=at_once, **options)
    for a, b in zip(whole, parts, strict=True):
        assert_same(a, b)


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


# What cannot be one computation


def loader_task() -> Task:
    features, labels, rows = cleaning().options["lower_data"]
    batches = list(DataLoader(TensorDataset(features, labels, rows), batch_size=8))
    return cleaning(lower_data=batches)


def table_task() -> Task:
    task = cleaning()
    return task._replace(x0=bilevel.Table(task.x0))


def stepwise(scores: Tensor) -> Tensor:
    return scores if scores.sum() > 1e9 else 2 * scores


def uneven() -> Task:
    """Batches of a size that depends on the seed."""

    def rows(generator: torch.Generator) -> Tensor:
        return torch.randn(1 + generator.initial_seed() % 7, 10, dtype=torch.float64)

    problem = bilevel.problems.Quadratic(seed=1)
    wrapped = bilevel.Problem(lambda x, y, batch: problem.upper(x, y, batch.mean(0)), problem.lower)
    return Task(wrapped, problem.x0, problem.y0, {"upper_data": rows})


GIVEN = f2sa(0.3, 0.1)
ALONE: dict[str, tuple[Callable[[], Task], Any, str]] = {
    "auto": (
        cleaning,
        F2SA(inner_steps=2),
        r"each run finds its rates for itself \('auto'\); give numbers, such as the last in "
        r"history\['lower_lr'\] and history\['upper_lr'\] of one run$",
    ),
    "auto for x": (
        cleaning,
        F2SA(0.1, inner_steps=2),
        r"each run finds its rates for itself",
    ),
    "optimizer": (
        cleaning,
        f2sa(0.3, upper_optimizer=lambda p: torch.optim.Adam(p, lr=0.1)),
        "an optimizer keeps a state of its own for each run",
    ),
    "acceleration": (
        cleaning,
        bilevel.F2BA(0.3, 0.1, acceleration=bilevel.Nesterov()),
        "acceleration keeps a state",
    ),
    "another method": (cleaning, bilevel.F3SA(0.3, 0.1), "F3SA cannot run many at once"),
    "batches": (loader_task, GIVEN, "lower_data is an iterable of batches"),
    "table": (table_task, GIVEN, "x.values is moved row by row"),
    "dropout": (lambda: cleaning(dropout), GIVEN, "the objectives draw random numbers"),
    "control flow": (
        lambda: cleaning(stepwise),
        GIVEN,
        r"lower\(x, y, batch\) cannot be evaluated for all runs at once .*control flow",
    ),
    "no rule": (
        lambda: cleaning(OnceDifferentiable.apply),
        GIVEN,
        r"lower\(x, y, batch\) cannot be evaluated for all runs at once .*vmap",
    ),
    "batch norm": (lambda: networks(nn.BatchNorm1d(4)), GIVEN, r"upper\(x, y, batch\) cannot be"),
    "set": (
        lambda: cleaning(x_set=lambda x: x.clone() if x.max() < 9 else x / 2),
        GIVEN,
        "the set <function.*control flow",
    ),
    "sizes": (uneven, GIVEN, "the batches of the runs cannot be stacked"),
}


@pytest.mark.parametrize(("make", "method", "reason"), ALONE.values(), ids=list(ALONE))
def test_other_runs_are_taken_one_after_another_and_one_warning_says_why(
    make: Callable[[], Task], method: Any, reason: str
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = many(make(), methods=method, seeds=2, steps=3)
    ours = [w for w in caught if issubclass(w.category, UnbatchedWarning)]
    assert len(ours) == 1
    assert ours[0].filename == __file__
    message = str(ours[0].message)
    assert message.startswith("2 of 2 runs are taken one after another, because ")
    with pytest.warns(UnbatchedWarning, match=reason):
        warnings.warn(ours[0].message, stacklevel=1)
    assert torch._C._functorch.maybe_current_level() is None  # vmap is left, however it went
    for seed, result in enumerate(results):
        assert_same(result, one(make(), method=method, seed=seed, steps=3))


class Counting(nn.Module):
    """Scores, and a buffer that counts how often they were asked for."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        self.count += 1
        return self.linear(features)


def test_buffers_that_change_are_found() -> None:
    with pytest.warns(UnbatchedWarning, match="change the buffers of a module"):
        results = many(networks(Counting()), methods=GIVEN, seeds=2, steps=2)
    for result in results:
        # the inner steps of the copy that is returned, in 2 steps and the one that fits it
        assert float(result.y[2].count) == 2 * 3


def test_buffers_that_do_not_change_are_no_obstacle() -> None:
    norm = nn.BatchNorm1d(4).double().eval()
    assert_as_one_by_one(networks(norm), GIVEN, 2, steps=3)


def test_starts_that_differ_in_frozen_parameters_are_taken_alone() -> None:
    tasks = [networks(seed=0), networks(seed=1)]
    task = tasks[0]._replace(x0=[t.x0 for t in tasks], y0=[t.y0 for t in tasks])
    assert not torch.equal(tasks[0].y0[0].bias, tasks[1].y0[0].bias)
    with pytest.warns(UnbatchedWarning, match="the starts of y differ in more than the values"):
        results = many(task, methods=GIVEN, seeds=2, steps=2, own_starts=True)
    for seed, result in enumerate(results):
        assert_same(result, one(tasks[seed], method=GIVEN, seed=seed, steps=2))


def test_all_reasons_are_in_one_warning() -> None:
    methods = [GIVEN, bilevel.F3SA(0.3, 0.1), F2SA(inner_steps=2)]
    with pytest.warns(UnbatchedWarning) as caught:
        results = many(cleaning(), methods=methods, seeds=2, steps=2)
    (warning,) = caught
    assert "4 of 6 runs" in str(warning.message)
    assert "F3SA" in str(warning.message)
    assert "finds its rates for itself" in str(warning.message)
    assert results[0].seconds == results[1].seconds != results[2].seconds


def test_steps_that_one_run_found_serve_all() -> None:
    history = one(cleaning(), method=F2SA(inner_steps=2), steps=20).history
    method = f2sa(history["lower_lr"][-1], history["upper_lr"][-1])
    assert_as_one_by_one(cleaning(), method, 3, steps=3)


def test_one_run_is_no_reason_to_warn() -> None:
    (result,) = many(cleaning(), seeds=[4], steps=2)
    assert_same(result, one(cleaning(), seed=4, steps=2))


def test_a_mistake_of_the_objective_is_reported_as_by_minimize() -> None:
    task = cleaning(lambda scores: scores[:, 5])
    with pytest.raises(IndexError, match="out of bounds"):
        many(task, methods=GIVEN, seeds=2, steps=2)
    vector = bilevel.Problem(lambda x, y, batch: y, lambda x, y, batch: (y - x).sum())
    with pytest.raises(bilevel.errors.ObjectiveError, match="must return a scalar"):
        bilevel.minimize_many(vector, torch.zeros(2), torch.zeros(2), methods=GIVEN, seeds=2)
    nowhere = cleaning(x_set=lambda x: [x])
    with pytest.raises(ArgumentTypeError):
        many(nowhere, methods=GIVEN, seeds=2, steps=2)


def test_what_an_objective_does_to_the_start_is_not_without_a_name() -> None:
    def lower(x: Any, y: Tensor, batch: Any) -> Tensor:
        x["kept"] = x["w"].exp()
        return (x["kept"] * (y - 1) ** 2).sum()

    problem = bilevel.Problem(lambda x, y, batch: ((y - 2) ** 2).sum(), lower)
    with pytest.warns(UnbatchedWarning, match="because an objective cannot be evaluated for all"):
        bilevel.minimize_many(
            problem, {"w": torch.zeros(2)}, torch.zeros(2), methods=GIVEN, seeds=2, steps=2
        )


# Results


def test_error_bars_and_the_best() -> None:
    task = noisy_quadratic()
    methods = [F2SA(0.5, lr, 20.0) for lr in (0.01, 0.2)]
    results = many(task, methods=methods, seeds=4, steps=30, record_every=10)
    curves = results.curves("upper")
    assert curves.shape == (2, 4, 4)
    assert curves[1, 2].tolist() == results[6].history["upper"].tolist()
    assert results.best_method() is methods[int(curves[:, :, -1].mean(1).argmin())] is methods[1]
    assert results.best() is results[int(curves[:, :, -1].argmin())]
    assert results.x.shape == (8, 5)
    assert torch.equal(results.y[5], results[5].y)
    assert results.seconds > 0
    assert repr(results).startswith("Results(2 methods x 4 seeds, seconds=")


def test_a_setting_that_breaks_is_not_the_best_and_has_no_curve_beyond() -> None:
    methods = [F2SA(lambda k: 0.5 if k < 3 else 1e300, 0.1), F2SA(0.5, 0.01)]
    results = many(deterministic(), methods=methods, seeds=2, steps=5)
    assert np.isnan(results.curves("upper")).tolist() == [
        [[False] * 3 + [True] * 2] * 2,
        [[False] * 5] * 2,
    ]
    assert results.best_method() is methods[1]
    assert results.best() is results[2]


def test_stacked_points_have_the_structure_of_the_start() -> None:
    results = many(networks(), methods=GIVEN, seeds=3, steps=1)
    assert results.x["weights"][0].shape == (3, N)
    assert results.x["bias"].tolist() == [r.x["bias"].item() for r in results]
    assert set(results.y) == {"0.weight", "2.weight", "2.bias"}
    assert torch.equal(results.y["2.weight"][1], results[1].y[2].weight)
    assert not results.y["2.weight"].requires_grad


def test_a_frame_has_all_histories() -> None:
    results = many(deterministic(), methods=[GIVEN, F2SA(0.3, 0.2)], seeds=[7, 9], steps=3)
    frame = results.to_frame()
    assert list(frame.columns) == ["method", "seed", *results[0].history]
    assert frame["method"].tolist() == [0] * 6 + [1] * 6
    assert frame["seed"].tolist() == ([7] * 3 + [9] * 3) * 2
    assert frame["upper"].tolist() == [v for r in results for v in r.history["upper"]]


def test_progress_shows_the_medians(capsys: pytest.CaptureFixture[str]) -> None:
    methods = [F2SA(0.3, 0.1, lam) for lam in (10.0, 20.0, 70.0)]
    many(deterministic(), methods=methods, seeds=1, steps=3, progress=True)
    assert "lam 20" in capsys.readouterr().err


# Arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"methods": []}, ArgumentError, "methods"),
        ({"methods": ["f9sa"]}, ArgumentError, "'f9sa' is not known"),
        ({"methods": 3}, ArgumentTypeError, "not 3"),
        ({"seeds": 0}, ArgumentError, "seeds .* at least 1, not 0"),
        ({"seeds": []}, ArgumentError, "seeds"),
        ({"seeds": [1, -2]}, ArgumentError, "seeds"),
        ({"steps": -1}, ArgumentError, "steps"),
        ({"record_every": 0}, ArgumentError, "record_every"),
        ({"at_once": 0}, ArgumentError, "at_once"),
        ({"own_starts": 1}, ArgumentTypeError, "own_starts"),
        ({"own_starts": True}, ArgumentError, "x0 holds 40 starts, .* 2 seeds or .* 2 runs"),
        ({"batch_size": 0}, ArgumentError, "batch_size"),
        ({"batch_size": 99}, ArgumentError, "batch_size=99"),
        ({"lower_data": iter([1])}, ArgumentError, "lower_data"),
    ],
)
def test_what_cannot_work_is_refused(options: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        many(cleaning(), **{"methods": GIVEN, "seeds": 2, "steps": 2, **options})


def test_every_method_is_checked_against_the_problem() -> None:
    task = deterministic()
    methods = [F2SA(0.3, 0.1, lam, scheme="central") for lam in (1000.0, 1e-3)]
    with pytest.raises(ArgumentError, match=r"multiplier=0\.001 is too small"):
        many(task, methods=methods, steps=2)


def test_a_start_list_must_be_one() -> None:
    task = cleaning()._replace(x0={"a": torch.zeros(2)})
    with pytest.raises(ArgumentTypeError, match="x0"):
        many(task, methods=GIVEN, seeds=2, own_starts=True)
    with pytest.raises(ArgumentTypeError, match=r"problem"):
        bilevel.minimize_many(None, torch.zeros(1), torch.zeros(1))
