"""minimize_many: what cannot be one computation is done one by one, and says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from bilevel.errors import ArgumentTypeError, UnbatchedWarning
from tests.methods.common import OnceDifferentiable
from tests.run import many_runs
from tests.run.many_runs import (
    F2SA,
    GIVEN,
    Task,
    assert_as_one_by_one,
    assert_same,
    cleaning,
    f2sa,
    many,
    networks,
    one,
)


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


ALONE: dict[str, tuple[Callable[[], Task], Any, str]] = {
    "auto": (
        cleaning,
        F2SA(inner_steps=2),
        r"each run finds its rates for itself \('auto'\); give numbers, such as the last in "
        r"history\['lower_lr'\] and a part of that in history\['upper_lr'\] of one run$",
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
    assert ours[0].filename == many_runs.__file__  # where `many` calls minimize_many
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


@pytest.mark.slow
def test_steps_that_one_run_found_serve_all() -> None:
    history = one(cleaning(), method=F2SA(inner_steps=2), steps=80).history
    moved = history["upper_lr"][history["upper_lr"] > 0]
    method = f2sa(history["lower_lr"][-1], moved[-1])
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
