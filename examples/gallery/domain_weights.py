"""Weights of data domains
=======================

Six collections of digits are at hand, each turned by another angle and one with labels that mean
nothing, and fifty digits that are turned as those that one will be asked about. x holds a number
for each collection, the logarithm of its share of the training loss; y is a linear classifier; f is
its loss on the fifty digits. Compared are equal shares, training on the fifty digits alone, and
both together. DoReMi and DoGE have the task for the sources of a language model, for which
``bilevel`` has :class:`bilevel.DataMixer`; Betty's example is nearest in the weights of samples.

.. gallery-result:: domain_weights
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

import bilevel

from ._digits import pixels

MEASURE = "test error on the target domain, %"
BETTER = min
ANGLES = (-90, -45, 0, 30, 60, 180)
TARGET, FEW, WRONG = 45, 50, 2  # the angle of the target, its digits, the domain with wrong labels

Domain = tuple[Tensor, Tensor]


def turned(images: Tensor, degrees: float) -> Tensor:
    """The images turned by an angle, as rows that end with a 1."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    matrix = torch.tensor([[c, -s, 0.0], [s, c, 0.0]]).expand(len(images), 2, 3)
    grid = functional.affine_grid(matrix, [len(images), 1, *images.shape[1:]], align_corners=False)
    rows = functional.grid_sample(images[:, None], grid, align_corners=False).flatten(1)
    return functional.pad(rows, (0, 1), value=1.0)


def trained(domains: list[Domain], target: Domain, method: str, steps: int) -> Tensor:
    """The classifier after some steps, from equal shares on."""
    X, labels = map(torch.cat, zip(*domains, strict=True))
    sizes = [len(own) for _, own in domains]

    def lower(x: Tensor, y: Tensor, batch: None) -> Tensor:
        losses = torch.split(functional.cross_entropy(X @ y, labels, reduction="none"), sizes)
        shares = x.softmax(0) @ torch.stack([own.mean() for own in losses])
        return shares + 1e-3 * (y**2).sum()

    def upper(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return functional.cross_entropy(target[0] @ y, target[1])

    x, y = torch.zeros(len(domains)), torch.zeros(X.shape[1], 10)
    problem = bilevel.Problem(upper, lower)
    found: Tensor = bilevel.minimize(problem, x, y, method=method, steps=steps).y
    return found


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The test error with each choice of shares."""
    generator, each, steps = (
        torch.Generator().manual_seed(seed),
        *((150, 20) if small else (300, 40)),
    )
    images, labels = pixels(small)
    order = torch.randperm(len(images), generator=generator)
    few, test, rest = torch.split(order, [FEW, len(order) - FEW - 6 * each, 6 * each])
    domains = [
        (turned(images[rows], angle), labels[rows])
        for rows, angle in zip(torch.split(rest, each), ANGLES, strict=True)
    ]
    X, right = domains[WRONG]
    domains[WRONG] = X, right[torch.randperm(each, generator=generator)]
    target, asked = ((turned(images[rows], TARGET), labels[rows]) for rows in (few, test))
    found = {
        "learned shares (F2SA)": trained(domains, target, "f2sa", steps),
        "equal shares": trained(domains, target, "no-bilevel", steps),
        "the target alone": trained([target], target, "no-bilevel", steps),
        "equal shares, the target too": trained([*domains, target], target, "no-bilevel", steps),
    }
    wrong = {name: (asked[0] @ y).argmax(1) != asked[1] for name, y in found.items()}
    return {name: 100 * float(of_test.float().mean()) for name, of_test in wrong.items()}
