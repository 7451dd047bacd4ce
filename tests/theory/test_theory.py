"""The theory against plain recursions, numbers made by hand, and a problem with known answers."""

from __future__ import annotations

import dataclasses
import math
import pickle
import types
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bilevel.errors import ArgumentError, ArgumentTypeError, ImpracticalDesignWarning
from bilevel.stepping.schedules import Constant, Power, Ramp
from bilevel.theory import REGIMES, Constants, check, design
from bilevel.theory.sequences import CappedMultiplier, Momentum

NOISE_REGIMES = ("stochastic", "upper-noise", "deterministic")
ALL_DESIGNS = [(algorithm, regime) for algorithm in REGIMES for regime in REGIMES[algorithm]]
EASY = Constants(mu_g=1.0, l_g1=1.0, l_f1=1.0, l_f0=1.0)  # T = 768, k0 = 3072, lam0 = 2
GENERAL = Constants(
    mu_g=2.0, l_g1=6.0, l_f1=3.0, l_f0=5.0, l_g0=7.0, l_f2=11.0, l_g2=13.0, sigma_f=1.0, sigma_g=2.0
)


def with_kappa(kappa):
    return Constants(mu_g=1.0, l_g1=kappa, l_f1=1.0, l_f0=1.0)


def quiet_design(constants, **options):
    """A design whose practicality is not the point of the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImpracticalDesignWarning)
        return design(constants, **options)


# Constants


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


# Regimes


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


# Designs: the numbers


def test_f2sa_numbers_by_hand():
    steps = quiet_design(GENERAL, regime="stochastic")
    lam0 = 3
    l_star1 = 32 * (13 + 11 / 3) * 36 / 8
    T = math.ceil(48 / 2 * max(6 * 10**2, math.sqrt(53) * l_star1))
    assert (steps.lam0, steps.xi, steps.T) == (lam0, 1, T)
    assert T == 419_335
    k0 = max(4 * T * 3, 2160 / (3 * 2), 4 * 3 / (3 * 2))
    assert steps.k0 == k0
    c_gamma = 1 / (2 * k0 ** (1 - 4 / 7))
    c_alpha = 1 / (2 * lam0 * 2 * k0 ** (1 - 5 / 7))
    for k in (0, 17, 10**8):
        assert steps.gamma(k) == pytest.approx(c_gamma / (k + k0) ** (4 / 7))
        assert steps.alpha(k) == pytest.approx(c_alpha / (k + k0) ** (5 / 7))
        assert steps.beta(k) == pytest.approx(steps.gamma(k) / 2)
        assert steps.upper_lr(k) == pytest.approx(steps.alpha(k))
    assert steps.momentum is None


def test_f3sa_numbers_by_hand():
    steps = quiet_design(GENERAL, algorithm="f3sa", regime="upper-noise", c_eta=2.0)
    xi = 2 / (48 * 6 * 10**2)
    k0 = max(128 * 3 * math.sqrt(2 * 3), 8 * xi * 2160 / (3 * 2))
    assert (steps.lam0, steps.T) == (3, 1)
    assert steps.xi == pytest.approx(xi)
    assert steps.k0 == pytest.approx(k0)
    c_gamma = 8 / (2 * k0 ** (1 - 1 / 4))
    c_alpha = 8 / (2 * 3 * k0 ** (1 - 1 / 2))
    gamma = [c_gamma / (k + k0) ** (1 / 4) for k in range(50)]
    for k in range(1, 49):
        assert steps.gamma(k) == pytest.approx(gamma[k])
        assert steps.alpha(k) == pytest.approx(c_alpha / (k + k0) ** (1 / 2))
        assert steps.beta(k) == pytest.approx(gamma[k])
        assert steps.upper_lr(k) == pytest.approx(xi * steps.alpha(k))
        fall = 2 * (gamma[k - 1] - gamma[k]) / gamma[k - 1]
        eta = min(1, max((k + 2) ** -0.5, 2 * 6**3 / 2 * gamma[k] ** 2, fall))
        assert steps.momentum(k + 1) == pytest.approx(eta)
    assert steps.momentum(0) == steps.momentum(1) == 1


def test_upper_smoothness_may_decide_k0():
    # l_F1 enters k0 through the second bound on alpha; a large l_g2 makes that the binding one.
    constants = Constants(mu_g=1.0, l_g1=1.0, l_f1=1.0, l_f0=1.0, l_g2=1e6)
    l_F1 = 4 * (1 + 1 + 2e6)
    assert quiet_design(constants, algorithm="f3sa").k0 == pytest.approx(8 * l_F1 / 768 / 2)
    assert quiet_design(constants, T=1, xi=1.0).k0 == pytest.approx(l_F1 / 2)


def test_inner_steps_and_xi_follow_from_each_other():
    assert design(EASY).T == 48 * 4**2 == 768
    assert design(EASY, xi=2.0).T == 2 * 768
    assert design(EASY, xi=1e-3).T == 32
    assert design(EASY, T=1).xi == pytest.approx(1 / 768)
    assert design(EASY, T=5000).xi == 1
    assert (design(EASY, T=3, xi=0.7).T, design(EASY, T=3, xi=0.7).xi) == (3, 0.7)
    assert design(EASY, c_xi=1 / 12).T == 12 * 4**2


def test_condition_number_ten_needs_half_a_million_inner_steps():
    with pytest.warns(ImpracticalDesignWarning, match="T = 461280 inner steps") as caught:
        steps = design(with_kappa(10.0))
    assert steps.T == 48 * 10 * 31**2 == 461_280
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("options", "impractical"),
    [
        ({"T": 9_999}, False),
        ({"T": 10_000}, True),
        ({"xi": 1e-5}, True),  # x moves by 1e-5 * 8 / (2 * 2 * 128) = 1.6e-7
        ({"k0": 7e8, "xi": 1e4, "T": 768}, False),  # z moves by 768 / k0, x by 2e4 / k0
        ({"k0": 8e8, "xi": 1e4, "T": 768}, True),
        ({"k0": 1e5, "xi": 0.06, "T": 768}, False),  # x moves by 2 xi / k0
        ({"k0": 1e5, "xi": 0.04, "T": 768}, True),
    ],
)
def test_impractical_designs_warn(options, impractical):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        design(EASY, **options)
    assert [warning.category for warning in caught] == [ImpracticalDesignWarning] * impractical


# Designs: the multiplier


def recursion(a, c, T, mu, lam0, k0, steps, lag=False):
    """The paper's delta_k, word for word (``lag``: with its printed index), and who limits it."""
    c_gamma = 1 / (mu * k0 ** (1 - c))
    c_alpha = 1 / (2 * lam0 * mu * k0 ** (1 - a))
    lam, history, capped = lam0, [lam0], []
    for k in range(steps):
        at = k if lag else k + 1
        target = (c_gamma / (at + k0) ** c) / (2 * c_alpha / (at + k0) ** a)
        cap = T * mu / 16 * c_alpha / (k + k0) ** a * lam**2
        capped.append(cap < target - lam)
        lam += min(cap, target - lam)
        history.append(lam)
    return history, capped


@pytest.mark.parametrize("regime", NOISE_REGIMES)
def test_closed_form_is_the_recursion(regime):
    constants = Constants(mu_g=0.5, l_g1=0.75, l_f1=1.0, l_f0=1.0)
    steps = design(constants, regime=regime, T=32)
    history, capped = recursion(steps.a, steps.c, 32, 0.5, steps.lam0, steps.k0, 20_000)
    assert not any(capped)
    np.testing.assert_allclose(steps.multiplier(np.arange(20_001)), history, rtol=1e-11)
    assert steps.delta(100) == pytest.approx(history[101] - history[100], rel=1e-9)


@pytest.mark.parametrize("regime", NOISE_REGIMES)
def test_f3sa_multiplier_is_gamma_over_alpha(regime):
    steps = design(EASY, algorithm="f3sa", regime=regime)
    k = np.arange(20_000)
    np.testing.assert_allclose(steps.multiplier(k), steps.gamma(k) / steps.alpha(k), rtol=1e-12)
    assert steps.multiplier(0) == steps.lam0


@pytest.mark.parametrize("regime", NOISE_REGIMES)
def test_printed_index_lags_one_step_and_harmlessly(regime):
    steps = design(EASY, regime=regime)
    history, _ = recursion(steps.a, steps.c, steps.T, 1.0, steps.lam0, steps.k0, 20_000, lag=True)
    assert history[1] == pytest.approx(history[0], rel=1e-14)  # delta_0 = 0
    closed = steps.multiplier(np.arange(20_001))
    np.testing.assert_allclose(history[1:], closed[:-1], rtol=1e-11)
    assert 1e-6 < 1 - history[-1] / closed[-1] < 1e-4


@pytest.mark.parametrize(
    ("regime", "enough"), [("stochastic", 5), ("upper-noise", 7), ("deterministic", 11)]
)
def test_cap_binds_exactly_below_its_threshold(regime, enough):
    row = REGIMES["f2sa"][regime]
    assert enough - 1 < 32 * (row.a - row.c) < enough
    assert 32 * (row.a - row.c) == pytest.approx(
        {"stochastic": 4.57, "upper-noise": 6.4, "deterministic": 10.67}[regime], abs=5e-3
    )
    for T, binds in [(enough - 1, True), (enough, False)]:
        steps = design(EASY, regime=regime, T=T)
        history, capped = recursion(row.a, row.c, T, 1.0, steps.lam0, steps.k0, 2_000)
        assert any(capped) == binds
        assert capped[0] == binds
        np.testing.assert_allclose(steps.multiplier(np.arange(2_001)), history, rtol=1e-11)
        closed_form = steps.lam0 * ((1 + steps.k0) / steps.k0) ** (row.a - row.c)
        assert (steps.multiplier(1) < closed_form * (1 - 1e-9)) == binds
        assert isinstance(steps.multiplier, CappedMultiplier) == binds


@pytest.mark.parametrize("regime", NOISE_REGIMES)
def test_single_loop_multiplier_is_the_capped_recursion(regime):
    steps = design(EASY, regime=regime, T=1, k0=40.0)
    history, capped = recursion(steps.a, steps.c, 1, 1.0, steps.lam0, steps.k0, 30_000)
    np.testing.assert_allclose(steps.multiplier(np.arange(30_001)), history, rtol=1e-10)
    assert steps.beta(137) == pytest.approx(steps.alpha(137) * history[137], rel=1e-11)
    # The multiplier has to catch up with its target before the cap lets go: far later than the
    # step at which the cap alone would allow the target's growth, (1 + k/k0)^(1-c) = 32 (a-c).
    last_capped = max(k for k, binds in enumerate(capped) if binds)
    expected = {"stochastic": 727, "upper-noise": 291, "deterministic": 70}[regime]
    assert all(capped[: last_capped + 1])
    assert last_capped / steps.k0 == pytest.approx(expected, abs=1)
    after = last_capped + 2
    assert steps.multiplier(after) == pytest.approx(
        steps.gamma(after) / (2 * steps.alpha(after)), rel=1e-12
    )


def test_capped_multiplier_is_pure_in_k():
    reference = design(EASY, T=1).multiplier
    values = [reference(k) for k in range(5_000)]
    scattered = design(EASY, T=1).multiplier
    for k in (4_999, 0, 1_024, 1_023, 4_999, 4_998, 17, 2_048, 3_000):
        assert scattered(k) == values[k]
    shuffled = np.array([[4_000, 3], [3_999, 0]])
    assert scattered(shuffled).tolist() == [[values[4_000], values[3]], [values[3_999], values[0]]]
    assert scattered == reference
    assert hash(scattered) == hash(reference)
    assert "_latest" not in repr(scattered)
    with pytest.raises(ArgumentError, match=r"\bk\b"):
        scattered(-1)


def test_capped_multiplier_costs_one_step_per_step_and_never_much_to_go_back():
    calls = 0

    def alpha(k):
        nonlocal calls
        calls += 1
        return 1e-3

    multiplier = CappedMultiplier(alpha, Power(1.0, 10.0, 0.3), cap=1.0)
    for k in range(10_000):
        multiplier(k)
        multiplier(k)  # beta_k asks again
    assert calls == 9_999
    multiplier(5_000)
    assert calls <= 9_999 + 1_024
    assert len(multiplier._anchors) <= 10


# Designs: the objects


@pytest.mark.parametrize(("algorithm", "regime"), ALL_DESIGNS)
def test_schedules_take_numbers_and_arrays(algorithm, regime):
    steps = design(EASY, algorithm=algorithm, regime=regime, T=1)
    k = np.arange(40)
    schedules = [steps.alpha, steps.gamma, steps.beta, steps.multiplier, steps.upper_lr]
    schedules += [steps.momentum] * (algorithm == "f3sa")
    for schedule in [*schedules, steps.delta]:
        values = schedule(k)
        assert values.shape == k.shape
        np.testing.assert_allclose(values, [schedule(int(j)) for j in k], rtol=1e-12)
        assert isinstance(schedule(3), float)


@pytest.mark.parametrize(("algorithm", "regime"), ALL_DESIGNS)
def test_designs_survive_pickling(algorithm, regime):
    steps = design(EASY, algorithm=algorithm, regime=regime, T=1)
    before = steps.multiplier(3_000)
    copy = pickle.loads(pickle.dumps(steps))
    assert copy == steps
    assert copy.multiplier(3_000) == before
    assert copy.multiplier(3_100) == steps.multiplier(3_100)
    assert copy.multiplier(10) == design(EASY, algorithm=algorithm, regime=regime, T=1).multiplier(
        10
    )


def test_one_inner_step_is_all_that_f3sa_has():
    with pytest.raises(ArgumentError, match=r"\bT\b"):
        design(EASY, T=2, algorithm="f3sa")


@pytest.mark.parametrize(
    ("algorithm", "change", "name"),
    [
        ("f3sa", {"T": 2}, "T"),
        ("f2sa", {"a": 0.1, "c": 0.5}, "a"),
        ("f3sa", {"momentum": None}, "momentum"),
        ("f2sa", {"momentum": Constant(1.0)}, "momentum"),
    ],
)
def test_designs_made_by_hand_are_validated(algorithm, change, name):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=rf"\b{name}\b"):
        dataclasses.replace(design(EASY, algorithm=algorithm), **change)


# The checker


def reference_f2sa(steps, constants, k, c_xi):
    """Both sides of every inequality at one step, in plain Python, from the theorem's text."""
    mu, l_g1, l_f1 = constants.mu_g, constants.l_g1, constants.l_f1
    lam0, lam, lam_next = (steps.multiplier(j) for j in (0, k, k + 1))
    alpha, gamma = steps.alpha(k), steps.gamma(k)
    l_star0 = 1 + 3 * l_g1 / mu
    l_star1 = 32 * (constants.l_g2 + constants.l_f2 / lam0) * l_g1**2 / mu**3
    M = max(
        constants.l_f0**2 + constants.sigma_f**2,
        constants.l_g0**2 + constants.sigma_g**2,
    )
    l_F1 = l_star0 * (l_f1 + l_g1**2 / mu + 2 * constants.l_f0 * l_g1 * constants.l_g2 / mu**2)
    growth, ratio = (lam_next - lam) / lam, steps.xi / steps.T
    return {
        "1": (max(1, 2 * l_f1 / mu), lam0),
        "2": (alpha * lam, gamma),
        "3": (gamma, min(1 / (4 * l_g1), 1 / (4 * steps.T * mu))),
        "4": (alpha, min(1 / (8 * l_f1), 1 / (2 * steps.xi * l_F1))),
        "5": (ratio, c_xi * mu / max(l_g1 * l_star0**2, l_star1 * math.sqrt(M))),
        "6a": (0, growth),
        "6b": (growth, steps.T * mu * alpha * lam / 16),
        "P1": (alpha * lam, 1 / (8 * l_g1)),
        "P2": (growth, steps.T * mu * alpha * lam / 32),
        "P3": (ratio, mu / (96 * l_g1)),
        "P4": (ratio**2, mu**2 / (8 * M * l_star1**2)),
    }


def reference_f3sa(steps, constants, k, c_xi, c_eta):
    mu, l_g1 = constants.mu_g, constants.l_g1
    lam, lam_next = steps.multiplier(k), steps.multiplier(k + 1)
    gamma = steps.gamma(k)
    l_star0 = 1 + 3 * l_g1 / mu
    cross = 2 * constants.l_f0 * l_g1 * constants.l_g2 / mu**2
    l_F1 = l_star0 * (constants.l_f1 + l_g1**2 / mu + cross)
    growth = (lam_next - lam) / lam
    sides = {
        "1": (2 * constants.l_f1 / mu, steps.multiplier(0)),
        "2a": (steps.alpha(k) * lam, gamma),
        "2b": (gamma, 1 / (16 * l_g1)),
        "3": (steps.xi * steps.alpha(k), 1 / l_F1),
        "4": (steps.xi, c_xi * mu / (l_g1 * l_star0**2)),
        "5a": (0, growth),
        "5b": (growth, mu * steps.alpha(k) * lam / 8),
        "7b": (steps.momentum(k), 1),
    }
    if k <= 1:
        sides["6"] = (abs(steps.momentum(k) - 1), 0)
    if k >= 1:
        before = steps.gamma(k - 1)
        lowest = max(2 * (before - gamma) / before, c_eta * l_g1**3 / mu * gamma**2)
        sides["7a"] = (lowest, steps.momentum(k + 1))
    return sides


@pytest.mark.parametrize("algorithm", ["f2sa", "f3sa"])
@pytest.mark.parametrize("regime", NOISE_REGIMES)
@pytest.mark.parametrize("k0", [None, 20.0])
def test_report_against_a_plain_loop(algorithm, regime, k0):
    horizon, c_xi, c_eta = 300, 1 / 30, 2.0
    steps = quiet_design(GENERAL, algorithm=algorithm, regime=regime, k0=k0)
    report = check(steps, GENERAL, horizon, strict=True, c_xi=c_xi, c_eta=c_eta)
    every = []
    for k in range(horizon):
        if algorithm == "f2sa":
            every.append(reference_f2sa(steps, GENERAL, k, c_xi))
        else:
            every.append(reference_f3sa(steps, GENERAL, k, c_xi, c_eta))
    numbers = set().union(*every)
    assert {row.number for row in report} - {"8"} == numbers
    for number in numbers:
        row = report[number]
        lhs, rhs = every[row.k][number]
        assert row.lhs == pytest.approx(lhs, rel=1e-6, abs=1e-15)
        assert row.rhs == pytest.approx(rhs, rel=1e-6, abs=1e-15)
        pairs = [sides[number] for sides in every if number in sides]
        assert row.holds == all(lhs <= rhs * (1 + 1e-9) + 1e-15 for lhs, rhs in pairs)
        if number not in ("6", "6a", "5a"):
            worst = max(lhs / rhs for lhs, rhs in pairs)
            assert row.lhs / row.rhs == pytest.approx(worst, rel=1e-6)


def jump(value, at, factor):
    """A multiplier that grows once, given as a function of one number."""
    return lambda k: value * factor if k > at else value


def scaled(schedule, factor):
    return dataclasses.replace(schedule, value=schedule.value * factor)


F2SA = {"algorithm": "f2sa"}
F3SA = {"algorithm": "f3sa"}
CURVED = Constants(mu_g=1.0, l_g1=1.0, l_f1=1.0, l_f0=1.0, l_g2=10.0)
STEEP = Constants(mu_g=1.0, l_g1=1.0, l_f1=1.0, l_f0=1.0, l_g2=1e6)
ETA: Any = design(EASY, **F3SA).momentum

# Per condition: constants, what design() is asked for, a change to the result, options of check(),
# and the step that the report must name.
VIOLATIONS = {
    ("f2sa", "1"): (
        EASY,
        F2SA,
        lambda d: {"multiplier": scaled(d.multiplier, 0.9)},
        {},
        0,
    ),
    ("f2sa", "2"): (EASY, F2SA, lambda d: {"gamma": scaled(d.gamma, 0.49)}, {}, 0),
    ("f2sa", "3"): (EASY, F2SA, lambda d: {"gamma": scaled(d.gamma, 1.001)}, {}, 0),
    # With c_xi = 1/48 the others imply this one; a laxer c_xi lets it be seen alone.
    ("f2sa", "4"): (EASY, F2SA, lambda d: {"xi": 800.0}, {"c_xi": 2e4}, 0),
    ("f2sa", "5"): (EASY, F2SA, lambda d: {"xi": 1.001}, {}, 0),
    ("f2sa", "6a"): (
        EASY,
        F2SA,
        lambda d: {"multiplier": lambda k: 2.0 if k <= 57 else 1.9999999},
        {},
        57,
    ),
    ("f2sa", "6b"): (EASY, F2SA, lambda d: {"multiplier": jump(2.0, 99, 1.5)}, {}, 99),
    ("f2sa", "P1"): (
        EASY,
        F2SA | {"T": 1},
        lambda d: {"multiplier": Constant(3.0)},
        {"strict": True},
        0,
    ),
    ("f2sa", "P2"): (
        EASY,
        F2SA,
        lambda d: {"multiplier": jump(2.0, 99, 1.006)},
        {"strict": True},
        99,
    ),
    ("f2sa", "P3"): (EASY, F2SA, lambda d: {"xi": d.T / 95}, {"strict": True, "c_xi": 1.0}, 0),
    ("f2sa", "P4"): (
        CURVED,
        F2SA | {"T": 768},
        lambda d: {"xi": d.T / 900},
        {"strict": True, "c_xi": 1.0},
        0,
    ),
    ("f3sa", "1"): (
        EASY,
        F3SA,
        lambda d: {"multiplier": scaled(d.multiplier, 0.9)},
        {},
        0,
    ),
    ("f3sa", "2a"): (EASY, F3SA, lambda d: {"gamma": scaled(d.gamma, 0.99)}, {}, 0),
    ("f3sa", "2b"): (EASY, F3SA, lambda d: {"gamma": scaled(d.gamma, 1.001)}, {}, 0),
    ("f3sa", "3"): (
        STEEP,
        F3SA,
        lambda d: {
            "alpha": scaled(d.alpha, 1.1),
            "gamma": scaled(d.gamma, 1.1),
            "momentum": Constant(1.0),
        },
        {},
        0,
    ),
    ("f3sa", "4"): (EASY, F3SA, lambda d: {"xi": d.xi * 1.001}, {}, 0),
    ("f3sa", "5a"): (
        EASY,
        F3SA,
        lambda d: {"multiplier": lambda k: 2.0 if k <= 57 else 1.9999999},
        {},
        57,
    ),
    ("f3sa", "5b"): (
        EASY,
        F3SA,
        lambda d: {"alpha": scaled(d.alpha, 0.5), "multiplier": jump(2.0, 99, 1.5)},
        {},
        99,
    ),
    ("f3sa", "6"): (
        EASY,
        F3SA,
        lambda d: {"momentum": lambda k: 0.99 if k == 1 else ETA(k)},
        {},
        1,
    ),
    ("f3sa", "7a"): (
        EASY,
        F3SA,
        lambda d: {"momentum": lambda k: 1e-9 if k == 301 else ETA(k)},
        {},
        300,
    ),
    ("f3sa", "7b"): (
        EASY,
        F3SA,
        lambda d: {"momentum": lambda k: 1.001 if k == 301 else ETA(k)},
        {},
        301,
    ),
    ("f3sa", "8"): (
        EASY,
        F3SA,
        lambda d: {
            "alpha": Power(d.alpha.value, d.k0, -1.0),
            "gamma": Power(d.gamma.value, d.k0, -0.5),
            "multiplier": Power(d.lam0, d.k0, 0.5),
            "momentum": Constant(1.0),
        },
        {},
        0,
    ),
}


@pytest.mark.parametrize(("algorithm", "number"), VIOLATIONS)
def test_each_condition_can_fail_alone(algorithm, number):
    constants, wanted, change, options, k = VIOLATIONS[algorithm, number]
    steps = quiet_design(constants, **wanted)
    unchanged = check(steps, constants, 1_000, **options)
    assert unchanged[number].holds
    report = check(dataclasses.replace(steps, **change(steps)), constants, 1_000, **options)
    assert [row.number for row in report.failed] == [number]
    assert not report.holds
    row = report[number]
    assert (row.k, row.holds) == (k, False)
    assert row.lhs > row.rhs or number == "8"
    failing_line = next(line for line in str(report).splitlines() if " NO " in line)
    assert failing_line.split()[0] == number
    assert failing_line.endswith(row.statement)


def test_violations_cover_every_condition():
    for algorithm in REGIMES:
        report = check(design(EASY, algorithm=algorithm), EASY, strict=True)
        assert [row.number for row in report] == [
            number for owner, number in VIOLATIONS if owner == algorithm
        ]


constants_strategy = st.builds(
    lambda mu_g, kappa, others: Constants(mu_g=mu_g, l_g1=mu_g * kappa, **others),
    st.floats(1e-3, 1e3),
    st.floats(1.0, 100.0),
    st.fixed_dictionaries(
        {
            name: st.just(0.0) | st.floats(1e-3, 1e3)
            for name in ("l_f1", "l_f0", "l_g0", "l_f2", "l_g2", "sigma_f", "sigma_g")
        }
    ),
)


@pytest.mark.parametrize(("algorithm", "regime"), ALL_DESIGNS)
@settings(max_examples=25, deadline=None)
@given(constants=constants_strategy, extra=st.floats(1.0, 50.0), c_eta=st.floats(0.01, 100.0))
def test_every_design_satisfies_its_theorem_and_its_proof(
    algorithm, regime, constants, extra, c_eta
):
    steps = quiet_design(constants, algorithm=algorithm, regime=regime, c_eta=c_eta)
    report = check(steps, constants, 2_000, strict=True, c_eta=c_eta)
    assert report.holds, str(report)
    larger = quiet_design(
        constants, algorithm=algorithm, regime=regime, c_eta=c_eta, lam0=extra * steps.lam0
    )
    report = check(larger, constants, 2_000, strict=True, c_eta=c_eta)
    assert report.holds, str(report)


@pytest.mark.parametrize("regime", NOISE_REGIMES)
@settings(max_examples=25, deadline=None)
@given(constants=constants_strategy, T=st.integers(1, 40))
def test_few_inner_steps_satisfy_the_theorem_but_not_always_the_proof(regime, constants, T):
    steps = quiet_design(constants, regime=regime, T=T)
    report = check(steps, constants, 500)
    assert report.holds, str(report)
    # The growth at k = 0 is the closed form's or, if that is too fast, the cap T / (32 k0); the
    # proof allows T / (64 k0).
    growth = min(math.expm1((steps.a - steps.c) * math.log1p(1 / steps.k0)), T / (32 * steps.k0))
    expected = [] if growth <= T / (64 * steps.k0) else ["P2"]
    assert [row.number for row in check(steps, constants, 500, strict=True).failed] == expected


def test_printed_k0_is_not_scale_safe():
    constants = Constants(mu_g=1.0, l_g1=1.0, l_f1=0.05, l_f0=1.0)
    options = {"lam0": 0.1, "T": 1, "xi": 1.0}
    l_F1 = 4 * (0.05 + 1)
    printed = 4 / 1.0 * max(1.0 * l_F1 / 2, 1 * 1.0, 0.05)
    assert not check(design(constants, k0=printed, **options), constants)["4"].holds
    corrected = design(constants, **options)
    assert check(corrected, constants)["4"].holds
    assert corrected.k0 > printed
    # With lam0 = 1/2 and above the printed rule is enough.
    assert check(design(constants, k0=printed, **(options | {"lam0": 0.5})), constants)["4"].holds


def test_both_bounds_of_the_lower_step_count():
    constants = with_kappa(2.0)
    single_loop = design(constants, T=1)
    row = check(single_loop, constants)["3"]
    assert (row.holds, row.rhs) == (True, 1 / (4 * 2.0))  # 1/(4 T mu_g) is 1/4
    too_long = dataclasses.replace(single_loop, gamma=scaled(single_loop.gamma, 1.001))
    assert not check(too_long, constants)["3"].holds
    assert check(design(EASY, T=50), EASY)["3"].rhs == 1 / (4 * 50)  # 1/(4 l_g1) is 1/4


def test_curvature_of_the_upper_objective_bounds_alpha():
    # xi = 1/768 makes l_F1 harmless, and lam0 far below the theorem's leaves only 1/(8 l_f1).
    steps = design(EASY, T=1, lam0=1e-3)
    assert steps.k0 == pytest.approx(4 / 1e-3)
    row = check(steps, EASY)["4"]
    assert (row.holds, row.rhs) == (True, 1 / 8)
    assert not check(design(EASY, T=1, lam0=1e-3, k0=3_990.0), EASY)["4"].holds


def test_fall_of_gamma_bounds_the_momentum():
    steps = dataclasses.replace(
        design(EASY, algorithm="f3sa"), momentum=lambda k: 1.0 if k < 2 else 1e-4
    )
    row = check(steps, EASY, c_eta=1e-12)["7a"]
    assert (row.holds, row.k) == (False, 1)
    assert row.lhs == pytest.approx(2 * (1 - (129 / 128) ** -0.4))


@pytest.mark.parametrize(("kappa", "first"), [(10.0, 1369), (100.0, 1031)])
def test_printed_momentum_violates_the_theorem(kappa, first):
    constants = with_kappa(kappa)
    steps = quiet_design(constants, algorithm="f3sa", regime="stochastic")
    assert steps.k0 == pytest.approx(128 * kappa**1.5)
    printed = dataclasses.replace(steps, momentum=Power(1.0, 1.0, -0.8))
    assert printed.momentum(9) == pytest.approx(10**-0.8)
    assert not check(printed, constants)["6"].holds  # eta_1 < 1
    assert check(printed, constants, horizon=first)["7a"].holds
    assert not check(printed, constants, horizon=first + 1)["7a"].holds
    assert check(steps, constants, horizon=50_000).holds


def test_momentum_uses_each_of_its_three_terms():
    gamma = Power(0.1, 10.0, -0.4)
    k = 5
    before, now = gamma(k - 2), gamma(k - 1)
    fall = 2 * (before - now) / before
    assert Momentum(gamma, decay=0.1, floor=0.0)(k) == pytest.approx(6**-0.1)
    assert Momentum(gamma, decay=5.0, floor=0.0)(k) == pytest.approx(fall)
    assert Momentum(gamma, decay=5.0, floor=50.0)(k) == pytest.approx(50.0 * now**2)
    assert Momentum(gamma, decay=5.0, floor=1e6)(k) == 1
    assert [Momentum(gamma, decay=5.0, floor=0.0)(k) for k in (0, 1)] == [1, 1]


def test_smaller_c_eta_does_not_loosen_the_lower_step():
    steps = design(EASY, algorithm="f3sa", c_eta=1e-4)
    assert check(steps, EASY, c_eta=1e-4)["2b"].holds
    assert steps.gamma(0) == pytest.approx(1 / 16)


def test_larger_c_eta_is_honoured():
    assert not check(design(EASY, algorithm="f3sa"), EASY, c_eta=1e4)["7a"].holds
    assert check(design(EASY, algorithm="f3sa", c_eta=1e4), EASY, c_eta=1e4).holds


def test_multiplier_below_one_fails_for_f2sa_only():
    constants = Constants(mu_g=1.0, l_g1=1.0, l_f1=0.1, l_f0=1.0)
    row = check(design(constants, lam0=0.5), constants)["1"]
    assert (row.holds, row.lhs, row.rhs) == (False, 1.0, 0.5)
    assert check(design(constants, algorithm="f3sa", lam0=0.5), constants).holds


def test_upper_objective_without_curvature():
    constants = Constants(mu_g=1.0, l_g1=1.0, l_f1=0.0, l_f0=0.0)
    for algorithm in REGIMES:
        assert check(design(constants, algorithm=algorithm), constants, strict=True).holds
    assert check(design(constants), constants, strict=True)["P4"].rhs == math.inf


def test_limit_is_judged_by_trend_for_unknown_schedules():
    steps = design(EASY, algorithm="f3sa")
    vanishing = dataclasses.replace(steps, multiplier=lambda k: steps.multiplier(k))
    assert check(vanishing, EASY).holds
    constant = dataclasses.replace(steps, multiplier=lambda k: 2.0)
    assert check(constant, EASY)["8"].holds
    ramp = dataclasses.replace(steps, multiplier=Ramp(2.0, 3.0, steps=10**6))
    row = check(ramp, EASY)["8"]
    assert (row.holds, row.lhs > row.rhs) == (False, True)
    fast_decay = Power(steps.gamma.value, steps.k0, -1.5)
    for multiplier in (Constant(2.0), Power(2.0, steps.k0, 0.0)):
        still = dataclasses.replace(steps, multiplier=multiplier, gamma=fast_decay)
        assert check(still, EASY)["8"].holds  # 0 / gamma_k, however fast gamma falls


def test_schedules_of_one_number_are_enough():
    steps = design(EASY)
    by_hand = dataclasses.replace(
        steps,
        alpha=lambda k: steps.alpha.value * math.pow((k + 3072) / 3072, -5 / 7),
        gamma=lambda k: steps.gamma(float(k)),
        multiplier=[steps.multiplier(k) for k in range(2_001)].__getitem__,
    )
    ours, theirs = check(steps, EASY, 2_000), check(by_hand, EASY, 2_000)
    assert theirs.holds
    for number in ("2", "3", "4", "6b"):
        assert theirs[number].lhs == pytest.approx(ours[number].lhs)
        assert theirs[number].k == ours[number].k


def test_anything_with_the_attributes_can_be_checked():
    steps = design(EASY)
    names = ("algorithm", "xi", "T", "alpha", "gamma", "beta", "multiplier")
    lookalike = types.SimpleNamespace(**{name: getattr(steps, name) for name in names})
    assert check(lookalike, EASY) == check(steps, EASY)


@pytest.mark.parametrize(
    ("name", "schedule", "k"),
    [
        ("gamma", lambda k: np.where(np.equal(k, 7), -1.0, 1e-4), 7),
        ("gamma", lambda k: np.where(np.equal(k, 7), math.inf, 1e-4), 7),
        ("alpha", lambda k: 1e-4 if k != 3 else math.nan, 3),
        ("multiplier", lambda k: 0, 0),
        ("gamma", lambda k: "fast", 0),
    ],
)
def test_schedules_that_are_no_step_sizes(name, schedule, k):
    steps = dataclasses.replace(design(EASY), **{name: schedule})
    with pytest.raises((ArgumentError, ArgumentTypeError), match=rf"{name}\({k}\)"):
        check(steps, EASY, 100)


def test_check_refuses_an_unknown_algorithm():
    with pytest.raises(ArgumentError, match="algorithm"):
        check(types.SimpleNamespace(algorithm="adam"), EASY)


def test_tolerance_is_relative_and_small():
    steps = design(EASY)  # attains equality in 1, 3 and 5
    for number, change in [
        ("3", lambda e: {"gamma": scaled(steps.gamma, 1 + e)}),
        ("5", lambda e: {"xi": 1 + e}),
    ]:
        assert check(dataclasses.replace(steps, **change(5e-10)), EASY)[number].holds
        assert not check(dataclasses.replace(steps, **change(2e-9)), EASY)[number].holds


def test_report_reads_as_a_table():
    report = check(design(EASY), EASY, 50, strict=True)
    lines = str(report).splitlines()
    assert lines[0] == "f2sa, steps 0 to 49: all 11 conditions hold"
    assert len(lines) == 2 + len(report) == 13
    for line, row in zip(lines[2:], report, strict=True):
        cells = line.split(maxsplit=5)
        assert cells[:3] == [row.number, "yes", str(row.k)]
        assert float(cells[3]) == pytest.approx(row.lhs, rel=1e-5)
        assert float(cells[4]) == pytest.approx(row.rhs, rel=1e-5)
        assert cells[5] == row.statement
    assert report.failed == ()
    with pytest.raises(KeyError):
        report["9"]
