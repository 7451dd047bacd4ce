"""How labels are cleaned: weights, then a model, then the probability that each label is right.

1. One weight per sample, in [0, 1], so that a model trained with the weights does well on trusted
   samples: min_x f(x, y*(x)) with

       g(x, y) = 1/n sum_i x_i CE_i(y) + ridge ||y||^2,      f(x, y) = 1/m sum_j CE_j(y),

   by F2SA. Its inner steps are on minibatches that both copies of y share; the direction of x is
   taken from one pass over all samples, which needs forward passes only. F falls long after the
   weights began to fit the trusted samples themselves, so the weights are those with which the loss
   on held-back trusted samples was lowest. A module starts from a training on all samples alike.
2. The model of step 1 says which labels are more probably wrong than right (:mod:`.noise`), and a
   model with a smaller ridge is trained without them.
3. Every label is judged by a model that was not trained on it. For this the samples are divided
   into folds.
4. The final model is trained on the samples that passed, and on all trusted ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import bilevel
from bilevel.cleaning import noise
from bilevel.cleaning.learners import INNER_STEPS, MULTIPLIER, WEIGHT_STEP, Learner
from bilevel.cleaning.progress import Progress
from bilevel.cleaning.rows import Rows

History: TypeAlias = dict[str, npt.NDArray[Any]]

FOLDS = 5
STEPS_UNWATCHED = 10
"""How many steps the weights are given where no trusted samples can be held back."""


@dataclass(frozen=True)
class Task:
    """What is to be cleaned.

    Attributes:
        rows, labels: all samples, trusted ones included.
        train: the numbers of those whose weights are learned.
        trusted: the numbers of those that teach them.
        held: the numbers of those, trusted too, that decide when to stop; may be empty.
        judged: the numbers of those whose labels are judged, ``train`` among them.
        verified: whether the trusted labels are right, and not only taken as right.
    """

    rows: Rows
    labels: Tensor
    train: Tensor
    trusted: Tensor
    held: Tensor
    judged: Tensor
    verified: bool

    @property
    def held_samples(self) -> tuple[Rows, Tensor] | None:
        """The held-back samples, if there are any."""
        if not len(self.held):
            return None
        return self.rows.part(self.held), self.labels[self.held]


@dataclass(frozen=True)
class Cleaned:
    """What was found.

    Attributes:
        model: trained on what passed.
        sharpness: by which its logits are multiplied to be calibrated.
        weights: of the samples in ``train``.
        probabilities: of each class, for the samples in ``judged``.
        quality: the probability that the label is right, for the samples in ``judged``.
        transitions: T(k, j), the probability that a sample of class k was given the label j.
        history: one entry for each step of the weights.
        settings: the choices made.
    """

    model: Any
    sharpness: float
    weights: Tensor
    probabilities: Tensor
    quality: Tensor
    transitions: Tensor
    history: History
    settings: dict[str, float]


def clean(
    learner: Learner,
    task: Task,
    *,
    max_steps: int,
    patience: int,
    batch_size: int,
    seed: int,
    checkpoint: Path | None = None,
) -> Cleaned:
    """All four steps; the first is saved in the folder ``checkpoint``, and goes on from there."""
    labels, held = task.labels, task.held_samples
    weights = torch.zeros(len(labels))
    weights[task.train] = 1.0
    start = learner.lower_start(task.rows, labels, weights, held)
    found = _learn_weights(learner, task, start, max_steps, patience, batch_size, seed, checkpoint)
    logits = learner.predict(found.model, task.rows.part(task.train))
    probabilities = (_calibrated(learner, found.model, task) * logits).softmax(1)
    q, _ = noise.judge(probabilities, labels[task.train], task.verified)

    weights[task.train] = _passed(q)
    weights[task.trusted] = 1.0
    ridge, model, sharpness = _choose_ridge(learner, task, weights)

    logits = torch.empty(len(labels), learner.classes)
    generator = torch.Generator().manual_seed(seed)
    shuffled = task.judged[torch.randperm(len(task.judged), generator=generator)]
    for fold in shuffled.tensor_split(FOLDS):
        others = weights.clone()
        others[fold] = 0.0
        if len(others.nonzero()) == 0:
            others = weights
        unseen = learner.fit(task.rows, labels, others, ridge, held)
        logits[fold] = learner.predict(unseen, task.rows.part(fold))
    probabilities = (sharpness * logits[task.judged]).softmax(1)
    q, T = noise.judge(probabilities, labels[task.judged], task.verified)

    weights[task.judged] = _passed(q)
    if task.verified:
        weights[task.held] = 1.0
    model = learner.fit(task.rows, labels, weights, ridge, held, start=model)
    return Cleaned(
        model=model,
        sharpness=sharpness,
        weights=found.weights,
        probabilities=probabilities,
        quality=q,
        transitions=T,
        history=found.history,
        settings={
            **learner.settings(),
            "multiplier": MULTIPLIER,
            "inner_steps": INNER_STEPS,
            "batch_size": found.batch_size,
            "upper_lr": WEIGHT_STEP * len(task.train),
            "steps": found.steps,
            "selected_step": found.selected_step,
            "held_back": len(task.held),
            "final_ridge": ridge,
            "sharpness": sharpness,
        },
    )


@dataclass
class _Weights:
    """The best that the first step came by.

    Attributes:
        weights, model: of that step.
        loss: on the held-back samples there.
        selected_step: its number; ``steps`` is how many were taken.
    """

    weights: Tensor
    model: Any
    loss: float
    selected_step: int
    batch_size: int
    steps: int = 0
    history: History = field(default_factory=dict)


def _learn_weights(
    learner: Learner,
    task: Task,
    start: Any,
    max_steps: int,
    patience: int,
    batch_size: int,
    seed: int,
    checkpoint: Path | None,
) -> _Weights:
    rows, labels, train = task.rows, task.labels, task.train
    held = task.held_samples

    taken: list[Any] = [None, None, None]  # y and z ask for the same samples, one after the other

    def samples(index: Tensor) -> tuple[Any, Tensor]:
        if taken[0] is not index:
            some = train[index]
            taken[:] = index, rows.take(some), labels[some]
        return taken[1], taken[2]

    def lower(x: Tensor, y: Any, index: Tensor) -> Tensor:
        features, given = samples(index)
        loss = learner.weighted_loss(y, features, given, x[index])
        return loss / len(index) + learner.ridge * learner.penalty(y)

    def upper(x: Tensor, y: Any, index: Tensor) -> Tensor:
        return cross_entropy(learner.logits(y, rows.take(index)), labels[index])

    batch_size = min(batch_size, len(train))
    ones = torch.ones(len(train))
    best = _Weights(ones, None, float("inf"), 0, batch_size)
    losses: list[float] = []

    def watch(solver: bilevel.Solver, info: Any) -> bool:
        y = solver.y
        loss = float("nan")
        if held is not None:
            loss = float(cross_entropy(learner.predict(y, held[0]), held[1]))
        del losses[solver.k - 1 :]  # of steps that are taken again after a checkpoint
        losses.append(loss)
        better = held is None or loss < best.loss
        if better:
            best.weights, best.model, best.loss, best.selected_step = solver.x, y, loss, solver.k
        stop = held is not None and solver.k - best.selected_step >= patience
        if progress is not None:
            progress.save(solver if better else None, losses, stop)
        return stop

    options: dict[str, Any] = {
        "problem": bilevel.Problem(upper, lower, x_set=bilevel.sets.Box(0, 1)),
        "x0": ones,
        "y0": start,
        "method": learner.method(len(train)),
        # repeated, so that a minibatch of either level has as many samples
        "upper_data": task.trusted.repeat(-(-batch_size // len(task.trusted))),
        "lower_data": torch.arange(len(train)),
        "batch_size": batch_size,
        "direction_batch_size": "all",
        "chunk_size": max(rows.chunk, batch_size),
        "seed": seed,
    }
    steps = max_steps if held is not None else min(max_steps, STEPS_UNWATCHED)
    progress = None if checkpoint is None else Progress(checkpoint)
    if progress is not None:
        solver = progress.best(options)
        losses += progress.losses
        if solver is not None:
            best.weights, best.model, best.selected_step = solver.x, solver.y, solver.k
            best.loss = losses[solver.k - 1] if solver.k <= len(losses) else float("inf")
        if progress.stopped:
            steps = len(losses)
    result = bilevel.minimize(
        **options,
        steps=steps,
        callback=watch,
        process_group=None,  # who cleans on one of many ranks need not ask the others
        checkpoint=None if progress is None else progress.run,
    )
    if result.outcome is bilevel.Outcome.INTERRUPTED:
        raise bilevel.errors.InterruptedRunError(result.steps)
    best.steps = result.steps
    best.history = {**result.history, "held_back": np.array(losses[: result.steps])}
    return best


def _passed(q: Tensor) -> Tensor:
    """1 where the label is more probably right than wrong."""
    return (q >= 0.5).float()


def _calibrated(learner: Learner, model: Any, task: Task) -> float:
    held = task.held_samples
    return 1.0 if held is None else noise.sharpness(learner.predict(model, held[0]), held[1])


def _choose_ridge(learner: Learner, task: Task, weights: Tensor) -> tuple[float, Any, float]:
    """The ridge that does best on held-back samples, the model trained with it, its sharpness."""
    held = task.held_samples
    chosen: tuple[float, Any, float] | None = None
    lowest, model = float("inf"), None
    for ridge in learner.ridges:
        model = learner.fit(task.rows, task.labels, weights, ridge, held, start=model)
        sharpness = _calibrated(learner, model, task)
        if held is None:
            return ridge, model, sharpness
        loss = float(cross_entropy(sharpness * learner.predict(model, held[0]), held[1]))
        if loss >= lowest:
            break
        chosen, lowest = (ridge, model, sharpness), loss
    assert chosen is not None, "a loss on held-back samples that is not a number"
    return chosen
