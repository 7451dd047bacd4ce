"""LabelCleaner with its default settings beside cleanlab: what they find, and how long they take.

Three data sets, with labels made wrong at random: MNIST (19,000 images to train on, 1,000 trusted),
20 Newsgroups (TF-IDF of 10,814 messages, sparse; 500 trusted) and Covertype (100,000 patches, 1,000
trusted, 50,000 to test), the latter with a module of one hidden layer. Which samples these are is
said by ``numpy.random.default_rng(seed)``. Noise is uniform over the other classes, or takes every
class for the next one.

cleanlab is used as its documentation has it: ``find_label_issues`` on probabilities by 5-fold cross
validation, then the same model is trained again without what was found. Its models are
scikit-learn's, with default settings unless the table says otherwise; it makes no use of trusted
samples. Where it is not installed, only LabelCleaner is measured.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table
from torch import nn

from benchmarks import report
from bilevel.data import covertype, mnist, newsgroups
from bilevel.errors import ArgumentError
from bilevel.errors.extras import needed

Array: TypeAlias = npt.NDArray[Any]

HIDDEN = 128
"""Units of the hidden layer of both networks on Covertype."""


@dataclass(frozen=True)
class Split:
    """Samples with labels that are all right, and the number of classes."""

    X: Any
    y: Array
    X_clean: Any
    y_clean: Array
    X_test: Any
    y_test: Array
    classes: int


class Source(Protocol):
    """Reads a data set and divides it, by the seed."""

    def __call__(self, seed: int, data_dir: Path | None, /) -> Split: ...


@dataclass(frozen=True)
class Noise:
    """A part of the labels is wrong: each one any other, or each one the next."""

    kind: str
    share: float

    def __str__(self) -> str:
        return f"{self.share:.0%} {self.kind}"

    def added(self, labels: Array, classes: int, seed: int) -> tuple[Array, npt.NDArray[np.bool_]]:
        """The labels with noise, and which of them are wrong."""
        count = len(labels)
        rng = np.random.default_rng([seed, int(100 * self.share)])
        wrong = np.zeros(count, dtype=bool)
        wrong[rng.choice(count, round(self.share * count), replace=False)] = True
        uniform = rng.integers(1, classes, count)
        shift = uniform if self.kind == "uniform" else np.ones(count, dtype=np.int64)
        return np.where(wrong, (labels + shift) % classes, labels), wrong


@dataclass(frozen=True)
class Case:
    """A data set, its kinds of noise, and the models.

    Attributes:
        source, noises: as they say.
        rivals: the models for cleanlab by name, as functions that make them.
        model: makes the module for LabelCleaner; None: its default.
    """

    source: Source
    noises: tuple[Noise, ...]
    rivals: Mapping[str, Callable[[], Any]]
    model: Callable[[], nn.Module] | None = None


@dataclass(frozen=True)
class Row:
    """One method on one data set with one kind of noise.

    Attributes:
        data, noise: which.
        share: of the labels that are wrong.
        method, model: which.
        auc: that of the label quality for right labels.
        weight_auc: that of LabelCleaner's raw weights.
        f1: of the labels that are called wrong.
        accuracy: on the test set, of the model trained without these.
        seconds: until that model was there, as a clock has it.
        cpu_seconds: the same, of the processor.
    """

    data: str
    noise: str
    share: float
    method: str
    model: str
    auc: float
    weight_auc: float | None
    f1: float
    accuracy: float
    seconds: float
    cpu_seconds: float


def run(
    *,
    seed: int = 0,
    only: Sequence[str] = (),
    data_dir: Path | None = None,
    track: report.Track = iter,
) -> list[Row]:
    """Every kind of noise on every data set, or on those named."""
    with needed("clean", "sklearn", "threadpoolctl"):
        from threadpoolctl import threadpool_limits
    unknown = [name for name in only if name not in CASES]
    if unknown:
        raise ArgumentError(f"only names {unknown[0]!r}, but the data are {', '.join(CASES)}")
    wanted = [(name, noise) for name in (only or CASES) for noise in range(len(CASES[name].noises))]
    splits = _Kept(seed, data_dir)
    rows: list[Row] = []
    with threadpool_limits(torch.get_num_threads()), warnings.catch_warnings():
        # by its default settings logistic regression ends before it has converged
        warnings.filterwarnings("ignore", message="lbfgs failed to converge")
        _load_once()
        for name, number in track(wanted):
            case = CASES[name]
            noise, split = case.noises[number], splits[name]
            given, wrong = noise.added(split.y, split.classes, seed)
            for found in _contestants(case, split, given, seed):
                rows.append(found.row(name, noise, split, wrong))
    return rows


def table(rows: Sequence[Row]) -> Table:
    """The rows to read."""
    shown = report.table(
        "wrong labels, found with a few that are right",
        rows,
        {
            "data": lambda row: row.data,
            "noise": lambda row: row.noise,
            "by": lambda row: row.method,
            "model": lambda row: row.model,
            "AUC": lambda row: f"{row.auc:.4f}",
            "F1": lambda row: f"{row.f1:.3f}",
            "accuracy": lambda row: f"{row.accuracy:.1%}",
            "seconds": lambda row: f"{row.seconds:.1f}",
            "of the CPU": lambda row: f"{row.cpu_seconds:.1f}",
        },
    )
    if all(row.method != "cleanlab" for row in rows):
        shown.caption = "cleanlab is not installed (pip install cleanlab), and left out"
    return shown


@dataclass
class _Kept:
    """The last split that was asked for; several at once would not fit into small machines."""

    seed: int
    data_dir: Path | None
    last: tuple[str, Split] | None = field(default=None)

    def __getitem__(self, name: str) -> Split:
        if self.last is None or self.last[0] != name:
            self.last = None
            self.last = name, CASES[name].source(self.seed, self.data_dir)
        return self.last[1]


@dataclass(frozen=True)
class _Found:
    """What one method found, and its time."""

    method: str
    model: str
    quality: Array
    suspected: npt.NDArray[np.bool_]
    predictor: Any
    seconds: float
    cpu_seconds: float
    weights: Array | None = None

    def row(self, data: str, noise: Noise, split: Split, wrong: npt.NDArray[np.bool_]) -> Row:
        from sklearn.metrics import f1_score, roc_auc_score

        weights = self.weights
        return Row(
            data=data,
            noise=str(noise),
            share=noise.share,
            method=self.method,
            model=self.model,
            auc=float(roc_auc_score(~wrong, self.quality)),
            weight_auc=None if weights is None else float(roc_auc_score(~wrong, weights)),
            f1=float(f1_score(wrong, self.suspected)),
            accuracy=float(self.predictor.score(split.X_test, split.y_test)),
            seconds=self.seconds,
            cpu_seconds=self.cpu_seconds,
        )


def _contestants(case: Case, split: Split, given: Array, seed: int) -> Iterator[_Found]:
    yield _label_cleaner(case, split, given, seed)
    if _cleanlab() is not None:
        for name, make in case.rivals.items():
            yield _by_cleanlab(name, make(), split, given)


def _label_cleaner(case: Case, split: Split, given: Array, seed: int) -> _Found:
    from bilevel.cleaning import LabelCleaner

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = None if case.model is None else case.model()
    watch = _Watch()
    cleaner = LabelCleaner(model, random_state=seed)
    cleaner.fit(split.X, given, X_clean=split.X_clean, y_clean=split.y_clean)
    seconds, cpu_seconds = watch.read()
    return _Found(
        "LabelCleaner",
        "softmax regression" if model is None else f"{HIDDEN} hidden units",
        cleaner.label_quality_,
        cleaner.label_issues()["is_label_issue"].to_numpy(),
        cleaner,
        seconds,
        cpu_seconds,
        cleaner.sample_weight_,
    )


def _by_cleanlab(name: str, model: Any, split: Split, given: Array) -> _Found:
    from sklearn.model_selection import cross_val_predict

    cleanlab = _cleanlab()
    watch = _Watch()
    p = cross_val_predict(model, split.X, given, cv=5, method="predict_proba")
    suspected = cleanlab.filter.find_label_issues(given, p, n_jobs=1)
    quality = cleanlab.rank.get_label_quality_scores(given, p)
    model.fit(split.X[~suspected], given[~suspected])
    return _Found("cleanlab", name, quality, suspected, model, *watch.read())


def _cleanlab() -> Any:
    """The package, or None where it is not installed."""
    try:
        import cleanlab.filter
        import cleanlab.rank
    except ImportError:
        return None
    return cleanlab


def _load_once() -> None:
    """What a process loads at its first fit is no part of any."""
    from bilevel.cleaning import LabelCleaner

    X = np.random.default_rng(0).normal(size=(60, 2))
    LabelCleaner(max_steps=1).fit(X, X[:, 0] > 0)
    _cleanlab()


class _Watch:
    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Seconds as a clock has them, and of the processor."""
        return time.perf_counter() - self._start[0], time.process_time() - self._start[1]


def _mnist(seed: int, data_dir: Path | None, train: int = 19_000, trusted: int = 1_000) -> Split:
    data = mnist(data_dir)
    images, tests = (
        part.flatten(1).numpy().astype(np.float32) / 255
        for part in (data.train_images, data.test_images)
    )
    labels = data.train_labels.numpy()
    order = np.random.default_rng(seed).permutation(len(labels))
    some, right = order[:train], order[train : train + trusted]
    return Split(
        images[some],
        labels[some],
        images[right],
        labels[right],
        tests,
        data.test_labels.numpy(),
        10,
    )


def _newsgroups(seed: int, data_dir: Path | None, trusted: int = 500) -> Split:
    from sklearn.feature_extraction.text import TfidfVectorizer

    data = newsgroups(data_dir)
    vectorizer = TfidfVectorizer()
    X, X_test = vectorizer.fit_transform(data.train_texts), vectorizer.transform(data.test_texts)
    labels = data.train_labels.numpy()
    order = np.random.default_rng(seed).permutation(len(labels))
    right, some = order[:trusted], order[trusted:]
    return Split(
        X[some],
        labels[some],
        X[right],
        labels[right],
        X_test,
        data.test_labels.numpy(),
        len(data.names),
    )


def _covertype(
    seed: int,
    data_dir: Path | None,
    train: int = 100_000,
    trusted: int = 1_000,
    test: int = 50_000,
) -> Split:
    data = covertype(data_dir)
    X, labels = data.features.numpy(), data.labels.numpy()
    order = np.random.default_rng(seed).permutation(len(labels))
    some, right, tests = np.split(order[: train + trusted + test], [train, train + trusted])
    return Split(X[some], labels[some], X[right], labels[right], X[tests], labels[tests], 7)


def _logistic_regression(**settings: Any) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(**settings)


def _standardised(model: Any) -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), model)


def _network() -> Any:
    from sklearn.neural_network import MLPClassifier

    return _standardised(MLPClassifier((HIDDEN,), early_stopping=True, random_state=0))


CASES: dict[str, Case] = {
    "mnist": Case(
        _mnist,
        (
            Noise("uniform", 0.1),
            Noise("uniform", 0.3),
            Noise("uniform", 0.5),
            Noise("next class", 0.4),
        ),
        {
            "logistic regression": _logistic_regression,
            "the same, C = 0.01": lambda: _logistic_regression(C=0.01),
        },
    ),
    "newsgroups": Case(
        _newsgroups,
        (Noise("uniform", 0.3),),
        {"logistic regression": _logistic_regression},
    ),
    "covertype": Case(
        _covertype,
        (Noise("uniform", 0.2),),
        {
            f"{HIDDEN} hidden units": _network,
            "logistic regression": lambda: _standardised(_logistic_regression()),
        },
        lambda: nn.Sequential(nn.Linear(54, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 7)),
    ),
}
"""By the name that ``--only`` takes."""
