"""The constants of a bilevel problem and the quantities that the theory derives from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import checked_number


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of the paper's assumptions on f (upper) and g (lower), valid everywhere.

    Args:
        mu_g: strong convexity of y -> g(x, y).
        l_g1: smoothness of g in (x, y); at least ``mu_g``.
        l_f1: smoothness of f in (x, y).
        l_f0: bound on ``||grad_y f||`` (for F2SA, on ``||grad_x f||`` too).
        l_g0: bound on ``||grad_x g||`` (F2SA only).
        l_f2: Lipschitz constant of the Hessian of f (F2SA only).
        l_g2: Lipschitz constant of the Hessian of g.
        sigma_f: ``E ||noise||^2 <= sigma_f^2`` for the stochastic gradient of f in (x, y).
        sigma_g: the same for g.

    Example:
        >>> constants = Constants(mu_g=1.0, l_g1=2.0, l_f1=1.0, l_f0=1.0)
        >>> constants.kappa_g, constants.l_star0, constants.min_multiplier
        (2.0, 7.0, 2.0)
        >>> constants.bias_bound(10.0)
        0.8
    """

    mu_g: float
    l_g1: float
    l_f1: float
    l_f0: float
    l_g0: float = 0.0
    l_f2: float = 0.0
    l_g2: float = 0.0
    sigma_f: float = 0.0
    sigma_g: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = checked_number(
                field.name, getattr(self, field.name), above=field.name == "mu_g"
            )
            object.__setattr__(self, field.name, value)
        if self.l_g1 < self.mu_g:
            raise ArgumentError(f"l_g1 must be at least mu_g = {self.mu_g!r}, not {self.l_g1!r}")
        for derived in ("l_F1", "M", "C_lam", "min_multiplier"):
            with in_range(repr(self)):
                getattr(self, derived)
        with in_range(repr(self)):
            self.l_star1()

    @property
    def kappa_g(self) -> float:
        """Condition number ``l_g1 / mu_g`` of the lower problem."""
        return self.l_g1 / self.mu_g

    @property
    def l_lam0(self) -> float:
        """``3 kappa_g``, the Lipschitz constant of x -> y*_lam(x) where lam >= 2 l_f1 / mu_g."""
        return 3.0 * self.kappa_g

    @property
    def l_star0(self) -> float:
        """``1 + 3 kappa_g``.

        The paper's text has max(1, l_lam0), its table 1 + l_lam0. The proof that F is smooth needs
        ``||dx|| + ||dy*||``, so the value of the table is used.
        """
        return 1.0 + self.l_lam0

    def l_star1(self, lam0: float | None = None) -> float:
        """Smoothness of x -> y*_lam(x) for every lam >= ``lam0`` (None: ``min_multiplier``).

        ``32 (l_g2 + l_f2 / lam0) l_g1^2 / mu_g^3``, which decreases in ``lam0``.
        """
        lam0 = self.min_multiplier if lam0 is None else checked_number("lam0", lam0, above=True)
        return 32.0 * (self.l_g2 + self.l_f2 / lam0) * self.l_g1**2 / self.mu_g**3

    @property
    def l_F1(self) -> float:
        """``l_star0 (l_f1 + l_g1^2/mu_g + 2 l_f0 l_g1 l_g2/mu_g^2)``, the smoothness of F."""
        cross = 2.0 * self.l_f0 * self.l_g1 * self.l_g2 / self.mu_g**2
        return self.l_star0 * (self.l_f1 + self.l_g1**2 / self.mu_g + cross)

    @property
    def M_f(self) -> float:
        """``l_f0^2 + sigma_f^2``, the second moment of the stochastic gradient of f."""
        return self.l_f0**2 + self.sigma_f**2

    @property
    def M_g(self) -> float:
        """``l_g0^2 + sigma_g^2``, the second moment of the stochastic gradient of g in x."""
        return self.l_g0**2 + self.sigma_g**2

    @property
    def M(self) -> float:
        """``max(M_f, M_g)``."""
        return max(self.M_f, self.M_g)

    @property
    def C_lam(self) -> float:
        """``(4 l_f0 l_g1/mu_g^2) (l_f1 + 2 l_f0 l_g2/mu_g)``, the constant of the bias."""
        curvature = self.l_f1 + 2.0 * self.l_f0 * self.l_g2 / self.mu_g
        return 4.0 * self.l_f0 * self.l_g1 / self.mu_g**2 * curvature

    @property
    def convex_multiplier(self) -> float:
        """``2 l_f1 / mu_g``; f + lam g is (lam mu_g / 2)-strongly convex in y for lam above it."""
        return 2.0 * self.l_f1 / self.mu_g

    @property
    def min_multiplier(self) -> float:
        """``max(1, 2 l_f1/mu_g)``, the smallest lam_0 of F2SA's proof.

        The paper states only the second term, but its proof also uses alpha_k <= beta_k, which
        means lam_k >= 1. If 1 is too large, rescale f: (f, lam) and (s f, s lam) are the same
        method.
        """
        return max(1.0, self.convex_multiplier)

    def bias_bound(self, lam: float) -> float:
        """Bound ``C_lam / lam`` on ``||grad F(x) - grad L*_lam(x)||`` (lemma 3.1)."""
        return self.C_lam / self._convex("lam", lam)

    def distance_bound(self, lam: float) -> float:
        """Bound ``2 l_f0 / (lam mu_g)`` on ``||y*_lam(x) - y*(x)||``."""
        return 2.0 * self.l_f0 / (self._convex("lam", lam) * self.mu_g)

    def drift_bound(self, lam1: float, lam2: float, dx: float) -> float:
        """Bound on ``||y*_lam1(x1) - y*_lam2(x2)||`` with ``dx = ||x1 - x2||`` (lemma 3.2).

        ``2 |lam2 - lam1| / (lam1 lam2) * l_f0 / mu_g + 3 kappa_g dx``; the order of ``lam1`` and
        ``lam2`` does not matter.
        """
        lam1, lam2 = self._convex("lam1", lam1), self._convex("lam2", lam2)
        change = 2.0 * abs(lam2 - lam1) / (lam1 * lam2) * self.l_f0 / self.mu_g
        return change + self.l_lam0 * checked_number("dx", dx)

    def _convex(self, name: str, value: float) -> float:
        """``value``, checked to be at least :attr:`convex_multiplier`."""
        result = checked_number(name, value, above=True)
        if result < self.convex_multiplier:
            raise ArgumentError(
                f"{name} must be at least 2 l_f1 / mu_g = {self.convex_multiplier:g} for this "
                f"bound, not {value!r}"
            )
        return result


@contextmanager
def in_range(given: str) -> Iterator[None]:
    """For computations that ``given`` may drive out of the range of floats."""
    try:
        yield
    except ArithmeticError as error:
        raise ArgumentError(
            f"{given}: these numbers are too large, too small or too far apart to compute with "
            f"({error}); choose other units of f, g, x and y"
        ) from error


def check_constants(constants: Constants) -> None:
    """Raise unless ``constants`` is a :class:`Constants`."""
    if not isinstance(constants, Constants):
        raise ArgumentTypeError(f"constants must be theory.Constants(...), not {constants!r}")
