"""Dataset distillation
====================

Ten images from which a classifier learns to read all digits of MNIST. x holds the images, one for
each class, and y is a softmax regression that is trained on them alone, with a ridge. The upper
level is its loss on 5,000 real digits. The images are compared with ten real digits and with the
mean of each class, on which the same classifier is trained.

JAXopt has this example, with implicit differentiation by conjugate gradients. That is ``AID`` here;
it gets as much CPU time as F2SA, and since this lower level is small, smooth and strongly convex,
it comes out a little ahead. To save time the digits have 14 x 14 pixels.

.. gallery-result:: dataset_distillation
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import bilevel

from ._digits import digits, error, until

MEASURE = "test error, %"
BETTER = min
CLASSES = torch.arange(10)
RIDGE = 1e-2


def read(y: Tensor, images: Tensor) -> Tensor:
    """The scores of the classes; the last row of y is the bias."""
    return images.flatten(1) @ y[:-1] + y[-1]


def upper(x: Tensor, y: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss on real digits."""
    return cross_entropy(read(y, batch[0]), batch[1])


def lower(x: Tensor, y: Tensor, batch: None) -> Tensor:
    """The loss on the synthetic digits, one of each class."""
    return cross_entropy(read(y, x), CLASSES) + RIDGE * y.square().sum()


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The test error after training on ten images, by where they come from."""
    train, test = digits(seed, 1000 if small else 5000, small=small, side=14)
    images, labels = train
    real = torch.stack([images[labels == c][0] for c in CLASSES])
    means = torch.stack([images[labels == c].mean(0) for c in CLASSES])
    y0 = torch.zeros(real[0].numel() + 1, len(CLASSES))
    problem = bilevel.Problem(upper, lower)

    def result(x0: Tensor, **options: Any) -> float:
        found = bilevel.minimize(problem, x0, y0, upper_data=train, **options)
        return error(lambda images: read(found.y, images), test)

    blank, steps = torch.zeros_like(real), 40 if small else 100
    start = time.process_time()
    ours = result(blank, steps=steps)
    seconds = time.process_time() - start
    return {
        "distilled images": ours,
        "real images": result(real, method="no-bilevel", steps=100),
        "means of the classes": result(means, method="no-bilevel", steps=100),
        "distilled by AID": result(blank, method="aid", callback=until(seconds)),
    }
