"""What is trained: the default softmax regression, or a module of the user's."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bilevel
from bilevel.cleaning.rows import Features, Rows, product
from bilevel.errors import ArgumentError

INNER_STEPS = 20
MULTIPLIER = 5.0
WEIGHT_STEP = 0.5
"""How far a weight goes for each unit of loss that the trusted samples would gain from it.

Weights lie in [0, 1] and losses are in nats, whatever the data; larger steps find F sooner, and
are worse detectors on the way.
"""

_MOMENTUM = 0.8
_SHARE_OF_CURVATURE = 0.005  # the ridge, so that the lower level is well conditioned
_ROWS_FOR_CURVATURE = 4000
_ITERATIONS = (15, 100)  # of L-BFGS, at least and at most
_WORK = 1e8  # features that are read by all iterations together, between the two
_RATES = (1e-2, 3e-3, 1e-3, 3e-4)  # the rates that are tried for a module
_TRIAL_STEPS = 200
_STEPS = (500, 6000)  # of the training of a module, at least and at most, unless these are too few
_EPOCHS = (10, 60)  # or too many


class Learner(ABC):
    """A model in the two places where it is needed: the lower level, and the fit afterwards."""

    classes: int

    @abstractmethod
    def start(self) -> Any:
        """Where training starts: a tree of tensors, or a module."""

    @abstractmethod
    def lower_start(
        self, rows: Rows, labels: Tensor, weights: Tensor, held: tuple[Rows, Tensor] | None
    ) -> Any:
        """Where the lower level starts."""

    @abstractmethod
    def logits(self, y: Any, features: Features) -> Tensor:
        """One number for each class."""

    @abstractmethod
    def penalty(self, y: Any) -> Tensor:
        """The squared norm that the ridge multiplies."""

    @abstractmethod
    def method(self, samples: int) -> bilevel.F2SA:
        """How weights of that many samples are learned."""

    @abstractmethod
    def settings(self) -> dict[str, float]:
        """The choices made, by name."""

    @property
    @abstractmethod
    def ridge(self) -> float:
        """Of the lower level."""

    @property
    @abstractmethod
    def ridges(self) -> list[float]:
        """To choose from for the fit, largest first."""

    @abstractmethod
    def fit(
        self,
        rows: Rows,
        labels: Tensor,
        weights: Tensor,
        ridge: float,
        held: tuple[Rows, Tensor] | None,
        start: Any = None,
    ) -> Any:
        """Train on weighted samples; on ``held`` ones the end of training may be chosen."""

    @torch.no_grad()
    def predict(self, y: Any, rows: Rows) -> Tensor:
        """The logits of all rows."""
        if len(rows) == 0:
            return torch.zeros(0, self.classes)
        places = torch.split(torch.arange(len(rows)), rows.chunk)
        return torch.cat([self.logits(y, rows.take(some)) for some in places])

    def weighted_loss(self, y: Any, features: Features, labels: Tensor, weights: Tensor) -> Tensor:
        """sum_i w_i CE_i, over the features."""
        return weights @ cross_entropy(self.logits(y, features), labels, reduction="none")


class SoftmaxRegression(Learner):
    """Linear in the features, with a bias that is not penalised.

    Its variables are W and b in the logits (a - m) W + s b, with m the mean of the features a and
    s^2 the largest eigenvalue of their covariance. That is the same model as a W + b, but without
    the direction that all samples have in common, which would be the steepest by far where features
    are not centred, as sparse ones never are. The Hessian of the cross entropy in the logits is at
    most 1/2, so L = s^2 / 2 bounds the curvature of the loss in both W and b. It is found by power
    iteration, and sets the step of y and the ridges that are tried.
    """

    def __init__(self, rows: Rows, classes: int) -> None:
        self.classes = classes
        self._mean, self._scale = _mean_and_scale(rows)
        self.curvature = 0.5 * self._scale**2

    def start(self) -> dict[str, Tensor]:
        return {
            "weight": torch.zeros(len(self._mean), self.classes),
            "bias": torch.zeros(self.classes),
        }

    def logits(self, y: Any, features: Features) -> Tensor:
        plain = self.plain(y)
        return product(features, plain["weight"]) + plain["bias"]

    def plain(self, y: Any) -> dict[str, Tensor]:
        """The W and b with which the logits are a W + b."""
        weight: Tensor = y["weight"]
        return {"weight": weight, "bias": self._scale * y["bias"] - self._mean.to(weight) @ weight}

    def penalty(self, y: Any) -> Tensor:
        weight: Tensor = y["weight"]
        return (weight * weight).sum()

    def lower_start(
        self, rows: Rows, labels: Tensor, weights: Tensor, held: tuple[Rows, Tensor] | None
    ) -> dict[str, Tensor]:
        return self.start()  # the lower level is so well conditioned that nothing is to be gained

    @property
    def ridge(self) -> float:
        return _SHARE_OF_CURVATURE * self.curvature

    @property
    def ridges(self) -> list[float]:
        return [0.1 * self.ridge, 0.01 * self.ridge, 0.001 * self.ridge]

    @property
    def lower_lr(self) -> float:
        """Half of what the penalised copy allows, because minibatches are sharper than all data."""
        return 0.5 / (self.curvature * (1 + 1 / MULTIPLIER) + 2 * self.ridge)

    def method(self, samples: int) -> bilevel.F2SA:
        return bilevel.F2SA(
            inner_steps=INNER_STEPS,
            multiplier=MULTIPLIER,
            upper_lr=WEIGHT_STEP * samples,
            lower_optimizer=lambda params: torch.optim.SGD(
                params, lr=self.lower_lr, momentum=_MOMENTUM
            ),
        )

    def settings(self) -> dict[str, float]:
        return {
            "curvature": self.curvature,
            "ridge": self.ridge,
            "lower_lr": self.lower_lr,
            "momentum": _MOMENTUM,
        }

    def fit(
        self,
        rows: Rows,
        labels: Tensor,
        weights: Tensor,
        ridge: float,
        held: tuple[Rows, Tensor] | None,
        start: Any = None,
    ) -> dict[str, Tensor]:
        del held  # which is for a model that has to be stopped
        kept = weights.nonzero().squeeze(1)
        features, labels, weights = rows.part(kept).everything(), labels[kept], weights[kept]
        y = {name: part.clone().requires_grad_() for name, part in (start or self.start()).items()}
        optimizer = torch.optim.LBFGS(
            list(y.values()),
            max_iter=self._iterations(len(kept)),
            tolerance_grad=1e-5,
            history_size=10,  # of two vectors as large as y each
            line_search_fn="strong_wolfe",
        )
        total = weights.sum()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.weighted_loss(y, features, labels, weights) / total
            loss = loss + ridge * self.penalty(y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        return {name: part.detach() for name, part in y.items()}

    def _iterations(self, samples: int) -> int:
        """Where the data are many, what comes after the first few changes no verdict."""
        fewest, most = _ITERATIONS
        return min(max(round(_WORK / max(samples * len(self._mean), 1)), fewest), most)


class Module(Learner):
    """A module of the user's, which is copied and never changed.

    It is trained by Adam. The rate rises over the first tenth of the steps and then falls to zero;
    its height is the one of a few with which a short training does best.
    """

    def __init__(self, module: nn.Module, classes: int, batch_size: int, seed: int) -> None:
        self.module = module
        self.classes = classes
        self._batch_size = batch_size
        self._seed = seed
        self._rate: float | None = None

    def start(self) -> nn.Module:
        return copy.deepcopy(self.module)

    def logits(self, y: Any, features: Features) -> Tensor:
        logits: Tensor = y(features)
        if logits.shape != (len(features), self.classes):
            raise ArgumentError(
                f"model must give one number for each of the {self.classes} classes, an output of "
                f"shape ({len(features)}, {self.classes}), not {tuple(logits.shape)}"
            )
        return logits

    def penalty(self, y: Any) -> Tensor:
        return torch.stack([(p * p).sum() for p in y.parameters()]).sum()

    def lower_start(
        self, rows: Rows, labels: Tensor, weights: Tensor, held: tuple[Rows, Tensor] | None
    ) -> nn.Module:
        return self.fit(rows, labels, weights, self.ridge, held)

    @property
    def ridge(self) -> float:
        return 1e-5

    @property
    def ridges(self) -> list[float]:
        return [self.ridge]

    def method(self, samples: int) -> bilevel.F2SA:
        return bilevel.F2SA(
            inner_steps=INNER_STEPS, multiplier=MULTIPLIER, upper_lr=WEIGHT_STEP * samples
        )

    def settings(self) -> dict[str, float]:
        assert self._rate is not None, "the module was never trained"
        return {"ridge": self.ridge, "learning_rate": self._rate}

    @torch.no_grad()
    def predict(self, y: Any, rows: Rows) -> Tensor:
        training = y.training
        try:
            return super().predict(y.eval(), rows)
        finally:
            y.train(training)

    def fit(
        self,
        rows: Rows,
        labels: Tensor,
        weights: Tensor,
        ridge: float,
        held: tuple[Rows, Tensor] | None,
        start: Any = None,
    ) -> nn.Module:
        training = _Training(self, rows, labels, weights, ridge)
        if self._rate is None:
            self._rate = training.best_rate(held)
        module = copy.deepcopy(start) if start is not None else self.start()
        per_epoch = self.per_epoch(training.kept)
        epochs = min(max(-(-_STEPS[1] // per_epoch), _EPOCHS[0]), _EPOCHS[1])
        epochs = max(epochs, -(-_STEPS[0] // per_epoch))
        best, lowest = None, float("inf")
        for step in training.steps(module, self._rate, epochs * per_epoch):
            if held is not None and step % per_epoch == 0:
                loss = float(cross_entropy(self.predict(module, held[0]), held[1]))
                if loss < lowest:
                    best, lowest = copy.deepcopy(module.state_dict()), loss
        if best is not None:
            module.load_state_dict(best)
        return module

    def minibatches(self, kept: Tensor) -> Iterator[Tensor]:
        """Numbers of samples, epoch after epoch without end."""
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            order = kept[torch.randperm(len(kept), generator=generator)]
            yield from order.tensor_split(self.per_epoch(kept))  # none is much smaller than others

    def per_epoch(self, kept: Tensor) -> int:
        """How many minibatches have all samples."""
        return -(-len(kept) // self._batch_size)


class _Training:
    """How a module is trained on weighted samples."""

    def __init__(
        self, learner: Module, rows: Rows, labels: Tensor, weights: Tensor, ridge: float
    ) -> None:
        self._learner = learner
        self._rows = rows
        self._labels = labels
        self._weights = weights
        self._ridge = ridge
        self.kept = weights.nonzero().squeeze(1)

    def steps(self, module: nn.Module, rate: float, count: int) -> Iterator[int]:
        """Train the module, and stop after each of ``count`` steps to say how many there were."""
        parameters = [p for p in module.parameters() if p.requires_grad]
        # the decay is the gradient of the ridge
        optimizer = torch.optim.Adam(parameters, lr=rate, weight_decay=2 * self._ridge, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda k: min(1.0, 10 * (k + 1) / count) * (1 - k / count)
        )
        module.train()
        for step, index in enumerate(self._learner.minibatches(self.kept), start=1):
            optimizer.zero_grad()
            features, labels = self._rows.take(index), self._labels[index]
            loss = self._learner.weighted_loss(module, features, labels, self._weights[index])
            (loss / len(index)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            yield step
            if step == count:
                return

    def best_rate(self, held: tuple[Rows, Tensor] | None) -> float:
        """The rate with which a short training does best, on held-back samples if there are any."""
        some = self.kept[: 4 * self._learner._batch_size]
        rows, labels = held or (self._rows.part(some), self._labels[some])

        def loss(rate: float) -> float:
            module = self._learner.start()
            for _ in self.steps(module, rate, _TRIAL_STEPS):
                pass
            value = float(cross_entropy(self._learner.predict(module, rows), labels))
            return value if math.isfinite(value) else math.inf

        return min(_RATES, key=loss)


def _mean_and_scale(rows: Rows, steps: int = 50) -> tuple[Tensor, float]:
    """The mean of the rows, and the root of the largest eigenvalue of their covariance.

    The eigenvalue is that of some thousand rows where there are more.
    """
    features = rows.everything()
    mean = (features.T @ torch.ones(len(rows), 1) / len(rows)).squeeze(1)
    generator = torch.Generator().manual_seed(0)
    if len(rows) > _ROWS_FOR_CURVATURE:
        some = torch.randperm(len(rows), generator=generator)[:_ROWS_FOR_CURVATURE]
        features = rows.take(some)
    v = torch.randn(len(mean), 1, generator=generator)
    v = v / v.norm()
    largest = 0.0
    for _ in range(steps):
        image = features @ v - mean @ v
        v = features.T @ image / len(features) - mean.unsqueeze(1) * image.mean()
        largest = float(v.norm())
        if largest == 0:
            break
        v = v / largest
    # features that are all the same have no unit; any will do
    return mean, largest**0.5 or 1.0
