"""A classifier of scikit-learn, or probabilities from elsewhere, as the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from torch import Tensor

from bilevel.cleaning.learners import Fitter, HeldBack
from bilevel.cleaning.rows import FeatureRows, SparseFeatures

_LEAST = 1e-6  # probability, so that logarithms are finite


def log_probabilities(p: Any) -> Any:
    """Logits from probabilities."""
    return np.log(np.clip(np.asarray(p, dtype=np.float64), _LEAST, None))


class ClassifierLearner(Fitter):
    """A classifier with ``predict_proba``; it is cloned and never changed.

    It is fitted to samples with a weight, all of which count alike: weights are 0 or 1 here.
    """

    ridges = (0.0, 0.0, 0.0)

    def __init__(self, classifier: Any, classes: int) -> None:
        self.classifier = classifier
        self.classes = classes

    def fit(
        self,
        rows: FeatureRows,
        labels: Tensor,
        weights: Tensor,
        ridge: float,
        held: HeldBack | None,
        start: Any = None,
    ) -> Any:
        """Fit a clone to the samples with a weight."""
        del ridge, held, start
        kept = weights.nonzero().squeeze(1)
        if len(set(labels[kept].tolist())) < 2:  # few classifiers can be fitted to one class
            return int(labels[kept][0])
        return clone(self.classifier).fit(_numbers(rows.part(kept)), labels[kept].numpy())

    def predict(self, y: Any, rows: FeatureRows) -> Tensor:
        """The logarithms of the probabilities of all rows."""
        p = np.zeros((len(rows), self.classes))
        if isinstance(y, int):
            p[:, y] = 1.0
        elif len(rows):
            p[:, y.classes_] = y.predict_proba(_numbers(rows))
        return torch.from_numpy(log_probabilities(p))


def _numbers(rows: FeatureRows) -> Any:
    features = rows.everything()
    return features.matrix if isinstance(features, SparseFeatures) else features.numpy()
