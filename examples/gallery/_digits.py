"""Handwritten digits for the examples, networks to read them, and CPU time as a budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

import bilevel

Batch = tuple[Tensor, Tensor]


def digits(seed: int, *sizes: int, small: bool = False, side: int = 28) -> list[Batch]:
    """Disjoint random parts of these sizes, (images, labels) each, and last the digits for tests.

    Images have shape (count, 1, side, side), mean 0 and variance 1 or so. They are MNIST's, where
    asked for made smaller to save time, or, if ``small``, the 1,797 digits of 8 x 8 pixels that
    scikit-learn contains.
    """
    generator = torch.Generator().manual_seed(seed)
    if small:
        from sklearn.datasets import load_digits

        pixels, classes = load_digits(return_X_y=True)
        images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 6 - 0.8
        labels = torch.from_numpy(classes).long()
        order = torch.randperm(len(labels), generator=generator)
        parts = torch.split(order, [*sizes, len(order) - sum(sizes)])
        return [(images[part], labels[part]) for part in parts]
    mnist = bilevel.data.mnist()
    order = torch.randperm(len(mnist.train_labels), generator=generator)[: sum(sizes)]
    train, test = (
        avg_pool2d(some[:, None].float(), 28 // side) / 79 - 0.42
        for some in (mnist.train_images[order], mnist.test_images)
    )
    rows = torch.split(torch.arange(len(order)), [*sizes])
    labels = mnist.train_labels[order]
    return [*((train[part], labels[part]) for part in rows), (test, mnist.test_labels)]


def pixels(small: bool) -> Batch:
    """Images of 14 x 14 (small: 8 x 8) pixels from 0 to 1, and their labels."""
    if small:
        from sklearn.datasets import load_digits

        given = load_digits()
        return torch.tensor(given.images, dtype=torch.float32) / 16, torch.tensor(given.target)
    images, labels, *_ = bilevel.data.mnist()
    return avg_pool2d(images[:10000].float() / 255, 2), labels[:10000]


def joined(*parts: Batch) -> Batch:
    """All digits of some parts."""
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def perceptron(seed: int, *widths: int) -> nn.Sequential:
    """A network with tanh between its layers; its weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.Tanh()]
        return nn.Sequential(*layers[:-1])


@torch.no_grad()
def error(model: Callable[[Tensor], Tensor], test: Batch) -> float:
    """The share of wrong answers, in per cent."""
    return 100 * float((model(test[0]).argmax(1) != test[1]).float().mean())


def until(seconds: float) -> Callable[[Any, Any], bool]:
    """A callback for ``bilevel.minimize`` that ends a run after so much CPU time."""
    end = time.process_time() + seconds
    return lambda solver, info: time.process_time() > end
