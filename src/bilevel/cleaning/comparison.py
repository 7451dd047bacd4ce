"""Cross-fitted models: each predicts the samples that it was not fitted to.

Four fits are compared on trusted samples: to the trusted samples alone, to the other samples alone,
to both, and to both without the labels that are more probably wrong than right. The ridge of each
is chosen by the loss on trusted samples that it was not fitted to. With few of them, the loss on
held-back labels, though these are noisy, is worth as much as the loss on 50 trusted samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel.cleaning.learners import HeldBack, Learner
from bilevel.cleaning.noise import Array, by_class, cross_entropy, fit_sharpness
from bilevel.cleaning.rows import FeatureRows
from bilevel.cleaning.softmax import SoftmaxRegression
from bilevel.cleaning.task import CleaningTask

TRUSTED, NOISY, BOTH, CLEANED = "trusted only", "noisy only", "noisy and trusted", "cleaned"

_STEP = 10**0.5  # between neighbouring ridges
_NOISY_WORTH = 50  # trusted samples


@dataclass(frozen=True)
class CrossFit:
    """A kind of fit.

    Attributes:
        name: which samples it was fitted to.
        model: the variables of the fit to all of these samples.
        folds: those of the fits without each fold.
        ridge: the ridge that was chosen.
        judged: the logits of the judged samples, by fits without them.
        trusted: the logits of the trusted samples, by fits without them.
    """

    name: str
    model: Any
    folds: list[Any]
    ridge: float
    judged: Array
    trusted: Array


class CrossFits:
    """Fits of one learner to the samples of one task."""

    def __init__(self, learner: Learner, task: CleaningTask) -> None:
        assert task.rows is not None
        self._learner, self._task, self._rows = learner, task, task.rows
        self._judged_rows = task.rows.part(task.judged)
        self._trusted_rows = task.rows.part(task.trusted)
        self._judged_fold = task.fold[task.judged].numpy()
        self._trusted_fold = task.fold[task.trusted].numpy()
        self._judged_parts = self._by_fold(self._judged_rows, self._judged_fold)
        self._trusted_parts = self._by_fold(self._trusted_rows, self._trusted_fold)
        self.right = task.labels[task.trusted].numpy()
        self.given = task.labels[task.judged].numpy()

    def trusted_only(self) -> tuple[CrossFit, list[Array]]:
        """The fit to trusted samples; also the logits of the judged samples by each fold."""
        learner, rows = self._learner, self._trusted_rows
        expanded: Callable[[Any], Any] = _unchanged
        small: Learner = learner
        if isinstance(learner, SoftmaxRegression) and len(rows) < learner.width:
            compressed = learner.compressed(rows)
            small, rows, expanded = compressed.learner, compressed.rows, compressed.expanded
        labels = torch.from_numpy(self.right)
        parts = self._by_fold(rows, self._trusted_fold)
        last: list[Any] = [None] * len(parts)
        weights = torch.from_numpy(np.stack([~part for part, _ in parts])).float()

        def scored(ridge: float) -> tuple[float, tuple[Array, list[Any]]]:
            last[:] = small.fit_several(rows, labels, weights, ridge, [None] * len(parts), last)
            logits = self._empty(self.right)
            for y, (part, some) in zip(last, parts, strict=True):
                logits[part] = small.predict(y, some).numpy()
            logits = self._neutral(logits)
            return fit_sharpness(logits, self.right)[1], (logits, list(last))

        ridge, (logits, models) = best_ridge(small.ridges, scored)
        whole = expanded(small.fit(rows, labels, torch.ones(len(labels)), ridge, None))
        if isinstance(learner, SoftmaxRegression):
            whole = {name: self._neutral(part.clone()) for name, part in whole.items()}
        by_fold = [self._neutral(self._predict(expanded(y), self._judged_rows)) for y in models]
        judged = self._neutral(self._predict(whole, self._judged_rows))
        return CrossFit(TRUSTED, whole, models, ridge, judged, logits), by_fold

    def _neutral(self, logits: Any) -> Any:
        """Without trusted samples of a class, the trusted ones have no opinion on it."""
        present = np.unique(self.right)
        absent = np.setdiff1d(np.arange(logits.shape[-1]), present)
        if len(absent):
            logits[..., absent] = logits[..., present].mean(-1)[..., None]
        return logits

    def noisy_only(self) -> tuple[CrossFit, Array]:
        """The fit to the judged samples as they are labelled.

        Also the logits of each trusted sample by one fold, as those of the judged samples are: the
        mean of all folds predicts better, which would look as if judged labels were wrong.
        """
        everything, none = np.ones(len(self.given)), np.zeros(len(self.right))
        ridge, first = self._ridge(everything, none == 0, self._learner.ridges, None)
        wanted = [(~part, none) for part, _ in self._judged_parts[1:]]
        # They do not start from the first, which has seen the labels that they are to judge.
        models = [first, *self._fit_several(wanted, ridge, [None] * len(wanted))]
        judged = self._empty(self.given)
        for (part, rows), model in zip(self._judged_parts, models, strict=True):
            judged[part] = self._predict(model, rows)
        # The trusted samples are in none of these fits, so that all folds may judge them.
        on_trusted = np.stack([self._predict(y, self._trusted_rows) for y in models])
        alike = by_class(on_trusted[self._trusted_fold, np.arange(len(self.right))])
        return CrossFit(NOISY, first, models, ridge, judged, on_trusted.mean(0)), alike

    def cleaned_ridge(self, kept: Array, both: CrossFit) -> float:
        """The ridge for the fit to what is kept.

        Args:
            kept: which judged samples are kept.
            both: the fit to all samples, which has about that ridge and is started from.
        """
        if not np.any(kept[self._judged_fold == 0]):
            return both.ridge
        # Without the labels that are probably wrong, less ridge is needed than with them.
        ridges = self._learner.ridges[0], both.ridge, both.ridge
        return self._ridge(kept, self._trusted_fold == 0, ridges, both.folds[0])[0]

    def _ridge(
        self, kept: Array, checked: Array, ridges: tuple[float, float, float], start: Any
    ) -> tuple[float, Any]:
        """The ridge with which a fit to what is kept does best on the first fold, and that fit.

        It is judged by the trusted samples that are ``checked``, too, and fitted to the others.
        """
        part = self._judged_fold == 0
        held = part & (kept > 0)
        rows = self._judged_rows.part(_places(held))
        others = self._trusted_rows.part(_places(checked))
        last = start

        def scored(ridge: float) -> tuple[float, Any]:
            nonlocal last
            last = self._fit(kept * ~part, ~checked * self._trust, ridge, last)
            loss = _NOISY_WORTH * cross_entropy(self._predict(last, rows), self.given[held])
            if self._task.verified:
                z = self._predict(last, others)
                loss += len(z) * fit_sharpness(z, self.right[checked])[1]
            return loss, last

        return best_ridge(ridges, scored)

    def together(
        self,
        name: str,
        kept_by_fold: list[Array],
        kept: Array | None,
        ridge: float,
        start: CrossFit,
    ) -> CrossFit:
        """The fit to the trusted samples and to those judged ones that are kept.

        Args:
            name: its name.
            kept_by_fold: which samples each fold keeps.
            kept: which samples the fit to all folds keeps; None: there is none yet.
            ridge: the ridge.
            start: each fold starts from the same fold of this fit, which has not seen it either.
        """
        judged = self._empty(self.given)
        trusted = self._empty(self.right)
        parts = list(zip(self._judged_parts, self._trusted_parts, strict=True))
        wanted = [
            (some * ~part, ~check * self._trust)
            for some, ((part, _), (check, _)) in zip(kept_by_fold, parts, strict=True)
        ]
        starts = list(start.folds)
        if kept is not None:
            wanted.append((kept, np.ones(len(self.right)) * self._trust))
            starts.append(start.model)
        models = self._fit_several(wanted, ridge, starts)
        whole = start.model if kept is None else models.pop()
        for ((part, rows), (check, checked)), model in zip(parts, models, strict=True):
            judged[part] = self._predict(model, rows)
            trusted[check] = self._predict(model, checked)
        return CrossFit(name, whole, models, ridge, judged, trusted)

    def again(self, fit: CrossFit, kept: Array) -> CrossFit:
        """The fit, with another choice of the judged samples that are kept."""
        trusted = np.ones(len(self.right)) * self._trust
        return replace(fit, model=self._fit(kept, trusted, fit.ridge, fit.model))

    @property
    def _trust(self) -> float:
        return 1.0 if self._task.verified else 0.0  # assumed samples are among the judged ones

    def _by_fold(self, rows: FeatureRows, fold: Array) -> list[tuple[Array, FeatureRows]]:
        """Which samples are in each fold, and their rows."""
        masks = [fold == number for number in self._folds()]
        return [(mask, rows.part(_places(mask))) for mask in masks]

    def _folds(self) -> list[int]:
        return list(range(self._task.folds))

    def _fit(self, kept: Array, trusted: Array, ridge: float, start: Any) -> Any:
        return self._fit_several([(kept, trusted)], ridge, [start])[0]

    def _fit_several(
        self, wanted: list[tuple[Array, Array]], ridge: float, starts: list[Any]
    ) -> list[Any]:
        """One model for each choice of weights for the judged and for the trusted samples."""
        weights = torch.zeros(len(wanted), len(self._task.labels))
        for row, (kept, trusted) in zip(weights, wanted, strict=True):
            if self._task.verified:
                row[self._task.trusted] = torch.from_numpy(np.asarray(trusted, np.float32))
            row[self._task.judged] = torch.from_numpy(np.asarray(kept, np.float32))
            if not row.any():
                row[self._task.judged] = 1.0
        held = [self._held(trusted) for _, trusted in wanted]
        return self._learner.fit_several(
            self._rows, self._task.labels, weights, ridge, held, starts
        )

    def _held(self, trusted: Array) -> HeldBack | None:
        """Trusted samples on which a module may choose the end of its training."""
        if not self._task.verified or isinstance(self._learner, SoftmaxRegression):
            return None
        some = _places(trusted > 0) if np.any(trusted) else _places(np.ones(len(trusted), bool))
        return self._trusted_rows.part(some), torch.from_numpy(self.right)[some]

    def _predict(self, y: Any, rows: FeatureRows) -> Array:
        return by_class(self._learner.predict(y, rows))

    def _empty(self, labels: Array) -> Array:
        return np.empty((len(labels), self._learner.classes), order="F")


def best_ridge(
    ridges: tuple[float, float, float], scored: Callable[[float], tuple[float, Any]]
) -> tuple[float, Any]:
    """The ridge with the lowest loss, and what came with it.

    The search walks from the first ridge, by a factor of ten, to where the loss is lower, as long
    as it falls. The parabola through the last three losses says whether the lowest one is nearer to
    half that distance, on one side; then that is looked at as well.

    Args:
        ridges: the smallest one, the first, and the largest.
        scored: the loss of a ridge and whatever came with it.
    """
    smallest, first, largest = ridges
    seen: dict[int, tuple[float, Any]] = {}

    def loss(place: int) -> float:
        ridge = first * _STEP**place
        if not 0.999 * smallest <= ridge <= 1.001 * largest:
            return float("inf")
        if place not in seen:
            seen[place] = scored(ridge)
        return seen[place][0]

    here = 0
    loss(here)
    if smallest < largest:
        for step in (2, -2):  # larger ridges first: their fits take less time
            while loss(here + step) < loss(here):
                here += step
            if here:
                break
        left, middle, right = loss(here - 2), loss(here), loss(here + 2)
        if max(left, right) < float("inf") and left + right > 2 * middle:
            half = here + round((left - right) / (left + right - 2 * middle))
            here = min((here, half), key=loss)
    return first * _STEP**here, seen[here][1]


def _unchanged(y: Any) -> Any:
    return y


def _places(mask: Any) -> Tensor:
    return torch.from_numpy(np.flatnonzero(np.asarray(mask)))
