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
"""Relative slack of ``left <= right``; several designs attain equality."""

ROUNDING = 4 * np.finfo(float).eps
"""Absolute slack where the left side is a relative difference of two nearly equal numbers."""


@dataclass(frozen=True)
class Condition:
    """One inequality ``lhs <= rhs``, at the step where it is tightest or most violated.

    Attributes:
        number: its number in the theorem, such as ``"3"``; ``"2a"`` and ``"2b"`` are the parts of a
            chain of inequalities, ``"P1"``, ... are conditions of the proof alone.
        statement: the inequality in words and symbols.
        holds: whether it holds at every step of the horizon.
        k: the step with the largest ``lhs / rhs``.
        lhs: the left side at step k.
        rhs: the right side at step k.

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
    """The result of :func:`check`: iterate over its conditions, index it by number, or print it.

    Example:
        >>> violated = Condition("2", "beta_k <= gamma_k", False, k=3, lhs=0.3, rhs=0.2)
        >>> report = Report("f2sa", 10, (violated,))
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
        verdict = f"all {total} conditions hold"
        if failed:
            verdict = f"{failed} of {total} conditions {'fails' if failed == 1 else 'fail'}"
        lines = [
            f"{self.algorithm}, steps 0 to {self.horizon - 1}: {verdict}",
            "  no.  holds  worst k          left         right  condition",
        ]
        for each in self.conditions:
            mark = "yes" if each.holds else "NO"
            lines.append(
                f"  {each.number:<4} {mark:<5} {each.k:>8} {each.lhs:>13.6g} {each.rhs:>13.6g}"
                f"  {each.statement}"
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
    """Check the conditions of the theorem for ``design.algorithm`` at k = 0, ..., ``horizon - 1``.

    Only the values of the schedules count, not the fields a, c, lam0 and k0 from which they were
    made, so a design with schedules of your own is judged by its values. Schedules that do not take
    arrays are evaluated one step at a time. Two conditions are checked that the paper does not
    state: the multiplier never decreases (every lemma assumes it), and lam_0 >= 1 for F2SA. F2SA's
    ``xi/T < ...`` is read as ``<=``, because the paper's own design attains equality.

    F3SA's last condition, ``delta_k/gamma_k -> 0``, is a limit. If multiplier and gamma are powers
    of k, the power of their ratio decides it exactly. For other schedules it counts as true if the
    mean of the ratio over the second half of the horizon is below the mean over the first half,
    which is evidence, not proof.

    Args:
        design: a :class:`Design`, or anything with its attributes.
        constants: of the problem.
        horizon: number of steps to check, at least 2.
        strict: for F2SA, also check the sharper inequalities (P1 to P4) that its proof uses. The
            theorem for F3SA states everything that its proof uses.
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
        raise ArgumentTypeError(
            f"design must be a theory.Design or have its attributes, not {design!r}"
        )
    check_choice("algorithm", design.algorithm, REGIMES)
    check_constants(constants)
    check_flag("strict", strict)
    check_count("horizon", horizon)
    if horizon < 2:
        raise ArgumentError(f"horizon must be at least 2, not {horizon!r}")
    c_xi = checked_number("c_xi", c_xi, above=True)
    c_eta = checked_number("c_eta", c_eta, above=True)
    values = _ScheduleValues(design, horizon)
    if design.algorithm == "f2sa":
        conditions = _f2sa_theorem(design, constants, values, c_xi)
        if strict:
            conditions += _f2sa_proof(design, constants, values)
    else:
        conditions = _f3sa_theorem(design, constants, values, c_xi, c_eta)
    return Report(design.algorithm, horizon, tuple(conditions))


def _f2sa_theorem(
    design: Design, constants: Constants, values: _ScheduleValues, c_xi: float
) -> list[Condition]:
    mu, T, xi = constants.mu_g, design.T, design.xi
    scale = double_loop_scale(constants, float(values.lam[0]))
    gamma_bound = min(1 / (4 * constants.l_g1), 1 / (4 * T * mu))
    alpha_bound = min(_inverse(8 * constants.l_f1), 1 / (2 * xi * constants.l_F1))
    return [
        _inequality("1", "max(1, 2 l_f1/mu_g) <= lam_0", constants.min_multiplier, values.lam[0]),
        _inequality("2", "beta_k <= gamma_k", values.beta, values.gamma),
        _inequality("3", "gamma_k <= min(1/(4 l_g1), 1/(4 T mu_g))", values.gamma, gamma_bound),
        _inequality("4", "alpha_k <= min(1/(8 l_f1), 1/(2 xi l_F1))", values.alpha, alpha_bound),
        _inequality(
            "5",
            "xi/T <= c_xi mu_g / max(l_g1 l_star0^2, l_star1 sqrt(M))",
            xi / T,
            c_xi * mu / scale,
        ),
        _inequality("6a", "0 <= delta_k/lam_k", 0.0, values.growth, slack=ROUNDING),
        _inequality(
            "6b",
            "delta_k/lam_k <= T mu_g beta_k / 16",
            values.growth,
            T * mu * values.beta / 16,
            slack=ROUNDING,
        ),
    ]


def _f2sa_proof(design: Design, constants: Constants, values: _ScheduleValues) -> list[Condition]:
    mu, T, xi = constants.mu_g, design.T, design.xi
    curvature = 8 * constants.M * constants.l_star1(float(values.lam[0])) ** 2
    return [
        _inequality("P1", "beta_k <= 1/(8 l_g1)", values.beta, 1 / (8 * constants.l_g1)),
        _inequality(
            "P2",
            "delta_k/lam_k <= T mu_g beta_k / 32",
            values.growth,
            T * mu * values.beta / 32,
            slack=ROUNDING,
        ),
        _inequality("P3", "xi/T <= mu_g / (96 l_g1)", xi / T, mu / (96 * constants.l_g1)),
        _inequality(
            "P4",
            "xi^2/T^2 <= mu_g^2 / (8 M l_star1^2)",
            (xi / T) ** 2,
            mu**2 * _inverse(curvature),
        ),
    ]


def _f3sa_theorem(
    design: Design, constants: Constants, values: _ScheduleValues, c_xi: float, c_eta: float
) -> list[Condition]:
    mu, l_g1 = constants.mu_g, constants.l_g1
    eta = _evaluate("momentum", design.momentum, np.arange(len(values.lam) + 1))
    fall = 2 * (values.gamma[:-1] - values.gamma[1:]) / values.gamma[:-1]
    lowest_eta = np.maximum(fall, c_eta * l_g1**3 / mu * values.gamma[1:] ** 2)
    return [
        _inequality("1", "2 l_f1/mu_g <= lam_0", constants.convex_multiplier, values.lam[0]),
        _inequality("2a", "beta_k <= gamma_k", values.beta, values.gamma),
        _inequality("2b", "gamma_k <= 1/(16 l_g1)", values.gamma, 1 / (16 * l_g1)),
        _inequality("3", "xi alpha_k <= 1/l_F1", design.xi * values.alpha, 1 / constants.l_F1),
        _inequality(
            "4",
            "xi <= c_xi mu_g / (l_g1 l_star0^2)",
            design.xi,
            c_xi * mu / (l_g1 * constants.l_star0**2),
        ),
        _inequality("5a", "0 <= delta_k/lam_k", 0.0, values.growth, slack=ROUNDING),
        _inequality(
            "5b",
            "delta_k/lam_k <= mu_g beta_k / 8",
            values.growth,
            mu * values.beta / 8,
            slack=ROUNDING,
        ),
        _inequality("6", "|eta_k - 1| <= 0 for k = 0, 1", abs(eta[:2] - 1.0), 0.0, slack=ROUNDING),
        _inequality(
            "7a",
            "max(2 (gamma_{k-1} - gamma_k)/gamma_{k-1}, c_eta l_g1^3 gamma_k^2/mu_g) <= eta_{k+1}",
            lowest_eta,
            eta[2:],
            first=1,
            slack=ROUNDING,
        ),
        _inequality("7b", "eta_k <= 1", eta, 1.0),
        _vanishing(design, values),
    ]


class _ScheduleValues:
    """The values of a design's schedules over a horizon, one array for each schedule."""

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
    """``schedule`` at every ``k``; raises an error that names the first bad step and value."""
    try:
        values = np.asarray(schedule(k), dtype=float)
    except (TypeError, ValueError):  # The schedule takes only a single number.
        values = np.empty(0)
    if values.shape not in ((), k.shape):
        return np.array([positive_at(name, schedule, int(j)) for j in k])
    values = np.broadcast_to(values, k.shape)
    good = np.isfinite(values) & (values > 0)
    if not good.all():
        first_bad = int(np.argmin(good))
        positive_at(name, lambda _: float(values[first_bad]), int(k[first_bad]))
    return values


def _inequality(
    number: str, statement: str, lhs: Any, rhs: Any, *, first: int = 0, slack: float = 0.0
) -> Condition:
    """``lhs <= rhs`` at k = first, first + 1, ..., reported at the tightest or worst step."""
    left, right = np.broadcast_arrays(np.atleast_1d(lhs), np.atleast_1d(rhs))
    holds = bool(np.all(left <= right * (1 + RELATIVE_TOLERANCE) + slack))
    scale = np.where((right > 0) & np.isfinite(right), right, 1.0)
    excess = (left - slack - right) / scale
    worst = int(np.argmax(excess >= excess.max() - ROUNDING))  # the first of equals
    return Condition(
        number, statement, holds, first + worst, float(left[worst]), float(right[worst])
    )


def _vanishing(design: Design, values: _ScheduleValues) -> Condition:
    """F3SA's condition 8, ``delta_k/gamma_k -> 0``."""
    growth, decay = _exponent(design.multiplier), _exponent(design.gamma)
    half = len(values.gamma) // 2
    if growth is not None and decay is not None:
        # delta_k ~ k^(growth - 1); if growth is 0, delta_k is 0 at every k.
        power = growth - 1.0 - decay if growth else -np.inf
        statement = "delta_k/gamma_k -> 0: its power of k < 0"
        return Condition("8", statement, bool(power < -ROUNDING), 0, float(power), 0.0)
    ratio = values.delta / values.gamma
    early, late = float(ratio[:half].mean()), float(ratio[half:].mean())
    statement = "delta_k/gamma_k -> 0: late mean < early mean, or 0"
    return Condition("8", statement, late < early or late == 0.0, half, late, early)


def _exponent(schedule: Any) -> float | None:
    """The power of k that ``schedule`` follows, or None if it is unknown."""
    if isinstance(schedule, Power):
        return schedule.exponent
    return 0.0 if isinstance(schedule, Constant) else None


def _inverse(value: float) -> float:
    return 1 / value if value > 0 else float("inf")
