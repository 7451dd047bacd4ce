"""Objectives that return metrics beside the loss: recorded, logged, averaged, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.errors import ArgumentError, CompileWarning, ObjectiveError, UnbatchedWarning
from bilevel.run.loggers import figures

ROWS = torch.linspace(-1, 2, 36).reshape(12, 3)


def upper(x: Tensor, y: Tensor, batch: Tensor) -> Any:
    wrong = ((y - 1 - batch) ** 2).mean(1)
    return wrong.mean(), {"near": (wrong < 1).double().mean(), "size": float(y.detach().norm())}


def lower(x: Tensor, y: Tensor, batch: Tensor) -> Any:
    return ((y - x - batch) ** 2).mean(), {"gap": (y - x).detach().norm().reshape(1)}


def run(method: Any = None, **options: Any) -> bilevel.Result:
    options = {"upper_data": ROWS, "lower_data": ROWS, "steps": 12} | options
    problem = bilevel.Problem(options.pop("upper", upper), options.pop("lower", lower))
    method = bilevel.F2SA(0.1, 0.1, inner_steps=3) if method is None else method
    return bilevel.minimize(problem, torch.zeros(3), torch.zeros(3), method=method, **options)


NAMES = {"upper/near", "upper/size", "lower/gap"}


@pytest.mark.parametrize("method", sorted(bilevel.METHODS))
def test_every_method_records_the_metrics_where_it_records_the_losses(method: str) -> None:
    points = []

    def measured(x: Tensor, y: Tensor, batch: Tensor) -> Any:
        points.append(y.detach().clone())
        return upper(x, y, batch)

    result = run(method, upper=measured, steps=4)
    assert set(result.history) >= NAMES
    losses, sizes = result.history["upper"], result.history["upper/size"]
    for loss, size in zip(losses, sizes, strict=True):
        near = [p for p in points if abs(float(p.norm()) - size) < 1e-6]
        assert near, "the metrics are not those of any point"
        assert min(abs(float(upper(None, p, ROWS)[0]) - loss) for p in near) < 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"batch_size": 6, "chunk_size": 2},
        {"batch_size": 5, "direction_batch_size": "all"},
        {"accumulate": True},
        {"method": bilevel.F2SA(0.1, 0.1, single_pass=True)},
        {"method": bilevel.F2SA(0.1, 0.1, single_pass=True), "accumulate": True},
    ],
    ids=str,
)
def test_metrics_change_nothing_else(options: dict[str, Any]) -> None:
    with_metrics = run(**options)
    plain = run(**options, upper=lambda *a: upper(*a)[0], lower=lambda *a: lower(*a)[0])
    assert torch.equal(with_metrics.x, plain.x)
    assert set(with_metrics.history) - set(plain.history) == NAMES
    for name in set(plain.history) - {"seconds"}:
        np.testing.assert_array_equal(with_metrics.history[name], plain.history[name])


def test_metrics_of_parts_are_their_weighted_mean() -> None:
    whole = run(batch_size=None, direction_batch_size=None)
    parts = run(batch_size=None, direction_batch_size="all", chunk_size=5)
    np.testing.assert_allclose(parts.history["upper/near"], whole.history["upper/near"], rtol=1e-6)
    np.testing.assert_allclose(parts.history["lower/gap"], whole.history["lower/gap"], rtol=1e-4)


def test_metrics_are_logged_and_in_the_frame_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    logged: list[dict[str, float]] = []

    def callback(solver: Any, info: Any) -> None:
        logged.append(figures(info))

    run(steps=5, checkpoint=tmp_path)
    result = run(steps=12, checkpoint=tmp_path, callback=callback)
    whole = run(steps=12)
    assert len(logged) == 7
    assert set(logged[0]) >= NAMES
    assert set(result.to_frame().columns) >= NAMES
    for name in NAMES:
        np.testing.assert_array_equal(result.history[name], whole.history[name])


def test_compiled_and_stacked_runs_say_that_they_have_no_metrics() -> None:
    with pytest.warns(CompileWarning, match="the objectives return metrics"):
        assert "upper/near" in run(compile=True, steps=2).history
    with pytest.warns(UnbatchedWarning, match="the objectives return metrics"):
        found = bilevel.minimize_many(
            bilevel.Problem(upper, lower), torch.zeros(3), torch.zeros(3), steps=2, seeds=2,
            methods=bilevel.F2SA(0.1, 0.1), upper_data=ROWS, lower_data=ROWS,
        )  # fmt: skip
    assert "upper/near" in found[0].history


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"a": torch.zeros(2)}, r"metric 'a': 'a tensor of shape \(2,\)'"),
        ({"a": "good"}, "metric 'a': 'good'"),
        ({1: 2.0}, "metric 1: 2.0"),
        ([1.0], "a pair of it and a dict of metrics"),
    ],
)
def test_what_is_no_metric_is_refused(metrics: Any, said: str) -> None:
    with pytest.raises(ObjectiveError, match=said):
        run(upper=lambda *a: (upper(*a)[0], metrics))


def test_metrics_that_come_and_go_are_refused() -> None:
    calls = 0

    def sometimes(x: Tensor, y: Tensor, batch: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return upper(x, y, batch)[0], {"new" if calls > 9 else "old": 1.0}

    with pytest.raises(ObjectiveError, match=r"metrics \['upper/new'\], but \['upper/old'\]"):
        run(upper=sometimes)


def test_a_complex_metric_is_refused() -> None:
    def complex_upper(x: Tensor, y: Tensor, batch: Tensor) -> Any:
        return upper(x, y, batch)[0], {"phase": torch.tensor(1j)}

    with pytest.raises(ObjectiveError, match="'phase': 'a complex tensor"):
        run(upper=complex_upper)


@pytest.mark.slow
def test_a_gap_that_the_method_has_not_cannot_be_followed() -> None:
    """It is NaN in every step, so that patience would end the run and no x be the best."""
    run("f2sa", monitor="gap", patience=50)
    with pytest.raises(ArgumentError, match=r"monitor must be one of 'upper', .* not 'gap'"):
        run("soba", monitor="gap", patience=3)


def broken_beyond(edge: float) -> bilevel.Problem:
    """A quadratic whose g is not a number where x is larger, so that "auto" takes steps back."""

    def upper(x: Tensor, y: Tensor, batch: Any) -> Any:
        return (y - 3) ** 2, {"far": (x - 30).abs()}

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return torch.as_tensor((y - x) ** 2 + 0 * (edge - x).log())

    return bilevel.Problem(upper, lower)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"select": "best", "monitor": "upper/far"},
        {"patience": 30, "monitor": "upper/far"},
    ],
    ids=str,
)
def test_a_step_that_was_taken_back_has_no_metrics(options: dict[str, Any]) -> None:
    """They are NaN, as the losses are; the run goes on, and its best is one that was measured."""
    seen: list[float] = []

    def callback(solver: Any, info: Any) -> None:
        seen.append(float(info.metrics["upper/far"]))

    zero = torch.tensor(0.0)
    result = bilevel.minimize(
        broken_beyond(0.2), zero, zero, steps=60, callback=callback, **options
    )
    unknown = np.isnan(result.history["upper/far"])
    assert unknown.any()
    assert not unknown.all()
    np.testing.assert_array_equal(unknown, np.isnan(result.history["upper"]))
    np.testing.assert_allclose(seen, result.history["upper/far"])
    assert 0.1 < float(result.x) < 0.2


def test_a_step_that_was_taken_back_is_logged_without_metrics() -> None:
    logged: list[dict[str, float]] = []

    def callback(solver: Any, info: Any) -> None:
        logged.append(figures(info))

    zero = torch.tensor(0.0)
    bilevel.minimize(broken_beyond(0.2), zero, zero, steps=60, callback=callback)
    assert [*map(set, logged)].count({"lower_lr", "multiplier", "upper_lr"}) > 0
    assert sum("upper/far" in figures for figures in logged) > 30
