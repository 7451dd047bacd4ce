"""The interface of the models that label cleaning trains, and the settings they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bilevel.cleaning.rows import FeatureRows, Features, in_chunks
from bilevel.methods import F2SA

MULTIPLIER = 5.0
WEIGHT_STEP = 0.5
"""The change of a weight per unit of loss that the trusted samples would gain from it.

Weights lie in [0, 1] and losses are in nats, so it does not depend on the data. Larger steps
minimise F sooner, but the weights on the way tell wrong labels from right ones less well.
"""

HeldBack: TypeAlias = tuple[FeatureRows, Tensor]
"""Trusted samples that are not trained on: their features and labels."""


class Fitter(ABC):
    """A kind of model that is fitted to weighted samples.

    Attributes:
        classes: how many there are.
    """

    classes: int

    @property
    @abstractmethod
    def ridges(self) -> tuple[float, float, float]:
        """The smallest ridge that is tried, the first and the largest; all equal: no choice."""

    @abstractmethod
    def fit(
        self,
        rows: FeatureRows,
        labels: Tensor,
        weights: Tensor,
        ridge: float,
        held: HeldBack | None,
        start: Any = None,
    ) -> Any:
        """Train on weighted samples, and return the variables.

        Args:
            rows, labels, weights: the samples; those of weight 0 are not used.
            ridge: the factor of the penalty.
            held: samples on which the end of training may be chosen.
            start: the variables to start from; None: the model begins anew.
        """

    def fit_several(
        self,
        rows: FeatureRows,
        labels: Tensor,
        weights: Tensor,
        ridge: float,
        held: Sequence[HeldBack | None],
        starts: Sequence[Any],
    ) -> list[Any]:
        """Train one model for each row of ``weights``, (models, samples), as :meth:`fit` does."""
        return [
            self.fit(rows, labels, w, ridge, some, start=start)
            for w, some, start in zip(weights, held, starts, strict=True)
        ]

    @abstractmethod
    def predict(self, y: Any, rows: FeatureRows) -> Tensor:
        """The logits of all rows."""

    def finished(self, y: Any) -> Any:
        """The variables in the form that is kept for predictions."""
        return y


class Learner(Fitter):
    """A kind of model: how it serves as the lower level, and how it is fitted afterwards.

    The variables y of a model are a tree of tensors or an ``nn.Module``.

    Attributes:
        at_once: whether the samples are so few that the search takes all of them in every step.
    """

    at_once = False

    @abstractmethod
    def start(self) -> Any:
        """The variables from which training starts."""

    @abstractmethod
    def lower_start(
        self, rows: FeatureRows, labels: Tensor, weights: Tensor, held: HeldBack | None
    ) -> Any:
        """The variables from which the lower level starts."""

    @abstractmethod
    def logits(self, y: Any, features: Features) -> Tensor:
        """The logits, of shape (rows, classes)."""

    @abstractmethod
    def folded(self, y: Any, folds: int) -> Any:
        """As many copies of the variables as there are folds, as variables of one problem."""

    @abstractmethod
    def fold(self, y: Any, number: int) -> Any:
        """One of these copies."""

    @abstractmethod
    def fold_logits(self, y: Any, features: Features) -> Tensor:
        """The logits of all copies, of shape (rows, folds, classes)."""

    @abstractmethod
    def penalty(self, y: Any) -> Tensor:
        """The squared norm that is multiplied by the ridge."""

    @abstractmethod
    def method(self, samples: int) -> F2SA:
        """The method that learns the weights of that many samples."""

    @abstractmethod
    def settings(self) -> dict[str, float]:
        """The settings that were chosen, by name."""

    @property
    @abstractmethod
    def ridge(self) -> float:
        """The ridge of the lower level."""

    @torch.no_grad()
    def predict(self, y: Any, rows: FeatureRows) -> Tensor:
        """The logits of all rows."""
        if len(rows) == 0:
            return torch.zeros(0, self.classes)
        return torch.cat([self.logits(y, some) for some in in_chunks(rows)])

    @torch.no_grad()
    def predict_folds(self, y: Any, rows: FeatureRows) -> Tensor:
        """The logits of all rows by all folds, of shape (rows, folds, classes)."""
        return torch.cat([self.fold_logits(y, some) for some in in_chunks(rows)])

    def fold_loss(
        self, y: Any, features: Features, labels: Tensor, weights: Tensor, ridge: float = 0.0
    ) -> Tensor:
        """sum_mi w_mi CE_mi / n by each copy m of the variables, and the ridge times the penalty.

        The weights are of shape (m, rows).
        """
        losses = weights.T * fold_losses(self.fold_logits(y, features), labels)
        return losses.sum() / len(labels) + ridge * self.penalty(y)


def fold_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """CE_i by each fold from logits (rows, folds, classes)."""
    repeated = labels.repeat_interleave(logits.shape[1])
    losses = cross_entropy(logits.flatten(0, 1), repeated, reduction="none")
    return losses.view(logits.shape[:2])
