"""The paper's algorithms spelled out line by line: slow, plain, and what the fast ones must equal.

Every gradient is its own evaluation, every update its own line, in the order and with the symbols
of the paper. Nothing here is meant for use beyond tests and reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel.methods.base import Info
from bilevel.methods.f2sa import F2SA, F2SAState
from bilevel.methods.f3sa import F3SA, F3SAState
from bilevel.problem import FORWARD, Objective, Problem
from bilevel.sampling import Draw
from bilevel.variables import Variable

Point = list[Tensor]


def gradient(objective: Objective, x: Variable, y: Variable, batch: Any, *, of: Variable) -> Point:
    """The gradient of one objective in x or y, alone."""
    value = objective(x.value, y.value, batch)
    grads = torch.autograd.grad(value, of.leaves, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, of.leaves, strict=True)]


def average(gradients: Iterable[tuple[float, Point]]) -> Point:
    """The gradient over a batch that comes in parts, each with its share."""
    weighted = [[share * g for g in point] for share, point in gradients]
    return [torch.stack(leaf).sum(0) for leaf in zip(*weighted, strict=True)]


@torch.no_grad()
def move(variable: Variable, rate: float, direction: Point) -> None:
    """Variable <- variable - rate * direction."""
    for leaf, d in zip(variable.leaves, direction, strict=True):
        leaf -= rate * d


@dataclass(frozen=True)
class ReferenceF2SA(F2SA):
    """Algorithm 1, term by term; given rates, plain steps without sets."""

    def step(self, problem: Problem, state: F2SAState, draw: Draw, *, measure: bool = True) -> Info:
        f, g = problem.upper, problem.lower
        x, (y, z), k = state.x, state.points, state.k
        shared = self.coupling == "shared"
        rates = self.rates.at(k, state.multiplier)
        lam, gamma, xi_alpha = rates.multiplier, rates.lower, rates.upper
        alpha = rates.penalty / lam
        for _ in range(self.inner_steps):
            at_y, at_z = draw.inner(FORWARD.nodes, shared)
            grad_gz = gradient(g, x, z, at_z.lower, of=z)
            grad_fy = gradient(f, x, y, at_y.upper, of=y)
            grad_gy = gradient(g, x, y, at_y.lower, of=y)
            move(z, gamma, grad_gz)
            move(y, alpha, [df + lam * dg for df, dg in zip(grad_fy, grad_gy, strict=True)])
        parts = list(draw.direction(FORWARD.nodes, shared))
        grad_fx = average(
            (s.upper_share, gradient(f, x, y, s.upper, of=x)) for s, _ in parts if s.upper_share
        )
        grad_gxy = average(
            (s.lower_share, gradient(g, x, y, s.lower, of=x)) for s, _ in parts if s.lower_share
        )
        grad_gxz = average(
            (s.lower_share, gradient(g, x, z, s.lower, of=x)) for _, s in parts if s.lower_share
        )
        direction = [
            df + lam * (dy - dz) for df, dy, dz in zip(grad_fx, grad_gxy, grad_gxz, strict=True)
        ]
        move(x, xi_alpha, direction)
        state.k, state.multiplier = k + 1, lam
        return Info(k, lam, gamma, xi_alpha)


@dataclass(frozen=True)
class ReferenceF3SA(F3SA):
    """Algorithm 2 with its six estimators, computed from the whole history of points kept here."""

    def init(self, problem: Problem, x: Variable, y: Variable) -> F3SAState:
        state = super().init(problem, x, y)
        state.x_estimates = [[torch.zeros_like(t) for t in x.leaves] for _ in range(3)]
        state.y_estimates = [[torch.zeros_like(t) for t in y.leaves] for _ in range(2)]
        return state

    def step(self, problem: Problem, state: F3SAState, draw: Draw, *, measure: bool = True) -> Info:
        f, g = problem.upper, problem.lower
        x, y, z, k = state.x, state.y, state.z, state.k
        x_, y_, z_ = state.before  # the points of step k - 1
        rates, eta = self.rates.at(k, state.multiplier), self._eta_at(k)
        lam, gamma, xi_alpha = rates.multiplier, rates.lower, rates.upper
        alpha = rates.penalty / lam

        def recursion(h: Point, now: Point, then: Point) -> Point:
            return [n + (1 - eta) * (a - t) for a, n, t in zip(h, now, then, strict=True)]

        at_y, at_z = draw.inner(FORWARD.nodes, self.coupling == "shared")
        zeta_y, phi_y, phi_z = at_y.upper, at_y.lower, at_z.lower
        hfy, hgy = state.y_estimates
        hz = recursion(
            state.z_estimate,
            gradient(g, x, z, phi_z, of=z),
            gradient(g, x_, z_, phi_z, of=z_),
        )
        hfy = recursion(hfy, gradient(f, x, y, zeta_y, of=y), gradient(f, x_, y_, zeta_y, of=y_))
        hgy = recursion(hgy, gradient(g, x, y, phi_y, of=y), gradient(g, x_, y_, phi_y, of=y_))
        y_.assign(y)
        z_.assign(z)
        move(z, gamma, hz)
        move(y, alpha, [df + lam * dg for df, dg in zip(hfy, hgy, strict=True)])

        ((at_x, _),) = draw.direction(FORWARD.nodes, shared=True)
        zeta_x, phi_x = at_x.upper, at_x.lower
        hfx, hgxy, hgxz = state.x_estimates
        hfx = recursion(hfx, gradient(f, x, y, zeta_x, of=x), gradient(f, x_, y_, zeta_x, of=x_))
        hgxy = recursion(hgxy, gradient(g, x, y, phi_x, of=x), gradient(g, x_, y_, phi_x, of=x_))
        hgxz = recursion(hgxz, gradient(g, x, z, phi_x, of=x), gradient(g, x_, z_, phi_x, of=x_))
        x_.assign(x)
        move(
            x,
            xi_alpha,
            [df + lam * (dy - dz) for df, dy, dz in zip(hfx, hgxy, hgxz, strict=True)],
        )
        state.y_estimates, state.z_estimate, state.x_estimates = [hfy, hgy], hz, [hfx, hgxy, hgxz]
        state.k, state.multiplier = k + 1, lam
        return Info(k, lam, gamma, xi_alpha)
