"""The conditions of the paper's two theorems, checked step by step over a horizon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import check_choice, check_count, check_flag, checked_number
from bilevel.stepping.schedules import Constant, Power, positive_at
from bilevel.theory.constants import Constants, check_constants
from bilevel.theory.designs import REGIMES, Design, double_loop_scale

Array = npt.NDArray[np.float64]

RELATIVE_TOLERANCE = 1e-9
"""``left <= right`` counts as true up to this: several designs attain equality."""

ROUNDING = 4 * np.finfo(float).eps
"""Allowed on top where the left side is a difference of two nearly equal numbers, over them."""


@dataclass(frozen=True)
class Condition:
    """One inequality ``lhs <= rhs``, at the step where it is tightest or most violated.

    Attributes:
        number: as in the theorem, such as ``"3"``; ``"2a"``, ``"2b"`` for the parts of a chain, and
            ``"P1"``, ... for what the proof needs beyond the theorem.
        statement: the condition in words and symbols.
        holds: whether it holds at every step of the horizon.
        k: the step with the largest ``lhs / rhs``.
        lhs: left side there.
        rhs: right side there.

    Example:
        >>> Condition("2", "beta_k <= gamma_k", True, k=0, lhs=0.1, rhs=0.2).holds
        True
    """

    number: str
    statement: str
    holds: bool
    k: int
    lhs: float
    rhs: float


@dataclass(frozen=True)
class Report:
    """What :func:`check` found; iterate over it, index it by number, or print it.

    Example:
        >>> row = Condition("2", "beta_k <= gamma_k", False, k=3, lhs=0.3, rhs=0.2)
        >>> report = Report("f2sa", 10, (row,))
        >>> report.holds, report["2"].k, [condition.number for condition in report.failed]
        (False, 3, ['2'])
        >>> print(report)
        f2sa, steps 0 to 9: 1 of 1 conditions fails
          no.  holds  worst k          left         right  condition
          2    NO           3           0.3           0.2  beta_k <= gamma_k
    """

    algorithm: str
    horizon: int
    conditions: tuple[Condition, ...]

    @property
    def holds(self) -> bool:
        """Whether every condition holds."""
        return not self.failed

    @property
    def failed(self) -> tuple[Condition, ...]:
        """The conditions that do not hold."""
        return tuple(condition for condition in self.conditions if not condition.holds)

    def __iter__(self) -> Iterator[Condition]:
        return iter(self.conditions)

    def __len__(self) -> int:
        return len(self.conditions)

    def __getitem__(self, number: str) -> Condition:
        for condition in self.conditions:
            if condition.number == number:
                return condition
        raise KeyError(number)

    def __str__(self) -> str:
        failed, total = len(self.failed), len(self.conditions)
        verb = "fails" if failed == 1 else "fail"
        verdict = f"all {total} conditions hold"
        if failed:
            verdict = f"{failed} of {total} conditions {verb}"
        lines = [
            f"{self.algorithm}, steps 0 to {self.horizon - 1}: {verdict}",
            "  no.  holds  worst k          left         right  condition",
        ]
        for row in self.conditions:
            mark = "yes" if row.holds else "NO"
            lines.append(
                f"  {row.number:<4} {mark:<5} {row.k:>8} {row.lhs:>13.6g} {row.rhs:>13.6g}"
                f"  {row.statement}"
            )
        return "\n".join(lines)


def check(
    design: Design,
    constants: Constants,
    horizon: int = 10_000,
    *,
    strict: bool = False,
    c_xi: float = 1 / 48,
    c_eta: float = 1.0,
) -> Report:
    """Every condition of the theorem for ``design.algorithm``, for k = 0, ..., ``horizon - 1``.

    Only the schedules themselves count, not the fields a, c, lam0 and k0 they were made from, so a
    design with schedules of your own is judged by what it does. Schedules that do not take arrays
    are evaluated one step at a time. Two things are asked that the paper leaves unsaid: that the
    multiplier never decreases (every lemma assumes it) and, for F2SA, that lam_0 >= 1. F2SA's
    ``xi/T < ...`` is read as ``<=``, because the paper's own design attains equality.

    F3SA's last condition, ``delta_k/gamma_k -> 0``, is a limit. It is decided exactly where
    multiplier and gamma are powers of k, by the power of their ratio; for other schedules it counts
    as true if the mean of the ratio is smaller over the second half of the horizon than over the
    first, which is evidence, not proof.

    Args:
        design: a :class:`Design`, or anything with its attributes.
        constants: of the problem.
        horizon: number of steps to check, at least 2.
        strict: F2SA: also the sharper inequalities that the proof uses where the theorem states
            weaker ones (P1 to P4). F3SA's theorem states all that its proof uses.
        c_xi: as in :func:`design`.
        c_eta: as in :func:`design`.

    Example:
        >>> from bilevel.theory import design
        >>> constants = Constants(mu_g=1.0, l_g1=1.0, l_f1=1.0, l_f0=1.0)
        >>> steps = design(constants, regime="deterministic", k0=100.0)
        >>> for condition in check(steps, constants).failed:
        ...     print(condition.number, condition.statement, condition.k, condition.lhs)
        3 gamma_k <= min(1/(4 l_g1), 1/(4 T mu_g)) 0 0.01
    """
    if not hasattr(design, "algorithm"):
        raise ArgumentTypeError(f"design must be a Design, or have its attributes, not {design!r}")
    check_choice("algorithm", design.algorithm, REGIMES)
    check_constants(constants)
    check_flag("strict", strict)
    check_count("horizon", horizon)
    if horizon < 2:
        raise ArgumentError(f"horizon must be at least 2, not {horizon!r}")
    c_xi, c_eta = (
        checked_number("c_xi", c_xi, above=True),
        checked_number("c_eta", c_eta, above=True),
    )
    if design.algorithm == "f2sa":
        rows = _f2sa(design, constants, horizon, c_xi)
        if strict:
            rows += _f2sa_proof(design, constants, horizon)
    else:
        rows = _f3sa(design, constants, horizon, c_xi, c_eta)
    return Report(design.algorithm, horizon, tuple(rows))


def _f2sa(design: Design, constants: Constants, horizon: int, c_xi: float) -> list[Condition]:
    mu, T, xi = constants.mu_g, design.T, design.xi
    values = _Values(design, horizon)
    scale = double_loop_scale(constants, float(values.lam[0]))
    gamma_bound = min(1 / (4 * constants.l_g1), 1 / (4 * T * mu))
    alpha_bound = min(_inverse(8 * constants.l_f1), 1 / (2 * xi * constants.l_F1))
    return [
        _row("1", "max(1, 2 l_f1/mu_g) <= lam_0", constants.min_multiplier, values.lam[0]),
        _row("2", "beta_k <= gamma_k", values.beta, values.gamma),
        _row("3", "gamma_k <= min(1/(4 l_g1), 1/(4 T mu_g))", values.gamma, gamma_bound),
        _row("4", "alpha_k <= min(1/(8 l_f1), 1/(2 xi l_F1))", values.alpha, alpha_bound),
        _row(
            "5",
            "xi/T <= c_xi mu_g / max(l_g1 l_star0^2, l_star1 sqrt(M))",
            xi / T,
            c_xi * mu / scale,
        ),
        _row("6a", "0 <= delta_k/lam_k", 0.0, values.growth, slack=ROUNDING),
        _row(
            "6b",
            "delta_k/lam_k <= T mu_g beta_k / 16",
            values.growth,
            T * mu * values.beta / 16,
            slack=ROUNDING,
        ),
    ]


def _f2sa_proof(design: Design, constants: Constants, horizon: int) -> list[Condition]:
    mu, T, xi = constants.mu_g, design.T, design.xi
    values = _Values(design, horizon)
    curvature = 8 * constants.M * constants.l_star1(float(values.lam[0])) ** 2
    return [
        _row("P1", "beta_k <= 1/(8 l_g1)", values.beta, 1 / (8 * constants.l_g1)),
        _row(
            "P2",
            "delta_k/lam_k <= T mu_g beta_k / 32",
            values.growth,
            T * mu * values.beta / 32,
            slack=ROUNDING,
        ),
        _row("P3", "xi/T <= mu_g / (96 l_g1)", xi / T, mu / (96 * constants.l_g1)),
        _row(
            "P4",
            "xi^2/T^2 <= mu_g^2 / (8 M l_star1^2)",
            (xi / T) ** 2,
            mu**2 * _inverse(curvature),
        ),
    ]


def _f3sa(
    design: Design, constants: Constants, horizon: int, c_xi: float, c_eta: float
) -> list[Condition]:
    mu, l_g1 = constants.mu_g, constants.l_g1
    values = _Values(design, horizon)
    eta = _evaluate("momentum", design.momentum, np.arange(horizon + 1))
    fall = 2 * (values.gamma[:-1] - values.gamma[1:]) / values.gamma[:-1]
    lowest_eta = np.maximum(fall, c_eta * l_g1**3 / mu * values.gamma[1:] ** 2)
    return [
        _row("1", "2 l_f1/mu_g <= lam_0", constants.convex_multiplier, values.lam[0]),
        _row("2a", "beta_k <= gamma_k", values.beta, values.gamma),
        _row("2b", "gamma_k <= 1/(16 l_g1)", values.gamma, 1 / (16 * l_g1)),
        _row("3", "xi alpha_k <= 1/l_F1", design.xi * values.alpha, 1 / constants.l_F1),
        _row(
            "4",
            "xi <= c_xi mu_g / (l_g1 l_star0^2)",
            design.xi,
            c_xi * mu / (l_g1 * constants.l_star0**2),
        ),
        _row("5a", "0 <= delta_k/lam_k", 0.0, values.growth, slack=ROUNDING),
        _row(
            "5b",
            "delta_k/lam_k <= mu_g beta_k / 8",
            values.growth,
            mu * values.beta / 8,
            slack=ROUNDING,
        ),
        _row("6", "|eta_k - 1| <= 0 for k = 0, 1", abs(eta[:2] - 1.0), 0.0, slack=ROUNDING),
        _row(
            "7a",
            "max(2 (gamma_{k-1} - gamma_k)/gamma_{k-1}, c_eta l_g1^3 gamma_k^2/mu_g) <= eta_{k+1}",
            lowest_eta,
            eta[2:],
            first=1,
            slack=ROUNDING,
        ),
        _row("7b", "eta_k <= 1", eta, 1.0),
        _vanishing(design, values),
    ]


class _Values:
    """The schedules of a design over a horizon, one array each."""

    def __init__(self, design: Design, horizon: int) -> None:
        k = np.arange(horizon)
        lam = _evaluate("multiplier", design.multiplier, np.arange(horizon + 1))
        self.alpha = _evaluate("alpha", design.alpha, k)
        self.gamma = _evaluate("gamma", design.gamma, k)
        self.beta = _evaluate("beta", design.beta, k)
        self.lam = lam[:-1]
        self.delta = np.diff(lam)
        self.growth = self.delta / self.lam


def _evaluate(name: str, schedule: Any, k: npt.NDArray[np.int64]) -> Array:
    """``schedule`` at every ``k``, positive and finite or an error that says where it is not."""
    try:
        values = np.asarray(schedule(k), dtype=float)
    except (TypeError, ValueError):  # it is a function of one number
        values = np.empty(0)
    if values.shape not in ((), k.shape):
        return np.array([positive_at(name, schedule, int(j)) for j in k])
    values = np.broadcast_to(values, k.shape)
    good = np.isfinite(values) & (values > 0)
    if not good.all():
        worst = int(np.argmin(good))
        positive_at(name, lambda _: float(values[worst]), int(k[worst]))
    return values


def _row(
    number: str, statement: str, lhs: Any, rhs: Any, *, first: int = 0, slack: float = 0.0
) -> Condition:
    """``lhs <= rhs`` for k = first, first + 1, ..., summed up at the worst of these steps."""
    left, right = np.broadcast_arrays(np.atleast_1d(lhs), np.atleast_1d(rhs))
    holds = bool(np.all(left <= right * (1 + RELATIVE_TOLERANCE) + slack))
    scale = np.where((right > 0) & np.isfinite(right), right, 1.0)
    excess = (left - slack - right) / scale
    worst = int(np.argmax(excess >= excess.max() - ROUNDING))  # the first, if several are equal
    return Condition(
        number, statement, holds, first + worst, float(left[worst]), float(right[worst])
    )


def _vanishing(design: Design, values: _Values) -> Condition:
    growth, decay = _exponent(design.multiplier), _exponent(design.gamma)
    half = len(values.gamma) // 2
    if growth is not None and decay is not None:
        # delta_k ~ k^(growth - 1), and 0 at every k if growth is 0.
        power = growth - 1.0 - decay if growth else -np.inf
        statement = "delta_k/gamma_k -> 0: its power of k < 0"
        return Condition("8", statement, bool(power < -ROUNDING), 0, float(power), 0.0)
    ratio = values.delta / values.gamma
    early, late = float(ratio[:half].mean()), float(ratio[half:].mean())
    statement = "delta_k/gamma_k -> 0: late mean < early mean, or 0"
    return Condition("8", statement, late < early or late == 0.0, half, late, early)


def _exponent(schedule: Any) -> float | None:
    """The power of k that ``schedule`` follows, where that is known."""
    if isinstance(schedule, Power):
        return schedule.exponent
    return 0.0 if isinstance(schedule, Constant) else None


def _inverse(value: float) -> float:
    return 1 / value if value > 0 else float("inf")
