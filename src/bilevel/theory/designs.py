"""Step sizes, multiplier and momentum as the paper's corollaries choose them.

:func:`design` differs from the printed paper in four places. Without the changes :func:`check`
would report a violated condition, or a claim of the corollary itself would be false:

- lam_{k+1} is built from gamma_{k+1}/alpha_{k+1}, not from gamma_k/alpha_k;
- F3SA has lam_k = gamma_k/alpha_k, without a factor 2;
- k0 divides by lam0, because alpha_0 is otherwise too large for lam0 < 1/2;
- the momentum eta_k has a floor, see :class:`~bilevel.theory.sequences.Momentum`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from bilevel.errors import ArgumentError, ArgumentTypeError, ImpracticalDesignWarning, warn
from bilevel.errors.checks import check_choice, check_count, checked_number
from bilevel.stepping.schedules import Constant, Power, Schedule
from bilevel.theory.constants import Constants, check_constants, in_range
from bilevel.theory.sequences import CappedMultiplier, Momentum, Product

IMPRACTICAL_INNER_STEPS = 10_000
IMPRACTICAL_FIRST_STEP = 1e-6


@dataclass(frozen=True)
class Regime:
    """Exponents of ``alpha_k ~ k^-a`` and ``gamma_k ~ k^-c``, and the rate that they give.

    Attributes:
        a: exponent of alpha; the multiplier grows as ``k^(a-c)``.
        c: exponent of gamma (and of beta = alpha*lam).
        slope: ``E ||grad F(x_R)||^2 = O(K^slope log K)`` for R uniform on {0, ..., K-1}; None if
            the method reaches only a stationary point of L*_lam, not one of F.

    Example:
        >>> REGIMES["f2sa"]["deterministic"].slope
        -0.6666666666666666
    """

    a: float
    c: float
    slope: float | None


REGIMES: Mapping[str, Mapping[str, Regime]] = MappingProxyType(
    {
        "f2sa": MappingProxyType(
            {
                "stochastic": Regime(a=5 / 7, c=4 / 7, slope=-2 / 7),
                "upper-noise": Regime(a=3 / 5, c=2 / 5, slope=-2 / 5),
                "deterministic": Regime(a=1 / 3, c=0.0, slope=-2 / 3),
                "constant-multiplier": Regime(a=1 / 2, c=1 / 2, slope=None),
            }
        ),
        "f3sa": MappingProxyType(
            {
                "stochastic": Regime(a=3 / 5, c=2 / 5, slope=-2 / 5),
                "upper-noise": Regime(a=1 / 2, c=1 / 4, slope=-1 / 2),
                "deterministic": Regime(a=1 / 3, c=0.0, slope=-2 / 3),
                "constant-multiplier": Regime(a=1 / 2, c=1 / 2, slope=None),
            }
        ),
    }
)
"""``REGIMES[algorithm][regime]``.

The regimes are noise in f and g, noise in f alone, no noise, and a constant multiplier.
"""


@dataclass(frozen=True)
class Design:
    """All step sizes, the multiplier and the momentum of F2SA or F3SA.

    Each schedule is a function of the outer step k; the schedules made by :func:`design` also take
    NumPy arrays. ``dataclasses.replace`` swaps any of them for your own, and :func:`check` tells
    whether the theorem still covers the result. ``beta`` and ``upper_lr`` follow from the others.

    Attributes:
        algorithm: ``"f2sa"`` or ``"f3sa"``.
        regime: a key of :data:`REGIMES`, or a label of your own.
        a: exponent of alpha.
        c: exponent of gamma.
        xi: step of x relative to alpha.
        T: inner steps per outer step.
        lam0: first multiplier.
        k0: offset of k in every schedule; the first step is ``1/k0`` up to a factor.
        alpha: alpha_k.
        gamma: gamma_k, the step of z (``lower_lr``).
        multiplier: lam_k.
        momentum: eta_k; None for F2SA.

    Example:
        >>> constants = Constants(mu_g=1.0, l_g1=1.0, l_f1=1.0, l_f0=1.0)
        >>> steps = design(constants, regime="deterministic", k0=10.0, T=12, xi=1.0, lam0=2.0)
        >>> steps.gamma(0), steps.beta(0), steps.multiplier(70)
        (0.1, 0.05, 4.0)
    """

    algorithm: str
    regime: str
    a: float
    c: float
    xi: float
    T: int
    lam0: float
    k0: float
    alpha: Schedule
    gamma: Schedule
    multiplier: Schedule
    momentum: Schedule | None = None

    def __post_init__(self) -> None:
        check_choice("algorithm", self.algorithm, REGIMES)
        _check_inner_steps(self.algorithm, self.T)
        for name in ("xi", "lam0", "k0"):
            checked_number(name, getattr(self, name), above=True)
        if not 0.0 <= checked_number("c", self.c) <= checked_number("a", self.a) <= 1.0:
            raise ArgumentError(f"a must be between c = {self.c!r} and 1, not {self.a!r}")
        for name in ("alpha", "gamma", "multiplier"):
            if not callable(getattr(self, name)):
                raise ArgumentTypeError(
                    f"{name} must be a function of the step k, not {getattr(self, name)!r}"
                )
        if self.algorithm == "f3sa" and not callable(self.momentum):
            raise ArgumentTypeError(
                f"momentum must be a function of the step k for 'f3sa', not {self.momentum!r}"
            )
        if self.algorithm == "f2sa" and self.momentum is not None:
            raise ArgumentTypeError(f"momentum must be None for 'f2sa', not {self.momentum!r}")

    @property
    def beta(self) -> Schedule:
        """``beta_k = alpha_k lam_k``, the step of y (``penalty_lr``)."""
        return Product(self.alpha, self.multiplier)

    @property
    def upper_lr(self) -> Schedule:
        """``xi alpha_k``, the step of x."""
        return Product(Constant(self.xi), self.alpha)

    def delta(self, k: Any) -> Any:
        """``delta_k = lam_{k+1} - lam_k``."""
        return self.multiplier(k + 1) - self.multiplier(k)


def design(
    constants: Constants,
    *,
    algorithm: str = "f2sa",
    regime: str = "stochastic",
    lam0: float | None = None,
    T: int | None = None,
    k0: float | None = None,
    xi: float | None = None,
    c_xi: float = 1 / 48,
    c_eta: float = 1.0,
) -> Design:
    """Step sizes under which the paper's theorem holds and its corollary gives the rate.

    With ``u_k = (k + k0) / k0`` and a, c from :data:`REGIMES`::

        F2SA  gamma_k = u_k^-c / (mu_g k0)       alpha_k = u_k^-a / (2 lam0 mu_g k0)
        F3SA  gamma_k = 8 u_k^-c / (mu_g k0)     alpha_k = 8 u_k^-a / (lam0 mu_g k0)
        both  lam_k = lam0 u_k^(a-c)

    so the y step is ``beta_k = gamma_k / 2`` (F2SA) or ``gamma_k`` (F3SA). Arguments left at None
    follow from the theory::

        lam0  max(1, 2 l_f1/mu_g)
        F2SA  xi = 1                             T = max(32, xi S / c_xi)     (T given: xi from it)
              k0 = max(4 T kappa_g, xi l_F1/(lam0 mu_g), 4 l_f1/(lam0 mu_g))
        F3SA  xi = c_xi / (kappa_g l_star0^2)    T = 1
              k0 = max(128 kappa_g max(1, sqrt(c_eta kappa_g)), 8 xi l_F1/(lam0 mu_g))

    with ``S = max(l_g1 l_star0^2, sqrt(M) l_star1) / mu_g``. Arguments that are given are used
    unchanged; :func:`check` tells whether the theorem covers the result. F2SA with
    ``T < 32 (a - c)`` cannot let the multiplier grow that fast and uses the paper's capped
    recursion instead.

    Args:
        constants: of the problem.
        algorithm: ``"f2sa"`` or ``"f3sa"``.
        regime: ``"stochastic"`` (noise in f and g), ``"upper-noise"`` (in f alone),
            ``"deterministic"``, or ``"constant-multiplier"`` (lam_k = lam0, steps ~ k^-1/2; the
            limit has a bias of ``constants.bias_bound(lam0)``). Not compared with ``constants``.
        lam0, T: the first multiplier, and the inner steps per outer step.
        k0, xi: the offset of k in every schedule, and the step of x relative to alpha.
        c_xi: the theorem's unnamed constant; 1/48 suffices for F2SA.
        c_eta: the theorem's second unnamed constant, for F3SA only; larger is safer.

    Warns:
        ImpracticalDesignWarning: if ``T >= 10^4``, or if the first outer step moves z by less than
            10^-6 of the plain gradient step (``T gamma_0 < 10^-6 / l_g1``), or x likewise
            (``xi alpha_0 < 10^-6 / l_F1``).

    Example:
        >>> constants = Constants(mu_g=1.0, l_g1=1.0, l_f1=1.0, l_f0=1.0)
        >>> steps = design(constants)
        >>> steps.T, steps.k0, steps.lam0, steps.xi
        (768, 3072.0, 2.0, 1.0)
        >>> single_loop = design(constants, T=1)
        >>> single_loop.xi == 1 / 768
        True
    """
    check_constants(constants)
    check_choice("algorithm", algorithm, REGIMES)
    check_choice("regime", regime, REGIMES[algorithm])
    c_xi = checked_number("c_xi", c_xi, above=True)
    c_eta = checked_number("c_eta", c_eta, above=True)
    lam0 = constants.min_multiplier if lam0 is None else checked_number("lam0", lam0, above=True)
    if T is not None:
        _check_inner_steps(algorithm, T)
    xi = None if xi is None else checked_number("xi", xi, above=True)
    k0 = None if k0 is None else checked_number("k0", k0, above=True)
    given = f"{constants!r} with lam0={lam0!r}, T={reprlib.repr(T)}, k0={k0!r}, xi={xi!r}"
    with in_range(f"{given}, c_xi={c_xi!r}, c_eta={c_eta!r}"):
        if algorithm == "f2sa":
            chosen = _f2sa_design(constants, regime, lam0, T, k0, xi, c_xi)
        else:
            chosen = _f3sa_design(constants, regime, lam0, k0, xi, c_xi, c_eta)
        first = chosen.gamma(0), chosen.xi * chosen.alpha(0), chosen.multiplier(0)
        if not all(0 < value < math.inf for value in first):
            raise ArithmeticError(f"the first gamma, xi*alpha and lam are {first}")
    _warn_if_impractical(chosen, constants)
    return chosen


def _f2sa_design(
    constants: Constants,
    regime: str,
    lam0: float,
    T: int | None,
    k0: float | None,
    xi: float | None,
    c_xi: float,
) -> Design:
    a, c = REGIMES["f2sa"][regime].a, REGIMES["f2sa"][regime].c
    mu = constants.mu_g
    T, xi = _inner_steps_and_xi(constants, lam0, T, xi, c_xi)
    if k0 is None:
        upper_k0 = max(xi * constants.l_F1, 4 * constants.l_f1) / (lam0 * mu)
        k0 = max(4 * T * constants.kappa_g, upper_k0)
    first = 1.0 / (mu * k0)
    gamma, alpha = Power(first, k0, -c), Power(first / (lam0 * 2.0), k0, -a)
    multiplier: Schedule = Power(lam0, k0, a - c)
    if 32 * (a - c) > T:
        multiplier = CappedMultiplier(alpha, multiplier, cap=T * mu / 16)
    return Design("f2sa", regime, a, c, xi, T, lam0, k0, alpha, gamma, multiplier)


def _f3sa_design(
    constants: Constants,
    regime: str,
    lam0: float,
    k0: float | None,
    xi: float | None,
    c_xi: float,
    c_eta: float,
) -> Design:
    a, c = REGIMES["f3sa"][regime].a, REGIMES["f3sa"][regime].c
    mu, kappa = constants.mu_g, constants.kappa_g
    xi = c_xi / (kappa * constants.l_star0**2) if xi is None else xi
    if k0 is None:
        lower_k0 = 128 * kappa * max(1.0, math.sqrt(c_eta * kappa))
        k0 = max(lower_k0, 8 * xi * constants.l_F1 / (lam0 * mu))
    first = 8.0 / (mu * k0)
    gamma, alpha = Power(first, k0, -c), Power(first / lam0, k0, -a)
    multiplier = Power(lam0, k0, a - c)
    momentum = Momentum(gamma, decay=2 * c, floor=c_eta * constants.l_g1**3 / mu)
    return Design("f3sa", regime, a, c, xi, 1, lam0, k0, alpha, gamma, multiplier, momentum)


def _warn_if_impractical(chosen: Design, constants: Constants) -> None:
    gamma, upper_lr = chosen.gamma(0), chosen.xi * chosen.alpha(0)
    z_travel, x_travel = chosen.T * gamma * constants.l_g1, upper_lr * constants.l_F1
    if chosen.T < IMPRACTICAL_INNER_STEPS and min(z_travel, x_travel) >= IMPRACTICAL_FIRST_STEP:
        return
    warn(
        ImpracticalDesignWarning(
            f"this design has the form that the theorem requires, but it is not practical: it "
            f"takes T = {chosen.T} inner steps per outer step, and the first outer step moves z by "
            f"{z_travel:.1e} and x by {x_travel:.1e} of a plain gradient step (kappa_g = "
            f"{constants.kappa_g:g}, gamma_0 = {gamma:.1e}, xi*alpha_0 = {upper_lr:.1e}). For a "
            f"real run, set the step sizes and the inner steps yourself"
        )
    )


def _inner_steps_and_xi(
    constants: Constants, lam0: float, T: int | None, xi: float | None, c_xi: float
) -> tuple[int, float]:
    """F2SA's T and xi; the theorem bounds only xi/T, so either one follows from the other."""
    ratio = c_xi * constants.mu_g / double_loop_scale(constants, lam0)
    if T is None:
        xi = 1.0 if xi is None else xi
        # The factor absorbs rounding: a whole-number ratio must not be rounded up by one step.
        return math.ceil(max(32.0, xi / ratio * (1 - 1e-12))), xi
    return T, min(1.0, T * ratio) if xi is None else xi


def double_loop_scale(constants: Constants, lam0: float) -> float:
    """``max(l_g1 l_star0^2, sqrt(M) l_star1)``, which bounds xi/T in F2SA's theorem."""
    moved = constants.l_g1 * constants.l_star0**2
    return max(moved, math.sqrt(constants.M) * constants.l_star1(lam0))


def _check_inner_steps(algorithm: str, T: int) -> None:
    check_count("T", T)
    if algorithm == "f3sa" and T != 1:
        raise ArgumentError(f"T must be 1 for algorithm 'f3sa', not {T!r}")
