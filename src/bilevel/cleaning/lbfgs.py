"""L-BFGS-B of SciPy, for the many small fits of label cleaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import fmin_l_bfgs_b

Array: TypeAlias = npt.NDArray[Any]


def minimised(
    objective: Callable[..., tuple[float, Array]],
    start: Array,
    args: tuple[Any, ...] = (),
    bounds: Sequence[tuple[float | None, float | None]] | None = None,
    **options: float,
) -> tuple[Array, float]:
    """Where a function is lowest, and its value there.

    SciPy's ``minimize`` gives the same numbers. For a few variables, though, its preparations take
    as long as five evaluations, and so does keeping the gradient with the value, point by point.

    Args:
        objective: the value and the gradient at a point.
        start: where the search starts.
        args: what the objective is given besides the point.
        bounds: the least and the largest value of each variable.
        options: ``maxiter``, ``pgtol`` and ``factr`` of ``fmin_l_bfgs_b``.
    """
    place, gradient = np.empty(0), np.empty(0)

    def value(x: Array, *args: Any) -> float:
        nonlocal place, gradient
        place = x.copy()
        found, gradient = objective(x, *args)
        return found

    def slope(x: Array, *args: Any) -> Array:
        if not np.array_equal(x, place):  # SciPy has so far asked for the value there just before
            value(x, *args)
        return gradient

    x, lowest, _ = fmin_l_bfgs_b(value, start, slope, args, bounds=bounds, **options)
    return x, float(lowest)
