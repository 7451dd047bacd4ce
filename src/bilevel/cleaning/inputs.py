"""What the estimator is given: labels of one or several annotators, features, predictions."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import issparse, vstack
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d
from torch import Tensor

from bilevel.cleaning.classifier import log_probabilities
from bilevel.cleaning.noise import MISSING
from bilevel.cleaning.wording import listed
from bilevel.errors import ArgumentError, ArgumentTypeError, BilevelError

Array = npt.NDArray[Any]

_ROUNDED = 0.01
"""By how much rounded probabilities may fail to add up to 1."""


@dataclass
class Labels:
    """Labels as positions among the classes.

    Attributes:
        classes: the labels, sorted.
        codes: the position of the label of each row of X, then of X_clean.
        votes: those of all annotators for the rows of X, if there are several.
        old: those that trusted rows were given before they were checked, if these are known.
    """

    classes: Array
    codes: Array
    votes: Array | None = None
    old: Array | None = None

    @classmethod
    def of(cls, y: Array, votes: Array | None) -> Labels:
        """The labels y, one for each row, of which ``votes`` has those by all annotators."""
        known = votes != None  # noqa: E711
        given = y if votes is None else with_its_type(votes[known])
        classes, codes = np.unique(given, return_inverse=True)
        if len(classes) < 2:
            raise ArgumentError(
                f"y has one class only, {classes.tolist()[0]!r}; there is no other class that a "
                f"label could be mistaken for"
            )
        if votes is None:
            return cls(classes, codes)
        numbers = np.full(votes.shape, MISSING, dtype=np.int64)
        numbers[known] = codes
        labels = cls(classes, codes, numbers)
        labels.codes = labels._coded("y", y)
        return labels

    def append(self, right: Array) -> None:
        """Take the labels of X_clean."""
        self.codes = np.concatenate([self.codes, self._coded("y_clean", right)])

    def correct(self, rows: Array, y_clean: Any) -> None:
        """Take the right labels of these rows: one for each in their order, or those of all."""
        with as_our_own():
            right = np.asarray(as_array(y_clean))
        if right.ndim == 0 or right.size != len(right):
            raise ArgumentError(
                f"y_clean must hold one label for each row, but has the shape {right.shape}"
            )
        right, count = right.reshape(-1), len(self.codes)
        numbers, times = np.unique(rows, return_counts=True)
        if len(right) == count:
            rows, right = numbers, right[numbers]
        elif len(right) != len(rows):
            raise ArgumentError(
                f"y_clean has {len(right)} labels, but trusted names {len(rows)} rows of {count}"
            )
        elif len(numbers) < len(rows):
            raise ArgumentError(
                f"trusted names row {numbers[times > 1][0]} more than once; name each row once, "
                f"with one label in y_clean"
            )
        self.old, self.codes = self.codes[numbers], self.codes.copy()
        self.codes[rows] = self._coded("y_clean", right)

    def _coded(self, name: str, labels: Array) -> Array:
        """The position of each label among the classes of y."""
        known = {label: code for code, label in enumerate(self.classes.tolist())}
        unknown = sorted({label for label in labels.tolist() if label not in known}, key=str)
        if unknown:
            raise ArgumentError(
                f"{name} has {listed(unknown)}, which y does not; the labels of y are "
                f"{listed(self.classes.tolist())}"
            )
        return np.array([known[label] for label in labels.tolist()], dtype=np.int64)


def majority_of(y: Any) -> tuple[Any, Array | None]:
    """The most frequent label of each row, the first of several, and all labels or None.

    If there is one label for each row, it is handed back as it is.
    """
    with as_our_own():
        array = np.asarray(as_array(y))
        if array.dtype.kind in "US" and isinstance(y, list | tuple):
            array = np.array(y, dtype=object)  # otherwise NaN becomes the text "nan"
    if array.ndim != 2 or array.shape[1] < 2:
        return y, None
    _refuse_one_hot(array)
    votes = array.astype(object)
    with np.errstate(invalid="ignore"):  # Python 3.13 notes a comparison with NaN as invalid
        missing = np.vectorize(_is_missing, otypes=[bool])(votes)
    refuse_mixed_labels(votes[~missing])
    votes[missing] = None
    if missing.all(1).any():
        raise ArgumentError(f"y has no label at all in row {int(missing.all(1).argmax())}")
    chosen = []
    for row in votes:
        labels = [label for label in row if label is not None]
        chosen.append(max(labels, key=labels.count))
    return np.array(chosen), votes


def _refuse_one_hot(y: Array) -> None:
    """Refuse columns that stand for classes: as votes they would be for the classes 0 and 1."""
    if y.dtype.kind in "biuf" and ((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all():
        raise ArgumentError(
            f"y has the shape {y.shape} and a single 1 in every row, so that its columns seem to "
            f"stand for classes, but those of a y with two dimensions are annotators; give one "
            f"label for each row, such as y.argmax(1)"
        )


def _is_missing(vote: Any) -> bool:
    try:
        return vote is None or bool(vote != vote)
    except TypeError:  # pandas.NA, which may be anything and so compares with nothing
        return True


def labels_of(y: Any, few: bool = False) -> Array:
    """One label for each sample, as an array that scikit-learn takes for classes.

    Args:
        y: the labels.
        few: whether a class may have a single one, as among trusted samples.
    """
    with as_our_own():
        refuse_mixed_labels(y)
        labels: Array = column_or_1d(with_its_type(as_array(y)))
        if not len(labels):
            raise ArgumentError("y is empty: there is no label to judge")
        with warnings.catch_warnings():
            if few:  # scikit-learn would take them for the numbers of a regression
                warnings.filterwarnings("ignore", "The number of unique classes")
            check_classification_targets(labels)
    return labels


def with_its_type(y: Any) -> Any:
    """Labels that are numbers in an array of objects, or of pandas and none missing, as numbers.

    scikit-learn takes the first for no labels at all, and makes fractions of the second.
    """
    kind = getattr(getattr(y, "dtype", None), "kind", "")
    if kind and kind in "iub" and not getattr(y, "hasnans", True):
        return y.to_numpy()
    if kind == "O" and all(isinstance(label, int | float | np.number) for label in np.ravel(y)):
        return np.array(np.asarray(y).tolist())
    return y


def checked_predictions(
    pred_probs: Any, rows: int, classes: Array, X: Any, *, separate: bool
) -> Array:
    """Probabilities as logits; trusted rows must not be ``separate`` ones."""
    shape = rows, len(classes)
    if X is not None and (count := X.shape[0] if hasattr(X, "shape") else len(X)) != rows:
        raise ArgumentError(f"X has {count} rows, but y has {rows} labels")
    pred_probs = _by_name(pred_probs, classes.tolist())
    with as_our_own():
        given = np.asarray(as_array(pred_probs), dtype=np.float64)
    logits: Array = log_probabilities(given)
    if logits.shape != shape or separate:
        raise ArgumentError(
            f"pred_probs must be of shape {shape}, one row for each label and one column for each "
            f"class, not {logits.shape}; trusted rows are among these, named by trusted"
        )
    wrong = ~((given >= 0).all(1) & (np.abs(given.sum(1) - 1) <= _ROUNDED))  # also where it is NaN
    if wrong.any():
        row = int(wrong.argmax())
        raise ArgumentError(
            f"pred_probs must be probabilities, which are at least 0 and add up to 1 in each row, "
            f"but row {row} is {reprlib.repr(given[row].tolist())}"
        )
    return logits


def _by_name(pred_probs: Any, classes: list[Any]) -> Any:
    """The columns of a DataFrame in the order of the classes that they are named after."""
    names = list(getattr(pred_probs, "columns", range(len(classes))))
    if names == list(range(len(classes))) or len(names) != len(classes):
        return pred_probs  # without names; the shape is checked later
    places = {str(name): place for place, name in enumerate(names)}
    wanted = [str(label) for label in classes]
    if set(places) != set(wanted):
        raise ArgumentError(
            f"pred_probs has the columns {listed(names)}, but the classes are {listed(classes)}; "
            f"name the columns after them, or give .to_numpy() with the columns in that order"
        )
    return pred_probs.iloc[:, [places[label] for label in wanted]]


def as_array(given: Any) -> Any:
    """A tensor as an array, a masked array with NaN or None for what is masked, or ``given``."""
    if isinstance(given, np.ma.MaskedArray):
        found: Array = given.data
        if not np.any(given.mask):
            return found
        if found.dtype.kind in "biuf":
            return np.where(np.ma.getmaskarray(given), np.nan, found)
        found = found.astype(object)
        found[np.ma.getmaskarray(given)] = None
        return found
    if not isinstance(given, Tensor):
        return given
    if given.layout != torch.strided:
        raise ArgumentTypeError(
            f"a tensor of the layout {given.layout} cannot be read; give a SciPy sparse matrix, "
            f"or convert it with .to_dense()"
        )
    if given.is_meta:
        raise ArgumentTypeError("a tensor on the meta device has no values")
    plain = given.detach().cpu()
    return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()


def refuse_missing_in_sparse(X: Any) -> None:
    """Refuse NaN among the entries of a sparse matrix, in which nothing stands for the mean."""
    if issparse(X) and np.isnan(X.data).any():
        raise ArgumentError(
            "X is sparse and has NaN; what is missing can be told only where X is dense, as it is "
            "taken for the mean: use .toarray(), or fill it in"
        )


def refuse_missing_unscaled(X: Any) -> None:
    """Refuse NaN in features that are not scaled, as their mean is not known then."""
    if isinstance(X, np.ndarray) and np.isnan(X).any():
        raise ArgumentError(
            "X has NaN, which is taken for the mean of its column only with standardize=True; fill "
            "it in, or leave standardize as it is"
        )


def stacked(X: Any, more: Any) -> Any:
    """The rows of both, which are both dense or both sparse."""
    if isinstance(X, np.ndarray) and isinstance(more, np.ndarray):
        return np.concatenate([X, more])
    if isinstance(X, np.ndarray) or isinstance(more, np.ndarray):
        raise ArgumentTypeError("X and X_clean must be both sparse or both dense")
    return vstack([X, more], format="csr")


def refuse_text(X: Any) -> None:
    """Refuse text and dates, and name the columns of a DataFrame that hold them."""
    refused, where = False, ""
    if hasattr(X, "select_dtypes"):
        kinds = X.select_dtypes(exclude=["number", "bool"])
        found = [
            str(name)
            for name, column in kinds.items()
            if column.dtype.kind in "Mm"
            or any(isinstance(value, str | date | timedelta) for value in column.iloc[:100])
        ]
        refused, where = bool(found), f", in the columns {listed(found)}"
    elif hasattr(X, "dtype"):
        refused = getattr(X.dtype, "kind", "V") in "USMm"
    if refused:
        raise ArgumentError(
            f"X has text or dates where numbers are expected{where}; leave them out or encode "
            f"them, text by a TfidfVectorizer, categories by a OneHotEncoder, dates as numbers of "
            f"days"
        )


def is_pandas_index(index: Any) -> bool:
    """Whether it is the index of a DataFrame."""
    return index is not None and hasattr(index, "get_indexer")  # a list has a method called index


@contextmanager
def as_our_own() -> Iterator[None]:
    """What scikit-learn finds wrong with X or y, as an error of this library."""
    try:
        yield
    except BilevelError:
        raise
    except ValueError as error:
        raise ArgumentError(str(error)) from error
    except TypeError as error:
        raise ArgumentTypeError(str(error)) from error


def refuse_mixed_labels(y: Any) -> None:
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
