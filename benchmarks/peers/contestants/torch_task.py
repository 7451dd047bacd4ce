"""The two losses in PyTorch, for all contestants that use PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.peers.task import Task


class TorchTask:
    """The task's arrays as tensors, its losses, and its batches.

    Args:
        task: the arrays.
        seed: the seed of the batches.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self.features = torch.from_numpy(task.features)
        self.labels = torch.from_numpy(task.labels)
        self.trusted_features = torch.from_numpy(task.trusted_features)
        self.trusted_labels = torch.from_numpy(task.trusted_labels)
        self.index = torch.arange(len(task.labels))
        self.start = torch.zeros(task.classes, task.features.shape[1])
        self.ridge = task.ridge
        self.generator = torch.Generator().manual_seed(seed)

    def weighted(self, weights: Tensor, y: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Return g on a batch with these weights."""
        losses = _cross_entropy(linear(features, y), labels)
        return (weights * losses).mean() + self.ridge * (y * y).sum()

    def trusted(self, y: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Return f on a batch."""
        return _cross_entropy(linear(features, y), labels).mean()

    def batch(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw samples; return their features, labels and indices."""
        index = torch.randint(len(self.labels), (size,), generator=self.generator)
        return self.features[index], self.labels[index], index

    def trusted_batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Draw trusted samples; return their features and labels."""
        index = torch.randint(len(self.trusted_labels), (size,), generator=self.generator)
        return self.trusted_features[index], self.trusted_labels[index]


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Like torch's own cross entropy, but several times as fast for many samples of few classes."""
    return logits.logsumexp(-1) - logits.gather(-1, labels[:, None])[:, 0]
