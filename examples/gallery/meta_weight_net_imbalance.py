"""Meta-Weight-Net: rare classes
=============================

Of the digits of MNIST 1,000 zeros but only 10 nines are there to learn from, and the other classes
in between; ten more of each class can be trusted. x is a small network that maps the loss of a
training digit to its weight, and y is the perceptron that is trained with these weights (Shu and
others, "Meta-Weight-Net", NeurIPS 2019; Betty has this example). The upper level is the loss of y
on the trusted digits. No step size is set. What is compared is the same as with wrong labels.

The weights are not ahead of uniform ones here: a weight that knows only the loss of a digit cannot
tell a rare one from one that is hard to read. And ten more digits of each class are worth more in
training than in choosing weights.

.. gallery-result:: meta_weight_net_imbalance
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._digits import Batch, digits
from ._weighting import compare_weights

MEASURE = "test error, %"
BETTER = min


def taken(digits: Batch, counts: Tensor) -> Batch:
    """The first so many digits of each class."""
    images, labels = digits
    rows = torch.cat([(labels == c).nonzero()[:n, 0] for c, n in enumerate(counts.tolist())])
    return images[rows], labels[rows]


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The test error of a perceptron, by how its training digits are weighted."""
    sizes = (1000, 300) if small else (12000, 500)
    pool, held_out, test = digits(seed, *sizes, small=small, side=14)
    most = 80 if small else 1000
    train = taken(pool, (most * 100 ** (-torch.arange(10) / 9)).int())
    trusted = taken(held_out, torch.full((10,), 10))
    return compare_weights(seed, train, trusted, test, steps=30 if small else 100)
