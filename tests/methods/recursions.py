"""The paper's two algorithms on a quadratic, in NumPy, written from the paper alone.

g = 1/2 (y - Bx)'A(y - Bx) and f = 1/2 ||y - t||^2 + rho/2 ||x||^2 with gradients by hand; nothing
of the library is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bilevel.problems import Quadratic

Array = npt.NDArray[np.float64]
Schedule = Callable[[int], float]
NO_NOISE: Any = 0.0


@dataclass
class Oracle:
    """Gradients by hand; ``n`` is noise that is added."""

    A: Array
    B: Array
    t: Array
    rho: float

    @classmethod
    def of(cls, problem: Quadratic) -> Oracle:
        return cls(problem.A.numpy(), problem.B.numpy(), problem.t.numpy(), problem.rho)

    def f_y(self, y: Array, n: Any = NO_NOISE) -> Array:
        return y - self.t + n

    def f_x(self, x: Array, n: Any = NO_NOISE) -> Array:
        return self.rho * x + n

    def g_y(self, x: Array, y: Array, n: Any = NO_NOISE) -> Array:
        return self.A @ (y - self.B @ x) + n

    def g_x(self, x: Array, y: Array, n: Any = NO_NOISE) -> Array:
        return -self.B.T @ (self.A @ (y - self.B @ x)) + n


def f2sa(
    o: Oracle,
    x: Array,
    y: Array,
    T: int,
    gamma: Schedule,
    alpha: Schedule,
    xi_alpha: Schedule,
    lam: Schedule,
) -> Iterator[tuple[Array, Array, Array]]:
    """Algorithm 1 without noise."""
    z = y.copy()
    k = 0
    while True:
        for _ in range(T):
            z = z - gamma(k) * o.g_y(x, z)
            y = y - alpha(k) * (o.f_y(y) + lam(k) * o.g_y(x, y))
        x = x - xi_alpha(k) * (o.f_x(x) + lam(k) * (o.g_x(x, y) - o.g_x(x, z)))
        k += 1
        yield x, y, z


@dataclass
class Noise:
    """What F3SA draws in one step: (n_x, n_y) for zeta_y, phi_y, phi_z, zeta_x, phi_x."""

    zeta_y: Array
    phi_y: Array
    phi_z: Array
    zeta_x: Array
    phi_x: Array


def f3sa(
    o: Oracle,
    x: Array,
    y: Array,
    gamma: Schedule,
    alpha: Schedule,
    xi_alpha: Schedule,
    lam: Schedule,
    eta: Schedule,
    noises: Iterator[Noise],
    combined: bool = False,
) -> Iterator[tuple[Array, Array, Array]]:
    """Algorithm 2; ``combined``: the recursion that its proof analyses."""
    dim = len(x)
    z = y.copy()
    x_, y_, z_ = x, y, z
    h: dict[str, Array] = {}
    k = 0

    def recur(name: str, fresh: Array, stale: Array) -> Array:
        past = h[name] - stale if name in h else 0.0
        h[name] = fresh + (1 - eta(k)) * past
        return h[name]

    while True:
        n = next(noises)
        now, then = lam(k), lam(max(k - 1, 0))
        hz = recur("z", o.g_y(x, z, n.phi_z[dim:]), o.g_y(x_, z_, n.phi_z[dim:]))
        f_now, f_then = o.f_y(y, n.zeta_y[dim:]), o.f_y(y_, n.zeta_y[dim:])
        g_now, g_then = o.g_y(x, y, n.phi_y[dim:]), o.g_y(x_, y_, n.phi_y[dim:])
        if combined:
            dy = recur("y", f_now + now * g_now, f_then + then * g_then)
        else:
            dy = recur("fy", f_now, f_then) + now * recur("gy", g_now, g_then)
        y_, z_ = y, z
        z = z - gamma(k) * hz
        y = y - alpha(k) * dy
        f_now, f_then = o.f_x(x, n.zeta_x[:dim]), o.f_x(x_, n.zeta_x[:dim])
        gy_now, gy_then = o.g_x(x, y, n.phi_x[:dim]), o.g_x(x_, y_, n.phi_x[:dim])
        gz_now, gz_then = o.g_x(x, z, n.phi_x[:dim]), o.g_x(x_, z_, n.phi_x[:dim])
        if combined:
            dx = recur("x", f_now + now * (gy_now - gz_now), f_then + then * (gy_then - gz_then))
        else:
            dx = recur("fx", f_now, f_then) + now * (
                recur("gxy", gy_now, gy_then) - recur("gxz", gz_now, gz_then)
            )
        x_, x = x, x - xi_alpha(k) * dx
        k += 1
        yield x, y, z
