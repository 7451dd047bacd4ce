"""The two strengths of an elastic net
===================================

Linear regression on features of which few matter and many are nearly alike. x are the logarithms
of two strengths, that of the l1 norm and that of the ridge; y are the coefficients. The lower
level has a kink wherever a coefficient is 0, so the l1 norm is declared as ``y_prox`` and followed
by proximal steps. f is the error on held-out rows; the measure is the error on rows that nobody
has seen.

Compared are least squares, the best lasso and the best elastic net of a grid, and the same two
strengths by unrolling 100 steps (ITD), as libraries of differentiable optimizers do. JAXopt has
the strength of a lasso among its examples. Unrolling is as good here, and with two numbers to be
found a grid of 100 nearly so; with one for each feature there is no grid.

.. gallery-result:: lasso_strength
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

import bilevel

from ._digits import Batch

L1 = bilevel.prox.L1(lambda x: x[0].exp())
X0, Y0 = torch.full((2,), -2.0, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)


def rows(count: int, generator: torch.Generator) -> Batch:
    """Ten causes, three of which matter, each seen in five features with noise of their own."""
    causes = torch.randn(count, 10, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, 51, generator=generator, dtype=torch.float64)
    features = causes.repeat_interleave(5, dim=1) + 0.5 * noise[:, :50]
    return features, causes[:, 0] - 2 * causes[:, 1] + 1.5 * causes[:, 2] + noise[:, 50]


def error(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """Half the mean squared error."""
    return 0.5 * (batch[0] @ y - batch[1]).square().mean()


def ridge(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """The error with the ridge; the l1 norm is declared beside it."""
    return error(x, y, batch) + 0.5 * x[1].exp() * (y @ y)


def fitted(x: Tensor, batch: Batch) -> Tensor:
    """The coefficients with these strengths."""
    g = partial(ridge, batch=batch)
    return cast(Tensor, bilevel.argmin(g, x, Y0, y_prox=L1, tolerance=1e-6))


def solve(seed: int = 0, *, small: bool = False, **how: Any) -> float:
    """The test error with the strengths that a method finds."""
    generator = torch.Generator().manual_seed(seed)
    train, held, test = (rows(n, generator) for n in (60, 60, 2000))
    problem, steps = bilevel.Problem(error, ridge, y_prox=L1), 20 if small else 60
    found = bilevel.minimize(problem, X0, Y0, upper_data=held, lower_data=train, steps=steps, **how)
    return float(error(found.x, fitted(found.x, train), test))


# --- what it is compared with ---------------------------------------------------------------------

MEASURE = "test error"
BETTER = min


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The test error with strengths that were found, with those of a grid, and with none."""
    generator = torch.Generator().manual_seed(seed)
    train, held, test = (rows(n, generator) for n in (60, 60, 2000))
    grid = torch.linspace(-6, 0, 4 if small else 10).tolist()

    def judged(y: Tensor, batch: Batch = test) -> float:
        return float(error(X0, y, batch))

    def best(ridges: list[float]) -> float:
        xs = torch.tensor([*itertools.product(grid, ridges)], dtype=torch.float64)
        ys = [fitted(x, train) for x in xs]
        return judged(min(ys, key=lambda y: judged(y, held)))

    return {
        "bilevel": solve(seed, small=small),
        "least squares": judged(torch.linalg.lstsq(*train).solution),
        "lasso, grid": best([-30.0]),
        "elastic net, grid": best(grid),
        "unrolling (ITD)": solve(seed, small=small, method=bilevel.ITD(inner_steps=100)),
    }
