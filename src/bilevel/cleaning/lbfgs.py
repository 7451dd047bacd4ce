"""L-BFGS for the many small fits of label cleaning."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

_MEMORY = 10  # steps that describe the curvature
_TRIALS = 20  # of the length of one step
_DECREASE = 1e-4  # of the decrease that the slope promises, Armijo's condition


def minimised(
    objective: Callable[..., tuple[float, Array]],
    start: Array,
    args: tuple[Any, ...] = (),
    *,
    bounded: int = 0,
    steps: int = 1000,
    gradient_tolerance: float = 1e-5,
    tolerance: float = 1e-7,
) -> tuple[Array, float]:
    """Where a function is lowest, and its value there.

    SciPy's L-BFGS-B finds the same, but takes longer between evaluations than these functions take
    to be evaluated.

    Args:
        objective: the value and the gradient at a point.
        start: where the search starts.
        args: what the objective is given besides the point.
        bounded: so many of the first variables are at least 0.
        steps: the most steps.
        gradient_tolerance: the search ends where no entry of the gradient is larger,
        tolerance: or where a step changes the value by less, relative to the larger of it and 1.
    """
    x = np.array(start, dtype=float)
    value, gradient = objective(x, *args)
    history: deque[tuple[Array, Array, float]] = deque(maxlen=_MEMORY)
    for _ in range(steps):
        # Variables stay at the bound where the gradient pushes them against it.
        held = np.flatnonzero((x[:bounded] <= 0) & (gradient[:bounded] > 0))
        downhill = -gradient
        downhill[held] = 0.0
        if np.abs(downhill).max() <= gradient_tolerance:
            break
        direction = _times_inverse_curvature(downhill, history)
        direction[held] = 0.0
        slope = float(direction @ gradient)
        if slope >= 0:
            break
        length = 1.0
        for _ in range(_TRIALS):
            moved = x + length * direction
            np.maximum(moved[:bounded], 0.0, out=moved[:bounded])
            after, gradient_after = objective(moved, *args)
            too_high = after - value - _DECREASE * length * slope
            if too_high <= 1e-14 * abs(value):
                break
            # The minimum of the parabola through both values, with the slope at x.
            best = -0.5 * slope * length**2 / (after - value - length * slope)
            length = min(max(0.1 * length, best), 0.5 * length)
        else:
            break  # the lowest value within the precision of the numbers
        step, change = moved - x, gradient_after - gradient
        if step @ change > 0:
            history.append((step, change, 1 / float(step @ change)))
        scale = max(abs(value), abs(after), 1.0)
        ended = value - after <= tolerance * scale
        x, value, gradient = moved, after, gradient_after
        if ended:
            break
    return x, float(value)


def _times_inverse_curvature(vector: Array, history: deque[tuple[Array, Array, float]]) -> Array:
    """The two loops of L-BFGS; the first step is as long as 1."""
    found: Array = vector.copy()
    if not history:
        found /= np.sqrt(vector @ vector)
        return found
    shares = []
    for step, change, factor in reversed(history):
        shares.append(factor * (step @ found))
        found -= shares[-1] * change
    _, change, factor = history[-1]
    found /= factor * (change @ change)
    for (step, change, factor), share in zip(history, reversed(shares), strict=True):
        found += (share - factor * (change @ found)) * step
    return found
