"""A multi-class support vector machine
====================================

To the right of each handwritten digit another one was pasted, which says nothing about the label; a
classifier is not told that. y is linear, with a squared hinge loss, and x are the logarithms of the
strengths of its ridge, one for each column of the picture. f is the loss on held-out pictures, and
the measure is the error on others. No step size is set. Such strengths select features, as in
Chapelle and others, "Choosing Multiple Parameters for Support Vector Machines" (2002).

Compared are one strength of 1 over the number of samples, the best single strength of a grid, and
the same strengths per column by implicit differentiation with conjugate gradients (AID). That is
JAXopt's way, whose example learns one strength, on the dual problem. All strengths stay within the
range of the grid: far weaker ones leave a lower level that is so badly conditioned that y does not
follow x. Of the steps of x, as of the grid, the best by f is taken (``select="best"``), which may
rise again at the end of a run. On digits without anything beside them a strength per pixel is not
ahead of the grid. To save time the digits have 14 x 14 pixels.

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
    generator = torch.Generator().manual_seed(seed)

    def beside_others(images: Tensor) -> Tensor:
        others = images[torch.randperm(len(images), generator=generator)]
        return torch.cat([images, others], -1).flatten(1)

    parts = digits(seed, *sizes, small=small, side=14)
    train, held_out, test = ((beside_others(images), labels) for images, labels in parts)
    wide = 2 * parts[0][0].shape[-1]
    pixels = train[0].shape[1]

    def hinge(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        scores = batch[0] @ y
        right = scores.gather(1, batch[1][:, None])
        # the right class itself adds a constant 1
        return ((1 + scores - right).clamp_min(0) ** 2).sum(1).mean()

    def ridged(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        columns = (y**2).sum(1).reshape(-1, wide).sum(0)
        return hinge(x, y, batch) + (x.exp() * columns).sum()

    problem = bilevel.Problem(hinge, ridged, x_set=bilevel.sets.Box(-4, 5))  # as the grid
    start, zeros = torch.full((wide,), -1.0), torch.zeros(pixels, 10)
    options: dict[str, Any] = {"upper_data": held_out, "lower_data": train, "select": "best"}

    def fitted(x: Tensor) -> Tensor:
        y: Tensor = bilevel.argmin(
            lambda x, y: ridged(x, y, train), x, zeros, tolerance=1e-4, steps=3000
        )
        return y

    def searched(method: str) -> Tensor:
        steps = 20 if small else 40
        result = bilevel.minimize(problem, start, zeros, method=method, steps=steps, **options)
        x: Tensor = result.x
        return x

    def judged(x: Tensor) -> float:
        y = fitted(x)
        return error(lambda images: images @ y, test)

    grid = [torch.full((wide,), s) for s in torch.linspace(-4, 5, 4 if small else 13).tolist()]
    best = min(grid, key=lambda x: float(hinge(x, fitted(x), held_out)))
    return {
        "a strength per column": judged(searched("f2sa")),
        "one strength, 1 / n": judged(torch.full((wide,), -math.log(len(train[0])))),
        "the best strength of a grid": judged(best),
        "a strength per column, by AID": judged(searched("aid")),
    }
