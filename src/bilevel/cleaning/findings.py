"""What was found about the labels of some samples."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from bilevel.cleaning.encoding import Encoder, fit
from bilevel.cleaning.estimator import LabelCleaner
from bilevel.cleaning.roles import FEWEST_TRUSTED
from bilevel.cleaning.samples import Labels, Samples, TableSamples
from bilevel.cleaning.saved import DESCRIPTION, TENSORS, CleanedModel
from bilevel.cleaning.wording import listed, shortened
from bilevel.errors import CleaningWarning, InputError

LABELS, CORRECTED, REPORT = "labels.csv", "corrected.csv", "report.html"
NEXT = 20
"""How many rows are named that are to be labelled next."""

GRID = 10_000
"""Qualities and weights are reported in steps of 1 / GRID, rounded down."""

Tell = Callable[[str], None]
"""Receives, in words, what is being done."""


@dataclass(frozen=True)
class Findings:
    """The verdict on the label of each sample.

    Attributes:
        samples: the samples whose labels were judged.
        trusted: the samples whose labels were taken as right, if there are any.
        encoder: turns samples into features.
        cleaner: the fitted estimator.
        classes: the labels in natural order, so that "9" comes before "10".
        given, predicted: the position in ``classes`` of each sample's label and of its prediction.
        quality, weight: in steps of 1 / GRID, rounded down. Where the estimator chose the
            threshold, a quality that would leave its side by that is rounded to the nearest step on
            the right side.
        threshold: labels of a lower quality are suspect; also in these steps.
        seconds: the time that the work took.
    """

    samples: Samples
    trusted: Samples | None
    encoder: Encoder
    cleaner: LabelCleaner
    classes: list[str]
    given: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    quality: npt.NDArray[np.int64]
    weight: npt.NDArray[np.int64]
    threshold: int
    seconds: float

    @property
    def suspect(self) -> npt.NDArray[np.bool_]:
        """Which labels are suspect."""
        return self.quality < self.threshold

    @property
    def confusions(self) -> npt.NDArray[np.int64]:
        """The number of suspect labels for each pair of given and predicted class."""
        counts = np.zeros((len(self.classes), len(self.classes)), dtype=np.int64)
        np.add.at(counts, (self.given[self.suspect], self.predicted[self.suspect]), 1)
        return counts

    def most_confused(self, most: int) -> list[tuple[str, str, int]]:
        """The most frequent pairs of different given and predicted labels, with their counts."""
        counts = self.confusions
        np.fill_diagonal(counts, 0)
        order = np.argsort(-counts, axis=None, kind="stable")[:most]
        pairs = zip(*np.unravel_index(order, counts.shape), strict=True)
        return [
            (self.classes[i], self.classes[j], int(counts[i, j])) for i, j in pairs if counts[i, j]
        ]

    @property
    def next_rows(self) -> list[str]:
        """The names of the rows whose review would help most."""
        rows = self.cleaner.label_next(NEXT).tolist()
        return [str(i) if self.samples.ids is None else self.samples.ids[i] for i in rows]

    @property
    def share_in_words(self) -> str:
        """The estimated share of wrong labels, with its interval."""
        low, high = self.cleaner.wrong_share_interval_
        return (
            f"About {self.cleaner.wrong_share_:.1%} of all labels are wrong, between {low:.1%} and "
            f"{high:.1%}."
        )

    def corrected(self) -> Iterator[pd.DataFrame] | None:
        """The table that was read, with suggested labels, if the samples are one.

        It comes in pieces, some rows at a time. All that is not a label is as it was in the file.
        """
        if not isinstance(self.samples, TableSamples) or self.samples.original is None:
            return None
        return self._relabelled(self.samples, self.samples.original())

    def _relabelled(
        self, samples: TableSamples, pieces: Iterable[pd.DataFrame]
    ) -> Iterator[pd.DataFrame]:
        forms = np.empty(len(self.classes), dtype=object)
        forms[:] = [samples.forms.get(name, name) for name in self.classes]
        first = 0
        for piece in pieces:
            rows = slice(first, first + len(piece))
            labels = piece[samples.label].to_numpy(dtype=object, copy=True)
            suspect = self.suspect[rows]
            labels[suspect] = forms[self.predicted[rows][suspect]]
            corrected = piece.copy(deep=False)
            corrected[samples.label] = labels
            yield corrected
            first = rows.stop

    def table(self) -> pd.DataFrame:
        """One row for each sample, as in ``labels.csv``."""
        names = np.array(self.classes, dtype=object)
        rows = np.arange(len(self.samples))
        suggested = np.where(self.suspect, self.predicted, self.given)
        return pd.DataFrame(
            {
                "row": rows,
                "id": rows if self.samples.ids is None else list(self.samples.ids),
                "given_label": names[self.given],
                "weight": self.weight / GRID,
                "label_quality": self.quality / GRID,
                "verdict": np.where(self.suspect, "suspect", "ok"),
                "suggested_label": names[suggested],
            }
        )

    def model(self) -> CleanedModel:
        """The model that was trained without the suspect labels."""
        return CleanedModel.of(self.cleaner, self.encoder)

    def summary(self) -> list[str]:
        """The findings in five lines, and what there is to be said about columns and models."""
        columns = self.encoder.in_words()
        count = int(self.suspect.sum())
        worst = np.argsort(self.quality, kind="stable")[: min(count, 5)]
        names = [str(i) if self.samples.ids is None else self.samples.ids[i] for i in worst]
        pairs = [
            f"{_quoted(given)} that {'looks' if n == 1 else 'look'} like {_quoted(other)} ({n:,})"
            for given, other, n in self.most_confused(3)
        ]
        return [
            f"{self.samples.counted()} of {_quoted(self.samples.name)} in {len(self.classes)} "
            f"classes, judged {self._help()}.",
            f"{count:,} labels look wrong, {count / len(self.samples):.1%} of all labels.",
            f"Most often: {', '.join(pairs) or 'none'}.",
            f"Look at these first: {self.samples.noun} {listed(names)}."
            if names
            else "There is nothing to look at.",
            self.share_in_words,
            *([] if columns is None else [columns]),
            *self.encoder.notices,
            *(f"Note: {notice}." for notice in self.cleaner.notices_),
        ]

    def _help(self) -> str:
        if self.trusted is None:
            return "without trusted samples, by what similar samples are labelled"
        return f"with {self.trusted.counted()} of {_quoted(self.trusted.name)}"

    def to_json(self) -> dict[str, Any]:
        """The figures as a JSON object."""
        return {
            "samples": len(self.samples),
            "trusted": 0 if self.trusted is None else len(self.trusted),
            "classes": self.classes,
            "suspect": int(self.suspect.sum()),
            "threshold": self.threshold / GRID,
            "confusions": self.confusions.tolist(),
            "settings": {name: float(v) for name, v in self.cleaner.settings_.items()},
            "wrong_share": self.cleaner.wrong_share_,
            "wrong_share_interval": list(self.cleaner.wrong_share_interval_),
            "comparison": self.cleaner.comparison_,
            "label_next": self.next_rows,
            "notices": [*self.encoder.notices, *self.cleaner.notices_],
            "seconds": self.seconds,
            "files": [
                LABELS,
                *([] if self.corrected() is None else [CORRECTED]),
                *(TENSORS, DESCRIPTION, REPORT),
            ],
        }


def clean(
    samples: Samples,
    trusted: Samples | None,
    encoder: Encoder | None = None,
    *,
    threshold: float | None = None,
    seed: int = 0,
    max_steps: int = 10,
    checkpoint: Path | None = None,
    tell: Tell = lambda stage: None,
) -> Findings:
    """Judge the labels of samples with the help of trusted samples.

    Args:
        samples: the samples to judge.
        trusted: samples whose labels are right; None: there are none.
        encoder: turns both into features; None: it is fitted to ``samples``.
        threshold: labels of a lower quality are suspect; None: that with which the suspects are
            expected to have the highest F1 score.
        seed: determines everything random.
        max_steps: the most steps of the weights.
        checkpoint: a folder, as for :class:`~bilevel.LabelCleaner`.
        tell: receives, in words, what is being done.
    """
    start = time.perf_counter()
    encoder = encoder or fit(samples)
    y, right = _checked_labels(samples, trusted)
    tell("computing features")
    X = encoder.encode(samples)
    X_clean = None if trusted is None else encoder.encode(trusted)
    tell("judging labels")
    cleaner = LabelCleaner(random_state=seed, max_steps=max_steps, checkpoint=checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CleaningWarning)  # they are among the findings
        cleaner.fit(X, y, X_clean=X_clean, y_clean=right)
    issues = cleaner.label_issues()
    quality, limit = _on_grid(cleaner.label_quality_), round((threshold or 0.0) * GRID)
    if threshold is None:
        quality, limit = _apart(quality, issues["is_label_issue"].to_numpy())
    classes = sorted(cleaner.classes_.tolist(), key=_natural_order)
    codes = {name: code for code, name in enumerate(classes)}
    return Findings(
        samples=samples,
        trusted=trusted,
        encoder=encoder,
        cleaner=cleaner,
        classes=classes,
        given=issues["given_label"].map(codes).to_numpy(np.int64),
        predicted=issues["predicted_label"].map(codes).to_numpy(np.int64),
        quality=quality,
        weight=_on_grid(cleaner.sample_weight_),
        threshold=limit,
        seconds=time.perf_counter() - start,
    )


def _checked_labels(samples: Samples, trusted: Samples | None) -> tuple[Labels, Labels | None]:
    """The labels of both sets; refuses trusted labels that the other samples do not have."""
    assert samples.labels is not None
    classes = np.unique(samples.labels)
    if len(classes) < 2:
        raise InputError(
            f"{samples.name} has one class only, {str(classes[0])!r}; there is no other class that "
            f"a label could be mistaken for"
        )
    if trusted is None:
        return samples.labels, None
    assert trusted.labels is not None
    if len(trusted) < FEWEST_TRUSTED:
        raise InputError(
            f"{trusted.name} has {trusted.counted()}, fewer than {FEWEST_TRUSTED}; trust some of "
            f"each class, better ten, or leave out --trusted"
        )
    unknown = np.setdiff1d(np.unique(trusted.labels), classes)
    if len(unknown):
        labels = listed(sorted(unknown.tolist(), key=_natural_order))
        raise InputError(
            f"{trusted.name} has the label {labels}, which {samples.name} does not have; correct "
            f"it, or leave these samples out"
        )
    return samples.labels, trusted.labels


def _apart(
    quality: npt.NDArray[np.int64], issue: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], int]:
    """Qualities and a threshold on the grid, below which are the issues and no other label.

    Qualities that differ by less than a step of the grid may be on both sides of the threshold.
    """
    if not issue.any():
        return quality, 0
    limit = min(int(quality[issue].max()) + 1, GRID)
    return np.where(issue, np.minimum(quality, limit - 1), np.maximum(quality, limit)), limit


def _on_grid(values: Any) -> npt.NDArray[np.int64]:
    # Rounding down keeps every value on its side of a threshold on the grid.
    steps: npt.NDArray[np.int64] = np.floor(np.asarray(values) * GRID).astype(np.int64)
    return steps


def _natural_order(label: str) -> list[tuple[int, int, str]]:
    """A sort key that puts "9" before "10"."""
    pieces = re.split(r"([0-9]+)", str(label))
    return [(0, int(p), "") if p.isascii() and p.isdigit() else (1, 0, p) for p in pieces if p]


def _quoted(name: str) -> str:
    return repr(shortened(name, 40))
