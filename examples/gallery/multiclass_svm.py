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
rise again at the end of a run. AID, which takes second derivatives, is level with F2SA here. On
digits without anything beside them a strength per pixel is not ahead of the grid. To save time the
digits have 14 x 14 pixels.

.. gallery-result:: multiclass_svm
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

import bilevel

from ._digits import Batch, digits, error


def pictures(seed: int, small: bool) -> list[Batch]:
    """Digits to train on, held-out ones and those of the test, each beside the one before."""
    parts = digits(seed, *((200, 300) if small else (300, 500)), small=small, side=14)
    return [(torch.cat([part, part.roll(1, 0)], -1).flatten(1), labels) for part, labels in parts]


def hinge(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """The squared hinge loss, to which the right class itself adds a constant 1."""
    scores = batch[0] @ y
    return ((1 + scores - scores.gather(1, batch[1][:, None])).relu() ** 2).sum(1).mean()


def ridged(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """The same with a ridge for each column of the picture, or one for all of them."""
    return hinge(x, y, batch) + (x.exp() * (y**2).sum(1).reshape(-1, len(x))).sum()


def fitted(x: Tensor, train: Batch) -> Tensor:
    """The classifier with these strengths."""
    g, y0 = partial(ridged, batch=train), torch.zeros(train[0].shape[1], 10)
    return cast(Tensor, bilevel.argmin(g, x, y0, tolerance=1e-4, steps=3000))


def tested(x: Tensor, train: Batch, test: Batch) -> float:
    """The test error with these strengths."""
    return error(lambda images: images @ fitted(x, train), test)


def solve(seed: int = 0, *, small: bool = False, method: str = "f2sa") -> float:
    """The same with those that a method finds."""
    train, held_out, test = pictures(seed, small)
    x0, y0 = torch.full((16 if small else 28,), -1.0), torch.zeros(train[0].shape[1], 10)
    problem = bilevel.Problem(hinge, ridged, x_set=bilevel.sets.Box(-4, 5))  # as the grid
    data: dict[str, Any] = {"upper_data": held_out, "lower_data": train, "select": "best"}
    found = bilevel.minimize(problem, x0, y0, method=method, steps=20 if small else 40, **data)
    return tested(found.x, train, test)


# --- what it is compared with ---------------------------------------------------------------------

MEASURE = "test error, %"
BETTER = min


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The test error with strengths that were learned, with one from a grid, and by default."""
    train, held_out, test = pictures(seed, small)
    grid = torch.linspace(-4, 5, 4 if small else 13)[:, None]
    best = min(grid, key=lambda x: float(hinge(x, fitted(x, train), held_out)))
    return {
        "a strength per column": solve(seed, small=small),
        "one strength, 1 / n": tested(-torch.tensor([len(train[0])]).log(), train, test),
        "the best strength of a grid": tested(best, train, test),
        "a strength per column, by AID": solve(seed, small=small, method="aid"),
    }
