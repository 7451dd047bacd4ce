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


class Rows(Protocol):
    """Samples that can be looked up by number."""

    def __len__(self) -> int: ...

    def take(self, index: Tensor) -> Tensor:
        """These rows, as a model takes them."""

    def everything(self) -> Tensor:
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

    def take(self, index: Tensor) -> Tensor:
        return self._tensor(self._features[index.numpy()])

    def everything(self) -> Tensor:
        return self._tensor(self._features)

    def part(self, index: Tensor) -> SparseRows:
        return SparseRows(self._features[index.numpy()], self._dense)

    def _tensor(self, some: Any) -> Tensor:
        if self._dense:
            return torch.from_numpy(some.toarray())
        some = some.tocoo()
        places = torch.from_numpy(np.vstack([some.row, some.col]).astype(np.int64))
        return torch.sparse_coo_tensor(
            places,
            torch.from_numpy(some.data),
            some.shape,
            is_coalesced=True,
            check_invariants=False,
        )


class Scaler:
    """Features in units of their standard deviation, from their mean; sparse ones from zero.

    Args:
        features: what the units are taken from, of shape (n, ...) or a SciPy matrix.
        standardize: whether they are changed at all.
        dense: whether sparse rows are to be made dense when they are taken.
    """

    def __init__(self, features: Any, standardize: bool, dense: bool) -> None:
        self._standardize = standardize
        self._dense = dense
        if not standardize:
            return
        if isinstance(features, np.ndarray):
            self._mean = features.mean(0, dtype=np.float64)
            scale = features.std(0, dtype=np.float64)
        else:
            self._mean = np.zeros(features.shape[1])
            squares = features.multiply(features).mean(0)
            scale = np.sqrt(np.asarray(squares, dtype=np.float64).reshape(-1))
        # a difference that is only rounding is none
        constant = scale <= 10 * np.finfo(np.float64).eps * np.abs(self._mean)
        self._scale = np.where(constant, 1.0, scale)

    def state(self) -> dict[str, Array]:
        """The units, by name; none where features are not changed."""
        return {"mean": self._mean, "scale": self._scale} if self._standardize else {}

    @classmethod
    def restored(cls, state: Mapping[str, Array]) -> Scaler:
        """The scaler that had this state, for a model that takes sparse rows as they are."""
        scaler = cls(None, standardize=False, dense=False)
        if "mean" in state:
            scaler._standardize = True
            scaler._mean, scaler._scale = state["mean"], state["scale"]
        return scaler

    def rows(self, features: Any, dtype: type[np.floating[Any]] = np.float32) -> Rows:
        """The features, scaled."""
        if isinstance(features, np.ndarray):
            if self._standardize:
                features = (features - self._mean) / self._scale
                features = np.clip(features, -WIDEST, WIDEST, out=features)
            return DenseRows(torch.from_numpy(np.ascontiguousarray(features, dtype=dtype)))
        features = features.tocsr().astype(dtype)
        if self._standardize:
            features.data /= self._scale[features.indices].astype(dtype)
            np.clip(features.data, -WIDEST, WIDEST, out=features.data)
        features.sum_duplicates()
        return SparseRows(features, self._dense)
