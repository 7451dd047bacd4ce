"""Invariant learning
==================

Coloured digits, as in the paper on invariant risk minimization (Arjovsky and others 2019). Is the
digit below five? A quarter of the labels are wrong. The colour agrees with the label in 90% of the
images of one environment, in half of those of another, and in 10% of those for tests. x are weights
between 0 and 1 of the features, which are shape and colour of each pixel; y are two linear
classifiers on the weighted features, one trained in each environment. f is the loss of each in the
other's environment, where only what is invariant helps. The measure is the accuracy on the tests of
one classifier that is trained on both environments with these weights.

Compared are the same classifier on all features, on the shape alone (whoever knows which features
are invariant does better than what learns it), and with the penalty of that paper (IRMv1). That is
clearly better than the learned weights, which are far ahead of all features but stay near one
half, so that the colour still deceives.

.. gallery-result:: invariant_learning
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import bilevel

from ._digits import Batch, digits

MEASURE = "accuracy where the colour deceives, %"
BETTER = max
RIDGE, IRM_PENALTY = 0.1, 1000.0


def coloured(batch: Batch, share: float, generator: torch.Generator) -> Batch:
    """Shape and colour of each pixel, where the colour is that of the label in so many images."""
    shape = batch[0].flatten(1)
    wrong, other = torch.rand(2, len(shape), generator=generator)
    labels = (batch[1] < 5) ^ (wrong < 0.25)
    colour = labels ^ (other > share)
    return torch.cat([shape, shape * (2.0 * colour[:, None] - 1)], 1), labels.float()


def risk(y: Tensor, batch: Batch) -> Tensor:
    """The logistic loss of a linear classifier."""
    return binary_cross_entropy_with_logits(batch[0] @ y, batch[1])


def upper(x: Tensor, y: Tensor, environments: list[Batch]) -> Tensor:
    """The loss of each classifier in the environment of the other."""
    return risk(x * y[1], environments[0]) + risk(x * y[0], environments[1])


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The accuracy in the third environment."""
    generator = torch.Generator().manual_seed(seed)
    size = 350 if small else 1000
    *parts, last = digits(seed, size, size, size, size, small=small, side=7)
    shares = (0.9, 0.5, 0.9, 0.5, 0.1)
    *known, test = (
        coloured(part, share, generator) for part, share in zip([*parts, last], shares, strict=True)
    )
    train, held_out = known[:2], known[2:]
    features = test[0].shape[1]
    ones, zeros = torch.ones(features), torch.zeros(2, features)

    def lower(x: Tensor, y: Tensor, batch: None) -> Tensor:
        losses = [risk(x * part, some) for part, some in zip(y, train, strict=True)]
        return torch.stack(losses).sum() + RIDGE * (y**2).sum()

    def pooled(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([risk(x * y, some) for some in known]).sum() + 2 * RIDGE * (y**2).sum()

    def accuracy(y: Tensor) -> float:
        return 100 * float((((test[0] @ y) > 0) == test[1]).float().mean())

    def fitted(x: Tensor) -> Tensor:
        y: Tensor = bilevel.argmin(pooled, x, zeros[0], tolerance=1e-4)
        return x * y

    def irm() -> Tensor:
        y = torch.zeros(features, requires_grad=True)
        optimizer = torch.optim.Adam([y], lr=0.01)
        for _ in range(100 if small else 1000):
            scores = [(some[0] @ y, some[1]) for some in known]
            slopes = torch.stack([((s.sigmoid() - t) * s).mean() for s, t in scores])
            optimizer.zero_grad()
            torch.autograd.backward(pooled(ones, y) + IRM_PENALTY * (slopes**2).sum())
            optimizer.step()
        return y.detach()

    problem = bilevel.Problem(
        lambda x, y, batch: upper(x, y, held_out), lower, x_set=bilevel.sets.Box(0, 1)
    )
    x = bilevel.minimize(problem, ones, zeros, steps=20 if small else 60).x
    shape = (torch.arange(features) < features // 2).float()
    return {
        "bilevel": accuracy(fitted(x)),
        "all features": accuracy(fitted(ones)),
        "the shape alone": accuracy(fitted(shape)),
        "IRMv1": accuracy(irm()),
    }
