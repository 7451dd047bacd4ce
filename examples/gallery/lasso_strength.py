"""The strength of a lasso by its validation error; the lower level has a kink at every zero.

x is the logarithm of the strength. The baseline is least squares, which is a strength of 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

import bilevel

FEATURES, ROWS = 30, 40


def data(seed: int) -> tuple[Tensor, Tensor]:
    """Rows whose target depends on three features of thirty."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    noise = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    return X, X[:, 0] - 2 * X[:, 1] + 1.5 * X[:, 2] + noise


def error(x: Tensor, y: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Half the mean squared error."""
    X, target = batch
    return 0.5 * ((X @ y - target) ** 2).mean()


def solve(steps: int = 100) -> tuple[float, float]:
    """The test error with the strength that was found, and that of least squares."""
    problem = bilevel.Problem(error, error, y_prox=bilevel.prox.L1(lambda x: x.exp()))
    train, test = data(0), data(2)
    zeros = torch.zeros(FEATURES, dtype=torch.float64)
    result = bilevel.minimize(
        problem,
        torch.tensor(-2.0, dtype=torch.float64),
        zeros,
        method=bilevel.F2SA(lower_lr=0.2, upper_lr=0.5, multiplier=100.0, inner_steps=30),
        upper_data=data(1),
        lower_data=train,
        steps=steps,
    )
    least_squares = torch.linalg.lstsq(train[0], train[1]).solution
    return float(error(result.x, result.y, test)), float(error(result.x, least_squares, test))


if __name__ == "__main__":
    print("test error with the lasso {:.3f}, with least squares {:.3f}".format(*solve()))
