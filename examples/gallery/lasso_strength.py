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
from typing import Any

import torch
from torch import Tensor

import bilevel

MEASURE = "test error"
BETTER = min
L1 = bilevel.prox.L1(lambda x: x[0].exp())


def rows(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ten causes, three of which matter, each seen in five features with noise of their own."""
    causes = torch.randn(count, 10, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, 51, generator=generator, dtype=torch.float64)
    features = causes.repeat_interleave(5, dim=1) + 0.5 * noise[:, :50]
    return features, causes[:, 0] - 2 * causes[:, 1] + 1.5 * causes[:, 2] + noise[:, 50]


def error(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    """Half the mean squared error."""
    rest: Tensor = batch[0] @ y - batch[1]
    return 0.5 * (rest**2).mean()


def ridge(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    """The error with the ridge; the l1 norm is declared beside it."""
    return error(x, y, batch) + 0.5 * x[1].exp() * (y @ y)


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The test error with strengths that were found, with those of a grid, and with none."""
    generator = torch.Generator().manual_seed(seed)
    train, held_out, test = (rows(n, generator) for n in (60, 60, 2000))
    x0, y0 = torch.full((2,), -2.0, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)

    def fitted(x: Any) -> Tensor:
        x = torch.as_tensor(x, dtype=torch.float64)
        y: Tensor = bilevel.argmin(
            lambda x, y: ridge(x, y, train), x, y0, y_prox=L1, tolerance=1e-6
        )
        return y

    def judged(y: Tensor, batch: Any = test) -> float:
        return float(error(x0, y, batch))

    def best(ridges: list[float]) -> float:
        ys = [
            fitted(x) for x in itertools.product(torch.linspace(-6, 0, 4 if small else 10), ridges)
        ]
        return judged(min(ys, key=lambda y: judged(y, held_out)))

    def searched(method: Any) -> float:
        problem = bilevel.Problem(error, ridge, y_prox=L1)
        data: dict[str, Any] = {"upper_data": held_out, "lower_data": train}
        steps = 20 if small else 60
        return judged(
            fitted(bilevel.minimize(problem, x0, y0, method=method, steps=steps, **data).x)
        )

    return {
        "bilevel": searched("f2sa"),
        "least squares": judged(torch.linalg.lstsq(*train).solution),
        "lasso, grid": best([-30.0]),
        "elastic net, grid": best(torch.linspace(-6, 0, 4 if small else 10).tolist()),
        "unrolling (ITD)": searched(bilevel.ITD(inner_steps=100)),
    }
