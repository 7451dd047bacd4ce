"""Softmax regression in closed form: losses, derivatives and a preconditioner for its Hessian."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import linear

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import check_count

ArrayLike: TypeAlias = Tensor | npt.NDArray[Any]

WIDEST = 2000
"""The largest number of features for which a dense matrix over the features pays off."""


@dataclass(frozen=True)
class LabelledSamples:
    """Features and labels of samples, with the derivatives of their cross entropies."""

    features: Tensor
    labels: Tensor

    @cached_property
    def _columns(self) -> Tensor:
        """The transposed features, contiguous: products with few columns run up to 4x faster."""
        return self.features.T.contiguous()

    def losses_and_errors(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The cross entropy of every sample, and its derivative in the logits.

        The derivative is the vector of class probabilities minus the one-hot label.
        """
        logarithms = torch.log_softmax(linear(self.features, y), -1)
        column = self.labels.unsqueeze(-1)
        losses = -logarithms.gather(-1, column)
        errors = logarithms.exp_().scatter_add_(-1, column, torch.full_like(losses, -1.0))
        return losses.squeeze(-1), errors

    def probabilities(self, errors: Tensor) -> Tensor:
        """The class probabilities, from the ``errors`` of :meth:`losses_and_errors`."""
        column = self.labels.unsqueeze(-1)
        return errors.scatter_add(-1, column, torch.ones_like(column, dtype=errors.dtype))

    def pulled_back(self, logits: Tensor) -> Tensor:
        """The derivative in y, from the derivative in the logits."""
        return (self._columns @ logits).T


@dataclass(frozen=True)
class Preconditioner:
    """A matrix M = L L' that acts on the rows of y, stored as L^-1; None stands for the identity.

    M approximates the Hessian of a weighted softmax regression, with one block for every class.
    """

    inverse: Tensor | None

    @classmethod
    def of(cls, features: Tensor, classes: int, ridge: float) -> Preconditioner:
        """Half the Hessian of the unweighted losses at y = 0, plus that of the ridge.

        At y = 0 every class has the probability 1/classes. The factor of one half accounts for
        weights and confident predictions, which both reduce the curvature.
        """
        if features.shape[1] > WIDEST:
            return cls(None)
        curvature = (classes - 1) / (2 * classes**2)
        matrix = (features.T @ features).double() * (curvature / len(features))
        # Products rounded to the precision of the features may make the matrix indefinite.
        rounding = torch.finfo(features.dtype).eps * float(matrix.trace())
        matrix.diagonal().add_(2 * ridge + rounding)
        factor = torch.linalg.cholesky(matrix)
        identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
        return cls(inverse.to(features.dtype))

    def from_whitened(self, v: Tensor) -> Tensor:
        """The rows v as v L^-1: from coordinates in which M is the identity."""
        return v if self.inverse is None else v @ self.inverse

    def to_whitened(self, v: Tensor) -> Tensor:
        """The rows v as v L^-T, the transpose of :meth:`from_whitened`."""
        return v if self.inverse is None else v @ self.inverse.T

    def solve(self, v: Tensor) -> Tensor:
        """The rows v as v M^-1."""
        return self.from_whitened(self.to_whitened(v))


def checked_features(
    name: str, images: ArrayLike, dtype: torch.dtype, device: torch.device | str | None
) -> Tensor:
    """The images as rows, with a constant last feature of 1 for the bias."""
    if not isinstance(images, Tensor | np.ndarray):
        raise ArgumentTypeError(f"{name} must be a tensor or an array, not {images!r}")
    rows = torch.as_tensor(images).to(device=device, dtype=dtype)
    if rows.ndim < 2 or rows.numel() == 0:
        raise ArgumentError(
            f"{name} must have the shape (samples, ...) with at least one sample and one feature, "
            f"not {tuple(rows.shape)}"
        )
    rows = rows.flatten(1)
    broken = (~rows.isfinite()).any(-1).nonzero()
    if len(broken):
        raise ArgumentError(f"{name} must be finite, but sample {int(broken[0])} is not")
    return torch.cat([rows, rows.new_ones(len(rows), 1)], -1)


def checked_labels(
    name: str, labels: Any, samples: int, device: torch.device | str | None
) -> Tensor:
    """The labels as int64 class numbers, one for each sample."""
    if not isinstance(labels, Tensor | np.ndarray):
        raise ArgumentTypeError(f"{name} must be a tensor or an array, not {labels!r}")
    numbers = labels if isinstance(labels, Tensor) else torch.from_numpy(labels)
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise ArgumentTypeError(f"{name} must be whole numbers, not {numbers.dtype}")
    if numbers.shape != (samples,):
        raise ArgumentError(
            f"{name} must have the shape ({samples},), one for each sample, "
            f"not {tuple(numbers.shape)}"
        )
    if int(numbers.min()) < 0:
        raise ArgumentError(f"{name} must be at least 0, not {int(numbers.min())}")
    return numbers.to(device=device, dtype=torch.int64)


def check_same_width(samples: dict[str, LabelledSamples]) -> None:
    """Raise unless all parts have as many features; the keys are prefixes of argument names."""
    widths = {f"{kind}images": part.features.shape[1] - 1 for kind, part in samples.items()}
    if len(set(widths.values())) > 1:
        stated = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise ArgumentError(f"all samples must have the same number of features, not {stated}")


def checked_class_count(
    classes: int | None, samples: dict[str, LabelledSamples], true_labels: Tensor | None
) -> int:
    """The number of classes, larger than every label."""
    largest = {f"{kind}labels": int(part.labels.max()) for kind, part in samples.items()}
    if true_labels is not None:
        largest["true_labels"] = int(true_labels.max())
    if classes is None:
        classes = max(largest.values()) + 1
    check_count("classes", classes, 2)
    for name, label in largest.items():
        if label >= classes:
            raise ArgumentError(f"{name} has the label {label}, but classes={classes}")
    return classes
