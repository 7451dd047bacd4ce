"""The rates, shortened; the full measurement is ``bilevel reproduce rates``."""

from __future__ import annotations

import pytest

from bilevel import theory
from bilevel.cli.experiments.rates import INSTANCES, SETTINGS, measure, method_for
from bilevel.problems import Quadratic


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "regime"),
    [("f2sa", "deterministic"), ("f3sa", "deterministic"), ("f3sa", "upper-noise")],
)
def test_where_the_bias_dominates_the_rate_is_the_theorems(algorithm: str, regime: str) -> None:
    curve = measure(algorithm, regime, INSTANCES["bias"], steps=2000, runs=4, seed=0)
    assert curve.slope == pytest.approx(theory.REGIMES[algorithm][regime].slope, abs=0.05)


@pytest.mark.slow
def test_with_noise_the_rate_is_at_least_the_theorems() -> None:
    curve = measure("f2sa", "stochastic", INSTANCES["noise"], steps=2000, runs=64, seed=0)
    slope = theory.REGIMES["f2sa"]["stochastic"].slope
    assert slope is not None
    assert curve.slope <= slope + 0.05


@pytest.mark.parametrize("algorithm", ["f2sa", "f3sa"])
def test_settings_change_constants_and_not_exponents(algorithm: str) -> None:
    method = method_for(Quadratic().constants, algorithm, "stochastic")
    row = theory.REGIMES[algorithm]["stochastic"]
    chosen = SETTINGS[algorithm]
    growth = 2.0 ** (row.a - row.c)
    assert method.rates.upper is not None
    assert method.rates.lower is not None
    assert method.rates.multiplier(0) == chosen.lam0
    assert method.rates.multiplier(int(chosen.k0)) == pytest.approx(chosen.lam0 * growth)
    assert method.rates.upper(0) == pytest.approx(chosen.x_step)
    assert method.rates.upper(int(chosen.k0)) == pytest.approx(chosen.x_step * 2.0**-row.a)
    assert method.rates.lower(int(chosen.k0)) == pytest.approx(method.rates.lower(0) * 2.0**-row.c)
