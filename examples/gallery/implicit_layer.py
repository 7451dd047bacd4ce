"""A layer that solves a problem
=============================

Signals that jump now and then are to be freed from noise. The layer answers with the solution of a
problem: the signal that is near its input and whose filtered version is small, ::

    y* = argmin_y ||y - input||^2 / 2 + strength * sum_i sqrt( (filter * y)_i^2 + 0.01 ).

The filter of five entries and the strength are parameters of an ``nn.Module``, trained by Adam like
any others: :func:`bilevel.argmin` is differentiable, and needs gradients of the objective alone.

Compared are a plain layer of the same size (a convolution with five entries and a bias), a network
with 59 times as many parameters, and the same layer with 30 gradient steps unrolled, as higher and
TorchOpt do it. The task is that of OptNet (Amos and Kolter 2017). JAXopt and TorchOpt have implicit
layers too; that of an equilibrium model is :func:`bilevel.fixed_point` here. Where so few steps are
enough and g has second derivatives, unrolling is as good. The network with 353 parameters is better
than both, which have six.

.. gallery-result:: implicit_layer
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, mse_loss

import bilevel

MEASURE = "squared error of the signal, x 1000"
BETTER = min


class Smallest(nn.Module):
    """The signal whose filtered version is small, near the input."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(0.1 * torch.randn(1, 1, 5, dtype=torch.float64))
        self.strength = nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))

    def objective(self, x: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
        """What the layer minimises."""
        weights, strength, inputs = x
        rough = (conv1d(y, weights) ** 2 + 0.01).sqrt().sum()
        return 0.5 * ((y - inputs) ** 2).sum() + strength.exp() * rough

    def forward(self, inputs: Tensor) -> Tensor:
        """The minimum."""
        y: Tensor = bilevel.argmin(self.objective, (self.filter, self.strength, inputs), inputs)
        return y


class Unrolled(Smallest):
    """The same after thirty gradient steps, through which autograd goes back."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Nearly the minimum."""
        y = inputs.clone().requires_grad_()
        for _ in range(30):
            value = self.objective((self.filter, self.strength, inputs), y)
            y = y - 0.2 * torch.autograd.grad(value, y, create_graph=True)[0]
        return y


def signals(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Signals of 64 values that jump now and then, with noise and without."""
    jumps = torch.randn(count, 1, 64, generator=generator, dtype=torch.float64)
    clean = (jumps * (torch.rand(count, 1, 64, generator=generator) < 0.08)).cumsum(-1)
    noise = torch.randn(count, 1, 64, generator=generator, dtype=torch.float64)
    return clean + 0.3 * noise, clean


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The test error of layers that were trained alike."""
    generator = torch.Generator().manual_seed(seed)
    train, test = signals(20 if small else 50, generator), signals(200, generator)

    def trained(build: Callable[[], nn.Module], steps: int) -> float:
        torch.manual_seed(seed)
        layer = build().double()
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.autograd.backward(mse_loss(layer(train[0]), train[1]))
            optimizer.step()
        return 1000 * mse_loss(layer(test[0]), test[1]).item()

    def plain() -> nn.Module:
        return nn.Conv1d(1, 1, 5, padding=2)

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(1, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 1, 5, padding=2)
        )

    few, many = (20, 100) if small else (40, 300)
    return {
        "bilevel.argmin": trained(Smallest, few),
        "a plain layer of the same size": trained(plain, many),
        "a network of 353 parameters": trained(network, many),
        "30 steps unrolled": trained(Unrolled, few),
    }
