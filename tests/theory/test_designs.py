"""Designs: the numbers, the multiplier, the objects."""

from __future__ import annotations

import dataclasses
import math
import pickle
import warnings

import numpy as np
import pytest

from bilevel.errors import ArgumentError, ArgumentTypeError, ImpracticalDesignWarning
from bilevel.stepping.schedules import Constant, Power
from bilevel.theory import REGIMES, Constants, design
from bilevel.theory.sequences import CappedMultiplier
from tests.theory.designs import (
    ALL_DESIGNS,
    EASY,
    GENERAL,
    NOISE_REGIMES,
    quiet_design,
    with_kappa,
)


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
