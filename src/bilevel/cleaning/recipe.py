"""The algorithm: several models, what they say together, and what that says about each label.

1. One weight per sample, in [0, 1], is learned so that a model trained with the weights does well
   on trusted samples: min_x f(x, y*(x)) with

       g(x, y) = 1/n sum_i x_i CE_i(y) + ridge ||y||^2,      f(x, y) = 1/m sum_j CE_j(y),

   by F2SA, see :mod:`~bilevel.cleaning.weights`. The inner steps use minibatches that both copies
   of y share, or all samples of a small set; the direction of x comes from one pass over all
   samples, which needs forward passes only. A module starts from a training on all samples with
   weight 1.
2. A model is fitted to the trusted samples, one to the others, one to both; see
   :mod:`~bilevel.cleaning.comparison`. These and the models of step 1 say which labels are more
   probably wrong than right, see :mod:`~bilevel.cleaning.noise`, and a model is fitted without
   them: the cleaned one.
3. The fits are compared on trusted samples that they were not fitted to, and pooled. The pool
   predicts, and judges labels; where one model is best, the others have little weight in it. As far
   as no label seems to be wrong, see :mod:`~bilevel.cleaning.verdict`, the fit to both predicts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel.cleaning.comparison import BOTH, CLEANED, CrossFit, CrossFits
from bilevel.cleaning.confusion import separated
from bilevel.cleaning.learners import MULTIPLIER, WEIGHT_STEP, Learner
from bilevel.cleaning.noise import (
    Array,
    NoiseModel,
    Pool,
    by_class,
    cross_entropy,
    fit_noise,
    fit_pool,
    fit_sharpness,
    log_softmax,
    softmax,
)
from bilevel.cleaning.signs import CLEARLY, OnBoth, Signs, signs_of_noise
from bilevel.cleaning.suggestions import Evidence
from bilevel.cleaning.task import CleaningTask, SearchSettings
from bilevel.cleaning.verdict import Verdict, judge
from bilevel.cleaning.weights import History, learn_weights

POOLED = "all of them, pooled"


@dataclass(frozen=True)
class Compared:
    """How a fit does on trusted samples that it was not fitted to."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class CleaningResult:
    """The result of label cleaning.

    Attributes:
        models: the variables of the models in the pool.
        pool: how they are pooled.
        weights: the learned weights of the samples in ``train``.
        verdict: what was found about the labels of the samples in ``judged``.
        compared: how each fit does, by its name, and the pool.
        helped: whether the cleaned fit is as good as the best of the others, within the error.
        history: one entry for each step of the weights.
        settings: the settings that were chosen.
    """

    models: list[Any]
    pool: Pool
    weights: Tensor
    verdict: Verdict
    compared: dict[str, Compared]
    helped: bool
    history: History
    settings: dict[str, float]


@dataclass(frozen=True)
class _Fitted:
    """The fits that predict.

    Attributes:
        pooled, pool: the fits, and how they are pooled.
        p: the probability of each class for the judged samples.
        compared: how each fit does, by its name.
        noise: how labels come about; None: that is still to be estimated.
        apart: the logits by the trusted samples alone; None: there are no such samples.
    """

    pooled: list[CrossFit]
    pool: Pool
    p: Array
    compared: dict[str, Compared]
    noise: NoiseModel | None = None
    apart: OnBoth | None = None


def clean(
    learner: Learner | None, searcher: Learner | None, task: CleaningTask, settings: SearchSettings
) -> CleaningResult:
    """Take all three steps.

    Args:
        learner: the model; None: there are predictions instead.
        searcher: the model with which weights are learned; None: they are not.
        task: the samples.
        settings: how the weights are searched.
    """
    if learner is None:
        return _from_predictions(task)
    fits = CrossFits(learner, task)
    ones = torch.zeros(len(task.labels)).index_fill(0, task.train, 1.0)
    learned = None
    if searcher is not None:
        assert task.rows is not None
        start = searcher.lower_start(task.rows, task.labels, ones, None)
        learned = learn_weights(searcher, task, start, settings)
    noisy, alike = fits.noisy_only()
    sharpness, _ = fit_sharpness(noisy.judged, fits.given)
    frequency = softmax(sharpness * noisy.judged)
    if task.verified:
        fitted = _verified(fits, task, noisy, frequency, searcher, learned)
    else:
        fitted = _unverified(fits, task, noisy, frequency)
    pooled, pool, p = fitted.pooled, fitted.pool, fitted.p
    checked = None
    if task.old_labels is not None:
        on_trusted = pool.probabilities([fit.trusted for fit in pooled])
        checked = Evidence(on_trusted, softmax(sharpness * noisy.trusted))
    signs: Signs | None = None
    if task.verified:
        signs = signs_of_noise(
            [noisy.judged, *(fit.judged for fit in pooled[1:])],
            [alike, *(fit.trusted for fit in pooled[1:])],
            fits.given,
            fits.right,
            fitted.apart,
        )
    verdict = judge(Evidence(p, frequency), checked, task, fitted.noise, signs)
    if signs is not None and checked is None:
        pool = _believed(pool, signs.belief, fit_sharpness(pooled[1].judged, fits.given)[0])
    # The cleaned model is fitted to all samples with the final verdicts.
    pooled[-1] = fits.again(pooled[-1], (verdict.quality >= 0.5).astype(float))
    chosen: dict[str, float] = {}
    if learned is not None and searcher is not None:
        chosen = {
            **searcher.settings(),
            "multiplier": MULTIPLIER,
            "inner_steps": searcher.method(len(task.train)).inner_steps,
            "batch_size": learned.batch_size,
            "upper_lr": WEIGHT_STEP * len(task.train),
            "steps": learned.steps,
            "selected_step": learned.selected_step,
        }
    weights = verdict.quality[np.isin(task.judged.numpy(), task.train.numpy())]
    return CleaningResult(
        models=[fit.model for fit in pooled],
        pool=pool,
        weights=torch.from_numpy(weights) if learned is None else learned.weights.mean(0),
        verdict=verdict,
        compared=fitted.compared,
        helped=_helped(pooled, fits.right, pool) if task.verified else True,
        history={} if learned is None else learned.history,
        settings={
            **chosen,
            "folds": task.folds,
            **{f"ridge, {fit.name}": fit.ridge for fit in (noisy, *pooled)},
            **{f"part of {fit.name}": a for fit, a in zip(pooled, pool.coefficients, strict=True)},
            "labels by features": verdict.noise.share,
        },
    )


def _verified(
    fits: CrossFits,
    task: CleaningTask,
    noisy: CrossFit,
    frequency: Array,
    searcher: Learner | None,
    learned: Any,
) -> _Fitted:
    """The fits with the help of trusted samples, and their pool."""
    votes, right = task.votes, fits.right
    trusted, by_fold = fits.trusted_only()
    everything = np.ones(len(fits.given))
    both = fits.together(BOTH, [everything] * task.folds, everything, noisy.ridge, noisy)
    first, firsts = [trusted.trusted, noisy.trusted], [[z, noisy.judged] for z in by_fold]
    whole = [trusted.judged, noisy.judged]
    if learned is not None and searcher is not None:
        assert task.rows is not None
        on_trusted = searcher.predict_folds(learned.model, task.rows.part(task.trusted))
        place = task.fold[task.trusted][:, None, None].expand(-1, 1, searcher.classes)
        first.append(by_class(on_trusted.gather(1, place).squeeze(1)))
        on_judged = searcher.predict_folds(learned.model, task.rows.part(task.judged)).double()
        for number, some in enumerate(firsts):
            some.append(by_class(on_judged[:, number]))
        whole.append(by_class(on_judged.mean(1)))
    early = fit_pool(first, right)

    noise = fit_noise(early.probabilities(whole), frequency, votes)

    def passed(models: list[Array]) -> Array:
        q = noise.posterior(early.probabilities(models), frequency, votes)
        passed: Array = (q[np.arange(len(q)), fits.given] >= 0.5).astype(float)
        return passed

    kept = [passed(some) for some in firsts]
    cleaned = fits.together(CLEANED, kept, None, fits.cleaned_ridge(kept[0], both), both)
    pooled = [trusted, both, cleaned]
    # The others have seen the trusted samples, too, so that these alone have to earn their part.
    pool = fit_pool([fit.trusted for fit in pooled], right, without=1)
    assert pool.sharpness is not None
    compared = {noisy.name: _compared(noisy.trusted, right)}
    compared |= {
        fit.name: Compared(cross_entropy(b * fit.trusted, right), _accuracy(fit.trusted, right))
        for fit, b in zip(pooled, pool.sharpness, strict=True)
    }
    logits = pool.logits([fit.trusted for fit in pooled])
    compared[POOLED] = Compared(pool.loss, _accuracy(logits, right))
    p = pool.probabilities([fit.judged for fit in pooled])
    # Each sample is judged by one fold, as the trusted ones are.
    folds = task.fold[task.judged].numpy()
    apart = by_class(np.stack(by_fold)[folds, np.arange(len(folds))]), trusted.trusted
    return _Fitted(pooled, pool, p, compared, apart=apart)


def _unverified(fits: CrossFits, task: CleaningTask, noisy: CrossFit, frequency: Array) -> _Fitted:
    """The fits without trusted samples: labels are wrong that disagree however sure p is."""
    p, noise = _alone(noisy.judged, fits.given, frequency, task)
    quality = noise.posterior(p, frequency, task.votes)[np.arange(len(p)), fits.given]
    kept = (quality >= 0.5).astype(float)
    ridge = fits.cleaned_ridge(kept, noisy)
    cleaned = fits.together(CLEANED, [kept] * task.folds, None, ridge, noisy)
    sharpness, _ = fit_sharpness(cleaned.judged, fits.given)
    return _Fitted([cleaned], Pool(np.array([sharpness]), np.zeros(p.shape[1])), p, {}, noise)


def _alone(
    logits: Array, given: Array, frequency: Array, task: CleaningTask
) -> tuple[Array, NoiseModel]:
    """The classes and how labels come about, from the labels alone."""
    p = separated(logits, given).probabilities([logits])
    return p, fit_noise(p, frequency, task.votes)


def _believed(pool: Pool, belief: float, sharpness: float) -> Pool:
    """The pool as far as labels are wrong, and otherwise the fit to all of them, the second.

    If no label is wrong, that fit has seen the trusted samples and many more, and what a few
    trusted samples say about the others is chance.
    """
    alone = sharpness * np.eye(len(pool.coefficients))[1]
    return replace(
        pool,
        coefficients=belief * pool.coefficients + (1 - belief) * alone,
        bias=belief * pool.bias,
    )


def _compared(logits: Array, labels: Array) -> Compared:
    return Compared(fit_sharpness(logits, labels)[1], _accuracy(logits, labels))


def _accuracy(logits: Array, labels: Array) -> float:
    return float((logits.argmax(1) == labels).mean())


def _helped(pooled: list[CrossFit], labels: Array, pool: Pool) -> bool:
    """Whether no fit is clearly better than the cleaned one, the last, in loss and accuracy."""
    rows = np.arange(len(labels))
    found = []
    assert pool.sharpness is not None
    for fit, sharpness in zip(pooled, pool.sharpness, strict=True):
        log_p = log_softmax(sharpness * fit.trusted)
        found.append((-log_p[rows, labels], (log_p.argmax(1) != labels).astype(float)))
    return not any(
        all(_clearly_positive(ours - theirs) for ours, theirs in zip(found[-1], other, strict=True))
        for other in found[:-1]
    )


def _clearly_positive(differences: Array) -> bool:
    return bool(differences.mean() > CLEARLY * differences.std() / len(differences) ** 0.5)


def _from_predictions(task: CleaningTask) -> CleaningResult:
    """Judge labels by the predictions of a model of the user's."""
    assert task.predictions is not None
    judged, trusted = (by_class(task.predictions[i]) for i in (task.judged, task.trusted))
    given, right = task.labels[task.judged].numpy(), task.labels[task.trusted].numpy()
    sharpness, _ = fit_sharpness(judged, given)
    frequency = softmax(sharpness * judged)
    checked, noise, signs = None, None, None
    if task.verified:
        pool = fit_pool([trusted], right)
        p = pool.probabilities([judged])
        if task.old_labels is not None:
            seen = softmax(sharpness * trusted)
            checked = Evidence(pool.probabilities([trusted]), seen)
        signs = signs_of_noise([judged], [trusted], given, right)
        compared = {POOLED: _compared(trusted, right)}
    else:
        p, noise = _alone(judged, given, frequency, task)
        compared = {}
        pool = Pool(np.array([sharpness]), np.zeros(p.shape[1]))
    verdict = judge(Evidence(p, frequency), checked, task, noise, signs)
    weights = verdict.quality[np.isin(task.judged.numpy(), task.train.numpy())]
    settings = {"labels by features": verdict.noise.share}
    return CleaningResult(
        [], pool, torch.from_numpy(weights), verdict, compared, True, {}, settings
    )
