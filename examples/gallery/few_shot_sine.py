"""Few-shot regression of sine waves: MAML by ITD, and iMAML without second derivatives by F2SA.

A task is a sine of random amplitude and phase, of which ten points are seen. x holds the initial
weights of a network. MAML judges them after a few steps; F2SA follows the minimum of the task's
loss with a pull back to x. The baseline adapts the same network from untrained weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import bilevel

PULL = 0.1
MAML = bilevel.ITD(
    lower_lr=0.05,
    inner_steps=5,
    upper_optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
)
IMAML = bilevel.F2SA(
    lower_lr=0.05,
    inner_steps=10,
    multiplier=30.0,
    upper_optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
)


def task(generator: torch.Generator) -> Any:
    """Ten points to adapt to, and ten to be judged by."""
    amplitude, phase = 0.5 + 2 * torch.rand(2, generator=generator)
    inputs = 10 * torch.rand(2, 10, 1, generator=generator) - 5
    targets = amplitude * (inputs + math.pi * phase).sin()
    return (inputs[0], targets[0]), (inputs[1], targets[1])


def loss(x: nn.Module, y: nn.Module, batch: Any) -> Tensor:
    """The squared error of y on a batch."""
    inputs, targets = batch
    return nn.functional.mse_loss(y(inputs), targets)


def pulled(x: nn.Module, y: nn.Module, batch: Any) -> Tensor:
    """The same, with a pull of y back to x."""
    pairs = zip(x.parameters(), y.parameters(), strict=True)
    return loss(x, y, batch) + PULL * sum(((b - a) ** 2).sum() for a, b in pairs)


def network() -> nn.Module:
    """One input, one output."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)
    )


def adapted_loss(start: nn.Module, tasks: int = 50, steps: int = 10) -> float:
    """The mean error on new tasks after a few steps from ``start``."""
    result = bilevel.minimize(
        bilevel.Problem(loss, pulled),
        start,
        start,
        method=bilevel.NoBilevel(lower_lr=0.05, inner_steps=steps),
        data=bilevel.Episodes(task, tasks=tasks, start=lambda x: x),
        steps=1,
        seed=1,
    )
    return float(result.history["upper"][0])


def solve(method: Any = MAML, steps: int = 2000) -> tuple[float, float]:
    """The error on new tasks from the weights that were learned, and from untrained ones."""
    start = network()
    lower = loss if isinstance(method, bilevel.ITD) else pulled
    result = bilevel.minimize(
        bilevel.Problem(loss, lower),
        start,
        start,
        method=method,
        data=bilevel.Episodes(task, tasks=8, start=lambda x: x),
        steps=steps,
    )
    return adapted_loss(result.x), adapted_loss(start)


if __name__ == "__main__":
    for name, chosen in (("MAML (ITD)", MAML), ("iMAML (F2SA)", IMAML)):
        learned, untrained = solve(chosen)
        print(f"{name}: {learned:.3f}, untrained {untrained:.3f}")
