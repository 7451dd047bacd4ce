"""From predictions to the probability that a label is right.

Several models are pooled: p_i = softmax(sum_m a_m z_mi + c), with z_mi the logits of model m for
sample i by a fit without that sample, and a >= 0 and c fitted to the trusted samples, so that p is
calibrated.

A label of a sample of class k is j with the probability

    (1 - s) T(k, j) + s b_i(j),

with T(k, j) the confusions of classes, and b_i(j) the frequency with which samples like i are given
the label j, whatever their class: keywords, rules and tired people err by the features, not by the
class. T and s maximise the likelihood of the given labels, by expectation maximisation. Then

    P(class k | sample i, its labels j) ~ p_i(k) prod_j ((1 - s) T(k, j) + s b_i(j)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bilevel.cleaning.lbfgs import minimised

Array: TypeAlias = npt.NDArray[Any]

MISSING = -1
"""The code of a label that an annotator did not give."""

_LEAST_PART = 1 / 2  # of the wrong labels follow the features; with fewer, qualities are too high
ITERATIONS = 100
TOLERANCE = 1e-3
MOST_SAMPLES = 5_000  # of an estimate that more would not change
_PRIOR = 20.0  # samples of each class that are assumed to have been seen, with average noise
PRECISION = 5.0
"""Of the prior of a pool: as much as 20 labelled samples say, each at most 1/4 about a logit."""
UNIDENTIFIED = 0.2
"""By how much s may be wrong, because the labels alone do not tell it."""


@lru_cache(maxsize=8)
def some_of(count: int, most: int = MOST_SAMPLES) -> Any:
    """Which of so many samples an estimate is made from; a choice at random knows no order."""
    if count <= most:
        return slice(None)
    return np.sort(np.random.default_rng(0).permutation(count)[:most])


def by_class(logits: Any) -> Array:
    """The same array, class by class in memory: sums over a few classes are six times as fast."""
    return np.asfortranarray(logits, np.float64)


def softmax(logits: Array) -> Array:
    """The probabilities of each row; SciPy's function takes longer to call than a few rows take."""
    p: Array = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return p


def log_softmax(logits: Array) -> Array:
    """The logarithms of the probabilities of each row."""
    log_p: Array = logits - logits.max(1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    return log_p


def cross_entropy(logits: Array, labels: Array) -> float:
    """The mean cross entropy."""
    return float(-log_softmax(logits)[np.arange(len(labels)), labels].mean())


def fit_sharpness(logits: Array, labels: Array) -> tuple[float, float]:
    """The factor b for which softmax(b * logits) fits the labels best, and the loss with it."""
    some = some_of(len(labels))
    z, given = by_class(logits[some]), labels[some]
    at_given = float(z[np.arange(len(given)), given].mean())
    # Without a prior, a few samples predicted by luck would make the model sure of everything.
    # Its width is a factor of e: models of noisy labels have logits that are several times too low.
    count = max(len(given), 1)
    precision = 1 / count
    log_b = 0.0
    for _ in range(ITERATIONS):  # Newton's method, in log b, without the negative curvature
        b = math.exp(log_b)
        p = softmax(b * z)
        p *= z
        mean = p.sum(1)
        slope = b * (float(mean.sum()) / count - at_given) + precision * log_b
        p *= z
        curvature = b * b * (float(p.sum()) - float(mean @ mean)) / count + precision
        step = min(max(-slope / curvature, -1.0), 1.0)
        log_b = min(max(log_b + step, -5.0), 5.0)
        if abs(step) < TOLERANCE:
            break
    b = math.exp(log_b)
    return b, cross_entropy(b * z, given)


@dataclass(frozen=True)
class Pool:
    """Models as one: p = softmax(sum_m coefficients_m z_m + bias).

    Attributes:
        coefficients: one for each model, not negative.
        bias: one for each class.
        loss: the cross entropy on the samples to which the pool was fitted, if trusted ones were.
        sharpness: the factor with which each model by itself fits these samples best.
    """

    coefficients: Array
    bias: Array
    loss: float = float("nan")
    sharpness: Array | None = None

    def logits(self, models: list[Array]) -> Array:
        """The logits of the pool from those of the models."""
        return _combined(self.coefficients, models) + self.bias

    def probabilities(self, models: list[Array]) -> Array:
        """The probability of each class."""
        p: Array = softmax(self.logits(models))
        return p


def _combined(coefficients: Array, models: list[Array]) -> Array:
    total: Array = sum(a * z for a, z in zip(coefficients, models, strict=True))
    return total


def fit_pool(models: list[Array], labels: Array, without: int = 0) -> Pool:
    """The pool that fits the labels best; with few labels, all models count alike.

    Args:
        models: the logits of each, for the labelled samples.
        labels: the classes of these samples.
        without: so many of the first models do not count with few labels.
    """
    count, classes = models[0].shape
    sharpness = np.array([fit_sharpness(z, labels)[0] for z in models])
    Z = [b * z for b, z in zip(sharpness, models, strict=True)]
    rows = np.arange(count)
    equal = np.where(np.arange(len(models)) < without, 0, 1 / (len(models) - without))
    # There is nothing to say about the bias of other classes.
    seen = np.bincount(labels, minlength=classes) > 0

    def objective(flat: Array) -> tuple[float, Array]:
        a, c = flat[: len(models)], flat[len(models) :]
        log_p = log_softmax(_combined(a, Z) + c)
        prior = 0.5 * PRECISION * float(((a - equal) ** 2).sum() + (c**2).sum())
        value = prior - float(log_p[rows, labels].sum())
        slope = np.exp(log_p)
        slope[rows, labels] -= 1
        by_a = [float((z * slope).sum()) for z in Z] + PRECISION * (a - equal)
        gradient = np.concatenate([by_a, (slope.sum(0) + PRECISION * c) * seen])
        return value / count, gradient / count

    start = np.concatenate([equal, np.zeros(classes)])
    found, _ = minimised(objective, start, bounded=len(models))
    a, c = found[: len(models)], found[len(models) :]
    logits = _combined(a, Z) + c
    return Pool(a * sharpness, c, cross_entropy(logits, labels), sharpness)


def fit_bias(logits: Array, labels: Array) -> Array:
    """The bias c for which softmax(logits + c) fits the labels best."""
    rows = np.arange(len(labels))

    def objective(c: Array) -> tuple[float, Array]:
        log_p = log_softmax(logits + c)
        slope = np.exp(log_p)
        slope[rows, labels] -= 1
        value = 0.5 * PRECISION * float((c**2).sum()) - float(log_p[rows, labels].sum())
        return value / len(rows), (slope.sum(0) + PRECISION * c) / len(rows)

    return minimised(objective, np.zeros(logits.shape[1]))[0]


@dataclass(frozen=True)
class NoiseModel:
    """How labels come about.

    Attributes:
        transitions: T(k, j), the confusions of classes.
        share: s, the share of labels that are given by the features and not by the class.
    """

    transitions: Array
    share: float

    def posterior(self, p: Array, b: Array, labels: Array) -> Array:
        """P(class k | sample, its labels), of shape (n, classes)."""
        rows = np.arange(len(p))
        columns = [(column, b[rows, column], column == MISSING) for column in labels.T]
        return self.explained(p, columns)[0]

    def explained(
        self, p: Array, columns: list[tuple[Array, Array, Array]]
    ) -> tuple[Array, list[Array]]:
        """The posterior, and which part of each label the class alone explains, by sample.

        Args:
            p: the probability of each class.
            columns: for each annotator the labels, their frequencies b, and which are missing.
        """
        q, parts = p, []
        transitions = (1 - self.share) * self.transitions
        for column, frequency, missing in columns:
            by_class = transitions.take(column, 1).T
            likelihood = self.share * frequency[:, None] + by_class
            parts.append(by_class / (likelihood + 1e-300))
            likelihood[missing] = 1.0
            q = q * likelihood
            q /= q.sum(1, keepdims=True) + 1e-300
        return q, parts


def fit_noise(
    p: Array, b: Array, labels: Array, known: Array | None = None, by_class: bool = False
) -> NoiseModel:
    """The T and s that fit the labels best.

    Args:
        p: the probability of each class, for each sample.
        b: the probability of each label, for each sample.
        labels: the labels that were given, of shape (n, annotators).
        known: how often each class is known to have been given each label.
        by_class: whether s is zero: labels depend on the class alone.
    """
    some = some_of(len(p))
    p, b, labels = np.asfortranarray(p[some]), np.asfortranarray(b[some]), labels[some]
    classes = p.shape[1]
    identity = np.eye(classes)
    known = np.zeros((classes, classes)) if known is None else known
    noise = NoiseModel(0.8 * identity + 0.2 / classes, 0.0 if by_class else 0.1)
    rows = np.arange(len(p))
    first = labels[rows, (labels != MISSING).argmax(1)]
    count = int((labels != MISSING).sum())
    columns = [(column, b[rows, column], column == MISSING) for column in labels.T]
    onehot = [identity[column] * ~missing[:, None] for column, _, missing in columns]
    for _ in range(ITERATIONS):
        posterior, parts = noise.explained(p, columns)
        counts = known.copy()
        for part, chosen in zip(parts, onehot, strict=True):
            counts += (posterior * part).T @ chosen
        by_features = 1 - (counts.sum() - known.sum()) / count
        wrong = 1 - (np.trace(counts) + 0.5) / (counts.sum() + 1)
        expected = (1 - wrong) * identity + wrong / (classes - 1) * (1 - identity)
        counts += _PRIOR * expected
        T = counts / counts.sum(1, keepdims=True)
        least = _LEAST_PART * float(1 - posterior[rows, first].mean())
        share = 0.0 if by_class else max(float(by_features), least)
        change = max(float(np.abs(T - noise.transitions).max()), abs(share - noise.share))
        noise = NoiseModel(T, share)
        if change < TOLERANCE:
            break
    return noise


def threshold(quality: Array) -> tuple[float, float]:
    """The quality below which labels are issues: that with the highest expected F1 score.

    With w_i = 1 - q_i, the expected F1 of the labels in a set S is nearly
    2 sum_S w_i / (|S| + sum w_i). Also, how far this score is on the way from that of all labels
    to 1: where the qualities tell nothing, all labels are as good a choice as any.
    """
    wrong = np.sort(1 - quality)[::-1]
    score = 2 * np.cumsum(wrong) / (np.arange(1, len(wrong) + 1) + wrong.sum() + 1e-12)
    best = int(score.argmax())
    told = (score[best] - score[-1]) / max(1 - score[-1], 1e-12)
    return float(1 - wrong[best]), float(told)
