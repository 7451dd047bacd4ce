"""The data sets with their kinds of noise and the models that are trained on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from benchmarks.cleaning.data import (
    Cifar10n,
    Noise,
    Source,
    a9a_split,
    covertype_split,
    hausa_split,
    mnist_split,
    newsgroups_split,
)

HIDDEN = 128
"""The number of hidden units of both networks on Covertype."""


@dataclass(frozen=True)
class Case:
    """A data set with its kinds of noise and the models.

    Attributes:
        source: reads and splits the data set.
        noises: the kinds of noise.
        rivals: functions that make the models for cleanlab, by name.
        model: makes the module for LabelCleaner; None: its default.
    """

    source: Source
    noises: tuple[Noise, ...]
    rivals: Mapping[str, Callable[[], Any]]
    model: Callable[[], nn.Module] | None = None


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


def _with_other(c: float) -> dict[str, Callable[[], Any]]:
    return {
        "logistic regression": _logistic_regression,
        f"the same, C = {c:g}": lambda: _logistic_regression(C=c),
    }


CASES: dict[str, Case] = {
    "mnist": Case(
        mnist_split,
        (
            Noise("uniform", 0.1),
            Noise("uniform", 0.3),
            Noise("uniform", 0.5),
            Noise("next class", 0.4),
        ),
        _with_other(0.01),
    ),
    "newsgroups": Case(
        newsgroups_split,
        (Noise("uniform", 0.3),),
        _with_other(10),
    ),
    "covertype": Case(
        covertype_split,
        (Noise("uniform", 0.2),),
        {
            f"{HIDDEN} hidden units": _network,
            "logistic regression": lambda: _standardised(_logistic_regression()),
        },
        lambda: nn.Sequential(nn.Linear(54, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 7)),
    ),
    "hausa": Case(hausa_split, (Noise("as given", 0.5),), _with_other(10)),
    "cifar10n-worse": Case(Cifar10n("worse"), (Noise("as given", 0.4),), _with_other(0.01)),
    "cifar10n-aggregate": Case(Cifar10n("aggre"), (Noise("as given", 0.09),), _with_other(0.01)),
    "a9a": Case(a9a_split, (Noise("by class", 0.2),), _with_other(0.01)),
}
"""The cases, by the name that ``--only`` takes."""
