"""L-BFGS for the many small fits of label cleaning."""

from __future__ import annotations

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
    curvature = _Curvature(len(x))
    for _ in range(steps):
        downhill = -gradient
        held = _held(x, gradient, bounded)
        if held is not None:
            downhill[held] = 0.0
        if np.abs(downhill).max() <= gradient_tolerance:
            break
        direction = curvature.inverse_times(downhill)
        if held is not None:
            direction[held] = 0.0
        slope = float(direction @ gradient)
        if slope >= 0:
            break
        length = 1.0
        for _ in range(_TRIALS):
            moved = x + length * direction
            if bounded:
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
        curvature.add(moved - x, gradient_after - gradient)
        scale = max(abs(value), abs(after), 1.0)
        ended = value - after <= tolerance * scale
        x, value, gradient = moved, after, gradient_after
        if ended:
            break
    return x, float(value)


def _held(x: Array, gradient: Array, bounded: int) -> Array | None:
    """The variables that the gradient pushes against their bound, where they stay."""
    if not bounded:
        return None
    return np.flatnonzero((x[:bounded] <= 0) & (gradient[:bounded] > 0))


class _Curvature:
    """The curvature along the last steps, in the compact form of Byrd, Nocedal and Schnabel.

    The usual two loops over the steps are as many small operations as there are steps, four times,
    and take longer than a small objective. Here all steps are the rows of one matrix. They need no
    order but one: R, with the products of a step and the changes of the gradient by it and by later
    steps, is triangular if the steps are in the order in which they were taken, and so is its
    inverse. Hence a step that is forgotten takes its row and its column along, and a new one adds
    one column.
    """

    def __init__(self, width: int) -> None:
        self._count = 0
        self._pairs = np.empty((2 * _MEMORY, width))  # a step, and the change of the gradient by it
        self._inverse = np.zeros((_MEMORY, _MEMORY))  # of R
        self._products = np.zeros(_MEMORY)  # of each step and its change: the diagonal of R
        self._gram = np.zeros((_MEMORY, _MEMORY))  # of the changes
        self._scale = 1.0

    def add(self, step: Array, change: Array) -> None:
        """Take a step into account by which the gradient changed, if it shows curvature."""
        product = float(step @ change)
        if product <= 0:
            return
        place = self._count % _MEMORY
        self._count += 1
        pairs, inverse, gram = self._used()
        pairs[2 * place], pairs[2 * place + 1] = step, change
        found = pairs @ change
        inverse[place] = inverse[:, place] = 0.0
        inverse[:, place] = inverse @ found[::2] / -product
        inverse[place, place] = 1 / product
        gram[place] = gram[:, place] = found[1::2]
        self._products[place] = product
        self._scale = product / float(gram[place, place])

    def inverse_times(self, vector: Array) -> Array:
        """The vector times the inverse of the curvature; the first step is as long as 1."""
        if not self._count:
            first: Array = vector / np.sqrt(vector @ vector)
            return first
        pairs, inverse, gram = self._used()
        scale, found = self._scale, pairs @ vector
        along = inverse @ found[::2]
        across = self._products[: len(gram)] * along + scale * (gram @ along - found[1::2])
        factors = np.empty(len(pairs))
        factors[::2], factors[1::2] = across @ inverse, -scale * along
        total: Array = factors @ pairs
        total += scale * vector
        return total

    def _used(self) -> tuple[Array, Array, Array]:
        used = min(self._count, _MEMORY)
        return self._pairs[: 2 * used], self._inverse[:used, :used], self._gram[:used, :used]
