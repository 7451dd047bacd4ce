"""Scaled rows and the default model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import sparse

from bilevel.cleaning.learners import Module, SoftmaxRegression
from bilevel.cleaning.rows import Scaler
from bilevel.errors import ArgumentError


def features(n: int = 60, width: int = 5) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, width)) * (rng.random((n, width)) < 0.4) * np.logspace(-3, 3, width)


def test_dense_rows_are_standardised_and_clipped() -> None:
    X = np.random.default_rng(0).normal(3.0, 5.0, size=(500, 4))
    X[0, 0] = 1e6
    rows = Scaler(X, standardize=True, dense=False).rows(X).everything()
    assert float(rows[0, 0]) == 4.0
    torch.testing.assert_close(rows[:, 1:].mean(0), torch.zeros(3), atol=0.01, rtol=0)
    torch.testing.assert_close(rows[:, 1:].std(0), torch.ones(3), atol=0.02, rtol=0)


def test_a_constant_feature_stays_finite() -> None:
    X = np.full((10, 2), 0.1)
    assert Scaler(X, True, False).rows(X).everything().abs().max() < 1e-6


@pytest.mark.parametrize("dense", [False, True])
def test_sparse_rows_are_scaled_without_centring(dense: bool) -> None:
    X = features()
    rows = Scaler(sparse.csr_array(X), True, dense).rows(sparse.csr_array(X), np.float64)
    expected = torch.from_numpy(np.clip(X / np.sqrt((X**2).mean(0)), -4, 4))
    index = torch.tensor([7, 3, 3, 50])
    assert rows.take(index).is_sparse is not dense
    torch.testing.assert_close(rows.take(index).to_dense(), expected[index])
    torch.testing.assert_close(rows.part(index).everything().to_dense(), expected[index])


def test_curvature_is_the_largest_eigenvalue() -> None:
    X = np.random.default_rng(0).normal(size=(50, 4))
    rows = Scaler(X, False, False).rows(X)
    A = np.hstack([X, np.ones((50, 1))])
    largest = np.linalg.eigvalsh(A.T @ A / 50)[-1]
    assert SoftmaxRegression(rows, 4, 3).curvature == pytest.approx(largest / 2, rel=1e-3)


@pytest.mark.parametrize("convert", [np.asarray, sparse.csr_array])
def test_fit_is_stationary_and_forgets_weight_zero(convert) -> None:
    X, labels = features(), torch.arange(60) % 3
    X = convert(X / np.abs(X).max(0))
    rows = Scaler(X, False, False).rows(X)
    learner = SoftmaxRegression(rows, 5, 3)
    weights = torch.rand(60)
    weights[:20] = 0.0
    y = learner.fit(rows, labels, weights, 0.01, None)
    other = labels.clone()
    other[:20] = 0
    again = learner.fit(rows, other, weights, 0.01, None)
    torch.testing.assert_close(y["weight"], again["weight"])

    for part in y.values():
        part.requires_grad_()
    loss = learner.weighted_loss(y, rows.everything(), labels, weights) / weights.sum()
    (loss + 0.01 * (y["weight"] ** 2).sum()).backward()
    assert max(float(part.grad.abs().max()) for part in y.values()) < 1e-4


def test_a_module_with_the_wrong_width_is_named() -> None:
    learner = Module(torch.nn.Linear(5, 2), classes=3, batch_size=10, seed=0)
    with pytest.raises(ArgumentError, match=r"3 classes.*\(4, 3\), not \(4, 2\)"):
        learner.logits(learner.start(), torch.zeros(4, 5))
