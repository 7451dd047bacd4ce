"""Features as a model takes them: scaled, dense or sparse, a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = npt.NDArray[Any]

WIDEST = 4.0
"""How many standard deviations a feature may be from its mean; what is further counts as there.

A feature that is nearly always the same (a pixel at the border) is a huge number in units of its
standard deviation wherever it is not, and a step size that it allows is too small for all others.
"""


Features: TypeAlias = "Tensor | SparseFeatures"
"""What stands to the left of the weights in a product."""


class Rows(Protocol):
    """Samples that can be looked up by number."""

    def __len__(self) -> int: ...

    def take(self, index: Tensor) -> Features:
        """These rows, as a model takes them."""

    def everything(self) -> Features:
        """All rows."""

    def part(self, index: Tensor) -> Rows:
        """These rows as samples of their own."""


class DenseRows:
    """Rows of a tensor."""

    def __init__(self, features: Tensor) -> None:
        self._features = features

    def __len__(self) -> int:
        return len(self._features)

    def take(self, index: Tensor) -> Tensor:
        return self._features.index_select(0, index)

    def everything(self) -> Tensor:
        return self._features

    def part(self, index: Tensor) -> DenseRows:
        return DenseRows(self.take(index))


class SparseRows:
    """Rows of a SciPy matrix in CSR form, which is never made dense.

    Args:
        features: the matrix.
        dense: whether the rows that are taken are, because the model knows no others.
    """

    def __init__(self, features: Any, dense: bool) -> None:
        self._features = features
        self._dense = dense

    def __len__(self) -> int:
        return int(self._features.shape[0])

    def take(self, index: Tensor) -> Features:
        return self._taken(self._features[index.numpy()])

    def everything(self) -> Features:
        return self._taken(self._features)

    def part(self, index: Tensor) -> SparseRows:
        return SparseRows(self._features[index.numpy()], self._dense)

    def _taken(self, some: Any) -> Features:
        return torch.from_numpy(some.toarray()) if self._dense else SparseFeatures(some)


class SparseFeatures:
    """A SciPy matrix in CSR form by which tensors are multiplied.

    SciPy's products are some six times faster than those of torch with matrices in COO form, which
    are the only ones that torch has for every platform.
    """

    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix

    @property
    def shape(self) -> torch.Size:
        """The numbers of rows and of features."""
        return torch.Size(self._matrix.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def T(self) -> SparseFeatures:
        """Transposed, without a copy."""
        return SparseFeatures(self._matrix.T)

    def __matmul__(self, other: Tensor) -> Tensor:
        product: Tensor = _Product.apply(self._matrix, other)  # type: ignore[no-untyped-call]
        return product


class _Product(torch.autograd.Function):
    """A B, for a sparse A that is not differentiated."""

    @staticmethod
    def forward(ctx: Any, matrix: Any, other: Tensor) -> Tensor:
        ctx.matrix = matrix
        return torch.from_numpy(matrix @ other.detach().numpy())

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, torch.from_numpy(ctx.matrix.T @ gradient.numpy())


class Scaler:
    """Features in one unit.

    Dense ones are taken from their mean, in units of their standard deviation. Sparse ones stay
    sparse: they are taken from zero, in units of their root mean square where they are not zero, so
    that what is rare stays as rare as it is. Sparse rows that all have the same length were brought
    to it by someone (TF-IDF does it), have a unit, and stay as they are.

    Args:
        features: what the units are taken from, of shape (n, ...) or a SciPy matrix.
        standardize: whether their unit is changed at all.
        dense: whether sparse rows are to be made dense when they are taken. If not, features that
            no two rows have are left out: one of them says nothing of any other row.
    """

    def __init__(self, features: Any, standardize: bool, dense: bool) -> None:
        self._dense = dense
        self._units: tuple[Array, Array] | None = None
        self._columns: Array | None = None
        if isinstance(features, np.ndarray):
            if standardize:
                mean = features.mean(0, dtype=np.float64)
                scale = features.std(0, dtype=np.float64)
                # a difference that is only rounding is none
                constant = scale <= 10 * np.finfo(np.float64).eps * np.abs(mean)
                self._units = mean, np.where(constant, 1.0, scale)
            return
        features = _canonical(features)
        if standardize and not _equally_long(features):
            scale = _where_not_zero(features)
            self._units = np.zeros(features.shape[1]), scale
        if not dense:
            shared = np.flatnonzero(np.bincount(features.indices, minlength=features.shape[1]) > 1)
            if 0 < len(shared) < features.shape[1]:
                self._columns = shared

    @property
    def scales(self) -> bool:
        """Whether the unit of the features is changed."""
        return self._units is not None

    def rows(self, features: Any, dtype: type[np.floating[Any]] = np.float32) -> Rows:
        """The features, scaled."""
        if isinstance(features, np.ndarray):
            if self._units is not None:
                mean, scale = self._units
                features = (features - mean) / scale
                features = np.clip(features, -WIDEST, WIDEST, out=features)
            return DenseRows(torch.from_numpy(np.ascontiguousarray(features, dtype=dtype)))
        features = _canonical(features).astype(dtype)
        if self._units is not None:
            features.data /= self._units[1][features.indices].astype(dtype)
            np.clip(features.data, -WIDEST, WIDEST, out=features.data)
        if self._columns is not None:
            features = features[:, self._columns]
        return SparseRows(features, self._dense)

    def state(self) -> dict[str, Array]:
        """The units and the features that are used, by name; none where nothing is changed."""
        state = {}
        if self._units is not None:
            state["mean"], state["scale"] = self._units
        if self._columns is not None:
            state["columns"] = self._columns
        return state

    @classmethod
    def restored(cls, state: Mapping[str, Array]) -> Scaler:
        """The scaler that had this state, for a model that takes sparse rows as they are."""
        scaler = cls(np.zeros((0, 0)), standardize=False, dense=False)
        if "mean" in state:
            scaler._units = state["mean"], state["scale"]
        scaler._columns = state.get("columns")
        return scaler


def _canonical(features: Any) -> Any:
    """In CSR form of its own, with each entry once and none that is zero."""
    features = features.tocsr(copy=True)
    features.sum_duplicates()
    features.eliminate_zeros()
    return features


def _equally_long(features: Any) -> bool:
    """Whether all rows that are not zero have the same length, up to rounding."""
    squares = np.asarray(features.multiply(features).sum(1), dtype=np.float64).reshape(-1)
    squares = squares[squares > 0]
    return bool(len(squares)) and bool(np.ptp(squares) <= 1e-3 * squares.max())


def _where_not_zero(features: Any) -> Array:
    """The root mean square of the entries of each column that are not zero; 1 where all are."""
    width = features.shape[1]
    squares = np.bincount(features.indices, np.square(features.data, dtype=np.float64), width)
    counts = np.bincount(features.indices, minlength=width)
    scale: Array = np.where(counts > 0, np.sqrt(squares / np.maximum(counts, 1)), 1.0)
    return scale
