"""Dataset distillation
====================

Ten images from which a classifier learns to read all digits of MNIST. x holds the images, one for
each class, and y is a softmax regression that is trained on them alone, with a ridge. The upper
level is its loss on 5,000 real digits. The images are compared with ten real digits and with the
mean of each class, on which the same classifier is trained.

JAXopt has this example, with implicit differentiation by conjugate gradients. That is ``AID`` here;
it gets as much CPU time as F2SA, and on this lower level, which is small, smooth and strongly
convex, it comes out level. To save time the digits have 14 x 14 pixels.

.. gallery-result:: dataset_distillation
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import bilevel

from ._digits import Batch, digits, error, until

CLASSES = torch.arange(10)
RIDGE = 1e-2


def read(y: Tensor, images: Tensor) -> Tensor:
    """The scores of the classes; the last row of y is the bias."""
    return images.flatten(1) @ y[:-1] + y[-1]


def upper(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """The loss on real digits."""
    return cross_entropy(read(y, batch[0]), batch[1])


def lower(x: Tensor, y: Tensor, batch: None) -> Tensor:
    """The loss on the synthetic digits, one of each class."""
    return cross_entropy(read(y, x), CLASSES) + RIDGE * y.square().sum()


def tested(x0: Tensor, train: Batch, test: Batch, **options: Any) -> float:
    """The test error after training on ten images, which start from these."""
    y0, problem = torch.zeros(x0[0].numel() + 1, len(CLASSES)), bilevel.Problem(upper, lower)
    found = bilevel.minimize(problem, x0, y0, upper_data=train, **options)
    return error(lambda images: read(found.y, images), test)


def solve(seed: int = 0, *, small: bool = False) -> float:
    """The same for images that were learned from blank ones."""
    train, test = digits(seed, 1000 if small else 5000, small=small, side=14)
    return tested(torch.zeros_like(train[0][:10]), train, test, steps=40 if small else 100)


# --- what it is compared with ---------------------------------------------------------------------

MEASURE = "test error, %"
BETTER = min


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The test error after training on ten images, by where they come from."""
    start = time.process_time()
    ours = solve(seed, small=small)
    seconds = time.process_time() - start
    train, test = digits(seed, 1000 if small else 5000, small=small, side=14)
    images, labels = train
    real = torch.stack([images[labels == c][0] for c in CLASSES])
    means = torch.stack([images[labels == c].mean(0) for c in CLASSES])
    blank = torch.zeros_like(real)
    return {
        "distilled images": ours,
        "real images": tested(real, train, test, method="no-bilevel", steps=100),
        "means of the classes": tested(means, train, test, method="no-bilevel", steps=100),
        "distilled by AID": tested(blank, train, test, method="aid", callback=until(seconds)),
    }
