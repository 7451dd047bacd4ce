"""Three levels: taxes, prices, purchases
======================================

A state taxes five goods, a firm that sells them answers with its prices, and customers answer the
prices. x are the taxes and y the prices. What the customers buy, z, is the solution of a problem of
their own inside the firm's objective, where :func:`bilevel.argmin` stands for it::

    z* maximises z (a - y) - z A z / 2,   y* maximises (y - c - x) z*,   x maximises x z*.

The measure is the state's income as a share of the best one, which for this problem is known: with
y* = (a + c + x) / 2 it is reached at x = (a - c) / 2. The baseline is what two levels give: the
state knows how customers answer prices, and takes it that the firm adds the tax to its price.

More than two levels are what Betty is made for, which has a problem object for each of them. Here
each evaluation of the firm's objective solves the customers' problem anew, which is simple and
takes most of the time.

.. gallery-result:: three_levels
"""

from __future__ import annotations

import torch
from torch import Tensor

import bilevel

MEASURE = "income, % of the best"
BETTER = max
GOODS = 5


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The income with three levels, and with the firm's answer left out."""
    generator = torch.Generator().manual_seed(seed)
    B = torch.randn(GOODS, GOODS, generator=generator)
    A = B @ B.T / GOODS + torch.eye(GOODS)  # how purchases of one good replace those of another
    a, c = 4 + torch.rand(GOODS, generator=generator), torch.rand(GOODS, generator=generator)
    zeros, ones = torch.zeros(GOODS), torch.ones(GOODS)

    def bought(y: Tensor) -> Tensor:
        z: Tensor = bilevel.argmin(lambda y, z: 0.5 * z @ A @ z - z @ (a - y), y, zeros)
        return z

    def income(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return -(x @ bought(y))

    def profit(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return -((y - c - x) @ bought(y))

    def passed_on(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return ((y - (a + c) / 2 - x) ** 2).sum()

    def exact(x: Tensor) -> float:
        return float(x @ torch.linalg.solve(A, a - c - x) / 2)

    best = exact((a - c) / 2)
    steps = 6 if small else 10
    found = {}
    for name, lower in (("three levels", profit), ("the firm passes the tax on", passed_on)):
        result = bilevel.minimize(bilevel.Problem(income, lower), ones, zeros, steps=steps)
        found[name] = 100 * exact(result.x) / best
    return found
