"""A multi-class support vector machine
====================================

y is a linear classifier of handwritten digits with a squared hinge loss, and x are the logarithms
of the strengths of its ridge, one for each pixel. f is the loss on held-out digits, and the measure
is the error on others.

Compared are one strength of 1 over the number of samples, the best single strength of a
grid, and the same strengths per pixel by implicit differentiation with conjugate gradients (AID).
That is JAXopt's way, whose example learns one strength, on the dual problem. All strengths stay
within the range of the grid. With 300 digits to train on, a strength per pixel is not clearly
ahead of one strength from a grid.

.. gallery-result:: multiclass_svm
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import bilevel

from ._digits import Batch, digits, error

MEASURE = "test error, %"
BETTER = min


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The test error with strengths that were learned, with one from a grid, and by default."""
    sizes = (200, 300) if small else (300, 500)
    train, held_out, test = (
        (images.flatten(1), labels) for images, labels in digits(seed, *sizes, small=small)
    )
    pixels = train[0].shape[1]

    def hinge(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        scores = batch[0] @ y
        right = scores.gather(1, batch[1][:, None])
        # the right class itself adds a constant 1
        return ((1 + scores - right).clamp_min(0) ** 2).sum(1).mean()

    def ridged(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return hinge(x, y, batch) + (x.exp()[:, None] * y**2).sum()

    problem = bilevel.Problem(hinge, ridged, x_set=bilevel.sets.Box(-9, 3))  # as the grid
    start, zeros = torch.full((pixels,), -3.0), torch.zeros(pixels, 10)
    data: dict[str, Any] = {"upper_data": held_out, "lower_data": train}

    def fitted(x: Tensor) -> Tensor:
        y: Tensor = bilevel.argmin(
            lambda x, y: ridged(x, y, train), x, zeros, tolerance=1e-4, steps=3000
        )
        return y

    def searched(method: str) -> Tensor:
        steps = 20 if small else 40
        result = bilevel.minimize(problem, start, zeros, method=method, steps=steps, **data)
        x: Tensor = result.x
        return x

    def judged(x: Tensor) -> float:
        y = fitted(x)
        return error(lambda images: images @ y, test)

    grid = [torch.full((pixels,), s) for s in torch.linspace(-9, 3, 4 if small else 13).tolist()]
    best = min(grid, key=lambda x: float(hinge(x, fitted(x), held_out)))
    return {
        "a strength per pixel": judged(searched("f2sa")),
        "one strength, 1 / n": judged(torch.full((pixels,), -math.log(len(train[0])))),
        "the best strength of a grid": judged(best),
        "a strength per pixel, by AID": judged(searched("aid")),
    }
