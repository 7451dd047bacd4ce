"""LabelCleaner: label cleaning as a scikit-learn estimator."""

from __future__ import annotations

import os
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from bilevel.cleaning.classifier import ClassifierLearner
from bilevel.cleaning.comparison import CLEANED
from bilevel.cleaning.device import computed_on_cpu
from bilevel.cleaning.inputs import (
    Labels,
    as_array,
    as_our_own,
    checked_predictions,
    is_pandas_index,
    labels_of,
    majority_of,
    refuse_missing_in_sparse,
    refuse_missing_unscaled,
    refuse_mixed_labels,
    refuse_text,
    stacked,
    with_its_type,
)
from bilevel.cleaning.module import ModuleLearner
from bilevel.cleaning.recipe import POOLED, CleaningResult, clean
from bilevel.cleaning.roles import Roles, assign_folds, assign_roles, trusted_rows
from bilevel.cleaning.rows import FeatureRows, Scaler, linear
from bilevel.cleaning.softmax import SoftmaxRegression
from bilevel.cleaning.task import CleaningTask, SearchSettings
from bilevel.cleaning.wording import listed
from bilevel.errors import ArgumentError, ArgumentTypeError, CleaningWarning
from bilevel.errors.checks import check_count, check_flag, checked_number, checked_path
from bilevel.errors.exceptions import warn
from bilevel.errors.extras import needed

if TYPE_CHECKING:
    import pandas as pd

Array = npt.NDArray[Any]


class LabelCleaner(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Find wrong labels with the help of a few that are right, and learn without them.

    One weight per training sample is learned so that a model trained with the weights does well on
    trusted samples, min_x f(x, y*(x)) with

        g(x, y) = 1/n sum_i x_i CE_i(y) + ridge ||y||^2,    f(x, y) = 1/m sum_j CE_j(y),

    x_i in [0, 1]. These models, one fitted to the trusted samples and one to the others say which
    labels are more probably wrong than right, and a cleaned model is trained without them. On
    trusted samples that they were not fitted to, the fits to the trusted samples, to the others, to
    both and the cleaned one are compared (``comparison_``) and pooled. The pool predicts, as far as
    labels seem to be wrong at all, and otherwise the fit to both; with an estimate of how labels
    come about, by class and by features, it determines the probability that a label is right: its
    ``label_quality``, by models that were not fitted to that label.

    The trusted samples are given to :meth:`fit`, either as separate samples (``X_clean``,
    ``y_clean``) or as rows of X (``trusted``); from about ten on they help, and a class may lack
    them. A :class:`~bilevel.errors.CleaningWarning` says so if cleaning did not help. Without
    trusted samples, only labels are found that disagree with those of similar samples: where most
    samples of one class have the label of another, that label looks right. Then few suggestions are
    made, and the weights are learned with a random part of the rows of each class,
    ``clean_fraction``, in place of trusted ones.

    Args:
        model: a classifier of scikit-learn with ``predict_proba``, which is cloned (no weights are
            learned then); or any ``nn.Module`` that maps rows of features to one number per class,
            in the order of ``classes_``; it is copied and never changed. It receives rows of X in
            their shape; sparse rows are made dense one minibatch at a time. None: softmax
            regression.
        clean_fraction: the part of the rows that is assumed to be right if none are trusted.
        early_stopping: whether to stop where the loss on held-back trusted samples is lowest, by
            cross-validation. Without it the weights take 10 steps.
        validation_fraction: the part of the samples in each fold of cross-validation.
        max_steps: the most steps of the weights.
        patience: the number of steps without a lower held-back loss after which to stop.
        batch_size: the number of samples in a minibatch; softmax regression takes up to 1,000
            samples all at once.
        standardize: whether features are centred, divided by their standard deviation and clipped
            at 4 standard deviations. Sparse features stay sparse: they are divided by the root mean
            square of their nonzero entries, unless all rows have the same norm, as with TF-IDF.
        checkpoint: a folder in which the search for weights is saved; fitting the same samples
            again resumes it and gives the same result (needs a ``random_state``). None: nothing is
            saved.
        random_state: a whole number, None or a NumPy ``RandomState``, as in scikit-learn.

    Attributes:
        classes_: the labels, sorted.
        sample_weight_: the learned weight of each row of X, in [0, 1]; 1 for trusted rows.
        label_quality_: the probability that each label of X is right; 1 for trusted rows.
        threshold_: labels of at most this quality are issues: the highest expected F1, or caution.
        wrong_share_, wrong_share_interval_: the share of wrong labels, and an interval for it.
        review_gain_: how many right labels are won by looking at each label.
        noise_matrix_: entry (k, j) is the probability that a sample of class k has the label j, as
            far as labels depend on the class.
        feature_noise_: the share of labels that depend on the features alone.
        comparison_: the loss and accuracy of each fit on trusted samples it was not fitted to.
        notices_: sentences about what went less well than one would expect.
        history_: arrays with one entry per step: "upper" (the loss on trusted samples), "lower",
            "held_back" (the loss on held-back samples), "seconds" and others.
        settings_: the settings that were chosen.
        trusted_: which rows of X were trusted.
        n_features_in_, feature_names_in_: as in scikit-learn.

    Example:
        >>> import numpy as np, bilevel
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(300, 2))
        >>> true = np.where(X[:, 0] > 0, "right", "left")
        >>> given = np.where(rng.random(300) < 0.3, np.roll(["left", "right"], 1)[
        ...     (true == "right").astype(int)], true)
        >>> cleaner = bilevel.LabelCleaner().fit(X[50:], given[50:], X_clean=X[:50],
        ...                                      y_clean=true[:50])
        >>> issues = cleaner.label_issues()
        >>> found = issues["is_label_issue"].to_numpy()
        >>> bool((found == (given != true)[50:]).mean() > 0.95)
        True
    """

    def __init__(
        self,
        model: Any = None,
        *,
        clean_fraction: float = 0.1,
        early_stopping: bool = True,
        validation_fraction: float = 0.2,
        max_steps: int = 10,
        patience: int = 1,
        batch_size: int = 250,
        standardize: bool = True,
        checkpoint: str | os.PathLike[str] | None = None,
        random_state: Any = 0,
    ) -> None:
        self.model = model
        self.clean_fraction = clean_fraction
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.max_steps = max_steps
        self.patience = patience
        self.batch_size = batch_size
        self.standardize = standardize
        self.checkpoint = checkpoint
        self.random_state = random_state

    @computed_on_cpu
    def fit(
        self,
        X: Any,
        y: Any,
        X_clean: Any = None,
        y_clean: Any = None,
        trusted: Any = None,
        pred_probs: Any = None,
    ) -> LabelCleaner:
        """Judge the labels y of the rows of X, and train the model.

        Args:
            X: features, as NumPy, pandas, SciPy sparse or torch; NaN where a number is missing.
            y: labels of any type; or of shape (n, annotators), with None or NaN where an annotator
                gave no label.
            X_clean, y_clean: samples whose labels are right, with the same features.
            trusted: which rows of X have a right label: a mask, or their numbers. With ``y_clean``,
                one for each of these rows in their order or for all rows of X, these are the right
                labels, and y has those that were given before, which show directly how often labels
                are wrong.
            pred_probs: the probability of each class for each row, by a model of your own that was
                not trained on that row; with a column for each class, in sorted order or, in a
                DataFrame, by name. X may then be None, and nothing can be predicted.
        """
        self._check_arguments()
        folder = None if self.checkpoint is None else checked_path("checkpoint", self.checkpoint)
        index = getattr(X, "index", None)
        if (X_clean is not None and (y_clean is None or trusted is not None)) or (
            y_clean is not None and X_clean is None and trusted is None
        ):
            raise ArgumentError(
                "give either X_clean and y_clean together, or trusted, or neither of them; y_clean "
                "may go with trusted, too"
            )
        rng = _random_state(self.random_state)
        y, votes = majority_of(y)
        features = X
        if pred_probs is None:
            X, y = self._validated(X, y, reset=True)
        else:
            X, y = None, labels_of(y)
        labels = Labels.of(y, votes)
        self.classes_ = labels.classes
        count = len(y)
        checked = None if trusted is None else trusted_rows(trusted, count)
        mask = None if checked is None else np.isin(np.arange(count), checked)
        if X_clean is not None:
            more, right = self._validated(X_clean, y_clean, reset=False)
            labels.append(right)
            X = stacked(X, more)
        elif y_clean is not None:
            assert checked is not None
            labels.correct(checked, y_clean)
        logits = None
        if pred_probs is not None:
            separate = X_clean is not None
            logits = checked_predictions(
                pred_probs, count, self.classes_, features, separate=separate
            )
        self._fit_checked(X, labels, count, mask, logits, rng, folder)
        self._index = index if is_pandas_index(index) else None
        return self

    def _fit_checked(
        self,
        X: Any,
        labels: Labels,
        count: int,
        mask: Array | None,
        logits: Array | None,
        rng: Any,
        folder: Path | None,
    ) -> None:
        """Fit to samples that were checked: the rows of X, and after them those of X_clean."""
        codes, old, votes = labels.codes, labels.old, labels.votes
        roles = assign_roles(codes, count, mask, self.clean_fraction, rng)
        folds = min(max(round(1 / self.validation_fraction), 2), len(roles.judged))
        if roles.verified:
            folds = min(folds, len(roles.trusted))
        groups = [roles.judged, roles.trusted] if roles.verified else [roles.judged]
        fold = assign_folds(codes, groups, folds, rng)
        seed = int(rng.randint(2**31 - 1))
        rows = None
        if X is not None:
            own = self._is_module or self._is_classifier
            standardize = self.standardize and not self._is_classifier
            self._scaler = Scaler(X, standardize, dense=own and self._is_module, narrow=not own)
            rows = self._scaler.rows(X)
        given = codes[roles.judged][:, None] if votes is None else votes[roles.judged]
        task = CleaningTask(
            rows=rows,
            labels=torch.from_numpy(codes),
            train=torch.from_numpy(roles.train),
            trusted=torch.from_numpy(roles.trusted),
            judged=torch.from_numpy(roles.judged),
            fold=torch.from_numpy(fold),
            folds=folds,
            verified=roles.verified,
            votes=given,
            old_labels=old,
            predictions=logits,
        )
        settings = SearchSettings(
            self.max_steps, self.patience, self.batch_size, seed, self.early_stopping, folder
        )
        self._learner = None if rows is None else self._make_learner(rows, seed)
        searcher = None if self._is_classifier else self._learner
        self._keep(clean(self._learner, searcher, task, settings), roles, codes[:count], old)
        self._warn(roles, codes)

    def _keep(self, result: CleaningResult, roles: Roles, given: Array, old: Any) -> None:
        """Set the attributes of a fitted estimator."""
        verdict = result.verdict
        self._models, self._pool = result.models, result.pool
        if isinstance(self._learner, SoftmaxRegression):
            parts = [self._learner.finished(y) for y in self._models]
            factors = torch.from_numpy(result.pool.coefficients)
            self._model: dict[str, Tensor] = {
                name: torch.tensordot(
                    factors, torch.stack([part[name].double() for part in parts]), 1
                )
                for name in ("weight", "bias")
            }
            self._model["bias"] = self._model["bias"] + torch.from_numpy(result.pool.bias)
            # As precise as it is saved, so that a model that was loaded predicts the same.
            self._model = {name: part.float().double() for name, part in self._model.items()}
        self.trusted_ = roles.mask
        self._given, suggested = given.copy(), given.copy()
        issue = np.zeros(len(given), dtype=bool)
        self.sample_weight_ = np.ones(len(given))
        self.label_quality_ = np.ones(len(given))
        self.review_gain_ = np.zeros(len(given))
        if old is not None:  # what was wrong is known
            self._given[roles.mask] = old
            issue[roles.mask] = old != given[roles.mask]
            self.label_quality_[issue] = 0.0
        self.sample_weight_[roles.train] = result.weights.numpy()
        self.label_quality_[roles.judged] = verdict.quality
        self.review_gain_[roles.judged] = verdict.gain
        suggested[roles.judged], issue[roles.judged] = verdict.suggested, verdict.issue
        self._suggested, self._issue = suggested, issue
        self.threshold_ = verdict.threshold
        self.wrong_share_ = verdict.wrong
        self.wrong_share_interval_ = verdict.interval
        self.noise_matrix_ = verdict.noise.transitions
        self.feature_noise_ = verdict.noise.share
        self.comparison_ = {name: vars(row) for name, row in result.compared.items()}
        self.cleaning_helped_ = result.helped
        self.history_ = result.history
        self.settings_ = result.settings
        if self._learner is not None:
            self.settings_ = {**result.settings, "standardized": self._scaler.scales}

    def _warn(self, roles: Roles, codes: Array) -> None:
        """Say what went less well than one would expect."""
        self.notices_: list[str] = []
        if not roles.verified:
            return
        seen = np.unique(codes[roles.trusted])
        absent = self.classes_[np.setdiff1d(np.arange(len(self.classes_)), seen)].tolist()
        if absent:
            self.notices_.append(
                f"no trusted row has the label {listed(absent)}; what is said about "
                f"{'it' if len(absent) == 1 else 'them'} rests on the labels as they were given"
            )
        shares = np.bincount(codes[roles.trusted]) / len(roles.trusted)
        guessing = float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())
        # If the trusted rows have one label, guessing is right about them, and nothing is known.
        if len(seen) > 1 and self._pool.loss >= guessing:
            self.notices_.append(
                f"nothing here predicts the trusted labels better than guessing: the loss is "
                f"{self._pool.loss:.3f}, that of guessing {guessing:.3f}; rely on no verdict"
            )
        elif not self.cleaning_helped_ and CLEANED in self.comparison_:
            best = min(
                (name for name in self.comparison_ if name != POOLED),
                key=lambda name: self.comparison_[name]["loss"],
            )
            self.notices_.append(
                f"cleaning did not help: on trusted samples the model without suspect labels has "
                f"the loss {self.comparison_[CLEANED]['loss']:.3f}, the model of {best} samples "
                f"{self.comparison_[best]['loss']:.3f}; predictions come from all models together, "
                f"with the loss {self._pool.loss:.3f}"
            )
        for notice in self.notices_:
            warn(CleaningWarning(notice))

    def label_issues(self) -> pd.DataFrame:
        """The verdict on each row of X, in the order of X and with its index.

        The columns are ``is_label_issue``, whether the label is worth a look, because its quality
        is below ``threshold_``; ``label_quality``, the probability that the label is right;
        ``given_label``; ``predicted_label``, a label that is better in expectation, where there is
        one, and otherwise the given one, so that accepting all of them helps; ``sample_weight``;
        and ``review_gain``, how many right labels are won by looking at this one.
        """
        check_is_fitted(self)
        with needed("clean", "pandas"):
            import pandas as pd
        return pd.DataFrame(
            {
                "is_label_issue": self._issue,
                "label_quality": self.label_quality_,
                "given_label": self.classes_[self._given],
                "predicted_label": self.classes_[self._suggested],
                "sample_weight": self.sample_weight_,
                "review_gain": self.review_gain_,
            },
            index=self._index,
        )

    def label_next(self, count: int = 20) -> Array:
        """The numbers of the rows whose review would help most, the most helpful first."""
        check_is_fitted(self)
        check_count("count", count)
        order: Array = np.argsort(-self.review_gain_, kind="stable")[:count]
        return order

    def predict(self, X: Any) -> Array:
        """The most probable class of each row."""
        best = self._logits(X).argmax(1).numpy()
        labels: Array = self.classes_[best]
        return labels

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class, calibrated on trusted samples."""
        probabilities: Array = self._logits(X).softmax(1).numpy()
        return probabilities

    @computed_on_cpu
    def _logits(self, X: Any) -> Tensor:
        check_is_fitted(self)
        if self._learner is None:
            raise ArgumentError(
                "nothing can be predicted, because fit was given pred_probs and trained no model"
            )
        X = self._validated(X, None, reset=False)[0]
        if isinstance(self._learner, SoftmaxRegression):
            # In double precision the prediction for a row does not depend on the rows beside it.
            rows = self._scaler.rows(X, np.float64)
            return linear(rows, self._model["weight"], self._model["bias"])
        rows = self._scaler.rows(X)
        models = [self._learner.predict(y, rows).double().numpy() for y in self._models]
        return torch.from_numpy(self._pool.logits(models))

    @property
    def _is_module(self) -> bool:
        return isinstance(self.model, nn.Module)

    @property
    def _is_classifier(self) -> bool:
        return self.model is not None and not self._is_module

    def _make_learner(self, rows: FeatureRows, seed: int) -> Any:
        classes = len(self.classes_)
        if self.model is None:
            return SoftmaxRegression(rows, classes)
        if self._is_classifier:
            names = getattr(self, "feature_names_in_", None)
            return ClassifierLearner(self.model, self.classes_, names)
        learner = ModuleLearner(self.model, classes, self.batch_size, seed)
        learner.check(rows)
        return learner

    def _check_arguments(self) -> None:
        if self._is_classifier and not all(
            hasattr(self.model, name) for name in ("fit", "predict_proba", "get_params")
        ):
            raise ArgumentTypeError(
                f"model must be an nn.Module, a classifier of scikit-learn with predict_proba, or "
                f"None, not {self.model!r}"
            )
        for name in ("clean_fraction", "validation_fraction"):
            if checked_number(name, getattr(self, name), above=True) >= 1:
                raise ArgumentError(f"{name} must be below 1, not {getattr(self, name)!r}")
        for name in ("max_steps", "patience", "batch_size"):
            check_count(name, getattr(self, name))
        for name in ("early_stopping", "standardize"):
            check_flag(name, getattr(self, name))

    def _validated(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        """Check both: X becomes an array or CSR matrix of finite numbers, y an array of labels."""
        X, y = as_array(X), with_its_type(as_array(y))
        refuse_text(X)
        options: dict[str, Any] = {
            "accept_sparse": "csr",
            "dtype": [np.float64, np.float32],
            "allow_nd": self._is_module,
            "ensure_all_finite": "allow-nan",
            "reset": reset,
        }
        with as_our_own():
            if y is None and not reset:
                X = validate_data(self, X, **options)
                self._check_missing(X)
                return X, None
            refuse_mixed_labels(y)
            X, y = validate_data(self, X, y, **options)
            self._check_missing(X)
            if isinstance(X, np.ndarray) and np.isnan(X).all():
                raise ArgumentError("X has no number in it: every entry is NaN, which is missing")
            return X, labels_of(y, few=not reset)

    def _check_missing(self, X: Any) -> None:
        refuse_missing_in_sparse(X)
        if not self.standardize and not self._is_classifier:
            refuse_missing_unscaled(X)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = True
        return tags


def _random_state(given: Any) -> np.random.RandomState:
    """scikit-learn's generator for a ``random_state``."""
    try:
        state: np.random.RandomState = check_random_state(given)
    except ValueError as error:
        raise ArgumentError(
            f"random_state must be a whole number from 0 to 2**32 - 1, None or a RandomState, not "
            f"{reprlib.repr(given)}"
        ) from error
    return state
