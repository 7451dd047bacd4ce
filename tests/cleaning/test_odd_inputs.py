"""Features in odd units and kinds, and predictions that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import nn

from bilevel import LabelCleaner
from bilevel.cleaning.rows import Scaler
from bilevel.errors import ArgumentError, ArgumentTypeError

RNG = np.random.default_rng(0)
TRUE = RNG.integers(2, size=90)
X = RNG.normal(size=(90, 3)) + 3 * np.eye(2, 3)[TRUE]
Y = np.where(RNG.random(90) < 0.2, 1 - TRUE, TRUE)


def fitted(features: Any) -> LabelCleaner:
    cleaner = LabelCleaner(max_steps=10)
    return cleaner.fit(features[30:], Y[30:], X_clean=features[:30], y_clean=TRUE[:30])


@pytest.mark.parametrize("as_sparse", [False, True])
@pytest.mark.parametrize("unit", [1e-200, 1e200])
def test_features_in_any_unit_are_scaled_alike(unit: float, as_sparse: bool) -> None:
    features = X.copy()
    features[3, 1] = 0 if as_sparse else np.nan
    features = np.c_[features, np.zeros(90)]

    def scaled(given: Any) -> Any:
        kind = sparse.csr_matrix(given) if as_sparse else given
        return Scaler(kind, standardize=True, dense=True).rows(kind).take(torch.arange(90))

    expected = scaled(features)
    torch.testing.assert_close(scaled(features * unit), expected)
    assert float(expected.std()) > 0.5


def test_features_in_large_units_are_judged_as_in_others() -> None:
    cleaner, expected = fitted(X * 1e200), fitted(X)
    np.testing.assert_allclose(cleaner.label_quality_, expected.label_quality_, atol=1e-3)


def test_tensors_of_every_kind_are_taken_or_refused() -> None:
    halved = torch.tensor(X).bfloat16()
    assert np.array_equal(
        fitted(halved).label_quality_, fitted(halved.float().numpy()).label_quality_
    )
    with pytest.raises(ArgumentTypeError, match="layout"):
        LabelCleaner().fit(torch.tensor(X).to_sparse(), Y)
    with pytest.raises(ArgumentTypeError, match="meta device"):
        LabelCleaner().fit(torch.tensor(X).to("meta"), Y)


def test_what_is_missing_in_a_sparse_matrix_is_refused() -> None:
    features = X.copy()
    features[40, 0] = np.nan
    with pytest.raises(ArgumentError, match="X is sparse and has NaN"):
        fitted(sparse.csr_matrix(features))
    cleaner = fitted(sparse.csr_matrix(X))
    with pytest.raises(ArgumentError, match="X is sparse and has NaN"):
        cleaner.predict(sparse.csr_matrix(features))


@pytest.mark.parametrize("spoil", [lambda p: p * 2, lambda p: p - 0.5, lambda p: p * np.nan])
def test_predictions_that_are_no_probabilities_are_refused(spoil: Any) -> None:
    p = np.where(TRUE[:, None] == [0, 1], 0.9, 0.1)
    p[7] = spoil(p[7])
    with pytest.raises(ArgumentError, match=r"pred_probs must be probabilities.*row 7"):
        LabelCleaner().fit(None, Y, pred_probs=p)
    with pytest.raises(ArgumentError):
        LabelCleaner().fit(None, Y, pred_probs=[["much", "little"]] * 90)


@pytest.mark.filterwarnings("ignore:The number of unique classes")
def test_as_many_classes_as_rows_are_told() -> None:
    with pytest.raises(ArgumentError, match="the 90 classes of the 90 rows are too many"):
        LabelCleaner().fit(X, np.arange(90))


class Pair(nn.Linear):
    def forward(self, rows: torch.Tensor) -> Any:
        return super().forward(rows), rows


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.LazyLinear(2), "call the lazy module once"),
        (nn.Linear(3, 2).requires_grad_(False), "no parameter that could be trained"),
        (nn.Identity(), "no parameter that could be trained"),
        (nn.Linear(3, 2, device="meta"), "model is on meta"),
        (nn.Linear(3, 2).double(), r"cannot take features of the shape \(2, 3\)"),
        (nn.Linear(4, 2), r"cannot take features of the shape \(2, 3\)"),
        (nn.Linear(3, 5), "one number for each of the 2 classes"),
        (Pair(3, 2), r"of shape \(2, 2\), not tuple"),
    ],
    ids=str,
)
def test_modules_that_cannot_be_trained_here_are_refused(model: nn.Module, message: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(ArgumentError, match=message):
        LabelCleaner(model=model).fit(X, Y, trusted=np.arange(90) < 30)
    assert torch.equal(torch.get_rng_state(), state)
