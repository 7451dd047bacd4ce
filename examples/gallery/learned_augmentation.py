"""Learned augmentation
====================

A perceptron learns from a few digits of MNIST, which are transformed at random in training. x holds
the strengths of seven transformations (turning, stretching in two directions, shearing, moving in
two directions, noise), as logarithms of their deviations, and y is the perceptron. The upper level
is its loss on 500 held-out digits as they are.

What was found is judged by training anew on all 1,000 digits. It is compared with no augmentation,
and with one strength for all transformations, chosen from four by the loss on held-out digits,
which is level: the learned strengths are ahead of it by less than two standard errors.

Here "auto" steps of x do not suit: they follow the noise of a transformed minibatch, and can make a
strength so large that nothing can be learned. x is therefore moved by Adam, after every step of y,
and bounded. With scikit-learn's digits, which have 8 x 8 pixels, augmentation does not help, and
learning its strengths does not either. To save time the digits have 14 x 14 pixels.

.. gallery-result:: learned_augmentation
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, cross_entropy, grid_sample

import bilevel

from ._digits import Batch, digits, error, joined, perceptron

MEASURE = "test error, %"
BETTER = min
DECAY = 1e-4
GRID = (-4.0, -3.0, -2.0, -1.0)


def adam(params: Any) -> torch.optim.Optimizer:
    """The optimizer of x."""
    return torch.optim.Adam(params, lr=0.02)


def transformed(x: Tensor, images: Tensor) -> Tensor:
    """Images turned, scaled, sheared, moved and made noisy, by deviations exp(x)."""
    turn, wide, high, shear, right, down = (x[:6].exp() * torch.randn(len(images), 6)).T
    cos, sin = turn.cos(), turn.sin()
    top = torch.stack([wide.exp() * cos, shear - sin, right], 1)
    bottom = torch.stack([sin, high.exp() * cos, down], 1)
    grid = affine_grid(torch.stack([top, bottom], 1), list(images.shape), align_corners=False)
    moved = grid_sample(images, grid, padding_mode="border", align_corners=False)
    return moved + x[6].exp() * torch.randn_like(images)


def upper(x: Tensor, y: Any, batch: Batch) -> Tensor:
    """The loss on digits as they are."""
    return cross_entropy(y(batch[0]), batch[1])


def lower(x: Tensor, y: Any, batch: Batch) -> Tensor:
    """The loss on transformed digits, with weight decay."""
    decay = torch.stack([p.square().sum() for p in y.parameters()]).sum()
    return cross_entropy(y(transformed(x, batch[0])), batch[1]) + DECAY * decay


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The test error after training on all digits, by how strongly they are transformed."""
    train, held_out, test = digits(seed, 500, 500, small=small, side=14)
    y0 = perceptron(seed, test[0][0].numel(), 64, 10)
    problem = bilevel.Problem(upper, lower, x_set=bilevel.sets.Box(-6, -1))

    def run(strength: Tensor, lower_data: Batch, y0: Any, **options: Any) -> bilevel.Result:
        given: dict[str, Any] = {"method": "no-bilevel", "steps": 20 if small else 80} | options
        data: dict[str, Any] = {"upper_data": held_out, "lower_data": lower_data, "batch_size": 64}
        return bilevel.minimize(problem, strength, y0, **data, **given)

    def tested(strength: Tensor) -> float:
        return error(run(strength, joined(train, held_out), y0).y, test)

    weak, method = torch.full((7,), -3.0), bilevel.F2SA(inner_steps=1, upper_optimizer=adam)
    fitted = run(weak, train, y0).y
    learned = run(weak, train, fitted, method=method, steps=100 if small else 300)
    tried = [torch.full((7,), strength) for strength in GRID]
    one = min(tried, key=lambda x: float(upper(x, run(x, train, y0).y, held_out).detach()))
    return {
        "learned strengths": tested(learned.x),
        "no augmentation": tested(torch.full((7,), -6.0)),
        "one strength, by a grid": tested(one),
    }
