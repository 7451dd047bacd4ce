"""LabelCleaner with its default settings beside cleanlab: the labels they find, and their time.

Three data sets have labels made wrong at random: MNIST (19,000 training images, 1,000 trusted),
20 Newsgroups (TF-IDF of 10,814 messages, sparse; 500 trusted) and Covertype (100,000 patches, 1,000
trusted, 50,000 for the test; with a module of one hidden layer). ``numpy.random.default_rng(seed)``
chooses the samples. The noise is uniform over the other classes, or replaces a class by the next.

Others have labels as people or rules gave them, read from ``--data-dir`` and left out where they
are not there: Hausa titles (distant supervision, 200 trusted), CIFAR-10N (features; 1,000 trusted)
and 500 rows of a9a with 30 trusted. Beside them stand the plain fits of the same models: to the
trusted samples, to the others, and to both; they have no verdict on labels but that of the first,
which is the probability of the given label and whether it is the predicted one.

cleanlab is used as its documentation recommends: ``find_label_issues`` on probabilities by 5-fold
cross validation; then the same model is trained again without the labels that were found. Its
models are scikit-learn's, with default settings unless the table says otherwise; it does not use
the trusted samples. If cleanlab is not installed, only LabelCleaner is measured.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table

from benchmarks import report
from benchmarks.cleaning.cases import CASES, HIDDEN, Case
from benchmarks.cleaning.data import Array, Noise, Split
from bilevel.errors import ArgumentError, InputError
from bilevel.errors.extras import needed

__all__ = ["CASES", "Case", "Noise", "Row", "Split", "run", "table"]


@dataclass(frozen=True)
class Row:
    """One method on one data set with one kind of noise.

    Attributes:
        data, noise: the data set and the kind of noise.
        seed: chooses the samples and everything else that is random.
        share: the fraction of labels that are wrong.
        method, model: the method and the model that it trains.
        auc: the AUC with which the label quality separates correct from wrong labels, if there is
            a quality.
        weight_auc: the AUC of LabelCleaner's weights; None for other methods.
        f1: the F1 score of the labels that are suspected, if any are.
        calibration_error: the mean difference, over tenths of the quality, between LabelCleaner's
            quality and the share of right labels.
        right_before, right_after: the share of right labels before and after all suggestions of
            LabelCleaner are accepted.
        accuracy: the test accuracy of the model trained without the suspected labels.
        seconds: the elapsed time until that model was trained.
        cpu_seconds: the processor time until then.
    """

    data: str
    noise: str
    seed: int
    share: float
    method: str
    model: str
    auc: float | None
    weight_auc: float | None
    f1: float | None
    accuracy: float
    seconds: float
    cpu_seconds: float
    calibration_error: float | None = None
    right_before: float | None = None
    right_after: float | None = None


def run(
    *,
    seed: int = 0,
    seeds: int = 1,
    only: Sequence[str] = (),
    data_dir: Path | None = None,
    track: report.Track = iter,
) -> list[Row]:
    """Measure every kind of noise on every data set, or on those in ``only``.

    Args:
        seed, seeds: the first seed, and how many there are.
        only: the names of the data sets; none: all of them.
        data_dir: the folder with the data sets.
        track: shows progress.
    """
    with needed("clean", "sklearn", "threadpoolctl"):
        from threadpoolctl import threadpool_limits
    unknown = [name for name in only if name not in CASES]
    if unknown:
        raise ArgumentError(f"only names {unknown[0]!r}, but the data are {', '.join(CASES)}")
    wanted = [
        (name, noise, number)
        for name in (only or CASES)
        for number in range(seed, seed + seeds)
        for noise in CASES[name].noises
    ]
    splits = _LastSplit(data_dir)
    rows: list[Row] = []
    with threadpool_limits(torch.get_num_threads()), warnings.catch_warnings():
        # With its default settings logistic regression stops before it has converged.
        warnings.filterwarnings("ignore", message="lbfgs failed to converge")
        _warm_up()
        for name, noise, number in track(wanted):
            try:
                split = splits.of(name, number)
            except InputError:
                if name in only:
                    raise
                continue  # nothing downloads it
            given, wrong = noise.added(split.y, split.classes, number, split.given)
            for found in _contestants(CASES[name], split, given, number):
                rows.append(found.row(name, noise, number, split, wrong))
    return rows


def table(rows: Sequence[Row]) -> Table:
    """Lay the rows out for printing: one line for all seeds, with the means."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.data, row.noise, row.method, row.model), []).append(row)

    def mean(name: str, form: str) -> Callable[[list[Row]], str]:
        def shown(group: list[Row]) -> str:
            values = [getattr(row, name) for row in group]
            return "" if None in values else format(float(np.mean(values)), form)

        return shown

    shown = report.table(
        "wrong labels, found with the help of trusted ones",
        list(groups.values()),
        {
            "data": lambda group: group[0].data,
            "noise": lambda group: group[0].noise,
            "by": lambda group: group[0].method,
            "model": lambda group: group[0].model,
            "AUC": mean("auc", ".4f"),
            "F1": mean("f1", ".3f"),
            "accuracy": mean("accuracy", ".1%"),
            "calibration": mean("calibration_error", ".3f"),
            "right before": mean("right_before", ".3f"),
            "after": mean("right_after", ".3f"),
            "seconds": mean("seconds", ".1f"),
            "of the CPU": mean("cpu_seconds", ".1f"),
        },
    )
    if all(row.method != "cleanlab" for row in rows):
        shown.caption = "cleanlab is left out, because it is not installed (pip install cleanlab)"
    return shown


@dataclass
class _LastSplit:
    """Keeps the split that was asked for last; several would not fit into a small machine."""

    data_dir: Path | None
    last: tuple[str, int, Split] | None = field(default=None)

    def of(self, name: str, seed: int) -> Split:
        """The data set, split by that seed."""
        if self.last is None or self.last[:2] != (name, seed):
            self.last = None
            self.last = name, seed, CASES[name].source(seed, self.data_dir)
        return self.last[2]


@dataclass(frozen=True)
class _Found:
    """The result of one method, and its times."""

    method: str
    model: str
    quality: Array | None
    suspected: npt.NDArray[np.bool_] | None
    predictor: Any
    seconds: float
    cpu_seconds: float
    weights: Array | None = None
    suggested: Array | None = None

    def row(
        self, data: str, noise: Noise, seed: int, split: Split, wrong: npt.NDArray[np.bool_]
    ) -> Row:
        from sklearn.metrics import f1_score, roc_auc_score

        weights = self.weights
        return Row(
            data=data,
            noise=str(noise),
            seed=seed,
            share=noise.share,
            method=self.method,
            model=self.model,
            auc=None if self.quality is None else float(roc_auc_score(~wrong, self.quality)),
            weight_auc=None if weights is None else float(roc_auc_score(~wrong, weights)),
            f1=None if self.suspected is None else float(f1_score(wrong, self.suspected)),
            accuracy=float(self.predictor.score(split.X_test, split.y_test)),
            seconds=self.seconds,
            cpu_seconds=self.cpu_seconds,
            **self._after(split, wrong),
        )

    def _after(self, split: Split, wrong: npt.NDArray[np.bool_]) -> dict[str, float]:
        if self.suggested is None or self.quality is None:
            return {}
        bins = np.minimum((self.quality * 10).astype(int), 9)
        off = [
            abs(self.quality[bins == b].sum() - (~wrong)[bins == b].sum()) for b in np.unique(bins)
        ]
        return {
            "calibration_error": float(sum(off)) / len(wrong),
            "right_before": float(1 - wrong.mean()),
            "right_after": float((self.suggested == split.y).mean()),
        }


def _contestants(case: Case, split: Split, given: Array, seed: int) -> Iterator[_Found]:
    yield _label_cleaner(case, split, given, seed)
    if _cleanlab() is not None:
        for name, make in case.rivals.items():
            yield _by_cleanlab(name, make(), split, given)
    for name, make in case.rivals.items():
        yield from _plain(name, make, split, given)


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
        cleaner.label_issues()["predicted_label"].to_numpy(),
    )


def _plain(name: str, make: Any, split: Split, given: Array) -> Iterator[_Found]:
    """The fits that one would try without any method."""
    from scipy import sparse

    stacked = sparse.vstack if sparse.issparse(split.X) else np.concatenate
    both = stacked([split.X, split.X_clean]), np.concatenate([given, split.y_clean])
    for method, samples in (
        ("trusted only", (split.X_clean, split.y_clean)),
        ("noisy only", (split.X, given)),
        ("noisy and trusted", both),
    ):
        watch = _Watch()
        model = make().fit(*samples)
        quality = suspected = None
        if method == "trusted only":
            p = np.zeros((len(given), split.classes))
            p[:, model.classes_] = model.predict_proba(split.X)
            quality, suspected = p[np.arange(len(given)), given], p.argmax(1) != given
        yield _Found(method, name, quality, suspected, model, *watch.read())


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
    """Import cleanlab; None if it is not installed."""
    try:
        import cleanlab.filter
        import cleanlab.rank
    except ImportError:
        return None
    return cleanlab


def _warm_up() -> None:
    """Warm up: what a process imports at its first fit is not measured."""
    from bilevel.cleaning import LabelCleaner

    X = np.random.default_rng(0).normal(size=(60, 2))
    LabelCleaner(max_steps=1).fit(X, X[:, 0] > 0)
    _cleanlab()


class _Watch:
    """A stopwatch of elapsed time and of processor time."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Return the elapsed seconds and the processor seconds."""
        return time.perf_counter() - self._start[0], time.process_time() - self._start[1]
