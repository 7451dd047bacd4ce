"""LabelCleaner: label cleaning as a scikit-learn estimator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import vstack
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from bilevel.cleaning.learners import Learner
from bilevel.cleaning.module import ModuleLearner
from bilevel.cleaning.recipe import CleaningResult, clean
from bilevel.cleaning.roles import Roles, assign_roles
from bilevel.cleaning.rows import FeatureRows, Scaler, linear
from bilevel.cleaning.softmax import SoftmaxRegression
from bilevel.cleaning.task import CleaningTask, SearchSettings
from bilevel.cleaning.wording import listed
from bilevel.errors import ArgumentError, ArgumentTypeError, BilevelError
from bilevel.errors.checks import check_count, check_flag, checked_number, checked_path
from bilevel.errors.extras import needed

if TYPE_CHECKING:
    import pandas as pd

Array = npt.NDArray[Any]


class LabelCleaner(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Find wrong labels with the help of a few that are right, and learn without them.

    One weight per training sample is learned so that a model trained with the weights does well on
    trusted samples, min_x f(x, y*(x)) with

        g(x, y) = 1/n sum_i x_i CE_i(y) + ridge ||y||^2,    f(x, y) = 1/m sum_j CE_j(y),

    x_i in [0, 1]. The model's prediction for a sample, and the estimated frequency with which each
    class was given each label, determine the probability that its label is right: its
    ``label_quality``. Labels that are more probably wrong than right are issues, and the final
    model is trained without them. Step sizes and ridge are chosen from the data and reported in
    ``settings_``.

    The trusted samples are given to :meth:`fit`, either as separate samples (``X_clean``,
    ``y_clean``) or as rows of X (``trusted``). Without them, a random part of the rows of each
    class, ``clean_fraction``, is assumed to be right. That only finds labels that disagree with
    the majority of similar samples: where most samples of one class have the label of another, that
    label looks right. ``label_quality`` is then p / (p + the largest probability of another class),
    with p the probability of the given label. Trusted samples are worth having.

    Args:
        model: any ``nn.Module`` that maps rows of features to one number per class, in the order
            of ``classes_``; it is copied and never changed. It receives rows of X in their shape;
            sparse rows are made dense one minibatch at a time. None: softmax regression.
        clean_fraction: the part of the rows that is assumed to be right if none are trusted.
        early_stopping: whether to stop where the loss on held-back trusted samples is lowest.
            Without it, or with fewer than 10 samples to hold back, the weights take 10 steps.
        validation_fraction: the part of the trusted samples that is held back.
        max_steps: the most steps of the weights.
        patience: the number of steps without a lower held-back loss after which to stop.
        batch_size: the number of samples in a minibatch.
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
        noise_matrix_: entry (k, j) is the probability that a sample of class k has the label j.
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
        """Judge the labels y of the rows of X, and train the model.

        Args:
            X: features, as NumPy, pandas, SciPy sparse or torch.
            y: labels of any type.
            X_clean, y_clean: samples whose labels are right, with the same features.
            trusted: which rows of X have a right label: a mask, or their numbers.
        """
        self._check_arguments()
        folder = None if self.checkpoint is None else checked_path("checkpoint", self.checkpoint)
        index = getattr(X, "index", None)
        X, y = self._validated(X, y, reset=True)
        if (X_clean is None) != (y_clean is None) or not (X_clean is None or trusted is None):
            raise ArgumentError(
                "give either X_clean and y_clean together, or trusted, or neither of them"
            )
        rng = check_random_state(self.random_state)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ArgumentError(
                f"y has one class only, {self.classes_[0]!r}; there is no other class that a label "
                f"could be mistaken for"
            )
        if X_clean is not None:
            features, labels = self._validated(X_clean, y_clean, reset=False)
            codes = np.concatenate([codes, self._codes("y_clean", labels)])
            X = _stacked(X, features)
        held_fraction = self.validation_fraction if self.early_stopping else None
        roles = assign_roles(
            self.classes_, codes, len(y), trusted, self.clean_fraction, held_fraction, rng
        )
        seed = int(rng.randint(2**31 - 1))
        self._scaler = Scaler(X, self.standardize, dense=self.model is not None)
        rows = self._scaler.rows(X)
        self._learner = self._make_learner(rows, seed)
        task = CleaningTask(
            rows=rows,
            labels=torch.from_numpy(codes),
            train=torch.from_numpy(roles.train),
            trusted=torch.from_numpy(roles.trusted),
            held=torch.from_numpy(roles.held),
            judged=torch.from_numpy(roles.judged),
            verified=roles.verified,
        )
        settings = SearchSettings(self.max_steps, self.patience, self.batch_size, seed, folder)
        self._keep(clean(self._learner, task, settings), roles, codes[: len(y)])
        self._index = index if _is_pandas_index(index) else None
        return self

    def _keep(self, result: CleaningResult, roles: Roles, given: Array) -> None:
        """Set the attributes of a fitted estimator."""
        self._model = self._learner.finished(result.model)
        self._sharpness = result.sharpness
        self._given = given
        self._predicted = given.copy()
        self._predicted[roles.judged] = result.probabilities.argmax(1).numpy()
        self.trusted_ = roles.mask
        self.sample_weight_ = np.ones(len(given))
        self.sample_weight_[roles.train] = result.weights.numpy()
        self.label_quality_ = np.ones(len(given))
        self.label_quality_[roles.judged] = result.quality.numpy()
        self.noise_matrix_ = result.transitions.numpy()
        self.history_ = result.history
        self.settings_ = {**result.settings, "standardized": self._scaler.scales}

    def label_issues(self) -> pd.DataFrame:
        """The verdict on each row of X, in the order of X and with its index.

        The columns are ``is_label_issue``, whether the label is more probably wrong than right;
        ``label_quality``, the probability that the label is right; ``given_label``;
        ``predicted_label``, by a model that was not trained on that row (for a trusted row, its own
        label); and ``sample_weight``.
        """
        check_is_fitted(self)
        with needed("clean", "pandas"):
            import pandas as pd
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
        # In double precision the prediction for a row does not depend on the rows beside it.
        weight, bias = self._model["weight"].double(), self._model["bias"].double()
        return linear(self._scaler.rows(X, np.float64), weight, bias)

    def _make_learner(self, rows: FeatureRows, seed: int) -> Learner:
        classes = len(self.classes_)
        if self.model is None:
            return SoftmaxRegression(rows, classes)
        return ModuleLearner(self.model, classes, self.batch_size, seed)

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
        """Check both: X becomes an array or CSR matrix of finite numbers, y an array of labels."""
        X = X.detach().cpu().numpy() if isinstance(X, Tensor) else X
        y = y.detach().cpu().numpy() if isinstance(y, Tensor) else y
        _refuse_text(X)
        options: dict[str, Any] = {
            "accept_sparse": "csr",
            "dtype": [np.float64, np.float32],
            "allow_nd": self.model is not None,
            "reset": reset,
        }
        with _as_our_own():
            if y is None and not reset:
                return validate_data(self, X, **options), None
            _refuse_mixed_labels(y)
            X, y = validate_data(self, X, y, **options)
            check_classification_targets(y)
            return X, column_or_1d(y)

    def _codes(self, name: str, labels: Array) -> npt.NDArray[np.int64]:
        """The position of each label among the classes of y."""
        known = {label: code for code, label in enumerate(self.classes_.tolist())}
        unknown = sorted({label for label in labels.tolist() if label not in known}, key=str)
        if unknown:
            raise ArgumentError(
                f"{name} has {listed(unknown)}, which y does not; the labels of y are "
                f"{listed(self.classes_.tolist())}"
            )
        return np.array([known[label] for label in labels.tolist()], dtype=np.int64)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _stacked(X: Any, more: Any) -> Any:
    if isinstance(X, np.ndarray) and isinstance(more, np.ndarray):
        return np.concatenate([X, more])
    if isinstance(X, np.ndarray) or isinstance(more, np.ndarray):
        raise ArgumentTypeError("X and X_clean must be both sparse or both dense")
    return vstack([X, more], format="csr")


@contextmanager
def _as_our_own() -> Iterator[None]:
    """What scikit-learn finds wrong with X or y, as an error of this library."""
    try:
        yield
    except BilevelError:
        raise
    except ValueError as error:
        raise ArgumentError(str(error)) from error
    except TypeError as error:
        raise ArgumentTypeError(str(error)) from error


def _refuse_mixed_labels(y: Any) -> None:
    """Raise for labels of several kinds, such as None and text, which have no order."""
    if not hasattr(y, "__len__") or getattr(getattr(y, "dtype", None), "kind", "O") != "O":
        return
    kinds = {
        "text" if isinstance(label, str) else str(None if label is None else type(label).__name__)
        for label in np.ravel(np.asarray(y, dtype=object))
    }
    if "text" in kinds and len(kinds) > 1:
        raise ArgumentTypeError(
            f"the labels mix {' and '.join(sorted(kinds))}; give every sample a label of one kind, "
            f"and leave out those that have none"
        )


def _refuse_text(X: Any) -> None:
    """Refuse text, and name the columns of a DataFrame that hold it."""
    if hasattr(X, "select_dtypes"):
        kinds = X.select_dtypes(exclude=["number", "bool"])
        text = [
            str(name)
            for name in kinds.columns
            if any(isinstance(value, str) for value in kinds[name].iloc[:100])
        ]
        if text:
            raise ArgumentError(
                f"X has text where numbers are expected, in the columns {listed(text)}; leave "
                f"them out or encode them, text by a TfidfVectorizer, categories by a OneHotEncoder"
            )
    elif getattr(getattr(X, "dtype", None), "kind", "") in "US" and hasattr(X, "dtype"):
        raise ArgumentError(
            "X has text where numbers are expected; encode it first, text by a TfidfVectorizer, "
            "categories by a OneHotEncoder"
        )


def _is_pandas_index(index: Any) -> bool:
    return index is not None and hasattr(index, "get_indexer")  # a list has a method called index
