"""Better labels, offered only where accepting all of them is expected to help.

That a label is improbable does not make another one right: how labels come about is estimated, and
so are the probabilities of classes. A suggestion is made where it holds in spite of that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bilevel.cleaning.noise import Array, fit_noise

ODDS = 3.0
"""How much more probable than the given label a suggestion must be, as probabilities are off.

Where more labels are right than wrong, it is as many times more: a model that errs then errs on
right labels, mostly.
"""
_EXCESS = 4.0
"""How much more often a label must be given than it is right, among samples like this one.

However labels come about, a label that is given b times and right p times is right with at most
the probability p / b.
"""
_FEWEST = 0.02  # suggestions per label; fewer are mostly the mistakes of a model
HARDLY_ANY = 0.03  # the share of wrong labels that models find even where there are none
_ODDS_ALONE, _SURE, _MANY = 20.0, 0.9, 0.2
"""Without trusted samples: the odds, the mean probability of the best class, and the share of wrong
labels from which on suggestions are made.

Wrong labels are told from classes that overlap by the samples that are far from other classes; if
few are, nothing is told, and up to a seventh of the labels seem to be wrong where none is.
"""


@dataclass(frozen=True)
class Evidence:
    """What the models say about samples, none of which they were fitted to.

    Attributes:
        p: the probability of each class.
        frequency: the probability of each label.
    """

    p: Array
    frequency: Array


def with_trusted(
    evidence: Evidence, posterior: Array, given: Array, votes: Array, measured: bool
) -> Array:
    """The labels that are better whether labels depend on features or on the class alone.

    Args:
        evidence: the models.
        posterior: the probability of each class, given the label.
        given: the label of each sample.
        votes: the labels by all annotators.
        measured: whether ``posterior`` is corrected by labels that are known to be wrong or right.
    """
    p, frequency, rows = evidence.p, evidence.frequency, np.arange(len(given))
    best = posterior.argmax(1)
    wrong = 1 - float(posterior[rows, given].mean())
    odds = ODDS * max((1 - wrong) / max(wrong, 1e-9), 1.0)
    better = _odds(posterior, best, given) > odds
    if not measured:
        by_class = fit_noise(p, frequency, votes, by_class=True).posterior(p, frequency, votes)
        better &= _odds(by_class, best, given) > odds
        better &= frequency[rows, given] > _EXCESS * p[rows, given]
    return np.where(better & (better.mean() >= _FEWEST), best, given)


def without_trusted(p: Array, posterior: Array, given: Array) -> Array:
    """The labels that are better by what the given ones show by themselves.

    Args:
        p: the probability of each class.
        posterior: the same, given the label.
        given: the label of each sample.
    """
    best = posterior.argmax(1)
    wrong = 1 - float(posterior[np.arange(len(given)), given].mean())
    if wrong < _MANY or float(p.max(1).mean()) < _SURE:
        return given.copy()
    return np.where(_odds(posterior, best, given) > _ODDS_ALONE, best, given)


def _odds(posterior: Array, best: Array, given: Array) -> Array:
    rows = np.arange(len(given))
    odds: Array = posterior[rows, best] / np.maximum(posterior[rows, given], 1e-12)
    return odds
