"""What is trained: the default softmax regression, or a module of the user's."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bilevel
from bilevel.cleaning.rows import Rows
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
_EPOCHS = 60  # at most, for a module
_PATIENCE = 5


class Learner(ABC):
    """A model in the two places where it is needed: the lower level, and the fit afterwards."""

    classes: int

    @abstractmethod
    def start(self) -> Any:
        """Where training starts: a tree of tensors, or a module."""

    @abstractmethod
    def logits(self, y: Any, features: Tensor) -> Tensor:
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
    def predict(self, y: Any, rows: Rows, chunk: int = 4096) -> Tensor:
        """The logits of all rows."""
        if len(rows) == 0:
            return torch.zeros(0, self.classes)
        places = torch.split(torch.arange(len(rows)), chunk)
        return torch.cat([self.logits(y, rows.take(some)) for some in places])

    def weighted_loss(self, y: Any, features: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """sum_i w_i CE_i, over the features."""
        return weights @ cross_entropy(self.logits(y, features), labels, reduction="none")


class SoftmaxRegression(Learner):
    """Linear in the features, with a bias that is not penalised.

    The Hessian of the cross entropy in the logits is at most 1/2, so L = 1/2 lambda_max(A'A / n)
    bounds the curvature of the loss in y, with a column of ones in A. It is found by power
    iteration, and sets the step of y and the ridge.
    """

    def __init__(self, rows: Rows, width: int, classes: int) -> None:
        self.width = width
        self.classes = classes
        self.curvature = 0.5 * _largest_eigenvalue(rows)

    def start(self) -> dict[str, Tensor]:
        return {
            "weight": torch.zeros(self.width, self.classes),
            "bias": torch.zeros(self.classes),
        }

    def logits(self, y: Any, features: Tensor) -> Tensor:
        logits: Tensor = features @ y["weight"] + y["bias"]
        return logits

    def penalty(self, y: Any) -> Tensor:
        weight: Tensor = y["weight"]
        return (weight * weight).sum()

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
        del held  # the optimum is unique
        kept = weights.nonzero().squeeze(1)
        features, labels, weights = rows.part(kept).everything(), labels[kept], weights[kept]
        y = {name: part.clone().requires_grad_() for name, part in (start or self.start()).items()}
        optimizer = torch.optim.LBFGS(
            list(y.values()),
            max_iter=60,
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


class Module(Learner):
    """A module of the user's, which is copied and never changed."""

    def __init__(self, module: nn.Module, classes: int, batch_size: int, seed: int) -> None:
        self.module = module
        self.classes = classes
        self._batch_size = batch_size
        self._seed = seed

    def start(self) -> nn.Module:
        return copy.deepcopy(self.module)

    def logits(self, y: Any, features: Tensor) -> Tensor:
        logits: Tensor = y(features)
        if logits.shape != (len(features), self.classes):
            raise ArgumentError(
                f"model must give one number for each of the {self.classes} classes, an output of "
                f"shape ({len(features)}, {self.classes}), not {tuple(logits.shape)}"
            )
        return logits

    def penalty(self, y: Any) -> Tensor:
        return torch.stack([(p * p).sum() for p in y.parameters()]).sum()

    @property
    def ridge(self) -> float:
        return 1e-4

    @property
    def ridges(self) -> list[float]:
        return [self.ridge]

    def method(self, samples: int) -> bilevel.F2SA:
        return bilevel.F2SA(
            inner_steps=INNER_STEPS, multiplier=MULTIPLIER, upper_lr=WEIGHT_STEP * samples
        )

    def settings(self) -> dict[str, float]:
        return {"ridge": self.ridge}

    @torch.no_grad()
    def predict(self, y: Any, rows: Rows, chunk: int = 4096) -> Tensor:
        training = y.training
        try:
            return super().predict(y.eval(), rows, chunk)
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
        module = copy.deepcopy(start) if start is not None else self.start()
        optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=2e-3)
        generator = torch.Generator().manual_seed(self._seed)
        kept = weights.nonzero().squeeze(1)
        best, lowest, waited = copy.deepcopy(module.state_dict()), float("inf"), 0
        for _ in range(_EPOCHS):
            module.train()
            order = kept[torch.randperm(len(kept), generator=generator)]
            for index in torch.split(order, self._batch_size):
                optimizer.zero_grad()
                loss = self.weighted_loss(module, rows.take(index), labels[index], weights[index])
                loss = loss / len(index) + ridge * self.penalty(module)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if held is None:
                continue
            loss_there = float(cross_entropy(self.predict(module, held[0]), held[1]))
            if loss_there < lowest:
                best, lowest, waited = copy.deepcopy(module.state_dict()), loss_there, 0
            else:
                waited += 1
            if waited == _PATIENCE:
                break
        if held is not None:
            module.load_state_dict(best)
        return module


def _largest_eigenvalue(rows: Rows, steps: int = 50) -> float:
    """Of A'A / n, where A are the features and a column of ones."""
    features = rows.everything()
    generator = torch.Generator().manual_seed(0)
    v = torch.rand(features.shape[1], 1, generator=generator)
    bias, largest = torch.ones(()), torch.ones(())
    for _ in range(steps):
        image = features @ v + bias
        v, bias = features.T @ image / len(rows), image.mean()
        largest = (v.square().sum() + bias.square()).sqrt()
        v, bias = v / largest, bias / largest
    return float(largest)
