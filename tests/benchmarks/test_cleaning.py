"""``python -m benchmarks cleaning`` in small."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.linear_model import LogisticRegression

from benchmarks import cleaning
from benchmarks.cleaning import Case, Noise, Split, data
from bilevel.data import Covertype, Mnist, Newsgroups
from bilevel.errors import ArgumentError


def made(seed: int, data_dir: Path | None) -> Split:
    rng = np.random.default_rng(seed)
    y = rng.integers(3, size=800)
    X = rng.normal(size=(800, 5)) + 4 * np.eye(3, 5)[y]
    return Split(X[:500], y[:500], X[500:600], y[500:600], X[600:], y[600:], 3)


@pytest.fixture(autouse=True)
def cases(monkeypatch: pytest.MonkeyPatch) -> None:
    noises = (Noise("uniform", 0.2), Noise("next class", 0.3))
    rivals = {"logistic regression": LogisticRegression}
    monkeypatch.setattr(
        cleaning,
        "CASES",
        {
            "linear": Case(made, noises, rivals),
            "module": Case(made, noises[:1], rivals, lambda: torch.nn.Linear(5, 3)),
        },
    )


@pytest.mark.slow
def test_wrong_labels_are_found() -> None:
    rows = [row for row in cleaning.run() if row.method == "LabelCleaner"]
    assert [(row.data, row.noise) for row in rows] == [
        ("linear", "20% uniform"),
        ("linear", "30% next class"),
        ("module", "20% uniform"),
    ]
    for row in rows:
        assert row.auc is not None
        assert row.f1 is not None
        assert min(row.auc, row.accuracy, row.f1) > 0.9
        assert row.weight_auc is not None
        assert row.seconds > 0


def test_cleanlab_stands_beside_it() -> None:
    pytest.importorskip("cleanlab")
    ours, theirs, *plain = cleaning.run(only=["module"])
    assert [row.method for row in plain] == ["trusted only", "noisy only", "noisy and trusted"]
    assert (theirs.method, theirs.model, theirs.weight_auc) == (
        "cleanlab",
        "logistic regression",
        None,
    )
    assert theirs.auc is not None
    assert theirs.f1 is not None
    assert min(theirs.auc, theirs.accuracy, theirs.f1) > 0.9
    assert ours.noise == theirs.noise
    table = cleaning.table([ours, theirs])
    assert (table.row_count, table.caption) == (2, None)


@pytest.mark.slow
def test_the_table_has_the_means_over_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cleanlab", None)
    rows = cleaning.run(only=["module"], seed=3, seeds=2)
    assert [row.seed for row in rows] == [3] * 4 + [4] * 4
    table = cleaning.table(rows)
    assert table.row_count == 4
    ours = [row.accuracy for row in rows if row.method == "LabelCleaner"]
    shown = dict(zip([c.header for c in table.columns], table.columns, strict=True))["accuracy"]
    assert next(iter(shown.cells)) == f"{np.mean(ours):.1%}"


@pytest.mark.slow
def test_without_cleanlab_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cleanlab", None)
    rows = cleaning.run(only=["module"])
    assert [row.method for row in rows][:2] == ["LabelCleaner", "trusted only"]
    assert "pip install cleanlab" in str(cleaning.table(rows).caption)


def test_other_data_are_refused() -> None:
    with pytest.raises(ArgumentError, match="'iris', but the data are linear, module"):
        cleaning.run(only=["iris"])


@pytest.mark.parametrize("kind", ["uniform", "next class"])
def test_noise_is_what_it_is_called(kind: str) -> None:
    labels = np.arange(6000) % 4
    given, wrong = Noise(kind, 0.25).added(labels, 4, seed=0)
    assert wrong.sum() == 1500
    assert ((given != labels) == wrong).all()
    shifts = np.bincount((given - labels)[wrong] % 4, minlength=4) / 1500
    expected = [0, 1 / 3, 1 / 3, 1 / 3] if kind == "uniform" else [0, 1, 0, 0]
    np.testing.assert_allclose(shifts, expected, atol=0.05)


def digits(data_dir: Path | None) -> Mnist:
    labels = torch.arange(30) % 10
    images = labels.to(torch.uint8).view(-1, 1, 1).expand(30, 2, 2)
    return Mnist(images[:20], labels[:20], images[20:], labels[20:])


def messages(data_dir: Path | None) -> Newsgroups:
    texts, labels = ["motor wheel", "orbit launch"] * 10, torch.arange(20) % 2
    return Newsgroups(texts, labels, texts[:4], labels[:4], ["rec.autos", "sci.space"])


def patches(data_dir: Path | None) -> Covertype:
    labels = torch.arange(40) % 7
    return Covertype(labels.float().view(-1, 1).expand(40, 54), labels)


@pytest.mark.parametrize(
    ("name", "source", "split", "read"),
    [
        (
            "mnist",
            digits,
            lambda: data.mnist_split(3, None, train=12, trusted=5),
            lambda X: np.rint(255 * X[:, 0]),
        ),
        (
            "newsgroups",
            messages,
            lambda: data.newsgroups_split(3, None, trusted=5),
            lambda X: np.where(X.toarray()[:, 1] > 0, 0, 1),
        ),
        (
            "covertype",
            patches,
            lambda: data.covertype_split(3, None, train=20, trusted=10, test=8),
            lambda X: X[:, 7],
        ),
    ],
)
def test_samples_keep_their_labels(
    name: str,
    source: Callable[..., object],
    split: Callable[[], Split],
    read: Callable[..., np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data, name, source)
    found = split()
    assert sparse.issparse(found.X) is (name == "newsgroups")
    for X, y in ((found.X, found.y), (found.X_clean, found.y_clean), (found.X_test, found.y_test)):
        assert X.shape[0] == len(y) > 0
        np.testing.assert_array_equal(read(X), y)
    assert found.y.max() < found.classes
