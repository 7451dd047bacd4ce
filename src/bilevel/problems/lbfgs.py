"""L-BFGS for smooth convex functions whose value and gradient are computed together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from bilevel.errors import NotConvergedError

History: TypeAlias = deque[tuple[Tensor, Tensor, Tensor]]
"""Past steps: (step, change of the gradient, their inner product)."""


def _identity(vector: Tensor) -> Tensor:
    return vector


def lbfgs(
    function: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    *,
    tolerance: float,
    steps: int = 2000,
    memory: int = 20,
    precondition: Callable[[Tensor], Tensor] = _identity,
) -> Tensor:
    """Minimise a convex function to ||gradient|| <= tolerance (Liu, Nocedal 1989).

    The line search uses the slope along the direction, as Hager and Zhang (2005) do: function
    values cannot distinguish points with a gradient below the root of the machine precision.

    Args:
        function: y -> (value, gradient).
        start: the starting point.
        tolerance: the bound on the Euclidean norm of the gradient.
        steps: the largest number of steps.
        memory: the number of past steps that describe the curvature.
        precondition: v -> M v, where M is symmetric, positive definite and approximately
            proportional to the inverse Hessian.

    Raises:
        NotConvergedError: the tolerance was not reached.

    Example:
        >>> A = torch.tensor([1.0, 10.0])
        >>> lbfgs(lambda y: ((A * y * y / 2 - y).sum(), A * y - 1), torch.zeros(2), tolerance=1e-5)
        tensor([1.0000, 0.1000])
    """
    y = start.detach().clone()
    value, gradient = function(y)
    history: History = deque(maxlen=memory)
    for _ in range(steps):
        norm = float(torch.linalg.vector_norm(gradient))
        if norm <= tolerance:
            return y
        direction = _direction(gradient, history, precondition)
        length = 1.0 if history else 1.0 / float(torch.linalg.vector_norm(direction))
        found = _search(function, y, value, gradient, direction, length)
        if found is None:
            raise NotConvergedError(
                f"L-BFGS stopped at a gradient of norm {norm:.2e}, above the tolerance of "
                f"{tolerance:.2e}: no step along its direction is an improvement. The tolerance is "
                f"too small for the precision of {y.dtype}, or the function is not convex"
            )
        moved, value, after = found
        step, change = moved - y, after - gradient
        history.append((step, change, (step * change).sum()))
        y, gradient = moved, after
    raise NotConvergedError(
        f"L-BFGS left a gradient of norm {float(torch.linalg.vector_norm(gradient)):.2e} after "
        f"{steps} steps, above the tolerance of {tolerance:.2e}"
    )


def _direction(
    gradient: Tensor,
    history: History,
    precondition: Callable[[Tensor], Tensor],
) -> Tensor:
    """-H gradient, where H approximates the inverse Hessian from the past steps."""
    direction = -gradient
    shares = []
    for step, change, product in reversed(history):
        share = (step * direction).sum() / product
        direction = direction - share * change
        shares.append(share)
    direction = precondition(direction)
    if history:
        _, change, product = history[-1]
        direction = direction * (product / (change * precondition(change)).sum())
    for (step, change, product), share in zip(history, reversed(shares), strict=True):
        direction = direction + (share - (change * direction).sum() / product) * step
    return direction


def _search(
    function: Callable[[Tensor], tuple[Tensor, Tensor]],
    y: Tensor,
    value: Tensor,
    gradient: Tensor,
    direction: Tensor,
    length: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The point, value and gradient after an acceptable step, or None if no step is acceptable.

    The slope of a convex function increases along the direction. A length is acceptable if the
    slope has risen from s < 0 to between 0.9 s and -0.8 s and the value is not larger, apart from
    rounding. Where the slope is still negative, the value need not be compared.
    """
    slope = float((gradient * direction).sum())
    slack = 10 * torch.finfo(y.dtype).eps * abs(float(value))
    low, high = 0.0, math.inf
    for _ in range(40):
        moved = y + length * direction
        after, gradient_after = function(moved)
        slope_after = float((gradient_after * direction).sum())
        no_larger = slope_after <= 0 or float(after) <= float(value) + slack
        if slope_after < 0.9 * slope:
            low = length
        elif slope_after <= -0.8 * slope and no_larger:
            return moved, after, gradient_after
        else:  # too far, or NaN
            high = length
        length = 4 * length if math.isinf(high) else (low + high) / 2
    return None
