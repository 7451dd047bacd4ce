"""From samples to what was found about their labels, and from that to a folder of results."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from bilevel.cleaning import encoding
from bilevel.cleaning.encoding import ColumnChoices, Encoder
from bilevel.cleaning.estimator import LabelCleaner
from bilevel.cleaning.reading import listed, read
from bilevel.cleaning.samples import Samples
from bilevel.cleaning.saved import DESCRIPTION, TENSORS, CleanedModel
from bilevel.data import output as folders
from bilevel.data.output import printable
from bilevel.errors import InputError, OutputError

LABELS, REPORT = "labels.csv", "report.html"

GRID = 10_000
"""Qualities and weights are reported in steps of 1 / GRID, rounded down."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Findings:
    """What was found.

    Attributes:
        samples: those whose labels were judged.
        trusted: those whose labels were taken as right.
        classes: the labels, in the order in which people count.
        given, predicted: for each sample, the number of its class.
        quality, weight: in steps of 1 / GRID, rounded down.
        threshold: labels of a lower quality are suspect; also in these steps.
        seconds: that the work took.
    """

    samples: Samples
    trusted: Samples
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
        """How many suspect labels of each given class look like each other class."""
        counts = np.zeros((len(self.classes), len(self.classes)), dtype=np.int64)
        np.add.at(counts, (self.given[self.suspect], self.predicted[self.suspect]), 1)
        return counts

    def most_confused(self, most: int) -> list[tuple[str, str, int]]:
        """The most frequent pairs of given and predicted label, and how often they occur."""
        counts = self.confusions
        np.fill_diagonal(counts, 0)
        order = np.argsort(-counts, axis=None, kind="stable")[:most]
        pairs = zip(*np.unravel_index(order, counts.shape), strict=True)
        return [
            (self.classes[i], self.classes[j], int(counts[i, j])) for i, j in pairs if counts[i, j]
        ]

    def table(self) -> pd.DataFrame:
        """One row for each sample, as in ``labels.csv``."""
        names = np.array(self.classes, dtype=object)
        better = self.suspect & (self.predicted != self.given)
        rows = np.arange(len(self.samples))
        return pd.DataFrame(
            {
                "row": rows,
                "id": rows if self.samples.ids is None else list(self.samples.ids),
                "given_label": names[self.given],
                "weight": self.weight / GRID,
                "label_quality": self.quality / GRID,
                "verdict": np.where(self.suspect, "suspect", "ok"),
                "suggested_label": np.where(better, names[self.predicted], names[self.given]),
            }
        )

    def model(self) -> CleanedModel:
        """The model that did not learn the suspect labels."""
        return CleanedModel.of(self.cleaner, self.encoder)

    def write(self, folder: Path, *, overwrite: bool = False) -> None:
        """Write labels, model and report; all of them or none."""
        from bilevel.cleaning import report

        table, page = self.table(), report.render(self)
        try:
            with folders.written(folder, overwrite) as part:
                table.to_csv(part / LABELS, index=False, lineterminator="\n", encoding="utf-8")
                self.model().save(part)
                (part / REPORT).write_text(page, encoding="utf-8")
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(f"{printable(folder)} cannot be written: {error}") from error

    def summary(self) -> list[str]:
        """What was found, in four lines."""
        count = int(self.suspect.sum())
        worst = np.argsort(self.quality, kind="stable")[: min(count, 5)]
        names = [str(i) if self.samples.ids is None else self.samples.ids[i] for i in worst]
        pairs = [
            f"{_short(given)} that {'looks' if n == 1 else 'look'} like {_short(other)} ({n:,})"
            for given, other, n in self.most_confused(3)
        ]
        return [
            f"{self.samples.counted()} of {_short(self.samples.name)} in {len(self.classes)} "
            f"classes, judged with {self.trusted.counted()} of {_short(self.trusted.name)}.",
            f"{count:,} labels look wrong, {count / len(self.samples):.1%} of them all.",
            f"Most often: {', '.join(pairs) or 'none'}.",
            f"To be looked at first: {self.samples.noun} {listed(names)}."
            if names
            else "There is nothing to be looked at.",
        ]

    def to_json(self) -> dict[str, Any]:
        """The figures as a plain object."""
        return {
            "samples": len(self.samples),
            "trusted": len(self.trusted),
            "classes": self.classes,
            "suspect": int(self.suspect.sum()),
            "threshold": self.threshold / GRID,
            "confusions": self.confusions.tolist(),
            "settings": {name: float(v) for name, v in self.cleaner.settings_.items()},
            "seconds": self.seconds,
            "files": [LABELS, TENSORS, DESCRIPTION, REPORT],
        }


def clean_files(
    train: Path,
    trusted: Path,
    *,
    label: str | None = None,
    id_column: str | None = None,
    choices: ColumnChoices | None = None,
    threshold: float = 0.5,
    seed: int = 0,
    checkpoint: Path | None = None,
    tell: Report = lambda stage: None,
) -> Findings:
    """Read both sets of samples and judge the labels of the first.

    Args:
        train: a file or a folder, as :func:`bilevel.cleaning.reading.read` takes it.
        trusted: the same, with labels that are right.
        label, id_column: columns of both.
        choices: the kinds of columns.
        threshold: of the quality below which a label is suspect.
        seed: of everything random.
        checkpoint: a folder, as :class:`~bilevel.LabelCleaner` takes it.
        tell: is told what is done next.
    """
    choices = choices or ColumnChoices()
    tell("reading")
    samples = read(train, label=label, id_column=id_column, text=[*choices.text, *choices.category])
    encoder = encoding.fit(samples, choices)
    # the same columns are text there, whatever they look like
    right = read(trusted, label=label, text=encoder.text)
    return clean(
        samples,
        right,
        encoder,
        threshold=threshold,
        seed=seed,
        checkpoint=checkpoint,
        tell=tell,
    )


def clean(
    samples: Samples,
    trusted: Samples,
    encoder: Encoder | None = None,
    *,
    threshold: float = 0.5,
    seed: int = 0,
    max_steps: int = 40,
    checkpoint: Path | None = None,
    tell: Report = lambda stage: None,
) -> Findings:
    """Judge the labels of samples with the help of trusted ones."""
    start = time.perf_counter()
    encoder = encoder or encoding.fit(samples)
    y, right = _checked_labels(samples, trusted)
    tell("making features")
    X, X_clean = encoder.encode(samples), encoder.encode(trusted)
    tell("judging labels")
    cleaner = LabelCleaner(random_state=seed, max_steps=max_steps, checkpoint=checkpoint)
    cleaner.fit(X, y, X_clean=X_clean, y_clean=right)
    issues = cleaner.label_issues()
    classes = sorted(cleaner.classes_.tolist(), key=_as_counted)
    numbers = {name: number for number, name in enumerate(classes)}
    return Findings(
        samples=samples,
        trusted=trusted,
        encoder=encoder,
        cleaner=cleaner,
        classes=classes,
        given=issues["given_label"].map(numbers).to_numpy(np.int64),
        predicted=issues["predicted_label"].map(numbers).to_numpy(np.int64),
        quality=_in_steps(cleaner.label_quality_),
        weight=_in_steps(cleaner.sample_weight_),
        threshold=round(threshold * GRID),
        seconds=time.perf_counter() - start,
    )


def _checked_labels(samples: Samples, trusted: Samples) -> tuple[Any, Any]:
    """The labels of both; refuses classes that only one of them has."""
    assert samples.labels is not None
    assert trusted.labels is not None
    classes, known = np.unique(samples.labels), np.unique(trusted.labels)
    if len(classes) < 2:
        raise InputError(
            f"{samples.name} has one class only, {str(classes[0])!r}; there is nothing that it "
            f"could be mistaken for"
        )
    if len(trusted) < len(classes):
        raise InputError(
            f"{trusted.name} has {trusted.counted()}, fewer than the {len(classes)} classes of "
            f"{samples.name}; trust at least one of each, better ten"
        )
    for here, there, lacking, asked in (
        (trusted, samples, np.setdiff1d(known, classes), "correct it, or leave those out"),
        (samples, trusted, np.setdiff1d(classes, known), "trust at least one of each, better ten"),
    ):
        if len(lacking):
            raise InputError(
                f"{here.name} has the label {listed(sorted(lacking, key=_as_counted))}, which "
                f"{there.name} has not; {asked}"
            )
    return samples.labels, trusted.labels


def _in_steps(values: Any) -> npt.NDArray[np.int64]:
    # what is below a threshold on the grid stays below it, what is at it stays there
    steps: npt.NDArray[np.int64] = np.floor(np.asarray(values) * GRID).astype(np.int64)
    return steps


def _as_counted(label: str) -> list[tuple[int, int, str]]:
    """A key that puts "9" before "10"."""
    pieces = re.split(r"([0-9]+)", str(label))
    return [(0, int(p), "") if p.isascii() and p.isdigit() else (1, 0, p) for p in pieces if p]


def _short(name: str, most: int = 40) -> str:
    return repr(name if len(name) <= most else f"{name[: most - 1]}…")
