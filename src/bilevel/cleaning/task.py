"""The input of label cleaning: the samples and their roles, and how the weights are searched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bilevel.cleaning.rows import FeatureRows


@dataclass(frozen=True)
class CleaningTask:
    """Samples, and the role of each.

    Attributes:
        rows, labels: all samples, including trusted ones.
        train: the numbers of the samples whose weights are learned.
        trusted: the numbers of the trusted samples.
        judged: the numbers of the samples whose labels are judged, with all of ``train``.
        fold: the fold of each sample; a model of a fold is fitted without the samples in it.
        folds: the number of folds.
        verified: whether the trusted labels are known to be right, and not only assumed to be.
        votes: the labels of the judged samples by all annotators, of shape (n, annotators).
        old_labels: the label that each trusted sample was given before it was checked, if known.
        predictions: logits of all samples from elsewhere, if there are any.
    """

    rows: FeatureRows | None
    labels: Tensor
    train: Tensor
    trusted: Tensor
    judged: Tensor
    fold: Tensor
    folds: int
    verified: bool
    votes: npt.NDArray[np.int64]
    old_labels: npt.NDArray[np.int64] | None = None
    predictions: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class SearchSettings:
    """How the weights are searched.

    Attributes:
        max_steps: the most steps of the weights.
        patience: the number of steps without a lower held-back loss after which the search stops.
        batch_size: the number of samples in a minibatch.
        seed: determines everything random.
        early_stopping: whether the search stops where the held-back loss is lowest.
        checkpoint: the folder in which the search is saved, if any.
    """

    max_steps: int
    patience: int
    batch_size: int
    seed: int
    early_stopping: bool = True
    checkpoint: Path | None = None
