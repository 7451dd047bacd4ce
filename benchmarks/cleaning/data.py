"""The data sets, split into noisy, trusted and test samples, and the noise of the labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from bilevel.data import covertype, mnist, newsgroups

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Split:
    """Samples with correct labels, and the number of classes."""

    X: Any
    y: Array
    X_clean: Any
    y_clean: Array
    X_test: Any
    y_test: Array
    classes: int


class Source(Protocol):
    """Reads a data set and splits it at random, by the seed."""

    def __call__(self, seed: int, data_dir: Path | None, /) -> Split: ...


@dataclass(frozen=True)
class Noise:
    """A fraction of the labels is wrong: "uniform" over the other classes, or the "next class"."""

    kind: str
    share: float

    def __str__(self) -> str:
        return f"{self.share:.0%} {self.kind}"

    def added(self, labels: Array, classes: int, seed: int) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Return the labels with noise, and which of them are wrong."""
        count = len(labels)
        rng = np.random.default_rng([seed, int(100 * self.share)])
        wrong = np.zeros(count, dtype=bool)
        wrong[rng.choice(count, round(self.share * count), replace=False)] = True
        uniform = rng.integers(1, classes, count)
        shift = uniform if self.kind == "uniform" else np.ones(count, dtype=np.int64)
        return np.where(wrong, (labels + shift) % classes, labels), wrong


def mnist_split(
    seed: int, data_dir: Path | None, train: int = 19_000, trusted: int = 1_000
) -> Split:
    """Split the training images of MNIST; its own test images are the test samples."""
    data = mnist(data_dir)
    images, tests = (
        part.flatten(1).numpy().astype(np.float32) / 255
        for part in (data.train_images, data.test_images)
    )
    labels = data.train_labels.numpy()
    order = np.random.default_rng(seed).permutation(len(labels))
    noisy, right = order[:train], order[train : train + trusted]
    return Split(
        images[noisy],
        labels[noisy],
        images[right],
        labels[right],
        tests,
        data.test_labels.numpy(),
        10,
    )


def newsgroups_split(seed: int, data_dir: Path | None, trusted: int = 500) -> Split:
    """Split the messages of 20 Newsgroups, as sparse TF-IDF features."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    data = newsgroups(data_dir)
    vectorizer = TfidfVectorizer()
    X, X_test = vectorizer.fit_transform(data.train_texts), vectorizer.transform(data.test_texts)
    labels = data.train_labels.numpy()
    order = np.random.default_rng(seed).permutation(len(labels))
    right, noisy = order[:trusted], order[trusted:]
    return Split(
        X[noisy],
        labels[noisy],
        X[right],
        labels[right],
        X_test,
        data.test_labels.numpy(),
        len(data.names),
    )


def covertype_split(
    seed: int,
    data_dir: Path | None,
    train: int = 100_000,
    trusted: int = 1_000,
    test: int = 50_000,
) -> Split:
    """Split a sample of Covertype."""
    data = covertype(data_dir)
    X, labels = data.features.numpy(), data.labels.numpy()
    order = np.random.default_rng(seed).permutation(len(labels))
    noisy, right, tests = np.split(order[: train + trusted + test], [train, train + trusted])
    return Split(X[noisy], labels[noisy], X[right], labels[right], X[tests], labels[tests], 7)
