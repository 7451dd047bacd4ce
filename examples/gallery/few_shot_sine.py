"""Few-shot regression of sine waves
=================================

A task is a sine of random amplitude and phase, of which ten points are seen. x are the initial
weights of a network, and y are the weights after the adaptation to a task. F2SA follows the minimum
of the task's loss with a pull back to x (iMAML), without second derivatives. Measured is the error
on new tasks after ten plain steps from the weights that were learned.

Compared are untrained weights, weights that were trained on all tasks at once, and MAML, whose five
steps are unrolled (ITD) as higher, TorchOpt and learn2learn do, which have this example. On a
network this small MAML is both faster and better; what F2SA saves, the graph of the inner steps and
second derivatives, costs little here.

.. gallery-result:: few_shot_sine
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

import bilevel

from ._digits import perceptron


def task(generator: torch.Generator) -> Any:
    """Ten points to adapt to, and ten to be judged by."""
    amplitude, phase = 0.5 + 2 * torch.rand(2, generator=generator)
    inputs = 10 * torch.rand(2, 10, 1, generator=generator) - 5
    targets = amplitude * (inputs + math.pi * phase).sin()
    return (inputs[0], targets[0]), (inputs[1], targets[1])


def loss(x: nn.Module, y: nn.Module, batch: Any) -> Tensor:
    """The squared error of y on a batch."""
    return nn.functional.mse_loss(y(batch[0]), batch[1])


def pulled(x: nn.Module, y: nn.Module, batch: Any) -> Tensor:
    """The same, with a pull of y back to x."""
    pairs = zip(x.parameters(), y.parameters(), strict=True)
    return loss(x, y, batch) + 0.1 * sum(((b - a) ** 2).sum() for a, b in pairs)


def run(lower: Any, method: Any, x: nn.Module, steps: int, seed: int, tasks: int = 8) -> Any:
    """Some steps from the weights x, each on new tasks."""
    data = bilevel.Episodes(task, tasks=tasks, start=lambda x: x)
    problem = bilevel.Problem(loss, lower)
    return bilevel.minimize(problem, x, x, method=method, data=data, steps=steps, seed=seed)


def adapted(x: nn.Module, seed: int, small: bool) -> float:
    """The error on new tasks after ten plain steps from the weights x."""
    plain = bilevel.ITD(lower_lr=0.05, inner_steps=10, first_order=True)
    result = run(loss, plain, x, 1, 1000 + seed, tasks=20 if small else 200)
    return float(result.history["upper"][0])


def solve(seed: int = 0, *, small: bool = False) -> float:
    """That error with the weights of iMAML."""
    start = perceptron(seed, 1, 40, 40, 1)
    return adapted(run(pulled, "f2sa", start, 20 if small else 200, seed).x, seed, small)


# --- what it is compared with ---------------------------------------------------------------------

MEASURE = "squared error on new tasks"
BETTER = min


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The error on new tasks from weights that were learned in several ways."""
    start, steps = perceptron(seed, 1, 40, 40, 1), 20 if small else 200

    def together() -> nn.Module:
        net, generator = copy.deepcopy(start), torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        for _ in range(steps):
            points = [pair for _ in range(8) for pair in task(generator)]
            batch = [torch.cat(column) for column in zip(*points, strict=True)]
            optimizer.zero_grad()
            torch.autograd.backward(loss(net, net, batch))
            optimizer.step()
        return net

    maml = bilevel.ITD(lower_lr=0.05, inner_steps=5)
    return {
        "iMAML": solve(seed, small=small),
        "untrained weights": adapted(start, seed, small),
        "trained on all tasks": adapted(together(), seed, small),
        "MAML, unrolled": adapted(run(loss, maml, start, steps, seed).x, seed, small),
    }
