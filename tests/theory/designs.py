"""Constants and designs that the tests of the theory share."""

from __future__ import annotations

import warnings

from hypothesis import strategies as st

from bilevel.errors import ImpracticalDesignWarning
from bilevel.theory import REGIMES, Constants, design

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
