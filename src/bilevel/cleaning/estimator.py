"""LabelCleaner: label cleaning as a scikit-learn estimator."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from bilevel.cleaning.learners import Learner, Module, SoftmaxRegression
from bilevel.cleaning.recipe import Task, clean
from bilevel.cleaning.rows import Scaler, linear
from bilevel.errors import ArgumentError, ArgumentTypeError, MissingExtraError
from bilevel.errors.checks import check_count, check_flag, checked_number, checked_path

if TYPE_CHECKING:
    import pandas as pd

Array = npt.NDArray[Any]

_FEWEST_HELD = 10  # trusted samples with which an early stop is better than a fixed one


class LabelCleaner(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Find wrong labels with the help of a few that are right, and learn without them.

    One weight per training sample is learned so that a model trained with the weights does well on
    trusted samples, min_x f(x, y*(x)) with

        g(x, y) = 1/n sum_i x_i CE_i(y) + ridge ||y||^2,    f(x, y) = 1/m sum_j CE_j(y),

    x_i in [0, 1]. What the model then takes each sample for, and how often each class was given
    each label, make the probability that a label is right: its ``label_quality``. Labels that are
    more probably wrong than right are issues, and the model that predicts is trained without them.
    Step sizes and ridge come from the data; ``settings_`` has what was chosen.

    Which samples are trusted is said to :meth:`fit`: samples of their own (``X_clean``,
    ``y_clean``), or rows of X (``trusted``). If nothing is said, a random part of the rows of each
    class, ``clean_fraction``, is taken as if it were right. That finds labels which disagree with
    the majority of their like, no more: where one class is mostly given the label of another, that
    looks right. ``label_quality`` is then p / (p + the largest of other classes' p), with p the
    probability of the given label. Trusted samples are worth having.

    Args:
        model: any ``nn.Module`` that maps rows of features to one number per class, in the order
            of ``classes_``; it is copied and never changed. It is given rows of X in their shape,
            sparse ones made dense a minibatch at a time. None: softmax regression.
        clean_fraction: the part of the rows that is taken as right where no others are named.
        early_stopping: stop where the loss on held-back trusted samples is lowest. Without it, or
            with fewer than 10 samples to hold back, the weights are given 10 steps.
        validation_fraction: the part of the trusted samples that is held back.
        max_steps: how many steps the weights are given at most.
        patience: after how many steps without a better held-back loss to stop.
        batch_size: of the minibatches.
        standardize: whether features are centred, divided by their standard deviation and clipped
            at 4 of it. Sparse ones stay sparse: they are divided by their root mean square where
            they are not zero, unless all rows have the same length, as those of TF-IDF do.
        checkpoint: a folder in which the search for weights is saved, so that fitting the same
            samples again goes on from there and finds the same (needs a ``random_state``). None:
            nothing is saved.
        random_state: a whole number, None or a NumPy ``RandomState``, as scikit-learn takes it.

    Attributes:
        classes_: the labels, sorted.
        sample_weight_: the weight learned for each row of X, in [0, 1]; trusted rows have 1.
        label_quality_: the probability that each label of X is right; trusted rows have 1.
        noise_matrix_: entry (k, j) is the probability that a sample of class k has the label j.
        history_: arrays with one entry per step: "upper" (the loss on trusted samples), "lower",
            "held_back" (the loss on those held back), "seconds" and others.
        settings_: the choices made.
        trusted_: which rows of X were trusted.
        n_features_in_, feature_names_in_: as scikit-learn has them.

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
        model: nn.Module | None = None,
        *,
        clean_fraction: float = 0.1,
        early_stopping: bool = True,
        validation_fraction: float = 0.25,
        max_steps: int = 40,
        patience: int = 4,
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

    def fit(
        self,
        X: Any,
        y: Any,
        X_clean: Any = None,
        y_clean: Any = None,
        trusted: Any = None,
    ) -> LabelCleaner:
        """Judge the labels y of the rows of X, and learn.

        Args:
            X: features, as NumPy, pandas, SciPy sparse or torch.
            y: labels of any kind.
            X_clean, y_clean: samples whose labels are right, with the same features.
            trusted: which rows of X have a right label: a mask, or their numbers.
        """
        self._check_arguments()
        folder = None if self.checkpoint is None else checked_path("checkpoint", self.checkpoint)
        index = getattr(X, "index", None)
        X, y = self._validated(X, y, reset=True)
        named = (X_clean is not None) + (trusted is not None)
        if named == 2 or (X_clean is None) != (y_clean is None):
            raise ArgumentError(
                "give either X_clean and y_clean together, or trusted, or neither of them"
            )
        rng = check_random_state(self.random_state)
        rows = np.arange(len(y))
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ArgumentError(
                f"y has one class only, {self.classes_[0]!r}; there is nothing to be mistaken for"
            )
        self.trusted_ = np.zeros(len(y), dtype=bool)
        if X_clean is not None:
            features, more = self._validated(X_clean, y_clean, reset=False)
            codes = np.concatenate([codes, self._codes("y_clean", more)])
            X = _stacked(X, features)
            clean_rows = np.arange(len(y), len(codes))
        elif trusted is not None:
            self.trusted_ = _mask("trusted", trusted, len(y))
            clean_rows = rows[self.trusted_]
        else:
            clean_rows = _part_of_each(codes, self.clean_fraction, rng, least=1)
            self.trusted_[clean_rows] = True
        train = rows[~self.trusted_]
        judged = rows if not named else train
        self._check_samples(codes, train, clean_rows, named > 0)

        held = np.zeros(0, dtype=np.int64)
        if self.early_stopping:
            part = _part_of_each(codes[clean_rows], self.validation_fraction, rng, least=0)
            held = clean_rows[part] if len(part) >= _FEWEST_HELD else held
        teaching = np.setdiff1d(clean_rows, held)
        seed = int(rng.randint(2**31 - 1))
        self._scaler = Scaler(X, self.standardize, dense=self.model is not None)
        samples = self._scaler.rows(X)
        self._learner = self._make_learner(samples, seed)
        cleaned = clean(
            self._learner,
            Task(
                rows=samples,
                labels=torch.from_numpy(codes),
                train=torch.from_numpy(train),
                trusted=torch.from_numpy(teaching),
                held=torch.from_numpy(held),
                judged=torch.from_numpy(judged),
                verified=named > 0,
            ),
            max_steps=self.max_steps,
            patience=self.patience,
            batch_size=self.batch_size,
            seed=seed,
            checkpoint=folder,
        )
        self._model = self._learner.finished(cleaned.model)
        self._sharpness = cleaned.sharpness
        self.sample_weight_ = np.ones(len(y))
        self.sample_weight_[train] = cleaned.weights.numpy()
        self.label_quality_ = np.ones(len(y))
        self.label_quality_[judged] = cleaned.quality.numpy()
        self._given = codes[: len(y)]
        self._predicted = self._given.copy()
        self._predicted[judged] = cleaned.probabilities.argmax(1).numpy()
        self._index = index if _is_pandas_index(index) else None
        self.noise_matrix_ = cleaned.transitions.numpy()
        self.history_ = cleaned.history
        self.settings_ = {**cleaned.settings, "standardized": self._scaler.scales}
        return self

    def label_issues(self) -> pd.DataFrame:
        """What was found for each row of X, in its order and with its index.

        The columns: ``is_label_issue``, whether the label is more probably wrong than right;
        ``label_quality``, the probability that it is right; ``given_label``; ``predicted_label``,
        by a model that was not trained on that row (for a trusted row its own label);
        ``sample_weight``.
        """
        check_is_fitted(self)
        try:
            import pandas as pd
        except ImportError:
            raise MissingExtraError("pandas", "clean") from None
        return pd.DataFrame(
            {
                "is_label_issue": self.label_quality_ < 0.5,
                "label_quality": self.label_quality_,
                "given_label": self.classes_[self._given],
                "predicted_label": self.classes_[self._predicted],
                "sample_weight": self.sample_weight_,
            },
            index=self._index,
        )

    def predict(self, X: Any) -> Array:
        """The most probable class of each row."""
        best = self._logits(X).argmax(1).numpy()
        labels: Array = self.classes_[best]
        return labels

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class, calibrated on held-back trusted samples."""
        logits = self._logits(X)
        probabilities: Array = (self._sharpness * logits).softmax(1).numpy()
        return probabilities

    def _logits(self, X: Any) -> Tensor:
        check_is_fitted(self)
        X = self._validated(X, None, reset=False)[0]
        if self.model is not None:
            return self._learner.predict(self._model, self._scaler.rows(X)).double()
        # in double precision a row's prediction does not depend on those beside it
        weight, bias = self._model["weight"].double(), self._model["bias"].double()
        return linear(self._scaler.rows(X, np.float64), weight, bias)

    def _make_learner(self, samples: Any, seed: int) -> Learner:
        classes = len(self.classes_)
        if self.model is None:
            return SoftmaxRegression(samples, classes)
        return Module(self.model, classes, self.batch_size, seed)

    def _check_arguments(self) -> None:
        if self.model is not None and not isinstance(self.model, nn.Module):
            raise ArgumentTypeError(f"model must be an nn.Module or None, not {self.model!r}")
        for name in ("clean_fraction", "validation_fraction"):
            if checked_number(name, getattr(self, name), above=True) >= 1:
                raise ArgumentError(f"{name} must be below 1, not {getattr(self, name)!r}")
        for name in ("max_steps", "patience", "batch_size"):
            check_count(name, getattr(self, name))
        for name in ("early_stopping", "standardize"):
            check_flag(name, getattr(self, name))

    def _validated(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        """X as an array or CSR matrix of finite numbers, y as an array of labels."""
        X = X.detach().cpu().numpy() if isinstance(X, Tensor) else X
        y = y.detach().cpu().numpy() if isinstance(y, Tensor) else y
        _refuse_text(X)
        options: dict[str, Any] = {
            "accept_sparse": "csr",
            "dtype": [np.float64, np.float32],
            "allow_nd": self.model is not None,
            "reset": reset,
        }
        if y is None and not reset:
            return validate_data(self, X, **options), None
        X, y = validate_data(self, X, y, **options)
        check_classification_targets(y)
        return X, column_or_1d(y)

    def _codes(self, name: str, labels: Array) -> npt.NDArray[np.int64]:
        """The numbers of the labels among the classes of y."""
        known = {label: code for code, label in enumerate(self.classes_.tolist())}
        unknown = sorted({label for label in labels.tolist() if label not in known}, key=str)
        if unknown:
            raise ArgumentError(
                f"{name} has {_listed(unknown)}, which y does not; the labels of y are "
                f"{_listed(self.classes_.tolist())}"
            )
        return np.array([known[label] for label in labels.tolist()], dtype=np.int64)

    def _check_samples(self, codes: Array, train: Array, clean_rows: Array, named: bool) -> None:
        """Refuse trusted samples that do not show every class, and classes only they show."""
        classes = len(self.classes_)
        if not len(train):
            raise ArgumentError("every row of X is trusted; there is no label to judge")
        if not len(clean_rows):
            raise ArgumentError("there is no trusted row; name at least one for each class")
        if named and len(clean_rows) < classes:
            raise ArgumentError(
                f"{len(clean_rows)} trusted rows are fewer than the {classes} classes; give at "
                f"least one of each class, better ten"
            )
        for rows, here, there in (
            (clean_rows, "trusted rows", "others"),
            (train, "rows to be judged", "trusted rows"),
        ):
            absent = np.setdiff1d(np.arange(classes), codes[rows])
            if len(absent) and named:
                raise ArgumentError(
                    f"the {here} have no sample labelled {_listed(self.classes_[absent].tolist())},"
                    f" which the {there} have; both need every class"
                )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _part_of_each(codes: Array, fraction: float, rng: Any, least: int) -> npt.NDArray[np.int64]:
    """The numbers of a random part of the rows of each class; never all of a class."""
    chosen = []
    for code in np.unique(codes):
        own = rng.permutation(np.flatnonzero(codes == code))
        count = min(max(round(fraction * len(own)), least), max(len(own) - 1, 0))
        chosen.append(own[:count])
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def _mask(name: str, wanted: Any, length: int) -> npt.NDArray[np.bool_]:
    """Which rows a mask or a list of numbers means."""
    wanted = np.asarray(wanted)
    mask: npt.NDArray[np.bool_] = np.zeros(length, dtype=bool)
    if wanted.dtype == bool:
        if wanted.shape != (length,):
            raise ArgumentError(
                f"{name} is a mask of shape {wanted.shape}, but X has {length} rows"
            )
        mask[:] = wanted
        return mask
    if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
        raise ArgumentTypeError(
            f"{name} must be a mask or the numbers of rows, not an array of {wanted.dtype} of "
            f"shape {wanted.shape}"
        )
    if wanted.size and not 0 <= wanted.min() <= wanted.max() < length:
        raise ArgumentError(
            f"{name} names rows from {wanted.min()} to {wanted.max()}, but those of X are "
            f"numbered from 0 to {length - 1}"
        )
    mask[wanted.astype(np.int64)] = True
    return mask


def _stacked(X: Any, more: Any) -> Any:
    if isinstance(X, np.ndarray) and isinstance(more, np.ndarray):
        return np.concatenate([X, more])
    if isinstance(X, np.ndarray) or isinstance(more, np.ndarray):
        raise ArgumentTypeError("X and X_clean must be both sparse or both dense")
    from scipy.sparse import vstack

    return vstack([X, more], format="csr")


def _refuse_text(X: Any) -> None:
    """Name the columns of text in a DataFrame, or say that an array holds text."""
    if hasattr(X, "select_dtypes"):
        kinds = X.select_dtypes(exclude=["number", "bool"])
        text = [
            str(name)
            for name in kinds.columns
            if any(isinstance(value, str) for value in kinds[name].iloc[:100])
        ]
        if text:
            raise ArgumentError(
                f"X has text where numbers are expected, in the columns {_listed(text)}; leave "
                f"them out or encode them, text by a TfidfVectorizer, categories by a OneHotEncoder"
            )
    elif getattr(getattr(X, "dtype", None), "kind", "") in "US" and hasattr(X, "dtype"):
        raise ArgumentError(
            "X has text where numbers are expected; encode it first, text by a TfidfVectorizer, "
            "categories by a OneHotEncoder"
        )


def _listed(values: list[Any], most: int = 10) -> str:
    shown = ", ".join(repr(value) for value in values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def _is_pandas_index(index: Any) -> bool:
    return index is not None and hasattr(index, "get_indexer")  # a list has a method index
