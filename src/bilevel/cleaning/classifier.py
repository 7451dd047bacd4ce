"""A classifier of scikit-learn, or probabilities from elsewhere, as the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from torch import Tensor

from bilevel.cleaning.learners import Fitter, HeldBack
from bilevel.cleaning.rows import FeatureRows, SparseFeatures
from bilevel.cleaning.wording import listed
from bilevel.errors import ArgumentError

_LEAST = 1e-6  # probability, so that logarithms are finite


def log_probabilities(p: Any) -> Any:
    """Logits from probabilities."""
    return np.log(np.clip(np.asarray(p, dtype=np.float64), _LEAST, None))


class ClassifierLearner(Fitter):
    """A classifier with ``predict_proba``; it is cloned and never changed.

    It is fitted to samples with a weight, all of which count alike: weights are 0 or 1 here. As
    labels it sees the numbers of classes, which every classifier takes.

    Args:
        classifier: the classifier.
        classes: the label of each class.
        names: those of the features, for a classifier that chooses by them; None: they have none.
    """

    ridges = (0.0, 0.0, 0.0)

    def __init__(self, classifier: Any, classes: Any, names: Any = None) -> None:
        self.classifier = clone(classifier).set_params(**_by_number(classifier, classes.tolist()))
        self.classes = len(classes)
        self._names = names

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
        return clone(self.classifier).fit(self._table(rows.part(kept)), labels[kept].numpy())

    def predict(self, y: Any, rows: FeatureRows) -> Tensor:
        """The logarithms of the probabilities of all rows."""
        p = np.zeros((len(rows), self.classes))
        if isinstance(y, int):
            p[:, y] = 1.0
        elif len(rows):
            p[:, y.classes_] = y.predict_proba(self._table(rows))
        return torch.from_numpy(log_probabilities(p))

    def _table(self, rows: FeatureRows) -> Any:
        features = rows.everything()
        if isinstance(features, SparseFeatures):
            return features.matrix
        numbers = features.numpy()
        if self._names is None:
            return numbers
        import pandas as pd

        return pd.DataFrame(numbers, columns=self._names, copy=False)


def _by_number(classifier: Any, labels: list[Any]) -> dict[str, Any]:
    """The weights of classes that the classifier has, by the numbers of these classes."""
    found = {}
    for name, value in classifier.get_params().items():
        if name.rpartition("__")[2] == "class_weight" and isinstance(value, dict):
            unknown = [label for label in value if label not in labels]
            if unknown:
                raise ArgumentError(
                    f"model has {name} for {listed(unknown)}, but the labels are {listed(labels)}"
                )
            found[name] = {labels.index(label): weight for label, weight in value.items()}
    return found
