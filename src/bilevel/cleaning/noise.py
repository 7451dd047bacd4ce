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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bilevel.cleaning.lbfgs import minimised

Array: TypeAlias = npt.NDArray[Any]

MISSING = -1
"""The code of a label that an annotator did not give."""

_LEAST_PART = 1 / 2  # of the wrong labels follow the features; with fewer, qualities are too high
_ITERATIONS = 100
_PARTS = 0.0, 0.5  # of confusions, which may be of classes that overlap, beside wrong labels
_ROUGHLY = 6  # iterations; more change the log of odds by less than chance does
_TOLERANCE = 1e-3
_MOST_SAMPLES = 5_000
_PRIOR = 20.0  # samples of each class that are assumed to have been seen, with average noise
PRECISION = 5.0
"""Of the prior of a pool: as much as 20 labelled samples say, each at most 1/4 about a logit."""
UNIDENTIFIED = 0.2
"""By how much s may be wrong, because the labels alone do not tell it."""


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
    every = -(-len(labels) // _MOST_SAMPLES)  # more samples would not change the estimate
    z, given = logits[::every], labels[::every]
    at_given = float(z[np.arange(len(given)), given].mean())
    # Without a prior, a few samples predicted by luck would make the model sure of everything.
    # Its width is a factor of e: models of noisy labels have logits that are several times too low.
    count = max(len(given), 1)
    precision = 1 / count
    log_b = 0.0
    for _ in range(_ITERATIONS):  # Newton's method, in log b, without the negative curvature
        b = math.exp(log_b)
        p = softmax(b * z)
        p *= z
        mean = p.sum(1)
        slope = b * (float(mean.sum()) / count - at_given) + precision * log_b
        p *= z
        curvature = b * b * (float(p.sum()) - float(mean @ mean)) / count + precision
        step = min(max(-slope / curvature, -1.0), 1.0)
        log_b = min(max(log_b + step, -5.0), 5.0)
        if abs(step) < _TOLERANCE:
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
    every = -(-len(p) // _MOST_SAMPLES)  # more samples would not change the estimate
    p, b, labels = p[::every], b[::every], labels[::every]
    classes = p.shape[1]
    identity = np.eye(classes)
    known = np.zeros((classes, classes)) if known is None else known
    noise = NoiseModel(0.8 * identity + 0.2 / classes, 0.0 if by_class else 0.1)
    rows = np.arange(len(p))
    first = labels[rows, (labels != MISSING).argmax(1)]
    count = int((labels != MISSING).sum())
    columns = [(column, b[rows, column], column == MISSING) for column in labels.T]
    onehot = [identity[column] * ~missing[:, None] for column, _, missing in columns]
    for _ in range(_ITERATIONS):
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
        if change < _TOLERANCE:
            break
    return noise


def separated(logits: Array, labels: Array) -> Pool:
    """The p of labels alone, p = softmax(a z + c) of the logits z: a pool of one model.

    The labels follow p T. Where classes overlap, labels become sure as fast as p does, and T is the
    identity; where labels are wrong, some disagree however far a sample is from other classes.
    Only wrong labels that show in this way are found. T, a and c maximise the likelihood, by
    expectation maximisation; as a prior, a few labels of each class are right.
    """
    every = -(-len(labels) // _MOST_SAMPLES)
    some, given = logits[::every], labels[::every]
    sharpness, _ = fit_sharpness(some, given)
    link = _Confused(sharpness * some, given, len(given)).link
    return Pool(link[:1] * sharpness, link[1:])


class _Confused:
    """Labels that follow p T, p = softmax(a z + c), and some last ones of which half may.

    Args:
        z: the logits.
        labels: the labels.
        reached: how many of the first labels T has reached.
        least: classes of which fewer labels than this share are wrong have none.
        iterations: of expectation maximisation, at most.
    """

    def __init__(
        self,
        z: Array,
        labels: Array,
        reached: int,
        least: float = 0.0,
        iterations: int = _ITERATIONS,
    ) -> None:
        classes = z.shape[1]
        identity = np.eye(classes)
        wanted = identity[labels]
        T, link = 0.8 * identity + 0.2 / classes, np.concatenate([[1.0], np.zeros(classes)])

        def objective(v: Array, q: Array) -> tuple[float, Array]:
            log_p = log_softmax(v[0] * z + v[1:])
            slope = np.exp(log_p) - q
            loss = 0.5 * PRECISION * float((v[1:] ** 2).sum()) - float((q * log_p).sum())
            gradient = np.concatenate([[(z * slope).sum()], slope.sum(0) + PRECISION * v[1:]])
            return loss / len(z), gradient / len(z)

        for _ in range(iterations):
            before = T, link[0]
            p = softmax(link[0] * z + link[1:])
            for _ in range(3):  # T converges more slowly than the link, and costs less
                q = p * T[:, labels].T
                q[reached:] += (p * wanted)[reached:]  # half by T, half as they are
                q /= q.sum(1, keepdims=True) + 1e-300
                through = q.copy()
                through[reached:] *= (T / (T + identity + 1e-300))[:, labels[reached:]].T
                self.counts = through.T @ wanted
                T = self.counts + PRECISION * identity
                T /= T.sum(1, keepdims=True)
            self.some = T.diagonal() <= 1 - least
            T[~self.some] = identity[~self.some]
            if not self.some.any():
                break
            link, _ = minimised(objective, link, (q,), bounded=1, steps=5)
            if max(float(np.abs(T - before[0]).max()), abs(link[0] - before[1])) < _TOLERANCE:
                break
        self.link, self._T = link, T
        self._labelled = z, labels, reached

    def evidence(self, part: float) -> float:
        """The log likelihood, less half the log of the samples for each number it takes.

        Args:
            part: by this much, T has reached the last labels, too.
        """
        z, labels, reached = self._labelled
        rows, c = np.arange(len(z)), self.link[1:]
        p = softmax(self.link[0] * z + c)
        likelihood = (p @ self._T)[rows, labels]
        likelihood[reached:] *= part
        likelihood[reached:] += (1 - part) * p[rows, labels][reached:]
        used = (self.counts > 1) & self.some[:, None] & ~np.eye(len(c), dtype=bool)
        costs = 0.5 * np.log(np.maximum(self.counts.sum(1), 1))
        prior = 0.5 * PRECISION * float(c @ c)
        return float(np.log(likelihood + 1e-300).sum()) - prior - float(used.sum(1) @ costs)


def log_odds_of_shares(
    shares: tuple[float, ...],
    logits: Array,
    given: Array,
    trusted: Array,
    right: Array,
    weight: float | None = None,
) -> float:
    """The log of the odds that one of these shares of the given labels is wrong, and not none.

    Classes follow p = softmax(a z + c) of the logits z. A wrong label is any other class, and all
    shares are as probable. The link, a and c, is the most probable one for each of them. If none is
    wrong, as many samples, of both sets, may still be of a class that the logits do not tell.

    Args:
        shares: of wrong labels; the smallest is also the least of a class that counts.
        logits, trusted: the logits of a model for both sets.
        given, right: the labels of both sets.
        weight: how many times as probable wrong labels of all classes are as those of some, which
            are looked for, too. All confusions that the logits show, T, may be classes that
            overlap; then trusted samples have them as well, or half of them if labels are wrong
            besides. None: only the shares are compared.
    """
    z, labels = by_class(np.concatenate([logits, trusted])), np.concatenate([given, right])
    z = fit_sharpness(z, labels)[0] * z
    judged, all_of_them = len(given), len(z)
    evidence = _of_a_share(z, labels)
    none = evidence(0.0, all_of_them)
    wrong = _mean([evidence(share, judged) for share in shares])
    if wrong > none:  # otherwise the shares do not matter
        none = _mean([none, *(evidence(share, all_of_them) for share in shares)])
    if weight is None:
        return wrong - none
    wrong += math.log(weight)
    confused = _Confused(z, labels, judged, shares[0], _ROUGHLY)
    if confused.some.any():
        wrong = float(np.logaddexp(wrong, _mean([confused.evidence(part) for part in _PARTS])))
        none = float(np.logaddexp(none, confused.evidence(1.0)))
    return wrong - none


def _mean(logarithms: list[float]) -> float:
    """The logarithm of the mean."""
    return float(np.logaddexp.reduce(logarithms) - np.log(len(logarithms)))


def _of_a_share(z: Array, labels: Array) -> Callable[[float, int], float]:
    """The log likelihood if a share of so many of the first labels is wrong."""
    classes = z.shape[1]
    rows = np.arange(len(z))
    link = np.concatenate([[1.0], np.zeros(classes)])
    places = rows + len(z) * labels  # in the probabilities class by class, made flat

    def objective(v: Array, other: Array) -> tuple[float, Array]:
        p = softmax(v[0] * z + v[1:])
        flat = p.T.reshape(-1)
        chosen = flat.take(places)
        likelihood = other + (1 - classes * other) * chosen + 1e-300
        flat[places] -= 1
        p *= ((1 - classes * other) * chosen / likelihood)[:, None]
        c = v[1:]
        loss = 0.5 * PRECISION * float(c @ c) - float(np.log(likelihood).sum())
        gradient = np.concatenate([[np.vdot(z.T, p.T)], p.sum(0) + PRECISION * c])
        return loss, gradient

    def evidence(share: float, reached: int) -> float:
        nonlocal link
        other = np.where(rows < reached, share / (classes - 1), 0.0)  # probability of other labels
        link, lowest = minimised(objective, link, (other,), bounded=1)
        return -lowest

    return evidence


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
