"""Weight decay, one for each group of features
============================================

A linear classifier of MNIST's digits on random waves over their pixels, of eight widths (random
Fourier features, Rahimi and Recht 2007), from far too narrow to far too wide; nobody knows
beforehand which of them are of use. x holds the logarithm of a weight decay for each width, and y
is the classifier, trained on 500 digits. The upper level is its loss on 500 held-out digits. No
step size is set.

What was found is judged by training y anew on all 1,000 digits. It is compared with one decay for
all features, chosen from seven by the loss on the held-out digits. Of the steps of x too the best
by that loss is taken (``select="best"``): once the decays of the wide waves are weak, the lower
level is badly conditioned, and y follows x only slowly. Where all widths are of use, one decay for
all features is as good. Betty, JAXopt and hypertorch have such examples; the last two differentiate
implicitly with conjugate gradients, which is ``AID`` here. It is not shown, because "auto" steps do
not suit it on this task. To save time the digits have 14 x 14 pixels.

.. gallery-result:: weight_decay
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import bilevel

from ._digits import Batch, digits, error, joined

MEASURE = "test error, %"
BETTER = min
WIDTHS, EACH = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0), 100
GRID = (-11.0, -9.0, -8.0, -7.0, -6.0, -5.0, -3.0)


def features(seed: int, images: Tensor) -> Tensor:
    """Random waves over the pixels, a group of them for each width, and a constant."""
    generator = torch.Generator().manual_seed(seed)
    pixels = images.flatten(1)
    waves = torch.randn(pixels.shape[1], len(WIDTHS) * EACH, generator=generator)
    waves /= torch.tensor(WIDTHS).repeat_interleave(EACH)
    phases = 2 * torch.pi * torch.rand(waves.shape[1], generator=generator)
    return torch.cat([(pixels @ waves + phases).cos(), torch.ones(len(pixels), 1)], 1)


def upper(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """The loss on a batch."""
    return cross_entropy(batch[0] @ y, batch[1])


def lower(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """The same with weight decay; x holds the logarithms of its strengths."""
    groups = y[:-1].square().reshape(len(WIDTHS), -1).sum(1)
    return upper(x, y, batch) + (x.exp() * groups).sum()


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The test error after training on all digits, by how the decay was chosen."""
    parts = digits(seed, 500, 500, small=small, side=14)
    train, held_out, test = ((features(seed, images), labels) for images, labels in parts)
    x0, y0 = torch.full((len(WIDTHS),), -3.0), torch.zeros(train[0].shape[1], 10)

    steps = 20 if small else 40
    options: dict[str, Any] = {"upper_data": held_out, "lower_data": train, "select": "best"}
    found = bilevel.minimize(bilevel.Problem(upper, lower), x0, y0, steps=steps, **options).x

    def trained(x: Tensor, data: Batch) -> Tensor:
        g = partial(lower, batch=data)
        return cast(Tensor, bilevel.argmin(g, x, y0, tolerance=1e-3))

    def tested(x: Tensor) -> float:
        y = trained(x, joined(train, held_out))
        return error(lambda some: some @ y, test)

    tried = [torch.full_like(x0, strength) for strength in GRID]
    one = min(tried, key=lambda x: float(upper(x, trained(x, train), held_out)))
    return {"a decay for each width": tested(found), "one decay, by a grid": tested(one)}
