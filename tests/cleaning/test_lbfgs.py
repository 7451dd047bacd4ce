"""L-BFGS for small fits, beside SciPy's."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from scipy.optimize import fmin_l_bfgs_b

from bilevel.cleaning.lbfgs import _Curvature, minimised

Vector: TypeAlias = npt.NDArray[np.float64]

WIDTH = 12
rng = np.random.default_rng(0)
FACTORS = rng.normal(size=(40, WIDTH)) * np.logspace(-1, 0.5, WIDTH)
SIGNS = rng.choice([-1.0, 1.0], 40)


def logistic(x: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
    margins = SIGNS * (FACTORS @ x)
    slope = -SIGNS / (1 + np.exp(margins))
    value = np.logaddexp(0, -margins).sum() + 0.05 * float(x @ x)
    return float(value), FACTORS.T @ slope + 0.1 * x


@pytest.mark.parametrize("bounded", [0, 5, WIDTH])
def test_the_minimum_is_that_of_scipy(bounded: int) -> None:
    bounds = [(0, None)] * bounded + [(None, None)] * (WIDTH - bounded)
    start = np.ones(WIDTH)
    expected, lowest, _ = fmin_l_bfgs_b(logistic, start, bounds=bounds, factr=10, pgtol=1e-9)
    x, value = minimised(logistic, start, bounded=bounded, gradient_tolerance=1e-7, tolerance=1e-15)
    assert value == pytest.approx(lowest, rel=1e-9)
    np.testing.assert_allclose(x, expected, atol=1e-4)
    assert (x[:bounded] >= 0).all()
    if bounded:
        assert (x[:bounded] == 0).any()  # otherwise this would be a test of no bound


def test_a_minimum_is_left_alone_and_the_start_is_not_changed() -> None:
    best, _ = minimised(logistic, np.zeros(WIDTH), gradient_tolerance=1e-8, tolerance=0.0)
    start = best.copy()
    x, value = minimised(logistic, start, gradient_tolerance=1e-5)
    np.testing.assert_array_equal(x, best)
    np.testing.assert_array_equal(start, best)
    assert value == logistic(best)[0]


def test_a_step_into_what_is_not_finite_is_shortened() -> None:
    def barrier(x: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        with np.errstate(invalid="ignore"):
            return float(100 * x[0] - np.log(x[0])), 100 - 1 / x

    x, _ = minimised(barrier, np.array([0.5]), tolerance=1e-14)
    assert x[0] == pytest.approx(0.01, rel=1e-4)


def test_no_more_steps_are_taken_than_asked_for() -> None:
    _, value = minimised(logistic, np.ones(WIDTH), steps=2)
    assert value > minimised(logistic, np.ones(WIDTH))[1] + 0.1


def by_two_loops(vector: Vector, pairs: list[tuple[Vector, Vector]]) -> Vector:
    """The direction of L-BFGS as it is in textbooks; the oldest pair first."""
    found, shares = vector.copy(), []
    for step, change in reversed(pairs):
        shares.append((step @ found) / (step @ change))
        found -= shares[-1] * change
    step, change = pairs[-1]
    found *= (step @ change) / (change @ change)
    for (step, change), share in zip(pairs, reversed(shares), strict=True):
        found += (share - (change @ found) / (step @ change)) * step
    return found


@pytest.mark.parametrize("taken", [1, 2, 9, 10, 11, 25])
def test_the_compact_form_is_that_of_two_loops_over_the_last_ten_steps(taken: int) -> None:
    steps = rng.normal(size=(taken, 30))
    factors = rng.normal(size=(30, 30)) / 5 + np.eye(30)
    pairs = [(step, factors @ (factors.T @ step)) for step in steps]
    curvature = _Curvature(30)
    for step, change in pairs:
        curvature.add(step, change)
        curvature.add(step, -change)  # shows no curvature, and is passed over
    vector = rng.normal(size=30)
    expected = by_two_loops(vector, pairs[-10:])
    np.testing.assert_allclose(curvature.inverse_times(vector), expected, rtol=1e-8, atol=1e-10)
