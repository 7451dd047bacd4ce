"""The search for weights: the bilevel problem of label cleaning, solved with early stopping.

F keeps falling after the weights have begun to fit the trusted samples themselves, so the weights
are those of the step with the lowest loss on held-back trusted samples, by cross-validation: the
problem is solved once for each fold of the trusted samples, without the samples in that fold. All
of these are one problem, in which x and y are those of all folds, and f and g are sums over folds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bilevel.cleaning.checkpoint import SearchCheckpoint
from bilevel.cleaning.learners import Learner, fold_losses
from bilevel.cleaning.task import CleaningTask, SearchSettings
from bilevel.errors import InterruptedRunError
from bilevel.problem import Box, Problem
from bilevel.run import Outcome, minimize
from bilevel.run.solver import Solver

History: TypeAlias = dict[str, npt.NDArray[Any]]

STEPS_WITHOUT_HELD_BACK = 10
"""The number of steps of the weights without early stopping."""


@dataclass
class LearnedWeights:
    """The weights of the best step.

    Attributes:
        weights, model: the weights, of shape (folds, n), and the models of that step.
        loss: the loss on the held-back samples at that step.
        selected_step: the number of that step, counted from 1.
        batch_size: the number of samples in a minibatch.
        steps: the number of steps that were taken.
        history: one entry for each step.
    """

    weights: Tensor
    model: Any
    loss: float
    selected_step: int
    batch_size: int
    steps: int = 0
    history: History = field(default_factory=dict)


def learn_weights(
    learner: Learner, task: CleaningTask, start: Any, settings: SearchSettings
) -> LearnedWeights:
    """Learn one weight for each sample in ``task.train``; the model starts from ``start``."""
    count, checked, rows = len(task.train), len(task.trusted), task.rows
    assert rows is not None
    batch_size = count if learner.at_once else min(settings.batch_size, count)
    ones = torch.ones(task.folds, count)
    options: dict[str, Any] = {
        "problem": _problem(learner, task),
        "x0": ones,
        "y0": learner.folded(start, task.folds),
        "method": learner.method(count),
        "seed": settings.seed,
    }
    if not learner.at_once:
        options |= {
            # Fewer trusted samples than are in a minibatch are taken all at once.
            "upper_data": torch.arange(checked) if checked > batch_size else None,
            "lower_data": torch.arange(count),
            "batch_size": batch_size,
            "direction_batch_size": "all",
            "chunk_size": max(rows.chunk, batch_size),
        }
    saved = None if settings.checkpoint is None else SearchCheckpoint(settings.checkpoint)
    best = LearnedWeights(ones, None, float("inf"), 0, batch_size)
    selection = _Selection(learner, task, settings, best, saved)
    steps = settings.max_steps
    if not settings.early_stopping:
        steps = min(steps, STEPS_WITHOUT_HELD_BACK)
    if saved is not None:
        selection.resume(saved.losses, saved.best(options))
        if saved.stopped:
            steps = len(saved.losses)
    result = minimize(
        **options,
        steps=steps,
        callback=selection,
        select="best",  # the callback keeps its own; the last x would take another step to fit
        process_group=None,  # each rank of a process group may clean labels of its own
        checkpoint=None if saved is None else saved.run,
    )
    if result.outcome is Outcome.INTERRUPTED:
        raise InterruptedRunError(result.steps)
    best.steps = result.steps
    best.history = {**result.history, "held_back": np.array(selection.losses[: result.steps])}
    return best


def _problem(learner: Learner, task: CleaningTask) -> Problem:
    """Both objectives as functions of the places of a minibatch; None: all samples."""
    rows, labels, train = task.rows, task.labels, task.train
    assert rows is not None
    trusted, right = rows.part(task.trusted), labels[task.trusted]
    outside = (task.fold[task.trusted] != torch.arange(task.folds)[:, None]).float()
    outside *= task.folds / max(task.folds - 1, 1)  # each sample is outside all folds but one
    last: list[Any] = []  # the two copies of y ask for the same samples in turn

    def samples(index: Tensor | None) -> tuple[Any, Tensor]:
        if not last or last[0] is not index:
            some = train if index is None else train[index]
            last[:] = index, rows.take(some), labels[some]
        return last[1], last[2]

    def lower(x: Tensor, y: Any, index: Tensor | None) -> Tensor:
        features, given = samples(index)
        return learner.fold_loss(
            y, features, given, x if index is None else x[:, index], learner.ridge
        )

    def upper(x: Tensor, y: Any, index: Tensor | None) -> Tensor:
        if index is None:
            return learner.fold_loss(y, trusted.everything(), right, outside)
        return learner.fold_loss(y, trusted.take(index), right[index], outside[:, index])

    return Problem(upper, lower, x_set=Box(0, 1))


class _Selection:
    """The callback of the run: keeps the best step in ``best``, and decides when to stop.

    Attributes:
        losses: the loss on the held-back samples of each step; NaN without early stopping.
    """

    def __init__(
        self,
        learner: Learner,
        task: CleaningTask,
        settings: SearchSettings,
        best: LearnedWeights,
        saved: SearchCheckpoint | None,
    ) -> None:
        self._learner = learner
        self._early = settings.early_stopping
        self._patience = settings.patience
        assert task.rows is not None
        self._rows, self._labels = task.rows.part(task.trusted), task.labels[task.trusted]
        self._fold = task.fold[task.trusted]
        self._best = best
        self._saved = saved
        self.losses: list[float] = []

    def resume(self, losses: list[float], best: Solver | None) -> None:
        """Continue after these losses, of which the solver has the best state."""
        self.losses = list(losses)
        if best is not None:
            loss = losses[best.k - 1] if best.k <= len(losses) else float("inf")
            self._keep(best, best.y, loss)

    def __call__(self, solver: Solver, info: Any) -> bool:
        loss, y = float("nan"), solver.y  # a copy
        if self._early:
            losses = fold_losses(self._learner.predict_folds(y, self._rows), self._labels)
            loss = float(losses.gather(1, self._fold.unsqueeze(1)).mean())
        del self.losses[solver.k - 1 :]  # steps after a checkpoint are taken again
        self.losses.append(loss)
        better = not self._early or loss < self._best.loss
        if better:
            self._keep(solver, y, loss)
        stop = self._early and solver.k - self._best.selected_step >= self._patience
        if self._saved is not None:
            self._saved.save(solver if better else None, self.losses, stop)
        return stop

    def _keep(self, solver: Solver, y: Any, loss: float) -> None:
        best = self._best
        best.weights, best.model, best.loss, best.selected_step = solver.x, y, loss, solver.k
