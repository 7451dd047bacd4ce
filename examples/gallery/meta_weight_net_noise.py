"""Meta-Weight-Net: wrong labels
=============================

Of 5,000 digits of MNIST 60% have a random label; 500 others can be trusted. x is a small network
that maps the loss of a training digit to its weight, and y is the perceptron that is trained with
these weights (Shu and others, "Meta-Weight-Net", NeurIPS 2019). The upper level is the loss of y on
the trusted digits. No step size is set.

It is compared with the same perceptron trained with uniform weights, on the noisy digits, on these
and the trusted ones, or on the trusted ones alone; these runs may end where their loss on the
trusted digits was lowest. The authors' code, the example of Betty and those written with higher
differentiate one unrolled step of y: ``ITD(inner_steps=1)`` here, which gets as much CPU time.
The weights are divided by their sum in the batch, as in the paper. To save time the digits have
14 x 14 pixels.

The weights are ahead of training on all digits, and of the 500 trusted digits alone, which with six
labels of ten being random are worth as much as the 5,000 others. One unrolled step is behind, too;
but its steps are those that "auto" finds for it, and in some seeds these are too long.

.. gallery-result:: meta_weight_net_noise
"""

from __future__ import annotations

import torch

from ._digits import digits
from ._weighting import compare_weights

MEASURE = "test error, %"
BETTER = min
NOISE = 0.6


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The test error of a perceptron, by how its training digits are weighted."""
    count, few = (800, 200) if small else (5000, 500)
    (images, labels), trusted, test = digits(seed, count, few, small=small, side=14)
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(10, (count,), generator=generator)
    given = torch.where(torch.rand(count, generator=generator) < NOISE, random, labels)
    return compare_weights(seed, (images, given), trusted, test, steps=60 if small else 100)
