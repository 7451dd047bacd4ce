"""Results: what minimize_many returns, and which arguments it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import bilevel
from bilevel.errors import ArgumentError, ArgumentTypeError
from tests.run.many_runs import (
    F2SA,
    GIVEN,
    N,
    cleaning,
    deterministic,
    many,
    networks,
    noisy_quadratic,
)

# Results


@pytest.mark.slow
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
