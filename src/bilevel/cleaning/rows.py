"""Features as a model takes them: scaled, dense or sparse, a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Array: TypeAlias = npt.NDArray[Any]

WIDEST = 4.0
"""How many standard deviations a feature may be from its mean; what is further counts as there.

A feature that is nearly always the same (a pixel at the border) is a huge number in units of its
standard deviation wherever it is not, and a step size that it allows is too small for all others.
"""


_CHUNK = 8192
_MADE_DENSE = 1 << 22  # numbers that are made dense at a time

Features: TypeAlias = "Tensor | SparseFeatures"
"""What stands to the left of the weights in a product."""


class Rows(Protocol):
    """Samples that can be looked up by number."""

    def __len__(self) -> int: ...

    @property
    def chunk(self) -> int:
        """How many rows to take at a time where all are wanted."""

    def take(self, index: Tensor) -> Features:
        """These rows, as a model takes them."""

    def everything(self) -> Features:
        """All rows."""

    def part(self, index: Tensor) -> Rows:
        """These rows as samples of their own."""


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

    @property
    def chunk(self) -> int:
        widest = max(self._features.shape[1], 1)
        return max(min(_CHUNK, _MADE_DENSE // widest), 1) if self._dense else _CHUNK

    def take(self, index: Tensor) -> Features:
        span = _span(index)
        return self._taken(self._features[index.numpy() if span is None else span])

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

    def __len__(self) -> int:
        return int(self._matrix.shape[0])

    @property
    def T(self) -> SparseFeatures:
        """Transposed, without a copy."""
        return SparseFeatures(self._matrix.T)

    def __matmul__(self, other: Tensor) -> Tensor:
        return torch.from_numpy(self._matrix @ other.detach().numpy())


def product(features: Features, weight: Tensor) -> Tensor:
    """The product of both, to be differentiated once, and by the weight alone."""
    found: Tensor = _Product.apply(features, weight)  # type: ignore[no-untyped-call]
    return found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Features, weight: Tensor) -> Tensor:
        ctx.features = features
        return features @ weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        if isinstance(ctx.features, Tensor):
            # a few long columns times a large matrix: this way round the matrix is read in order
            return None, (gradient.T @ ctx.features).T
        return None, ctx.features.T @ gradient


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
                squares = sum(np.square(some - mean).sum(0) for some in _blocks(features))
                scale = np.sqrt(squares / len(features))
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
            if self._units is None:
                return DenseRows(torch.from_numpy(np.ascontiguousarray(features, dtype=dtype)))
            mean, scale = self._units
            scaled = np.empty(features.shape, dtype)
            for some, out in zip(_blocks(features), _blocks(scaled), strict=True):
                np.clip((some - mean) / scale, -WIDEST, WIDEST, out=out, casting="same_kind")
            return DenseRows(torch.from_numpy(scaled))
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


def _span(index: Tensor) -> slice | None:
    """The same rows as a slice, where their numbers follow each other: nothing has to be copied."""
    if len(index) == 0:
        return None
    first, last = int(index[0]), int(index[-1])
    if last - first != len(index) - 1 or not bool((index.diff() == 1).all()):
        return None
    return slice(first, last + 1)


def _blocks(features: Array, length: int = 256) -> list[Array]:
    """A few rows at a time, so that what is computed from them in passing stays small."""
    return [features[i : i + length] for i in range(0, len(features), length)]


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
