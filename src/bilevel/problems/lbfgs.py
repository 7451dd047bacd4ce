"""L-BFGS for smooth convex functions whose value and gradient come together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from bilevel.errors import NotConvergedError


def _unchanged(vector: Tensor) -> Tensor:
    return vector


def lbfgs(
    function: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    *,
    tolerance: float,
    steps: int = 2000,
    memory: int = 20,
    precondition: Callable[[Tensor], Tensor] = _unchanged,
) -> Tensor:
    """argmin_y of a convex function, to ||gradient|| <= tolerance (Liu, Nocedal 1989).

    The length of a step is searched for by the slope along it, as Hager and Zhang (2005) do: values
    alone cannot tell points apart whose gradient is below the root of the machine precision.

    Args:
        function: y -> (value, gradient).
        start: where to start.
        tolerance: of the Euclidean norm of the gradient.
        steps: at most so many.
        memory: how many past steps describe the curvature.
        precondition: v -> M v with M near the inverse Hessian but for a factor, symmetric and
            positive definite; what is known beforehand need not be learned from steps.

    Raises:
        NotConvergedError: the tolerance was not reached.

    Example:
        >>> A = torch.tensor([1.0, 10.0])
        >>> lbfgs(lambda y: ((A * y * y / 2 - y).sum(), A * y - 1), torch.zeros(2), tolerance=1e-5)
        tensor([1.0000, 0.1000])
    """
    y = start.detach().clone()
    value, gradient = function(y)
    history: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=memory)
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
                f"below what {y.dtype} resolves, or the function is not convex"
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
    history: deque[tuple[Tensor, Tensor, Tensor]],
    precondition: Callable[[Tensor], Tensor],
) -> Tensor:
    """-H gradient, H being the inverse Hessian as the past steps show it."""
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
    """The point, value and gradient of a step along which the slope has fallen, None without one.

    Along the direction the slope of a convex function only grows; the wanted lengths are those at
    which it has risen from s < 0 to between 0.9 s and -0.8 s and the value is no larger but for
    rounding. Where the slope is still negative, the value need not be asked.
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
        else:  # too far, or not a number
            high = length
        length = 4 * length if math.isinf(high) else (low + high) / 2
    return None
