"""Architecture weights
====================

Which operations should an image pass before a linear classifier reads it? In each of two layers
there is a choice of four: leave it as it is, blur it, its edges, or the largest pixel around each.
As in DARTS (Liu and others, ICLR 2019), a layer is a mixture of all its operations, weighted by the
softmax of a row of x; y is the classifier, trained on 500 digits of MNIST with a ridge. The upper
level is its loss on 500 held-out digits. No step size is set.

What was found is judged by training y anew on all 1,000 digits. It is compared with equal weights,
with weights that are learned together with y from the training digits, and with the best of the 16
choices of one operation for each layer, by the loss on the held-out digits. Betty and TorchOpt have
such examples with convolutions that are trained as well, which take much longer. To save time the
digits have 14 x 14 pixels. With so few weights little can be overfitted: learning them from the
training digits is nearly as good as from held-out ones, and so is the best single choice.

.. gallery-result:: architecture_weights
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy, max_pool2d

import bilevel

from ._digits import Batch, digits, error, joined

MEASURE = "test error, %"
BETTER = min
RIDGE = 1e-2


def mixed(images: Tensor, weights: Tensor) -> Tensor:
    """One layer: all operations, weighted."""
    blurred, largest = avg_pool2d(images, 3, 1, 1), max_pool2d(images, 3, 1, 1)
    return torch.stack([images, blurred, (images - blurred).abs(), largest], -1) @ weights


def read(x: Tensor, y: Tensor, images: Tensor) -> Tensor:
    """The scores of the classes, after two layers; the last row of y is the bias."""
    for weights in x.softmax(1):
        images = mixed(images, weights)
    return images.flatten(1) @ y[:-1] + y[-1]


def upper(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """The loss on a batch."""
    return cross_entropy(read(x, y, batch[0]), batch[1])


def lower(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """The same with a ridge."""
    return upper(x, y, batch) + RIDGE * y.square().sum()


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The test error after training on all digits, by how the operations are weighted."""
    train, held_out, test = digits(seed, 500, 500, small=small, side=14)
    x0, y0 = torch.zeros(2, 4), torch.zeros(test[0][0].numel() + 1, 10)

    def learned(data: Batch) -> Tensor:
        problem, steps = bilevel.Problem(upper, lower), 10 if small else 30
        found = bilevel.minimize(problem, x0, y0, upper_data=data, lower_data=train, steps=steps)
        return cast(Tensor, found.x)

    def trained(x: Tensor, data: Batch) -> Tensor:
        g = partial(lower, batch=data)
        return cast(Tensor, bilevel.argmin(g, x, y0, tolerance=1e-3))

    def tested(x: Tensor) -> float:
        return error(partial(read, x, trained(x, joined(train, held_out))), test)

    choices = [100 * torch.eye(4)[list(pair)] for pair in product(range(4), repeat=2)]
    single = min(choices, key=lambda x: float(upper(x, trained(x, train), held_out)))
    return {
        "weights by held-out digits": tested(learned(held_out)),
        "equal weights": tested(x0),
        "weights by training digits": tested(learned(train)),
        "the best single operations": tested(single),
    }
