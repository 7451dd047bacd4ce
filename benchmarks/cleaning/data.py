"""The data sets, split into noisy, trusted and test samples, and the noise of the labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from bilevel.data import covertype, mnist, newsgroups
from bilevel.errors import InputError

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Split:
    """Samples with correct labels, and the number of classes.

    ``given`` are the labels that people or rules gave, where these are known.
    """

    X: Any
    y: Array
    X_clean: Any
    y_clean: Array
    X_test: Any
    y_test: Array
    classes: int
    given: Array | None = None


class Source(Protocol):
    """Reads a data set and splits it at random, by the seed."""

    def __call__(self, seed: int, data_dir: Path | None, /) -> Split: ...


@dataclass(frozen=True)
class Noise:
    """A fraction of the labels is wrong.

    The kind is "uniform" over the other classes, the "next class", "by class" (of two classes, the
    second is taken for the first twice as often as labels are wrong on average), or "as given", the
    labels that people or rules gave.
    """

    kind: str
    share: float

    def __str__(self) -> str:
        return self.kind if self.kind == "as given" else f"{self.share:.0%} {self.kind}"

    def added(
        self, labels: Array, classes: int, seed: int, given: Array | None = None
    ) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Return the labels with noise, and which of them are wrong."""
        count = len(labels)
        if self.kind == "as given":
            assert given is not None
            return given, given != labels
        rng = np.random.default_rng([seed, int(100 * self.share)])
        wrong = np.zeros(count, dtype=bool)
        wrong[rng.choice(count, round(self.share * count), replace=False)] = True
        if self.kind == "by class":
            second = labels == 1
            often = 2 * self.share
            seldom = (self.share - often * second.mean()) / (1 - second.mean())
            wrong = rng.random(count) < np.where(second, often, seldom)
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


def _real(name: str, data_dir: Path | None) -> Path:
    """A file of real noise, which nothing downloads."""
    path = Path(data_dir or ".") / name
    if not path.exists():
        raise InputError(f"{path} does not exist; --data-dir must name a folder that has {name}")
    return path


def _given_split(
    seed: int, trusted: int, X: Any, right: Array, given: Array, X_test: Any, y_test: Array
) -> Split:
    """Rows whose labels were given by people or rules; some of them were checked."""
    order = np.random.default_rng(seed).permutation(len(right))
    checked, rest = order[:trusted], order[trusted:]
    classes = len(np.unique(right))
    return Split(
        X[rest], right[rest], X[checked], right[checked], X_test, y_test, classes, given[rest]
    )


def hausa_split(seed: int, data_dir: Path | None, trusted: int = 200) -> Split:
    """Split Hausa news titles, labelled by distant supervision, as sparse TF-IDF features."""
    import csv

    from sklearn.feature_extraction.text import TfidfVectorizer

    def read(name: str) -> list[list[str]]:
        with _real(f"real_noise/{name}", data_dir).open(encoding="utf-8", newline="") as file:
            return list(csv.reader(file))[1:]

    train, test = read("hausa.csv"), read("hausa_test.csv")
    names = sorted({row[2] for row in train} | {row[1] for row in train})
    code = {name: number for number, name in enumerate(names)}
    vectorizer = TfidfVectorizer()
    X = vectorizer.fit_transform([row[0] for row in train])
    return _given_split(
        seed,
        trusted,
        X,
        np.array([code[row[2]] for row in train]),
        np.array([code[row[1]] for row in train]),
        vectorizer.transform([row[0] for row in test]),
        np.array([code[row[1]] for row in test]),
    )


@dataclass(frozen=True)
class Cifar10n:
    """Split images of CIFAR-10N, as features, labelled by people.

    Attributes:
        labels: "aggre" (the majority of three people) or "worse" (the worst of three).
        trusted: the number of trusted images.
    """

    labels: str
    trusted: int = 1_000

    def __call__(self, seed: int, data_dir: Path | None) -> Split:
        """Split the images."""
        with np.load(_real("real_noise/cifar10n.npz", data_dir)) as data:
            X, X_test = (data[name].astype(np.float32) for name in ("X", "X_test"))
            right, given, y_test = (
                data[name].astype(np.int64) for name in ("right", self.labels, "y_test")
            )
        return _given_split(seed, self.trusted, X, right, given, X_test, y_test)


def a9a_split(seed: int, data_dir: Path | None, train: int = 500, trusted: int = 30) -> Split:
    """Split a few rows of a9a."""
    with np.load(_real("a9a/a9a.npz", data_dir)) as data:
        X, X_test = (
            np.unpackbits(data[name], axis=1)[:, :123].astype(np.float32)
            for name in ("Xbits_train", "Xbits_test")
        )
        y, y_test = ((data[name] > 0).astype(np.int64) for name in ("y_train", "y_test"))
    order = np.random.default_rng(seed).permutation(len(y))
    noisy, right = order[:train], order[train : train + trusted]
    return Split(X[noisy], y[noisy], X[right], y[right], X_test, y_test, 2)
