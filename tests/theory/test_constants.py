"""The constants of a problem, the bounds of the lemmas, and the regimes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from bilevel.errors import ArgumentError
from bilevel.theory import REGIMES, Constants, design
from tests.theory.designs import (
    EASY,
    GENERAL,
    NOISE_REGIMES,
)


def test_derived_constants_by_hand():
    assert GENERAL.kappa_g == 3
    assert GENERAL.l_lam0 == 9
    assert GENERAL.l_star0 == 10
    assert GENERAL.l_F1 == 10 * (3 + 36 / 2 + 2 * 5 * 6 * 13 / 4) == 2160
    assert (GENERAL.M_f, GENERAL.M_g, GENERAL.M) == (26, 53, 53)
    assert GENERAL.C_lam == (4 * 5 * 6 / 4) * (3 + 2 * 5 * 13 / 2) == 2040
    assert GENERAL.convex_multiplier == 3
    assert GENERAL.l_star1(11.0) == 32 * (13 + 1) * 36 / 8 == 2016
    assert GENERAL.l_star1() == pytest.approx(32 * (13 + 11 / 3) * 36 / 8) == pytest.approx(2400)
    assert GENERAL.bias_bound(8.0) == 255
    assert GENERAL.distance_bound(4.0) == 2 * 5 / (4 * 2) == 1.25
    assert GENERAL.drift_bound(4.0, 5.0, 0.5) == pytest.approx(2 * 1 / 20 * 5 / 2 + 9 * 0.5)
    assert GENERAL.drift_bound(5.0, 4.0, 0.5) == GENERAL.drift_bound(4.0, 5.0, 0.5)


def test_smallest_multiplier_is_never_below_one():
    assert GENERAL.min_multiplier == 3
    assert Constants(mu_g=1.0, l_g1=1.0, l_f1=0.4, l_f0=1.0).min_multiplier == 1
    assert Constants(mu_g=1.0, l_g1=1.0, l_f1=0.4, l_f0=1.0).convex_multiplier == 0.8


class KnownProblem:
    """f = sqrt(1 + (y - t)^2), g = a (y - b x)^2 / 2 in one dimension; |f'| <= 1, 0 <= f'' <= 1."""

    a, b, t = 0.5, 1.5, 3.0
    constants = Constants(mu_g=a, l_g1=a * (1 + b**2), l_f1=1.0, l_f0=1.0)

    def df(self, y):
        return (y - self.t) / math.sqrt(1 + (y - self.t) ** 2)

    def y_lam(self, x, lam):
        low, high = self.b * x - 100, self.b * x + 100
        for _ in range(200):
            middle = (low + high) / 2
            rising = self.df(middle) + lam * self.a * (middle - self.b * x) > 0
            low, high = (low, middle) if rising else (middle, high)
        return low

    def penalty_gradient(self, x, lam):  # grad_x of g is -a b (y - b x); that of f is 0
        return -lam * self.a * self.b * (self.y_lam(x, lam) - self.b * x)

    def gradient(self, x):  # F = f(b x)
        return self.b * self.df(self.b * x)


def test_bounds_hold_on_a_problem_with_known_solutions():
    problem = KnownProblem()
    bounds = problem.constants
    multipliers = [bounds.convex_multiplier * factor for factor in (1, 2, 7, 100)]
    points = [-4.0, 0.0, 1.9, 2.1, 6.0]
    tightness = 0.0
    for lam in multipliers:
        for x in points:
            bias = abs(problem.gradient(x) - problem.penalty_gradient(x, lam))
            assert bias <= bounds.bias_bound(lam)
            distance = abs(problem.y_lam(x, lam) - problem.b * x)
            assert distance <= bounds.distance_bound(lam)
            tightness = max(tightness, distance / bounds.distance_bound(lam))
            for lam2 in multipliers:
                for x2 in points:
                    drift = abs(problem.y_lam(x, lam) - problem.y_lam(x2, lam2))
                    assert drift <= bounds.drift_bound(lam, lam2, abs(x - x2))
    assert tightness > 0.4  # the bound is twice what a strong pull of f attains


VALID = {"mu_g": 1.0, "l_g1": 2.0, "l_f1": 1.0, "l_f0": 1.0}


def test_constants_are_keyword_only_frozen_floats():
    with pytest.raises(TypeError):
        Constants(1.0, 2.0, 1.0, 1.0)
    constants = Constants(mu_g=1, l_g1=np.float32(2), l_f1=np.int64(1), l_f0=1)
    assert constants == Constants(**VALID)
    assert all(type(value) is float for value in dataclasses.astuple(constants))
    with pytest.raises(dataclasses.FrozenInstanceError):
        constants.mu_g = 2.0


def test_bounds_refuse_a_multiplier_outside_the_lemmas():
    for call in (GENERAL.bias_bound, GENERAL.distance_bound):
        with pytest.raises(ArgumentError, match=r"\blam\b.*3"):
            call(2.9)
    with pytest.raises(ArgumentError, match="lam2"):
        GENERAL.drift_bound(3.0, 2.9, 0.0)
    with pytest.raises(ArgumentError, match="dx"):
        GENERAL.drift_bound(3.0, 4.0, -1)
    with pytest.raises(ArgumentError, match="lam0"):
        GENERAL.l_star1(0)


@pytest.mark.parametrize(
    ("algorithm", "regime", "a", "c", "slope"),
    [
        ("f2sa", "stochastic", 5 / 7, 4 / 7, -2 / 7),
        ("f2sa", "upper-noise", 3 / 5, 2 / 5, -2 / 5),
        ("f2sa", "deterministic", 1 / 3, 0, -2 / 3),
        ("f3sa", "stochastic", 3 / 5, 2 / 5, -2 / 5),
        ("f3sa", "upper-noise", 1 / 2, 1 / 4, -1 / 2),
        ("f3sa", "deterministic", 1 / 3, 0, -2 / 3),
    ],
)
def test_exponents_balance(algorithm, regime, a, c, slope):
    row = REGIMES[algorithm][regime]
    assert (row.a, row.c, row.slope) == (a, c, slope)
    assert slope == pytest.approx(a - 1)
    # Powers of 1/k under the theorem's sums. 1 sums to log K; the noises that exist must not do
    # worse, and the one that limits the rate does no better.
    bias = 3 * a - 2 * c
    upper_noise, lower_noise = (a + c, 3 * c - a) if algorithm == "f2sa" else (2 * c + a, 4 * c - a)
    assert bias == pytest.approx(1)
    if regime == "stochastic":
        assert lower_noise == pytest.approx(1)
        assert upper_noise > 1
    if regime == "upper-noise":
        assert upper_noise == pytest.approx(1)


@pytest.mark.parametrize("algorithm", ["f2sa", "f3sa"])
@pytest.mark.parametrize("regime", NOISE_REGIMES)
def test_limiting_terms_of_the_designed_schedules_decay_as_one_over_k(algorithm, regime):
    steps = design(EASY, algorithm=algorithm, regime=regime)

    def decay(term):
        return -math.log10(term(10**13) / term(10**12))

    assert decay(lambda k: steps.alpha(k) / steps.multiplier(k) ** 2) == pytest.approx(1, abs=1e-6)
    if algorithm == "f2sa":
        terms = {
            "stochastic": lambda k: steps.gamma(k) ** 2 * steps.multiplier(k),
            "upper-noise": lambda k: steps.alpha(k) ** 2 * steps.multiplier(k),
        }
    else:

        def weight(k):
            return steps.momentum(k + 1) ** 2 / steps.gamma(k)

        terms = {
            "stochastic": lambda k: weight(k) * steps.multiplier(k),
            "upper-noise": lambda k: weight(k) / steps.multiplier(k),
        }
    if regime in terms:
        assert decay(terms[regime]) == pytest.approx(1, abs=1e-6)


def test_constant_multiplier_regime():
    for algorithm in REGIMES:
        assert REGIMES[algorithm]["constant-multiplier"].slope is None
        steps = design(EASY, algorithm=algorithm, regime="constant-multiplier", lam0=5.0)
        assert [steps.multiplier(k) for k in (0, 1, 10**6)] == [5.0, 5.0, 5.0]
        assert steps.gamma(3 * steps.k0) == pytest.approx(steps.gamma(0) / 2)
        assert steps.alpha(3 * steps.k0) == pytest.approx(steps.alpha(0) / 2)


def test_regimes_cannot_be_changed():
    with pytest.raises(TypeError):
        REGIMES["f2sa"]["stochastic"] = None
    with pytest.raises(TypeError):
        REGIMES["sgd"] = {}
