"""What is found about each label: its quality, a better label, and what to look at next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, logit

from bilevel.cleaning.noise import (
    UNIDENTIFIED,
    Array,
    NoiseModel,
    fit_noise,
    threshold,
)
from bilevel.cleaning.signs import SURELY, Signs
from bilevel.cleaning.suggestions import HARDLY_ANY, Evidence, with_trusted, without_trusted
from bilevel.cleaning.task import CleaningTask

_FEW = 0.005, 0.01  # called wrong where none may be: at least and at most
_FEW_ALONE = 0.02  # the same without trusted samples
_OF_THE_MODEL = 0.15
"""Without trusted samples: the share of wrong labels up to which a model may err instead of them.

A linear model of images takes a seventh of right labels for wrong ones.
"""
_MOSTLY = 0.6
"""Without trusted samples: of contradicted labels, the share that has to seem wrong.

Where classes overlap, that explains most of the labels that a model contradicts, even of a model
so poor that it takes a third of right labels for wrong ones: of photographs at most 0.59 seemed
wrong, none being so. Where a quarter of labels was wrong at random, it was mostly 0.65 to 0.9.
"""
_LIKELY = 0.75  # the belief from which on labels are taken to be wrong, with odds of three to one
_TELLING = 0.1  # of the way from calling all labels wrong to an F1 of 1; chance goes 0.06 of it


@dataclass(frozen=True)
class Verdict:
    """What was found about the labels of the judged samples.

    Attributes:
        quality: the probability that the label is right.
        posterior: the probability of each class, given the sample and its label.
        suggested: the label that is better in expectation; otherwise the given one.
        issue: which labels are worth a look.
        threshold: the quality below which they are.
        gain: how much it would help to look at each label, in right labels.
        wrong, interval: the share of wrong labels, and an interval that covers it with 95%.
        noise: how labels come about.
    """

    quality: Array
    posterior: Array
    suggested: Array
    issue: Array
    threshold: float
    gain: Array
    wrong: float
    interval: tuple[float, float]
    noise: NoiseModel


def judge(
    judged: Evidence,
    checked: Evidence | None,
    task: CleaningTask,
    noise: NoiseModel | None,
    signs: Signs | None = None,
) -> Verdict:
    """Judge the labels.

    Args:
        judged: the models on the judged samples.
        checked: the models on the trusted samples; needed if these have old labels.
        task: the samples.
        noise: how labels come about; None: that is estimated.
        signs: whether the trusted samples show that labels are wrong at all; None: not known.
    """
    p, frequency, votes = judged.p, judged.frequency, task.votes
    given = task.labels[task.judged].numpy()
    rows = np.arange(len(given))
    old = task.old_labels
    fitted = noise is None
    if noise is None:
        noise = fit_noise(p, frequency, votes, _counted(task, p.shape[1]))
    posterior = noise.posterior(p, frequency, votes)
    measured = old is not None and checked is not None
    certain = signs is not None and signs.certain
    belief = 1.0 if measured or signs is None else signs.belief
    whole = posterior
    posterior = belief * posterior
    posterior[rows, given] += 1 - belief
    quality = posterior[rows, given]
    if old is not None and checked is not None:
        right = task.labels[task.trusted].numpy() == old
        certain = not right.all()
        before = noise.posterior(checked.p, checked.frequency, old[:, None])
        calibrated = _calibrated(before[np.arange(len(old)), old], right, quality)
        posterior = posterior * ((1 - calibrated) / np.maximum(1 - quality, 1e-9))[:, None]
        posterior[rows, given] = calibrated
        quality = calibrated
    suggested = given.copy()
    if certain:
        suggested = with_trusted(judged, posterior, given, votes, measured)
    elif not fitted:
        suggested = without_trusted(p, posterior, given)
    wrong = float((1 - quality).mean())
    low = high = wrong
    if not measured:
        low, high = _possible(noise, whole[rows, given], judged, given, votes, fitted)
    spread = 1.96 * (wrong * (1 - wrong) * (1 / max(len(task.trusted), 1) + 1 / len(p))) ** 0.5
    # Whether any label is wrong does not change which threshold is best if some are.
    limit, told = threshold(quality if measured else whole[rows, given])
    limit = limit if measured else belief * limit + (1 - belief)
    # So many labels may be wrong without one of the trusted ones showing it.
    few = _lowest(quality, np.clip(1 / len(task.trusted), *_FEW) if fitted else _FEW_ALONE)
    contradicted = float((frequency.argmax(1) != given).mean())
    unlikely = not certain if measured else belief < _LIKELY
    doubtful = unlikely if fitted else wrong < _MOSTLY * contradicted
    if told < _TELLING:
        limit = min(limit, few)
    elif not fitted and wrong < _OF_THE_MODEL:
        limit = min(limit, max(1 - _LIKELY, few))
    elif doubtful:
        limit = min(limit, few)
    elif not fitted or wrong < HARDLY_ANY:
        limit = min(limit, max(0.5, few))  # what is rare has to be probable, too
    if unlikely or belief < SURELY:
        low = 0.0
    return Verdict(
        quality=quality,
        posterior=posterior,
        suggested=suggested,
        issue=(quality <= limit),
        threshold=limit,
        gain=1 - posterior[rows, suggested],
        wrong=wrong,
        interval=(max(low - spread, 0.0), min(high + spread, 1.0)),
        noise=noise,
    )


def _possible(
    noise: NoiseModel, right: Array, judged: Evidence, given: Array, votes: Array, fitted: bool
) -> tuple[float, float]:
    """The shares of wrong labels between which the labels alone do not tell.

    Args:
        noise: how labels come about, as estimated.
        right: the probability of each label by that.
        judged: the models on the samples.
        given, votes: the labels, and those by all annotators.
        fitted: whether trusted samples helped to estimate p.
    """
    p, frequency = judged.p, judged.frequency
    shares = [float(1 - right.mean())]
    if not fitted:
        return 0.0, max(*shares, float((1 - (frequency**2).sum(1)).mean()))
    for share in (noise.share - UNIDENTIFIED, noise.share + UNIDENTIFIED):
        other = NoiseModel(noise.transitions, float(np.clip(share, 0, 1)))
        found = other.posterior(p, frequency, votes)[np.arange(len(given)), given]
        shares.append(float(1 - found.mean()))
    return min(shares), max(shares)


def _counted(task: CleaningTask, classes: int) -> Array | None:
    """How often the trusted samples of each class had each label; None: that is not known."""
    if task.old_labels is None:
        return None
    known = np.zeros((classes, classes))
    np.add.at(known, (task.labels[task.trusted].numpy(), task.old_labels), 1)
    return known


def _lowest(quality: Array, share: float) -> float:
    """The quality that no more than this share of the labels has at most."""
    ordered = np.sort(quality)
    below = ordered[ordered < ordered[int(share * len(ordered))]]
    return float(below[-1]) if len(below) else 0.0


def _calibrated(before: Array, right: Array, quality: Array) -> Array:
    """Qualities corrected by what is known of some: sigmoid(a logit(q) + c), near a = 1, c = 0."""
    x, z = (logit(np.clip(q, 1e-4, 1 - 1e-4)) for q in (before, quality))
    signs = np.where(right, 1.0, -1.0)

    def objective(v: Array) -> float:
        prior = 0.5 * ((v[0] - 1) ** 2 + v[1] ** 2)
        return float(np.logaddexp(0, -signs * (v[0] * x + v[1])).sum() + prior)

    a, c = minimize(objective, np.array([1.0, 0.0]), bounds=[(0, None), (None, None)]).x
    return np.asarray(expit(a * z + c))
