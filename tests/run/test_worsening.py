"""Runs that end with f above where it was: told where it is so, and not by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bilevel
from bilevel import F2SA, Outcome
from bilevel.errors import WorsenedWarning
from bilevel.problems import Quadratic
from bilevel.run.worsening import worsening
from tests.marks import slow_except

QUADRATIC = Quadratic(seed=0)
RANDOM = np.random.default_rng(0)
K = np.arange(400.0)


def history(f: Any, moved: Any = None, lower: Any = None) -> dict[str, Any]:
    f = np.asarray(f, dtype=float)
    moved = np.ones(len(f)) if moved is None else np.asarray(moved, dtype=float)
    return {
        "upper": f,
        "lower": np.ones(len(f)) if lower is None else np.asarray(lower, dtype=float),
        "step": np.arange(len(f)),
        "upper_lr": np.ones(len(f)),
        "direction_norm": moved,
    }


# The test by itself

SINCE_START: dict[str, tuple[Any, Any]] = {
    "a steady rise": (1 + K / 400, None),
    "a rise in noise": (1 + K / 400 + 0.1 * RANDOM.normal(size=400), None),
    "a rise below zero": (-2 + K / 400, None),
    "down and then above the start": (1 - K / 100 + (K / 150) ** 2, None),
    "exponential": (1.03**K, 1.015**K),
    "a rise in the first of many growing steps": (4 - 3 * np.exp(-K / 40), 1.05**K),
    "one jump at the first step": (np.where(K < 1, 1.0, 50.0), np.where(K < 1, 100.0, 0.01)),
}
NOT_WORSE: dict[str, tuple[Any, Any]] = {
    "constant": (np.ones(400), None),
    "constant but for rounding": (np.float32(1) + RANDOM.integers(0, 2, 400) * 1e-7, None),
    "a fall": (np.exp(-K / 50), np.exp(-K / 50)),
    "a fall and a small return": (np.exp(-K / 20) + 0.0002 * K, np.exp(-K / 20)),
    "a fall into noise": (np.exp(-K / 50) + 0.1 * RANDOM.normal(size=400), None),
    "a bad batch at the end": (np.where(K > 390, np.where(K % 4, 1.0, 99.0), 1.0), None),
    "noise that grows": (1 + K / 400 * RANDOM.normal(size=400), None),
    "low until y is fitted": (np.where(K < 10, K / 10, np.exp(-K / 400)), None),
    "x does not move": (1 + K, np.zeros(400)),
    "nothing": ([], None),
    "too short": ([1.0, 2.0, 3.0], None),
}


@pytest.mark.parametrize("series", SINCE_START.values(), ids=list(SINCE_START))
def test_a_rise_above_the_start_is_seen(series: tuple[Any, Any]) -> None:
    found = worsening(history(*series))
    assert found is not None
    assert found.since == "start"
    assert found.after > found.before
    assert "where it began" in str(found)
    shifted = worsening({**history(*series), "upper": 1e-8 * series[0]})
    assert shifted is not None  # in whatever units


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_rise_above_the_best_is_seen(noise: float) -> None:
    f = np.where(K < 200, 1 - 0.8 * K / 200, 0.2 + 0.5 * (K - 200) / 200)
    found = worsening(history(f + noise * RANDOM.normal(size=400)))
    assert found is not None
    assert found.since == "best"
    assert found.before == pytest.approx(0.2, abs=0.1)
    assert abs(found.step - 200) < 30
    assert found.after == pytest.approx(0.7, abs=0.1)


@pytest.mark.parametrize("series", NOT_WORSE.values(), ids=list(NOT_WORSE))
def test_what_is_no_rise_is_not_called_one(series: tuple[Any, Any]) -> None:
    assert worsening(history(*series)) is None


def test_a_rest_has_no_length_whatever_its_direction_was() -> None:
    rise = history(1 + K / 400)
    rise["upper_lr"][7], rise["direction_norm"][7] = 0.0, np.inf
    assert worsening(rise) is not None


def test_what_rises_while_y_is_fitted_is_no_rise() -> None:
    fitting = np.exp(-K / 20)
    assert worsening(history(2 - fitting)) is not None
    assert worsening(history(2 - fitting, lower=1 + fitting**2)) is None
    # nor is a fall of both, to a level about which f then moves
    fall = np.exp(-K / 10) + 0.1 + 0.01 * (K > 300)
    assert worsening(history(fall, 1.05**K, lower=1 + fitting)) is None
    # nor is what is lost of a fall that was over before x had made a tenth of its steps
    rested = history(np.where(K < 20, 1.0, 0.1) + 0.01 * (K > 300))
    rested["upper_lr"][:10] = 0.0
    assert worsening(rested) is None
    # but where g falls all the time, it is x that makes it fall
    assert worsening(history(1 + K / 400, lower=2 - K / 400)) is not None


NOISES: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "normal": lambda r, n: 1 + 0.5 * r.normal(size=n),
    "skewed": lambda r, n: np.exp(r.normal(size=n)),
    "with outliers": lambda r, n: 5 + r.standard_t(2, size=n),
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=list(NOISES))
@pytest.mark.parametrize("rows", slow_except(["20"], [20, 100, 1000]))
def test_chance_is_seldom_called_a_rise(noise: Callable[..., Any], rows: int) -> None:
    generator, runs = np.random.default_rng(rows), 1000
    found = sum(worsening(history(noise(generator, rows))) is not None for _ in range(runs))
    assert found <= 0.003 * runs  # of 20 heavy-tailed numbers; of more numbers far fewer


# Whole runs


def run(method: Any, problem: bilevel.Problem = QUADRATIC, **options: Any) -> bilevel.Result:
    start = {"x0": QUADRATIC.x0, "y0": QUADRATIC.y0, "steps": 150, **options}
    return bilevel.minimize(problem, method=method, **start)


def far(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return (y**2).sum() + (x**2).sum()


def towards_x(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return 0.5 * ((y - x) ** 2).sum()


SLOWLY_RISING: dict[str, Any] = {
    # steps of x a little beyond 2 / 4, the curvature of F being 4: x grows by 2% a step
    "problem": bilevel.Problem(far, towards_x),
    "method": F2SA(1.0, 0.505, 1e6),
    "x0": torch.ones(3, dtype=torch.float64),
    "y0": torch.zeros(3, dtype=torch.float64),
    "steps": 60,
}


@pytest.mark.slow
def test_a_step_of_x_that_makes_f_rise_is_told() -> None:
    with pytest.warns(WorsenedWarning) as caught:
        result = run(**SLOWLY_RISING)
    assert result.outcome is Outcome.WORSENED
    assert result.steps == 60
    assert len(caught) == 1
    assert caught[0].filename == __file__
    text = str(caught[0].message)
    assert "where it began" in text
    assert "select='best'" in text
    assert "smaller upper_lr" in text
    assert "upper_lr='auto'" in text


@pytest.mark.slow
def test_the_best_is_returned_without_a_word() -> None:
    result = run(**SLOWLY_RISING, select="best")
    assert result.outcome is Outcome.WORSENED
    assert result.selected_step < 5


@pytest.mark.slow
def test_a_rise_after_a_fall_is_told() -> None:
    method = F2SA(1.0, lambda k: 0.1 if k < 30 else 0.51, 1e6)
    with pytest.warns(WorsenedWarning, match="above"):
        result = run(**{**SLOWLY_RISING, "method": method, "steps": 500})
    assert result.outcome is Outcome.WORSENED


@pytest.mark.slow
def test_runs_that_fall_or_fluctuate_are_not_told_anything() -> None:
    noisy = Quadratic(condition=3.0, sigma_f=0.5, sigma_g=0.5, seed=0)
    data = {"upper_data": noisy.upper_noise, "lower_data": noisy.lower_noise}
    begun = bilevel.minimize(noisy, noisy.x0, noisy.y0, method=F2SA(0.5, 0.1), steps=100, **data)
    assert begun.outcome is Outcome.COMPLETED
    for seed in range(5):  # from where only noise is left
        result = bilevel.minimize(
            noisy, begun.x, begun.y, method=F2SA(0.5, 0.1, inner_steps=3), steps=100, seed=seed,
            **data,
        )  # fmt: skip
        assert result.outcome is Outcome.COMPLETED


@pytest.mark.slow
def test_many_runs_have_the_outcome_each() -> None:
    grid = [F2SA(1.0, 0.1, 1e6), SLOWLY_RISING["method"]]
    options = {name: value for name, value in SLOWLY_RISING.items() if name != "method"}
    results = bilevel.minimize_many(**options, methods=grid)
    assert [r.outcome for r in results] == [Outcome.COMPLETED, Outcome.WORSENED]


def test_a_run_that_was_stopped_keeps_that_outcome_and_is_told() -> None:
    with pytest.warns(WorsenedWarning):
        result = run(**SLOWLY_RISING, callback=lambda solver, info: info.step == 40)
    assert result.outcome is Outcome.STOPPED


# Steps that were taken back

NOISE = 0.1 * torch.randn(200, generator=torch.Generator().manual_seed(0))


def cliff(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    """It falls towards 3, but from 1.5 on it is a hundred higher."""
    return ((y - 3) ** 2).sum() + batch.mean() + 100 * torch.sigmoid(40 * (y - 1.5)).sum()


def follower(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    return 0.5 * ((y - x + batch.mean()) ** 2).sum()


@pytest.mark.slow
def test_steps_that_were_taken_back_are_not_where_a_run_ended(
    recwarn: pytest.WarningsRecorder,
) -> None:
    problem = bilevel.Problem(cliff, follower)
    beyond = 0
    for steps in range(60, 72):
        xs: list[Tensor] = []
        found = bilevel.minimize(
            problem,
            torch.zeros(1),
            torch.zeros(1),
            upper_data=NOISE,
            lower_data=NOISE,
            batch_size=4,
            steps=steps,
            callback=lambda solver, info: xs.append(solver.x.clone()),  # noqa: B023
        )
        assert found.x < 1.5
        assert found.outcome is Outcome.COMPLETED
        assert torch.equal(found.x, xs[found.selected_step - 1])  # x_k comes after step k - 1
        beyond += worsening(found.history) is not None
    assert beyond  # some of these runs end with f a hundred higher, at an x that was taken back
    assert not recwarn
