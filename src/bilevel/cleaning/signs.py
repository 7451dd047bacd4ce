"""Whether labels are wrong at all, by the labels of trusted samples beside the given ones."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.special import expit, log_ndtr

from bilevel.cleaning.confusion import log_odds_of_shares
from bilevel.cleaning.noise import (
    Array,
    by_class,
    cross_entropy,
    fit_bias,
    fit_pool,
    fit_sharpness,
    softmax,
    some_of,
)

OnBoth: TypeAlias = tuple[Array, Array]
"""The logits of a model for the judged and for the trusted samples."""

_MOST_FOR_NOISE = 2_000  # judged samples; more would not change the answer
SURELY = 0.95  # the probability of an interval
_SHARES = (0.05, 0.1, 0.2)  # of wrong labels, one of which is likely if any are wrong
_EXPECTED = 8.0
"""How much more often some labels of every class are wrong than none, where labels are cleaned."""
_SELDOM = 4.0  # how much less often than not labels are wrong in one way that they do not show
_DOUBLED = np.linspace(-3, 3, 13)  # how often a sharpness is; 99.7% of its prior
_PARTS = np.linspace(0, 1.25, 6)  # of a model beside another, over what it has alone
_HARDER = 4.0  # standard errors by which given labels are harder to predict if some are wrong
CLEARLY = 1.6  # standard errors, which chance exceeds in one case of 20
_CONTRADICTION = 10.0  # nats; the odds against chance are 20,000 to one


@dataclass(frozen=True)
class Signs:
    """Whether trusted samples are labelled otherwise than the judged ones are.

    Attributes:
        belief: the probability that labels are wrong at all.
        certain: whether it is certain enough to change labels by it.
    """

    belief: float
    certain: bool


def signs_of_noise(
    judged: list[Array],
    trusted: list[Array],
    given: Array,
    right: Array,
    apart: OnBoth | None = None,
) -> Signs:
    """Compare the labels of trusted samples with those of the judged ones.

    A label that is improbable is not wrong for that: classes overlap. If no label is wrong, what
    predicts the judged labels best predicts the trusted ones, too. Others stand against it:

    - some labels of every class are wrong. Then no label is ever sure, however far a sample is from
      other classes; where labels are as sure as the trusted ones, they tell against it;
    - some labels of a few classes are wrong, with the same signs there;
    - labels are wrong in a way that they do not show by themselves. Then the model that is fitted
      without those that seem to be wrong predicts the trusted samples better, or what the trusted
      samples teach about each other, beside the given labels, is not what it is for the others;
      or nothing shows but that the given labels are harder to predict than the trusted ones.

    It is certain if, besides, the given labels are clearly harder to predict than the trusted ones,
    as wrong labels are unless they follow the features, or if the trusted ones contradict them by
    far.

    Args:
        judged, trusted: the logits of models, none of which were fitted to these samples: the first
            to the given labels, the second to all, the last without those that seem to be wrong.
        given, right: the labels of these samples.
        apart: the logits of a model of the trusted samples alone, none of which was fitted to its
            sample either; None: there is none.
    """
    of_all = min(1, len(judged) - 1)  # the fit to all samples, if there is one
    harder = _harder((judged[of_all], trusted[of_all]), given, right)
    some = some_of(len(given), _MOST_FOR_NOISE)
    judged, given = [by_class(z[some]) for z in judged], given[some]
    models = [by_class(np.concatenate(pair)) for pair in zip(judged, trusted, strict=True)]
    one = fit_pool(models, np.concatenate([given, right])).logits(trusted)
    as_given, flat = cross_entropy(one, right), fit_sharpness(one, right)
    gained = len(right) * as_given + _at_any_sharpness(judged[-1], trusted[-1], given, right)
    # That trusted samples are harder to predict than the others is no sign of wrong labels.
    by_chance = len(right) * (as_given - flat[1]) if flat[0] < 1 else 0.0
    ways = [gained - by_chance, _of_harder_labels(harder)]
    if apart is not None:
        own = apart[0][some], apart[1]
        ways.append(_in_other_parts((judged[0], trusted[0]), own, given, right))
    hidden = float(np.logaddexp.reduce(ways) - np.log(_SELDOM))
    evidence = hidden
    if hidden < _CONTRADICTION:
        shown = log_odds_of_shares(_SHARES, judged[0], given, trusted[0], right, _EXPECTED)
        evidence = float(np.logaddexp(hidden, shown))
    belief = float(expit(evidence))
    return Signs(belief, belief > SURELY and (harder > CLEARLY or gained > _CONTRADICTION))


def _at_any_sharpness(judged: Array, trusted: Array, given: Array, right: Array) -> float:
    """The log of the mean likelihood of trusted labels, over sharpnesses of the model.

    They are probable around that with which the model fits the given labels, within a factor of
    two. As a mean, and not the highest one, the likelihood exceeds another by chance no more often
    than its odds say, however few the samples are.
    """
    sharpness, _ = fit_sharpness(judged, given)
    prior = -0.5 * _DOUBLED**2
    found = [
        part - len(right) * cross_entropy(sharpness * 2.0**doubled * trusted, right)
        for doubled, part in zip(_DOUBLED, prior, strict=True)
    ]
    return float(np.logaddexp.reduce(found) - np.logaddexp.reduce(prior))


def _harder(logits: OnBoth, given: Array, right: Array) -> float:
    """By how many standard errors the given labels are harder to predict than the trusted ones."""
    sharpness, _ = fit_sharpness(logits[0], given)
    first, second = (
        _losses(softmax(sharpness * z), labels)
        for z, labels in zip(logits, (given, right), strict=True)
    )
    spread = float(first.std()) * (1 / len(first) + 1 / len(second)) ** 0.5
    errors: float = float(first.mean() - second.mean()) / max(spread, 1e-12)
    return errors


def _of_harder_labels(errors: float) -> float:
    """The log of the odds that given labels are harder to predict, if they are by these errors.

    If no label is wrong, the difference of the losses is normal, with an error of 1; otherwise so
    is the truth beside, with a deviation of ``_HARDER`` to one side.
    """
    share = _HARDER**2 / (1 + _HARDER**2)
    peak = 0.5 * share * errors**2 + float(log_ndtr(share**0.5 * errors))
    return float(np.log(2) - 0.5 * np.log(1 + _HARDER**2)) + peak


def _losses(p: Array, labels: Array) -> Array:
    lost: Array = -np.log(np.maximum(p[np.arange(len(labels)), labels], 1e-300))
    return lost


def _in_other_parts(noisy: OnBoth, own: OnBoth, given: Array, right: Array) -> float:
    """The log of the mean likelihood of trusted labels, over that with the parts of given labels.

    Two models are pooled: the one of given labels, and the one of trusted labels. If no label is
    wrong, both sets of labels follow them in the same parts; otherwise trusted labels may follow
    the first less, or more surely, and the second more. Either way the trusted samples may be
    chosen at random (where there are as many of each class, evenly), or by class in some other way.
    """
    own_unit, noisy_unit = fit_sharpness(own[1], right)[0], fit_sharpness(noisy[0], given)[0]
    models = [by_class(np.concatenate(pair)) for pair in (own, noisy)]
    pool = fit_pool(models, np.concatenate([given, right]))
    z, z_noisy = by_class(own[1]), by_class(noisy[1])
    as_given = pool.coefficients[0] * z + pool.coefficients[1] * z_noisy
    classes = z.shape[1]
    counts = np.bincount(right, minlength=classes)
    present = counts[counts > 0]
    usual = pool.bias
    if present.max() - present.min() <= 1:
        usual = usual - np.log((np.bincount(given, minlength=classes) + 1) / (len(given) + classes))
    cost = 0.5 * (len(present) - 1) * np.log(len(right))
    chosen = [(usual, 0.0), (fit_bias(as_given, right), cost)]

    def likelihood(logits: Array) -> float:
        found = [
            -len(right) * cross_entropy(logits + bias, right) - unlikely
            for bias, unlikely in chosen
        ]
        return float(np.logaddexp.reduce(found))

    others = [
        likelihood(a * own_unit * z + b * noisy_unit * z_noisy)
        for a, b in itertools.product(_PARTS, _PARTS)
    ]
    mean = float(np.logaddexp.reduce(others)) - float(np.log(len(others)))
    return mean - likelihood(as_given)
