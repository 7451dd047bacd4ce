"""The sequences of the paper that are not plain powers of k."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bilevel.errors import ArgumentError
from bilevel.stepping.schedules import Schedule

_STRIDE = 1024  # steps between the values of a capped multiplier that are kept


@dataclass(frozen=True)
class Product:
    """``first(k) * second(k)``."""

    first: Schedule
    second: Schedule

    def __call__(self, k: Any) -> Any:
        return self.first(k) * self.second(k)


@dataclass(frozen=True)
class CappedMultiplier:
    """``lam_{k+1} = min(lam_k + cap * alpha_k * lam_k^2, target_{k+1})`` from ``lam_0 = target_0``.

    F2SA's multiplier if T is too small for it to follow ``target_k = gamma_k/(2 alpha_k)``. A call
    continues from the previous one, so increasing k is cheap; one value in ``_STRIDE`` is kept, so
    a smaller k is at most ``_STRIDE`` steps away. ``k`` is a whole number or an array of them.
    """

    alpha: Schedule
    target: Schedule
    cap: float
    _anchors: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _latest: list[tuple[int, float]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __call__(self, k: Any) -> Any:
        if np.ndim(k) > 0:
            steps = np.asarray(k)
            return np.array([self._at(int(j)) for j in steps.ravel()]).reshape(steps.shape)
        return self._at(int(k))

    def _at(self, k: int) -> float:
        if k < 0:
            raise ArgumentError(f"k must be at least 0, not {k!r}")
        if not self._latest:
            self._anchors[0] = self.target(0)
            self._latest.append((0, self._anchors[0]))
        anchor = k // _STRIDE
        while anchor not in self._anchors:
            anchor -= 1
        j, lam = anchor * _STRIDE, self._anchors[anchor]
        latest = self._latest[0]
        if j <= latest[0] <= k:
            j, lam = latest
        while j < k:
            lam = min(lam + self.cap * self.alpha(j) * lam**2, self.target(j + 1))
            j += 1
            if j % _STRIDE == 0:
                self._anchors[j // _STRIDE] = lam
        self._latest[0] = (k, lam)
        return lam


@dataclass(frozen=True)
class Momentum:
    """F3SA's momentum eta_k: the smallest the theorem allows, but at least ``(k+1)^-decay``.

    ``eta_0 = eta_1 = 1`` and ``eta_{k+1} = min(1, max((k+2)^-decay, floor * gamma_k^2,
    2 (gamma_{k-1} - gamma_k) / gamma_{k-1}))``. The paper prints only the first term. That term
    decreases in k, while gamma decreases in k + k0, so it would fall below the other two.
    """

    gamma: Schedule
    decay: float
    floor: float

    def __call__(self, k: Any) -> Any:
        steps = np.asarray(k)
        j = np.maximum(steps, 2)  # keeps the argument of gamma at 0 or above
        gamma: Any = self.gamma
        before, now = gamma(j - 2), gamma(j - 1)
        required = np.maximum(self.floor * now**2, 2.0 * (before - now) / before)
        eta = np.minimum(1.0, np.maximum((j + 1.0) ** -self.decay, required))
        eta = np.where(steps < 2, 1.0, eta)
        return eta if steps.ndim else float(eta)
