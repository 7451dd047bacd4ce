"""Which labels of the judged samples are confused with which, and whether any are at all.

Labels of class k are seen as j with the probability T[k, j], while classes follow p = softmax(a z +
c) of the logits z of one model. T, a and c maximise the likelihood of the labels, by expectation
maximisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from bilevel.cleaning.lbfgs import minimised
from bilevel.cleaning.noise import (
    ITERATIONS,
    PRECISION,
    TOLERANCE,
    Array,
    Pool,
    by_class,
    fit_sharpness,
    log_softmax,
    softmax,
    some_of,
)

_ROUGHLY = 6  # iterations; more change the log of odds by less than chance does
_PARTS = 0.0, 0.5  # of confusions, which may be of classes that overlap, beside wrong labels


def separated(logits: Array, labels: Array) -> Pool:
    """The p of labels alone, p = softmax(a z + c) of the logits z: a pool of one model.

    The labels follow p T. Where classes overlap, labels become sure as fast as p does, and T is the
    identity; where labels are wrong, some disagree however far a sample is from other classes.
    Only wrong labels that show in this way are found. T, a and c maximise the likelihood, by
    expectation maximisation; as a prior, a few labels of each class are right.
    """
    some = some_of(len(labels))
    z, given = by_class(logits[some]), labels[some]
    sharpness, _ = fit_sharpness(z, given)
    link = _Confused(sharpness * z, given, len(given)).link
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
        iterations: int = ITERATIONS,
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
            if max(float(np.abs(T - before[0]).max()), abs(link[0] - before[1])) < TOLERANCE:
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
