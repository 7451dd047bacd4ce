"""Adversarial training
====================

An adversary may change every pixel of an image a little. x holds the weights of a network, y the
changes of the images of a minibatch, within a box; g is the negative loss, which the adversary
minimizes in a few steps, f the loss on the changed images. Every minibatch is an episode with
changes of its own. Compared are plain training, and training with random changes of the same size,
on as many minibatches; the judge is an attack of 20 steps. Zhang and others (Fast-BAT, 2022) state
adversarial training as two levels; TorchOpt and Betty would unroll the attack.

The steps of y are set, by Adam and of the length of an attack's: g is not convex, which the steps
that are found are made for. Here f is -g, so that x does not act on f through y: a loop by hand
that attacks a minibatch and then moves the weights has the same direction after 6 evaluations of
the network, where F2SA has 18. Two levels pay where the adversary wants something else than -f.

.. gallery-result:: adversarial_training
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import bilevel

from ._digits import pixels

MEASURE = "test error under attack, %"
BETTER = min
RADIUS, BATCH, ATTACK = 0.15, 100, 5


def loss(x: nn.Module, y: Tensor, batch: Any) -> Tensor:
    """The loss on changed images."""
    return functional.cross_entropy(x(batch[0] + y), batch[1])


def adversary(x: nn.Module, y: Tensor, batch: Any) -> Tensor:
    """What the changes are chosen for."""
    return -loss(x, y, batch)


def by_sign(params: Any) -> torch.optim.Optimizer:
    """Steps of the same length for every pixel, as attacks take them."""
    return torch.optim.Adam(params, lr=RADIUS / 2)


ROBUST = bilevel.F2SA(inner_steps=ATTACK, lower_optimizer=by_sign)
BOX = bilevel.sets.Box(-RADIUS, RADIUS)


def changed(x: nn.Module, batch: Any, steps: int = 20) -> Tensor:
    """The images after an attack by signs of gradients."""
    y = torch.zeros_like(batch[0])
    for _ in range(steps):
        (slope,) = torch.autograd.grad(loss(x, y.requires_grad_(), batch), y)
        y = (y + RADIUS / 5 * slope.sign()).clamp(-RADIUS, RADIUS).detach()
    found: Tensor = batch[0] + y
    return found


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The error under attack after each kind of training."""
    steps, tested = (150, 500) if small else (600, 2000)
    images, labels = pixels(small)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    X, Y = images.flatten(1)[order], labels[order]
    test = X[:tested], Y[:tested]

    def network() -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(X.shape[1], 64), nn.ReLU(), nn.Linear(64, 10))

    def batch(generator: torch.Generator) -> Any:
        rows = torch.randint(tested, len(X), (BATCH,), generator=generator)
        return [(X[rows], Y[rows])] * 2

    def plain(change: Callable[[Tensor], Tensor]) -> nn.Module:
        x, generator = network(), torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(x.parameters(), lr=1e-3)
        for _ in range(steps):
            (inputs, targets), _ = batch(generator)
            optimizer.zero_grad()
            functional.cross_entropy(x(change(inputs)), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return x

    robust = bilevel.minimize(
        bilevel.Problem(loss, adversary, y_set=BOX),
        network(),
        torch.zeros(BATCH, X.shape[1]),
        method=ROBUST,
        data=bilevel.Episodes(batch),
        steps=steps,
        seed=seed,
    )
    found = {
        "adversary in the lower level (F2SA)": robust.x,
        "plain training": plain(lambda inputs: inputs),
        "random changes": plain(lambda v: v + RADIUS * (2 * torch.rand_like(v) - 1).sign()),
    }
    return {
        name: 100 * float((x(changed(x, test)).argmax(1) != test[1]).float().mean())
        for name, x in found.items()
    }
