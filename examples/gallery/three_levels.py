"""Three levels: a tax x, a firm y that answers it, and customers z that answer both.

Customers buy z to maximise z (4 - y) - z^2 / 2; the firm sets its price y to maximise
(y - 1 - x) z; the state sets the tax x to maximise its income x z. By hand: z = 4 - y,
y = (5 + x) / 2, and x = 3/2. The baseline is the income of a tax of 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

import bilevel

EXACT = 1.5
START = torch.zeros((), dtype=torch.float64)


def bought(y: Tensor) -> Tensor:
    """What customers buy at the price y."""
    z: Tensor = bilevel.argmin(lambda y, z: z**2 / 2 - z * (4 - y), y, START)
    return z


def price(x: Tensor) -> Tensor:
    """The price of the firm at the tax x; the argmin of an objective that holds one."""
    y: Tensor = bilevel.argmin(lambda x, y: -(y - 1 - x) * bought(y), x, START)
    return y


def income(x: Tensor) -> Tensor:
    """What the state gets."""
    return x * bought(price(x))


def solve(steps: int = 30) -> tuple[float, float]:
    """The income at the tax that was found, and that at a tax of 1."""
    x = torch.ones((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.7)
    first = income(x).item()
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(-income(x))
        optimizer.step()
    return income(x).item(), first


if __name__ == "__main__":
    print("income {:.6f}, at a tax of 1 {:.6f}".format(*solve()))
