"""Scaled rows and the default model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse

from bilevel.cleaning.comparison import CrossFits
from bilevel.cleaning.cross_entropy import loss_and_gradient, places_of
from bilevel.cleaning.module import ModuleLearner
from bilevel.cleaning.rows import DenseRows, Scaler, SparseFeatures
from bilevel.cleaning.softmax import SoftmaxRegression
from bilevel.cleaning.task import CleaningTask
from bilevel.errors import ArgumentError


def features(n: int = 60, width: int = 5) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, width)) * (rng.random((n, width)) < 0.4) * np.logspace(-3, 3, width)


def test_dense_rows_are_standardised_and_clipped() -> None:
    X = np.random.default_rng(0).normal(3.0, 5.0, size=(500, 4))
    X[0, 0] = 1e6
    rows = dense(Scaler(X, standardize=True, dense=False).rows(X, np.float64).everything(), 4)
    assert float(rows[0, 0]) == 4.0
    torch.testing.assert_close(
        rows[:, 1:].mean(0), torch.zeros(3, dtype=torch.float64), atol=0.01, rtol=0
    )
    torch.testing.assert_close(
        rows[:, 1:].std(0), torch.ones(3, dtype=torch.float64), atol=0.02, rtol=0
    )


def test_a_constant_feature_stays_finite() -> None:
    X = np.full((10, 2), 0.1)
    assert Scaler(X, True, False).rows(X).everything().abs().max() < 1e-6


def dense(taken: torch.Tensor | SparseFeatures, width: int) -> torch.Tensor:
    return taken @ torch.eye(width, dtype=torch.float64)


@pytest.mark.parametrize("made_dense", [False, True])
def test_sparse_rows_are_scaled_where_they_are_not_zero(made_dense: bool) -> None:
    X = features()
    rows = Scaler(sparse.csr_array(X), True, made_dense).rows(sparse.csr_array(X), np.float64)
    expected = torch.from_numpy(np.clip(X / np.sqrt((X**2).sum(0) / (X != 0).sum(0)), -4, 4))
    index = torch.tensor([7, 3, 3, 50])
    assert isinstance(rows.take(index), torch.Tensor) is made_dense
    torch.testing.assert_close(dense(rows.take(index), 5), expected[index])
    torch.testing.assert_close(dense(rows.part(index).everything(), 5), expected[index])


def test_sparse_rows_of_one_length_have_their_unit() -> None:
    X = features() + np.eye(60, 5)
    X /= np.linalg.norm(X, axis=1, keepdims=True).clip(1e-300)
    scaler = Scaler(sparse.csr_array(X), True, False)
    assert not scaler.scales
    rows = scaler.rows(sparse.csr_array(X), np.float64).everything()
    torch.testing.assert_close(dense(rows, 5), torch.from_numpy(X))
    X[0] *= 2
    assert Scaler(sparse.csr_array(X), True, False).scales


def test_a_feature_of_one_sparse_row_alone_is_left_out() -> None:
    X = np.zeros((4, 3))
    X[1:3, 0], X[2, 1], X[:, 2] = 1, 5, 1
    scaler = Scaler(sparse.csr_array(X), False, False)
    kept = torch.from_numpy(X[:, [0, 2]])
    for again in (scaler, Scaler.restored(scaler.state())):
        rows = again.rows(sparse.csr_array(X), np.float64)
        torch.testing.assert_close(dense(rows.everything(), 2), kept)
    # a module was made for all of them
    assert Scaler(sparse.csr_array(X), False, True).rows(X).everything().shape == (4, 3)


def test_few_wide_rows_are_made_dense_at_a_time() -> None:
    wide = sparse.csr_array((9000, 2_000_000), dtype=np.float32)
    assert Scaler(wide, False, True).rows(wide).chunk == 2
    assert Scaler(wide, False, False).rows(wide).chunk > 1000


def test_entries_that_are_stored_twice_or_are_zero_count_as_what_they_are() -> None:
    stored = sparse.csr_array(
        (np.array([1.0, 1.0, 0.0, 2.0, 3.0]), np.array([0, 0, 1, 0, 1]), np.array([0, 3, 4, 5])),
        shape=(3, 2),
    )
    before = stored.copy()
    rows = Scaler(stored, True, False).rows(stored, np.float64)
    torch.testing.assert_close(
        dense(rows.everything(), 1), torch.tensor([[1.0], [1.0], [0.0]], dtype=torch.float64)
    )
    assert (stored.data == before.data).all()


@pytest.mark.parametrize("convert", [np.asarray, sparse.csr_array])
def test_the_loss_of_several_models_has_the_gradient_of_autograd(convert: Any) -> None:
    X, labels = features() / np.logspace(-3, 3, 5), torch.arange(60) % 3
    rows = Scaler(convert(X), False, False).rows(convert(X))
    learner = SoftmaxRegression(rows, 3)
    parts = torch.randn(5, 6), torch.randn(6), torch.rand(2, 60)  # two models, side by side
    weight, bias, weights = (part.requires_grad_() for part in parts)
    y = {"weight": weight, "bias": bias}
    found = learner.fold_loss(y, rows.everything(), labels, weights, 0.3)
    plain = learner.finished(y)
    logits = torch.from_numpy(X).float() @ plain["weight"] + plain["bias"]
    expected = 0.3 * (weight * weight).sum() + sum(
        w @ torch.nn.functional.cross_entropy(z, labels, reduction="none") / 60
        for w, z in zip(weights, logits.split(3, 1), strict=True)
    )
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        *(torch.autograd.grad(loss, (weight, bias, weights)) for loss in (found, expected)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_the_loss_is_the_cross_entropy_and_its_gradient() -> None:
    logits = (100 * torch.randn(30, 8, dtype=torch.float64)).requires_grad_()  # of two models
    labels, weights = torch.arange(30) % 4, torch.rand(2, 30, dtype=torch.float64)
    expected = sum(
        w @ torch.nn.functional.cross_entropy(part, labels, reduction="none")
        for w, part in zip(weights, logits.split(4, 1), strict=True)
    )
    assert isinstance(expected, torch.Tensor)
    by_class = logits.detach().numpy().T.copy()
    places = places_of(labels.numpy(), 2, 4)
    found, gradient = loss_and_gradient(by_class, places, weights.numpy())
    assert found == pytest.approx(float(expected.detach()))
    torch.testing.assert_close(
        torch.from_numpy(gradient.T), torch.autograd.grad(expected, logits)[0]
    )


def test_models_fitted_at_once_are_those_fitted_one_by_one() -> None:
    X, labels = features(), torch.arange(60) % 3
    rows = Scaler(X, True, False).rows(X)
    learner = SoftmaxRegression(rows, 3)
    weights = (torch.rand(3, 60) > 0.3).float()
    together = learner.fit_several(rows, labels, weights, 0.01, [None] * 3, [None] * 3)
    for y, w in zip(together, weights, strict=True):
        alone = learner.predict(learner.fit(rows, labels, w, 0.01, None), rows)
        torch.testing.assert_close(learner.predict(y, rows), alone, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("convert", [np.asarray, sparse.csr_array])
def test_few_rows_of_many_features_are_fitted_in_their_span(convert: Any) -> None:
    X = convert(np.random.default_rng(0).normal(size=(30, 80)))
    rows, labels = Scaler(X, False, False).rows(X), torch.arange(30) % 3
    learner = SoftmaxRegression(rows, 3)
    expected = learner.predict(learner.fit(rows, labels, torch.ones(30), 0.1, None), rows)
    small = learner.compressed(rows)
    y = small.learner.fit(small.rows, labels, torch.ones(30), 0.1, None)
    torch.testing.assert_close(small.learner.predict(y, small.rows), expected, atol=0.01, rtol=0.01)
    torch.testing.assert_close(
        learner.predict(small.expanded(y), rows), expected, atol=0.01, rtol=0.01
    )


@pytest.mark.parametrize("convert", [np.asarray, sparse.csr_array])
def test_curvature_is_the_largest_eigenvalue(convert: Any) -> None:
    X = np.random.default_rng(0).normal(10.0, size=(50, 4)) * [1, 2, 3, 4]
    rows = Scaler(convert(X), False, False).rows(convert(X))
    largest = np.linalg.eigvalsh(np.cov(X.T, bias=True))[-1]
    assert SoftmaxRegression(rows, 3).curvature == pytest.approx(largest / 2, rel=1e-3)


def test_curvature_bounds_the_loss_and_is_estimated_from_some_rows() -> None:
    X = np.random.default_rng(0).normal(2.0, size=(9000, 6)) * np.arange(1, 7)
    rows = Scaler(X, False, False).rows(X)
    learner, labels = SoftmaxRegression(rows, 3), torch.arange(9000) % 3
    largest = np.linalg.eigvalsh(np.cov(X.T, bias=True))[-1]
    assert learner.curvature == pytest.approx(largest / 2, rel=0.1)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        y = {"weight": flat[:18].view(6, 3), "bias": flat[18:]}
        plain = learner.finished(y)
        logits = rows.everything() @ plain["weight"] + plain["bias"]
        return torch.nn.functional.cross_entropy(logits, labels)

    H = torch.autograd.functional.hessian(loss, torch.zeros(21))
    assert float(torch.linalg.eigvalsh(H)[-1]) <= 1.1 * learner.curvature


def test_centring_does_not_change_the_model() -> None:
    X = np.random.default_rng(0).normal(3.0, size=(40, 4))
    rows = Scaler(X, False, False).rows(X)
    learner = SoftmaxRegression(rows, 3)
    y = {"weight": torch.randn(4, 3), "bias": torch.randn(3)}
    centred = torch.from_numpy(X - X.mean(0)).float() @ y["weight"]
    scale = np.sqrt(2 * learner.curvature)
    expected = centred + scale * y["bias"]
    torch.testing.assert_close(learner.predict(y, rows), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("convert", [np.asarray, sparse.csr_array])
def test_fit_is_stationary_and_forgets_weight_zero(convert: Any) -> None:
    X, labels = features(), torch.arange(60) % 3
    X = convert(X / np.abs(X).max(0))
    rows = Scaler(X, False, False).rows(X)
    learner = SoftmaxRegression(rows, 3)
    weights = torch.rand(60)
    weights[:20] = 0.0
    y = learner.fit(rows, labels, weights, 0.01, None)
    other = labels.clone()
    other[:20] = 0
    again = learner.fit(rows, other, weights, 0.01, None)
    torch.testing.assert_close(y["weight"], again["weight"])

    for part in y.values():
        part.requires_grad_()
    loss = 60 / weights.sum() * learner.fold_loss(y, rows.everything(), labels, weights[None])
    (loss + 0.01 * (y["weight"] ** 2).sum()).backward()
    assert max(float(part.grad.abs().max()) for part in y.values()) < 1e-4


class Steep(torch.nn.Linear):
    """A layer that only the smallest rates suit."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return 1000 * super().forward(features)


@pytest.mark.slow
def test_the_rate_of_a_module_suits_it() -> None:
    X = np.random.default_rng(0).normal(size=(400, 5))
    rows = Scaler(X, True, False).rows(X)
    labels = torch.from_numpy(X[:, :3].argmax(1))
    labels[::4] = 0  # so that it is not right to be sure of anything
    chosen = []
    for module in (torch.nn.Linear(5, 3), Steep(5, 3)):
        torch.nn.init.zeros_(module.weight)
        torch.nn.init.zeros_(module.bias)
        learner = ModuleLearner(module, classes=3, batch_size=40, seed=0)
        learner.fit(rows, labels, torch.ones(400), learner.ridge, None)
        chosen.append(learner.settings()["learning_rate"])
    assert chosen[0] == 1e-2
    assert chosen[1] <= 1e-3


@pytest.mark.slow
def test_a_module_forgets_weight_zero() -> None:
    X = np.random.default_rng(0).normal(size=(120, 5))
    rows = Scaler(X, True, False).rows(X)
    labels = torch.from_numpy(X[:, :3].argmax(1))
    other, weights = labels.clone(), torch.ones(120)
    other[:50], weights[:50] = 0, 0.0
    module = torch.nn.Linear(5, 3)
    fits = [
        ModuleLearner(module, classes=3, batch_size=40, seed=0).fit(rows, some, weights, 1e-5, None)
        for some in (labels, other)
    ]
    assert torch.equal(fits[0].weight, fits[1].weight)
    assert (fits[0](rows.everything()).argmax(1) == labels)[50:].float().mean() > 0.9


def test_a_module_with_the_wrong_width_is_named() -> None:
    learner = ModuleLearner(torch.nn.Linear(5, 2), classes=3, batch_size=10, seed=0)
    with pytest.raises(ArgumentError, match=r"3 classes.*\(4, 3\), not \(4, 2\)"):
        learner.logits(learner.start(), torch.zeros(4, 5))


class FreeRegression(SoftmaxRegression):
    """Nearly without a ridge, so that it remembers the labels it was fitted to."""

    @property
    def ridges(self) -> tuple[float, float, float]:
        return 1e-8, 1e-8, 1e-8


def test_no_label_is_judged_by_a_fit_that_has_seen_it() -> None:
    rng = np.random.default_rng(0)
    rows = DenseRows(torch.from_numpy(rng.normal(size=(400, 800))).float())
    labels = torch.from_numpy(rng.integers(0, 2, 400))  # at random: no fit can know the others
    everything = torch.arange(400)
    votes = labels.numpy()[:, None]
    task = CleaningTask(
        rows, labels, everything, everything[:20], everything, everything % 5, 5, False, votes
    )
    learner = FreeRegression(rows, 2)
    fit, alike = CrossFits(learner, task).noisy_only()
    assert (fit.judged.argmax(1) == labels.numpy()).mean() == pytest.approx(0.5, abs=0.08)
    # Trusted rows are predicted by one fold as well, so that both may be compared.
    for number, model in enumerate(fit.folds):
        own = task.trusted[task.fold[task.trusted] == number]
        expected = learner.predict(model, rows.part(own))
        np.testing.assert_allclose(alike[own.numpy()], expected, rtol=1e-5, atol=1e-5)
