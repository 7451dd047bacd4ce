"""The input of label cleaning: the samples and their roles, and how the weights are searched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from bilevel.cleaning.learners import HeldBack
from bilevel.cleaning.rows import FeatureRows


@dataclass(frozen=True)
class CleaningTask:
    """Samples, and the role of each.

    Attributes:
        rows, labels: all samples, including trusted ones.
        train: the numbers of the samples whose weights are learned.
        trusted: the numbers of the trusted samples in the upper level.
        held: the numbers of the trusted samples that decide when to stop; may be empty.
        judged: the numbers of the samples whose labels are judged, with all of ``train``.
        verified: whether the trusted labels are known to be right, and not only assumed to be.
    """

    rows: FeatureRows
    labels: Tensor
    train: Tensor
    trusted: Tensor
    held: Tensor
    judged: Tensor
    verified: bool

    @cached_property
    def held_samples(self) -> HeldBack | None:
        """The held-back samples, if there are any."""
        if not len(self.held):
            return None
        return self.rows.part(self.held), self.labels[self.held]


@dataclass(frozen=True)
class SearchSettings:
    """How the weights are searched.

    Attributes:
        max_steps: the most steps of the weights.
        patience: the number of steps without a lower held-back loss after which the search stops.
        batch_size: the number of samples in a minibatch.
        seed: determines everything random.
        checkpoint: the folder in which the search is saved, if any.
    """

    max_steps: int
    patience: int
    batch_size: int
    seed: int
    checkpoint: Path | None = None
