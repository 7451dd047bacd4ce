"""Accurate solutions of lower levels, by other means than the methods that are judged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bilevel.errors import NotConvergedError

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def double(tree: Any) -> Any:
    """Return the tree of tensors with all real numbers in double precision."""
    if isinstance(tree, Tensor):
        return tree.detach().double() if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {name: double(part) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(double, tree))
    return tree


def finite(value: Callable[[Any], Tensor | float]) -> Callable[[Any, Any], float]:
    """Make a judge of x alone; where F cannot be computed it is infinite."""

    def judged(x: Any, y: Any) -> float:
        try:
            number = float(value(double(x)))
        except (LinAlgError, NotConvergedError):
            return math.inf
        return number if math.isfinite(number) else math.inf

    return judged


class Logistic:
    """min_y mean_i log(1 + exp(-b_i a_i'y)) + 1/2 sum_j s_j y_j^2, by Newton from the last y."""

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self._signed = (features * labels[:, None]).double()
        self._single = features.float()
        self._last = self._signed.new_zeros(features.shape[1])

    def solve(self, strengths: Tensor) -> Tensor:
        """Return the solution for strengths s in double precision."""

        def objective(y: Tensor) -> Tensor:
            return softplus(-(self._signed @ y)).mean() + 0.5 * (strengths * y * y).sum()

        y = self._last
        for _ in range(60):
            p = torch.sigmoid(-(self._signed @ y))
            gradient = strengths * y - self._signed.T @ p / len(p)
            # Single precision is enough for a Hessian that only has to give a good direction.
            weighted = self._single * (p * (1 - p)).float()[:, None]
            hessian = (weighted.T @ self._single).double() / len(p) + torch.diag(strengths)
            step = torch.linalg.solve(hessian, gradient)
            decrease, before, length = float(gradient @ step), float(objective(y)), 1.0
            if not decrease > 1e-10 * (1 + abs(before)):
                break
            while length > 1e-8 and not float(objective(y - length * step)) <= before:
                length /= 2
            y = y - length * step
        if bool(y.isfinite().all()):
            self._last = y
        return y


def proximal(
    gradient: Callable[[Tensor], Tensor],
    prox: Callable[[Tensor, float], Tensor],
    curvature: float,
    start: Tensor,
    steps: int = 3000,
) -> Tensor:
    """Minimise smooth + simple by FISTA, restarted where it goes uphill (O'Donoghue, Candes)."""
    step = 1.0 / max(curvature, 1e-300)
    y, ahead, t = start, start, 1.0
    for _ in range(steps):
        moved = prox(ahead - step * gradient(ahead), step)
        change = moved - y
        if float((ahead - moved) @ change) > 0:
            ahead, t = y, 1.0
            continue
        later = (1 + math.sqrt(1 + 4 * t * t)) / 2
        ahead, t = moved + (t - 1) / later * change, later
        done = float(change.norm()) <= 1e-13 * float(moved.norm() + 1e-30)
        y = moved
        if done:
            break
    return y


def soft(v: Tensor, by: Tensor | float) -> Tensor:
    """Shrink each entry towards 0."""
    return v.sign() * (v.abs() - by).clamp(min=0)
