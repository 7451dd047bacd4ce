"""The checker of the theorems' conditions."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.stepping.schedules import Constant, Power, Ramp
from bilevel.theory import REGIMES, Constants, check, design
from bilevel.theory.sequences import Momentum
from tests.theory.designs import (
    ALL_DESIGNS,
    EASY,
    GENERAL,
    NOISE_REGIMES,
    constants_strategy,
    quiet_design,
    with_kappa,
)


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
