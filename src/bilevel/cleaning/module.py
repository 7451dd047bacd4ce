"""A module of the user as the model, trained by Adam."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parameter import is_lazy

from bilevel.cleaning.learners import MULTIPLIER, WEIGHT_STEP, HeldBack, Learner
from bilevel.cleaning.rows import FeatureRows, Features
from bilevel.errors import ArgumentError, BilevelError
from bilevel.methods import F2SA

_INNER_STEPS = 10
_RATES = (1e-2, 3e-3, 1e-3, 3e-4)  # the learning rates that are tried
_TRIAL_STEPS = 200
_FEWEST_STEPS, _MOST_STEPS = 500, 6000  # the length of a training; the epochs below may exceed it
_EPOCHS = (10, 60)  # at least and at most, unless these are too few steps


class ModuleLearner(Learner):
    """A module of the user, which is copied and never changed.

    It is trained by Adam. The learning rate rises over the first tenth of the steps and then falls
    to zero; its peak is the one with which a short training does best.
    """

    def __init__(self, module: nn.Module, classes: int, batch_size: int, seed: int) -> None:
        self.module = module
        self.classes = classes
        self.batch_size = batch_size
        self._seed = seed
        self._rate: float | None = None

    def start(self) -> nn.Module:
        return copy.deepcopy(self.module)

    def folded(self, y: Any, folds: int) -> nn.ModuleList:
        return nn.ModuleList([copy.deepcopy(y) for _ in range(folds)])

    def fold(self, y: Any, number: int) -> Any:
        return y[number]

    def fold_logits(self, y: Any, features: Features) -> Tensor:
        return torch.stack([self.logits(module, features) for module in y], 1)

    def logits(self, y: Any, features: Features) -> Tensor:
        logits: Tensor = y(features)
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if shape != (len(features), self.classes):
            raise ArgumentError(
                f"model must give one number for each of the {self.classes} classes, as an output "
                f"of shape ({len(features)}, {self.classes}), not {shape}"
            )
        return logits

    def check(self, rows: FeatureRows) -> None:
        """Refuse a module that cannot be trained here, or cannot take these rows."""
        parameters = list(self.module.parameters())
        if any(map(is_lazy, parameters)):
            raise ArgumentError(
                f"model={self.module!r} has parameters without a shape; call the lazy module once "
                f"on a batch, which gives them one"
            )
        if not any(p.requires_grad for p in parameters):
            raise ArgumentError(f"model={self.module!r} has no parameter that could be trained")
        places = {p.device.type for p in parameters} - {"cpu"}
        if places:
            raise ArgumentError(f"model is on {', '.join(places)}; labels are cleaned on the CPU")
        features = rows.take(torch.arange(min(2, len(rows))))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                self.logits(self.start().eval(), features)
            except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
                if isinstance(error, BilevelError):
                    raise
                kind = f"{len(features)} rows"
                if isinstance(features, Tensor):
                    kind = f"features of the shape {tuple(features.shape)} and {features.dtype}"
                raise ArgumentError(f"model cannot take {kind} ({error})") from error

    def penalty(self, y: Any) -> Tensor:
        return torch.stack([(p * p).sum() for p in y.parameters()]).sum()

    def lower_start(
        self, rows: FeatureRows, labels: Tensor, weights: Tensor, held: HeldBack | None
    ) -> nn.Module:
        return self.fit(rows, labels, weights, self.ridge, held)

    @property
    def ridge(self) -> float:
        return 1e-5

    @property
    def ridges(self) -> tuple[float, float, float]:
        return self.ridge, self.ridge, self.ridge

    def method(self, samples: int) -> F2SA:
        return F2SA(inner_steps=_INNER_STEPS, multiplier=MULTIPLIER, upper_lr=WEIGHT_STEP * samples)

    def settings(self) -> dict[str, float]:
        assert self._rate is not None, "the module was never trained"
        return {"ridge": self.ridge, "learning_rate": self._rate}

    @torch.no_grad()
    def predict(self, y: Any, rows: FeatureRows) -> Tensor:
        training = y.training
        try:
            return super().predict(y.eval(), rows)
        finally:
            y.train(training)

    @torch.no_grad()
    def predict_folds(self, y: Any, rows: FeatureRows) -> Tensor:
        return torch.stack([self.predict(module, rows) for module in y], 1)

    def fit(
        self,
        rows: FeatureRows,
        labels: Tensor,
        weights: Tensor,
        ridge: float,
        held: HeldBack | None,
        start: Any = None,
    ) -> nn.Module:
        training = _Training(self, rows, labels, weights, ridge)
        if self._rate is None:
            self._rate = training.best_rate(held)
        module = copy.deepcopy(start) if start is not None else self.start()
        per_epoch = self.per_epoch(training.kept)
        epochs = min(max(-(-_MOST_STEPS // per_epoch), _EPOCHS[0]), _EPOCHS[1])
        epochs = max(epochs, -(-_FEWEST_STEPS // per_epoch))
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
        """The numbers of the samples of each minibatch, epoch after epoch without end."""
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            order = kept[torch.randperm(len(kept), generator=generator)]
            yield from order.tensor_split(self.per_epoch(kept))  # all of nearly the same size

    def per_epoch(self, kept: Tensor) -> int:
        """The number of minibatches in an epoch."""
        return -(-len(kept) // self.batch_size)


class _Training:
    """The training of a module on weighted samples."""

    def __init__(
        self,
        learner: ModuleLearner,
        rows: FeatureRows,
        labels: Tensor,
        weights: Tensor,
        ridge: float,
    ) -> None:
        self._learner = learner
        self._rows = rows
        self._labels = labels
        self._weights = weights
        self._ridge = ridge
        self.kept = weights.nonzero().squeeze(1)

    def steps(self, module: nn.Module, rate: float, count: int) -> Iterator[int]:
        """Train the module; yields the number of each step after it was taken."""
        parameters = [p for p in module.parameters() if p.requires_grad]
        # The weight decay is the gradient of the ridge penalty.
        optimizer = torch.optim.Adam(parameters, lr=rate, weight_decay=2 * self._ridge, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda k: min(1.0, 10 * (k + 1) / count) * (1 - k / count)
        )
        module.train()
        for step, index in enumerate(self._learner.minibatches(self.kept), start=1):
            optimizer.zero_grad()
            features, labels = self._rows.take(index), self._labels[index]
            losses = cross_entropy(self._learner.logits(module, features), labels, reduction="none")
            (self._weights[index] @ losses / len(index)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            yield step
            if step == count:
                return

    def best_rate(self, held: HeldBack | None) -> float:
        """The rate with which a short training does best, on held-back samples if there are any."""
        some = self.kept[: 4 * self._learner.batch_size]
        rows, labels = held or (self._rows.part(some), self._labels[some])

        def loss(rate: float) -> float:
            module = self._learner.start()
            for _ in self.steps(module, rate, _TRIAL_STEPS):
                pass
            value = float(cross_entropy(self._learner.predict(module, rows), labels))
            return value if math.isfinite(value) else math.inf

        return min(_RATES, key=loss)
