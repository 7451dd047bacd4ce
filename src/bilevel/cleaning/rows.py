"""Rows of features for a model: scaled, dense or sparse, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = npt.NDArray[Any]

CLIP = 4.0
"""Scaled features are clipped to [-CLIP, CLIP], in standard deviations.

A nearly constant feature, such as a pixel at the border, is huge in units of its standard deviation
wherever it differs; the step size would have to be too small for all other features.
"""

_CHUNK = 8192
_DENSE_ENTRIES = 1 << 22  # the most entries of a sparse matrix that are made dense at a time

Features: TypeAlias = "Tensor | SparseFeatures"
"""A matrix of features by which weights are multiplied."""


class FeatureRows(Protocol):
    """The features of samples, which are looked up by number."""

    def __len__(self) -> int: ...

    @property
    def chunk(self) -> int:
        """The number of rows to take at a time when all are needed."""

    def take(self, index: Tensor) -> Features:
        """These rows, as a matrix for the model."""

    def everything(self) -> Features:
        """All rows, as a matrix for the model."""

    def part(self, index: Tensor) -> FeatureRows:
        """These rows, as a smaller set of samples."""


class DenseRows:
    """Rows of a tensor."""

    chunk = _CHUNK

    def __init__(self, features: Tensor) -> None:
        self._features = features

    def __len__(self) -> int:
        return len(self._features)

    def take(self, index: Tensor) -> Tensor:
        span = _span(index)
        return self._features.index_select(0, index) if span is None else self._features[span]

    def everything(self) -> Tensor:
        return self._features

    def part(self, index: Tensor) -> DenseRows:
        return DenseRows(self.take(index))


class SparseRows:
    """Rows of a SciPy CSR matrix, which is never made dense as a whole.

    Args:
        features: the matrix.
        dense: whether the rows that are taken are made dense, for a model that needs it.
    """

    def __init__(self, features: Any, dense: bool) -> None:
        self._features = features
        self._dense = dense

    def __len__(self) -> int:
        return int(self._features.shape[0])

    @property
    def chunk(self) -> int:
        width = max(self._features.shape[1], 1)
        return max(min(_CHUNK, _DENSE_ENTRIES // width), 1) if self._dense else _CHUNK

    def take(self, index: Tensor) -> Features:
        span = _span(index)
        return self._as_features(self._features[index.numpy() if span is None else span])

    def everything(self) -> Features:
        return self._as_features(self._features)

    def part(self, index: Tensor) -> SparseRows:
        return SparseRows(self._features[index.numpy()], self._dense)

    def _as_features(self, some: Any) -> Features:
        return torch.from_numpy(some.toarray()) if self._dense else SparseFeatures(some)


class SparseFeatures:
    """A SciPy CSR matrix by which tensors are multiplied.

    SciPy's products are about six times faster than torch's products with COO matrices, which are
    the only sparse ones that torch has on every platform.
    """

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix

    def __len__(self) -> int:
        return int(self.matrix.shape[0])

    @property
    def T(self) -> SparseFeatures:
        """The transposed matrix, without a copy."""
        return SparseFeatures(self.matrix.T)

    def gram(self) -> Tensor:
        """The inner products of all pairs of rows."""
        return torch.from_numpy((self.matrix @ self.matrix.T).toarray())

    def __matmul__(self, other: Tensor) -> Tensor:
        return torch.from_numpy(self.matrix @ other.detach().numpy())


def linear(rows: FeatureRows, weight: Tensor, bias: Tensor) -> Tensor:
    """A W + b for the rows A, a few rows at a time."""
    return torch.cat([some @ weight + bias for some in in_chunks(rows)])


def in_chunks(rows: FeatureRows) -> Iterator[Features]:
    """All rows, a few at a time."""
    if len(rows) <= rows.chunk:
        yield rows.everything()
        return
    for some in torch.split(torch.arange(len(rows)), rows.chunk):
        yield rows.take(some)


class Scaler:
    """Brings all features to a common scale.

    Dense features are centred and divided by their standard deviation. Sparse features stay sparse:
    they are not centred, and are divided by the root mean square of their nonzero entries. If all
    sparse rows have the same norm, they have been normalised already, as by TF-IDF, and stay as
    they are.

    Args:
        features: the features whose scale is measured, of shape (n, ...) or a SciPy matrix.
        standardize: whether features are scaled at all.
        dense: whether sparse rows are made dense when they are taken.
        narrow: whether features that fewer than two sparse rows have are left out, because they
            say nothing about other rows; None: if rows are not made dense.
    """

    def __init__(
        self, features: Any, standardize: bool, dense: bool, narrow: bool | None = None
    ) -> None:
        self._dense = dense
        self._units: tuple[Array, Array] | None = None
        self._columns: Array | None = None
        if isinstance(features, np.ndarray):
            if standardize:
                self._units = _mean_and_scale(features)
            return
        features = _canonical(features)
        unit = _unit(features)
        if unit != 1:
            features.data = features.data / unit
        if standardize and not _equal_norms(features):
            scale = unit * _rms_of_nonzeros(features)
            self._units = np.zeros(features.shape[1]), np.where(scale > 0, scale, 1.0)
        if narrow if narrow is not None else not dense:
            shared = np.flatnonzero(np.bincount(features.indices, minlength=features.shape[1]) > 1)
            if 0 < len(shared) < features.shape[1]:
                self._columns = shared

    @property
    def scales(self) -> bool:
        """Whether features are scaled."""
        return self._units is not None

    def rows(self, features: Any, dtype: type[np.floating[Any]] = np.float32) -> FeatureRows:
        """The scaled features."""
        if isinstance(features, np.ndarray):
            if self._units is None:
                return DenseRows(torch.from_numpy(np.ascontiguousarray(features, dtype=dtype)))
            mean, scale = self._units
            scaled = np.empty(features.shape, dtype)
            for some, out in zip(_blocks(features), _blocks(scaled), strict=True):
                np.clip((some - mean) / scale, -CLIP, CLIP, out=out, casting="same_kind")
                np.nan_to_num(out, copy=False)  # a missing number is taken for the mean
            return DenseRows(torch.from_numpy(scaled))
        features = _canonical(features)
        if self._units is not None:
            # In double precision, because it may not fit into single precision before.
            features.data = features.data / self._units[1][features.indices]
            np.clip(features.data, -CLIP, CLIP, out=features.data)
        features = features.astype(dtype)
        if self._columns is not None:
            features = features[:, self._columns]
        return SparseRows(features, self._dense)

    def state(self) -> dict[str, Array]:
        """The arrays from which the scaler is restored, by name."""
        state = {}
        if self._units is not None:
            state["mean"], state["scale"] = self._units
        if self._columns is not None:
            state["columns"] = self._columns
        return state

    def check(self, features: int) -> int:
        """Raise a ValueError unless rows of so many features can be scaled; how many are left."""
        for part in self._units or ():
            if part.shape != (features,) or not np.isfinite(part).all():
                raise ValueError(f"mean and scale must be {features} finite numbers each")
        if self._units is not None and not (self._units[1] > 0).all():
            raise ValueError("scale must be positive")
        columns = self._columns
        if columns is None:
            return features
        if columns.ndim != 1 or columns.dtype.kind not in "iu" or not len(columns):
            raise ValueError(f"columns must be whole numbers, not {columns.dtype} {columns.shape}")
        if columns.min() < 0 or columns.max() >= features:
            raise ValueError(f"columns must be numbers of the {features} features")
        return len(columns)

    @classmethod
    def restored(cls, state: Mapping[str, Array]) -> Scaler:
        """The scaler with this state, for a model that takes sparse rows."""
        scaler = cls(np.zeros((0, 0)), standardize=False, dense=False)
        if "mean" in state:
            scaler._units = state["mean"], state["scale"]
        scaler._columns = state.get("columns")
        return scaler


def _mean_and_scale(features: Array) -> tuple[Array, Array]:
    """The mean and the standard deviation of each column, without what is missing.

    The deviation of a column that is constant is 1.
    """
    mean, scale = _moments(features)
    # Where squares overflow, or vanish, another unit is needed.
    vanished = (scale <= 1e-150) & (mean != 0) & (np.abs(mean) < 1e-140)
    odd = ~(scale < 1e150) | vanished
    if odd.any():
        columns = features[:, odd].astype(np.float64)
        unit = np.nanmax(np.abs(columns), axis=0, initial=0.0)
        unit = np.where(unit > 0, unit, 1.0)
        in_units = _moments(columns / unit)
        mean[odd], scale[odd] = in_units[0] * unit, in_units[1] * unit
    # Treat a spread that is only rounding error as none.
    constant = scale <= 10 * np.finfo(np.float64).eps * np.abs(mean)
    return mean, np.where(constant, 1.0, scale)


def _moments(features: Array) -> tuple[Array, Array]:
    known = np.maximum(sum(np.isfinite(some).sum(0) for some in _blocks(features)), 1)
    with np.errstate(over="ignore", invalid="ignore"):  # seen by the caller
        mean = np.nansum(features, 0, dtype=np.float64) / known
        squares = sum(np.nansum(np.square(some - mean), 0) for some in _blocks(features))
        return mean, np.sqrt(squares / known)


def _span(index: Tensor) -> slice | None:
    """The index as a slice, which copies nothing, if its numbers are consecutive."""
    if len(index) == 0:
        return None
    numbers = index.numpy()  # an entry of a tensor takes ten times as long to read
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first != len(numbers) - 1 or not (np.diff(numbers) == 1).all():
        return None
    return slice(first, last + 1)


def _blocks(features: Array, length: int = 256) -> list[Array]:
    """A few rows at a time, so that temporary arrays stay small."""
    return [features[i : i + length] for i in range(0, len(features), length)]


def _canonical(features: Any) -> Any:
    """A copy in CSR form without duplicate entries or stored zeros."""
    features = features.tocsr(copy=True)
    features.sum_duplicates()
    features.eliminate_zeros()
    return features


def _unit(features: Any) -> float:
    """What to divide sparse features by so that their squares neither overflow nor vanish."""
    largest = float(np.abs(features.data).max()) if len(features.data) else 1.0
    return 1.0 if 1e-100 < largest < 1e100 else largest


def _equal_norms(features: Any) -> bool:
    """Whether all nonzero rows have the same norm, up to rounding."""
    squares = np.asarray(features.multiply(features).sum(1), dtype=np.float64).reshape(-1)
    squares = squares[squares > 0]
    return bool(len(squares)) and bool(np.ptp(squares) <= 1e-3 * squares.max())


def _rms_of_nonzeros(features: Any) -> Array:
    """The root mean square of the nonzero entries of each column; 1 for an empty column."""
    width = features.shape[1]
    squares = np.bincount(features.indices, np.square(features.data, dtype=np.float64), width)
    counts = np.bincount(features.indices, minlength=width)
    scale: Array = np.where(counts > 0, np.sqrt(squares / np.maximum(counts, 1)), 1.0)
    return scale
