"""Small networks on 1,797 real digits of 8 x 8 pixels, which scikit-learn ships.

There is no exact answer: the judge is f on all held-out samples, at the run's own y.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from benchmarks.auto.case import Case, Maker
from bilevel import Problem, sets

PIXELS, CLASSES, HIDDEN = 64, 10, 32
TRAIN, HELD_OUT = 800, 600


@cache
def _all_digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 8 - 1, torch.from_numpy(labels).long()


class Digits:
    """Training digits, of which a share has random labels, and held-out digits.

    Attributes:
        train: (images, labels, index).
        held_out: (images, labels).
    """

    def __init__(self, seed: int, noise: float = 0.4) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        images, labels = _all_digits()
        order = torch.randperm(len(labels), generator=self.generator)
        first, second = order[:TRAIN], order[TRAIN : TRAIN + HELD_OUT]
        wrong = torch.rand(TRAIN, generator=self.generator) < noise
        random = torch.randint(CLASSES, (TRAIN,), generator=self.generator)
        given = torch.where(wrong, random, labels[first])
        self.train = (images[first], given, torch.arange(TRAIN))
        self.held_out = (images[second], labels[second])


def network(seed: int, *widths: int) -> nn.Sequential:
    """Make a perceptron with tanh between its layers; its weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(pairwise(widths)):
            layers += [nn.Tanh()] * bool(i) + [nn.Linear(before, after)]
        return nn.Sequential(*layers)


def _decay(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()])


def _upper(x: Any, y: Any, batch: Any) -> Tensor:
    return cross_entropy(y(batch[0]), batch[1])


def _case(
    upper: Callable[..., Tensor],
    lower: Callable[..., Tensor],
    x0: Any,
    y0: Any,
    train: Any,
    held_out: Any,
    x_set: Any = None,
    batch_size: int | None = 64,
) -> Case:
    @torch.no_grad()
    def value(x: Any, y: Any) -> float:
        return float(upper(x, y, held_out))

    data = {"upper_data": held_out, "lower_data": train, "batch_size": batch_size}
    return Case(Problem(upper, lower, x_set=x_set), x0, y0, value, data, steps=80, trials=16)


def weighting_net(seed: int, data_dir: Path | None) -> Case:
    """A net maps the loss of a sample to its weight (Meta-Weight-Net, Shu et al. 2019)."""
    digits = Digits(seed)

    def lower(x: Any, y: Any, batch: Any) -> Tensor:
        losses = cross_entropy(y(batch[0]), batch[1], reduction="none")
        weights = torch.sigmoid(x(losses.detach()[:, None]))[:, 0]
        return (weights * losses).mean() + 1e-3 * _decay(y).sum()

    x0, y0 = network(seed, 1, 16, 1), network(seed + 1, PIXELS, HIDDEN, CLASSES)
    return _case(_upper, lower, x0, y0, digits.train, digits.held_out)


def layer_decay(seed: int, data_dir: Path | None, *, batch_size: int | None) -> Case:
    """One log-strength of weight decay for each matrix and each bias."""
    digits = Digits(seed)

    def lower(x: Tensor, y: Any, batch: Any) -> Tensor:
        return _upper(x, y, batch) + (x.exp() * _decay(y)).sum()

    y0 = network(seed, PIXELS, HIDDEN, HIDDEN, CLASSES)
    x0 = torch.full((6,), -6.0)
    return _case(_upper, lower, x0, y0, digits.train, digits.held_out, batch_size=batch_size)


def augmentation(seed: int, data_dir: Path | None) -> Case:
    """The log-deviation of the noise that is added to each pixel in training.

    The held-out digits have noise in their upper half.
    """
    digits = Digits(seed, noise=0.0)
    images, labels = digits.held_out
    noise = torch.randn(images.shape, generator=digits.generator)
    noise[:, PIXELS // 2 :] = 0
    drawn = torch.randn(TRAIN, PIXELS, generator=digits.generator)

    def lower(x: Tensor, y: Any, batch: Any) -> Tensor:
        pixels, given, noise = batch
        return cross_entropy(y(pixels + x.exp() * noise), given) + 1e-3 * _decay(y).sum()

    train = (*digits.train[:2], drawn)
    y0 = network(seed, PIXELS, HIDDEN, CLASSES)
    x0 = torch.full((PIXELS,), -2.0)
    return _case(_upper, lower, x0, y0, train, (images + noise, labels))


def distillation(seed: int, data_dir: Path | None) -> Case:
    """Two synthetic images per class, on which a net is trained that knows real ones."""
    digits = Digits(seed, noise=0.0)
    labels = torch.arange(CLASSES).repeat(2)

    def lower(x: Tensor, y: Any, batch: Any) -> Tensor:
        return cross_entropy(y(x), labels) + 1e-3 * _decay(y).sum()

    x0 = 0.1 * torch.randn(len(labels), PIXELS, generator=digits.generator)
    y0 = network(seed, PIXELS, HIDDEN, CLASSES)
    return _case(_upper, lower, x0, y0, digits.train, digits.held_out)


class Mixed(nn.Module):
    """Four operations side by side, of which :func:`architecture` learns the weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(network(seed + i, PIXELS, HIDDEN) for i in range(3))
        self.head = network(seed + 3, HIDDEN, CLASSES)

    def forward(self, pixels: Tensor, weights: Tensor) -> Tensor:
        a, b, c = (branch(pixels) for branch in self.branches)
        parts = torch.stack([a, torch.tanh(b), relu(c), torch.zeros_like(a)], -1)
        return self.head(parts @ weights)  # type: ignore[no-any-return]


def architecture(seed: int, data_dir: Path | None) -> Case:
    """The weights of four operations in a layer (DARTS, Liu et al. 2019)."""
    digits = Digits(seed, noise=0.2)

    def upper(x: Tensor, y: Any, batch: Any) -> Tensor:
        return cross_entropy(y(batch[0], x.softmax(0)), batch[1])

    def lower(x: Tensor, y: Any, batch: Any) -> Tensor:
        return upper(x, y, batch) + 1e-3 * _decay(y).sum()

    x0 = 1e-3 * torch.randn(4, generator=digits.generator)
    return _case(upper, lower, x0, Mixed(seed), digits.train, digits.held_out)


def domains(seed: int, data_dir: Path | None, *, simplex: bool) -> Case:
    """Weights of four sources, two of which have random labels; a softmax, or in the simplex."""
    digits = Digits(seed, noise=0.0)
    images, labels, index = digits.train
    random = torch.randint(CLASSES, (TRAIN,), generator=digits.generator)
    source = index % 4
    given = torch.where(source < 2, labels, random)

    def lower(x: Tensor, y: Any, batch: Any) -> Tensor:
        pixels, given, source = batch
        losses = cross_entropy(y(pixels), given, reduction="none")
        weights = x if simplex else x.softmax(0)
        return 4 * (weights[source] * losses).mean() + 1e-3 * _decay(y).sum()

    x0 = torch.full((4,), 0.25 if simplex else 0.0)
    y0 = network(seed, PIXELS, HIDDEN, CLASSES)
    x_set = sets.Simplex() if simplex else None
    return _case(_upper, lower, x0, y0, (images, given, source), digits.held_out, x_set)


def representation(seed: int, data_dir: Path | None) -> Case:
    """A layer of features as x, and a linear head with weight decay as y."""
    digits = Digits(seed, noise=0.2)

    def upper(x: Any, y: Any, batch: Any) -> Tensor:
        return cross_entropy(y(torch.tanh(x(batch[0]))), batch[1])

    def lower(x: Any, y: Any, batch: Any) -> Tensor:
        return upper(x, y, batch) + 1e-3 * _decay(y).sum()

    x0, y0 = network(seed, PIXELS, 16), network(seed + 1, 16, CLASSES)
    return _case(upper, lower, x0, y0, digits.train, digits.held_out)


PROBLEMS: dict[str, Maker] = {
    "weights by a net": weighting_net,
    "decay of layers": partial(layer_decay, batch_size=64),
    "decay of layers, all samples": partial(layer_decay, batch_size=None),
    "augmentation": augmentation,
    "distillation": distillation,
    "architecture": architecture,
    "domains, softmax": partial(domains, simplex=False),
    "domains, simplex": partial(domains, simplex=True),
    "representation": representation,
}
