"""Data poisoning
==============

How much harm can a few training images do? An attacker may move 5% of the training images, each by
a Euclidean distance of at most 10 (an image has a length of about 28), with their labels as they
are. x are the perturbations, and y is the classifier that somebody else will train then, a softmax
regression with a ridge. f is minus its loss on images of the attacker's own. The measure is the
error on other images of a classifier that is trained afresh on the poisoned set: the larger, the
better for the attacker.

Compared are random perturbations of the same length, none, and unrolling ten steps of training
(ITD) as one does with higher or TorchOpt. The attack is that of Munoz-Gonzalez and others (2017).
Within these 50 steps unrolling gets as far.

.. gallery-result:: data_poisoning
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import bilevel

from ._digits import digits, error

MEASURE = "test error, %"
BETTER = max


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The test error that several attacks reach."""
    count, radius = (15, 3.0) if small else (25, 10.0)
    train, own, test = (
        (images.flatten(1), labels)
        for images, labels in digits(seed, 20 * count, 20 * count, small=small)
    )
    pixels = train[0].shape[1]
    zeros = torch.zeros(pixels, 10)
    within = bilevel.sets.Rows(bilevel.sets.Ball(radius))

    def harm(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return -cross_entropy(own[0] @ y, own[1])

    def training(x: Tensor, y: Tensor, batch: None) -> Tensor:
        images = torch.cat([train[0][:count] + x, train[0][count:]])
        return cross_entropy(images @ y, train[1]) + 1e-3 * (y**2).sum()

    def fitted(x: Tensor) -> Tensor:
        y: Tensor = bilevel.argmin(lambda x, y: training(x, y, None), x, zeros, tolerance=1e-4)
        return y

    def attack(method: str) -> Tensor:
        problem = bilevel.Problem(harm, training, x_set=within)
        x0 = 0.01 * radius * torch.randn(count, pixels) / pixels**0.5
        steps = 20 if small else 50
        x: Tensor = bilevel.minimize(problem, x0, zeros, method=method, steps=steps).x
        return x

    def judged(x: Tensor) -> float:
        y = fitted(x)
        return error(lambda images: images @ y, test)

    torch.manual_seed(seed)
    random = within(1e3 * torch.randn(count, pixels))
    return {
        "bilevel": judged(attack("f2sa")),
        "random perturbations": judged(random),
        "no perturbation": judged(0 * random),
        "unrolling (ITD)": judged(attack("itd")),
    }
