"""The algorithm: learn weights, then a model, then the probability that each label is right.

1. One weight per sample, in [0, 1], is learned so that a model trained with the weights does well
   on trusted samples: min_x f(x, y*(x)) with

       g(x, y) = 1/n sum_i x_i CE_i(y) + ridge ||y||^2,      f(x, y) = 1/m sum_j CE_j(y),

   by F2SA. The inner steps use minibatches that both copies of y share; the direction of x comes
   from one pass over all samples, which needs forward passes only. The search ends early, see
   :mod:`~bilevel.cleaning.weights`. A module starts from a training on all samples with weight 1.
2. The model of step 1 says which labels are more probably wrong than right, see
   :mod:`~bilevel.cleaning.noise`. A model with a smaller ridge is trained without them.
3. Every label is judged by a model that was not trained on it: the samples are divided into folds.
4. The final model is trained on the samples whose labels passed, and on all trusted ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bilevel.cleaning.learners import INNER_STEPS, MULTIPLIER, WEIGHT_STEP, Learner
from bilevel.cleaning.noise import fit_sharpness, judge
from bilevel.cleaning.task import CleaningTask, SearchSettings
from bilevel.cleaning.weights import History, learn_weights

FOLDS = 5


@dataclass(frozen=True)
class CleaningResult:
    """The result of label cleaning.

    Attributes:
        model: the variables of the final model.
        sharpness: the factor by which its logits are multiplied for calibrated probabilities.
        weights: the learned weights of the samples in ``train``.
        probabilities: the probability of each class, for the samples in ``judged``.
        quality: the probability that the label is right, for the samples in ``judged``.
        transitions: T(k, j), the probability that a sample of class k was given the label j.
        history: one entry for each step of the weights.
        settings: the settings that were chosen.
    """

    model: Any
    sharpness: float
    weights: Tensor
    probabilities: Tensor
    quality: Tensor
    transitions: Tensor
    history: History
    settings: dict[str, float]


def clean(learner: Learner, task: CleaningTask, settings: SearchSettings) -> CleaningResult:
    """Take all four steps."""
    labels, held = task.labels, task.held_samples
    weights = torch.zeros(len(labels))
    weights[task.train] = 1.0
    start = learner.lower_start(task.rows, labels, weights, held)
    learned = learn_weights(learner, task, start, settings)
    logits = learner.predict(learned.model, task.rows.part(task.train))
    probabilities = (_sharpness(learner, learned.model, task) * logits).softmax(1)
    quality, _ = judge(probabilities, labels[task.train], task.verified)

    weights[task.train] = _passed(quality)
    weights[task.trusted] = 1.0
    ridge, model, sharpness = _choose_ridge(learner, task, weights)
    logits = _out_of_fold_logits(learner, task, weights, ridge, settings.seed)
    probabilities = (sharpness * logits).softmax(1)
    quality, transitions = judge(probabilities, labels[task.judged], task.verified)

    weights[task.judged] = _passed(quality)
    if task.verified:
        weights[task.held] = 1.0
    return CleaningResult(
        model=learner.fit(task.rows, labels, weights, ridge, held, start=model),
        sharpness=sharpness,
        weights=learned.weights,
        probabilities=probabilities,
        quality=quality,
        transitions=transitions,
        history=learned.history,
        settings={
            **learner.settings(),
            "multiplier": MULTIPLIER,
            "inner_steps": INNER_STEPS,
            "batch_size": learned.batch_size,
            "upper_lr": WEIGHT_STEP * len(task.train),
            "steps": learned.steps,
            "selected_step": learned.selected_step,
            "held_back": len(task.held),
            "final_ridge": ridge,
            "sharpness": sharpness,
        },
    )


def _out_of_fold_logits(
    learner: Learner, task: CleaningTask, weights: Tensor, ridge: float, seed: int
) -> Tensor:
    """The logits of the judged samples, each by a model that was not trained on it."""
    logits = torch.empty(len(task.labels), learner.classes)
    generator = torch.Generator().manual_seed(seed)
    shuffled = task.judged[torch.randperm(len(task.judged), generator=generator)]
    for fold in shuffled.tensor_split(FOLDS):
        others = weights.clone()
        others[fold] = 0.0
        if len(others.nonzero()) == 0:  # no sample with a weight is left outside the fold
            others = weights
        model = learner.fit(task.rows, task.labels, others, ridge, task.held_samples)
        logits[fold] = learner.predict(model, task.rows.part(fold))
    return logits[task.judged]


def _passed(quality: Tensor) -> Tensor:
    """1 if the label is more probably right than wrong, otherwise 0."""
    return (quality >= 0.5).float()


def _sharpness(learner: Learner, model: Any, task: CleaningTask) -> float:
    """The factor that calibrates the logits on held-back samples; 1 if there are none."""
    held = task.held_samples
    return 1.0 if held is None else fit_sharpness(learner.predict(model, held[0]), held[1])


def _choose_ridge(
    learner: Learner, task: CleaningTask, weights: Tensor
) -> tuple[float, Any, float]:
    """The ridge that does best on held-back samples, the model fitted with it, its sharpness."""
    held = task.held_samples
    chosen: tuple[float, Any, float] | None = None
    lowest, model = float("inf"), None
    for ridge in learner.ridges:
        model = learner.fit(task.rows, task.labels, weights, ridge, held, start=model)
        sharpness = _sharpness(learner, model, task)
        if held is None:
            return ridge, model, sharpness
        loss = float(cross_entropy(sharpness * learner.predict(model, held[0]), held[1]))
        if loss >= lowest:
            break
        chosen, lowest = (ridge, model, sharpness), loss
    assert chosen is not None, "the loss on held-back samples is not a number"
    return chosen
