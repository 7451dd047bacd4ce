"""LabelCleaner with its default settings on MNIST: what it finds, and how long it takes.

19,000 images to train on and 1,000 trusted ones, both from the first 60,000 in the order of
``numpy.random.default_rng(seed)``; the test set is MNIST's. Noise is uniform over the other
classes, or takes every class for the next one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from bilevel.benchmarks import report
from bilevel.data import mnist
from bilevel.errors import MissingExtraError

TRAIN, TRUSTED, CLASSES = 19_000, 1_000, 10
NOISES = (("uniform", 0.1), ("uniform", 0.3), ("uniform", 0.5), ("next class", 0.4))


@dataclass(frozen=True)
class Row:
    """One kind of noise.

    Attributes:
        noise: its kind.
        share: of the labels that are wrong.
        auc: that of ``label_quality`` for right labels.
        weight_auc: that of the raw weights.
        f1: of ``is_label_issue``.
        accuracy: on the test set.
        cpu_seconds: of the fit.
    """

    noise: str
    share: float
    auc: float
    weight_auc: float
    f1: float
    accuracy: float
    cpu_seconds: float


def run(*, seed: int = 0, data_dir: Path | None = None, track: report.Track = iter) -> list[Row]:
    """Every kind of noise."""
    try:
        from sklearn.metrics import f1_score, roc_auc_score
    except ImportError:
        raise MissingExtraError("scikit-learn", "clean") from None
    from bilevel.cleaning import LabelCleaner

    data = mnist(data_dir)
    images, tests = (
        part.flatten(1).numpy().astype(np.float32) / 255
        for part in (data.train_images, data.test_images)
    )
    labels, wanted = data.train_labels.numpy(), data.test_labels.numpy()
    order = np.random.default_rng(seed).permutation(len(labels))
    train, trusted = order[:TRAIN], order[TRAIN : TRAIN + TRUSTED]
    rows = []
    for noise, share in track(NOISES):
        rng = np.random.default_rng([seed, int(100 * share)])
        wrong = np.zeros(TRAIN, dtype=bool)
        wrong[rng.choice(TRAIN, round(share * TRAIN), replace=False)] = True
        shift = rng.integers(1, CLASSES, TRAIN) if noise == "uniform" else np.ones(TRAIN, int)
        given = np.where(wrong, (labels[train] + shift) % CLASSES, labels[train])
        start = time.process_time()
        cleaner = LabelCleaner(random_state=seed).fit(
            images[train], given, X_clean=images[trusted], y_clean=labels[trusted]
        )
        seconds = time.process_time() - start
        suspected = cleaner.label_issues()["is_label_issue"].to_numpy()
        rows.append(
            Row(
                noise=noise,
                share=share,
                auc=float(roc_auc_score(~wrong, cleaner.label_quality_)),
                weight_auc=float(roc_auc_score(~wrong, cleaner.sample_weight_)),
                f1=float(f1_score(wrong, suspected)),
                accuracy=float(cleaner.score(tests, wanted)),
                cpu_seconds=seconds,
            )
        )
    return rows


def table(rows: Sequence[Row]) -> Table:
    """The rows to read."""
    return report.table(
        "wrong labels of MNIST, found with 1,000 right ones",
        rows,
        {
            "noise": lambda row: f"{row.share:.0%} {row.noise}",
            "AUC": lambda row: row.auc,
            "AUC of the weights": lambda row: row.weight_auc,
            "F1": lambda row: row.f1,
            "accuracy": lambda row: row.accuracy,
            "CPU seconds": lambda row: row.cpu_seconds,
        },
    )
