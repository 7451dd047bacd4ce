"""Columns of a table as features: numbers, categories and text."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer

from bilevel.cleaning.samples import Array, TableSamples
from bilevel.cleaning.wording import listed
from bilevel.errors import InputError

Description = dict[str, Any]
"""A JSON object from which an encoder, or a part of one, can be restored."""

LARGEST = 1e100
"""Numbers must be smaller than this, so that their squares are finite."""

_MOST_CATEGORIES = 50  # a column of text with more distinct values is not one of categories
_MOST_WORDS = 50_000
_FEWEST_ROWS = 20  # with fewer, what a column holds cannot be told from its values
_DATE = re.compile(r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})($|[T ])")
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_TRUTH = frozenset({"true", "false"})
_NUMERIC_SHARE = 0.9  # if this share of the values are numbers, the others are taken for mistakes


@dataclass(frozen=True)
class ColumnChoices:
    """Columns whose kind the user gives by name; other columns are judged by their values."""

    text: Sequence[str] = ()
    category: Sequence[str] = ()
    ignore: Sequence[str] = ()

    @property
    def named(self) -> list[str]:
        """All columns that the user named."""
        return [*self.text, *self.category, *self.ignore]

    def check(self, samples: TableSamples) -> None:
        """Refuse columns that do not exist or are named twice."""
        unknown = [name for name in self.named if name not in samples.table]
        if unknown:
            raise InputError(
                f"{samples.name} has no column {listed(unknown)} among its features, which are "
                f"{listed(samples.columns, 20)}"
            )
        if len(set(self.named)) < len(self.named):
            raise InputError(
                "a column is named twice by --text, --category and --ignore; name each only once"
            )


class Column(ABC):
    """A column of a table as one or several features."""

    kind: ClassVar[str]
    name: str

    @abstractmethod
    def encode(self, values: Array, source: str) -> Any:
        """The features, of shape (n, width), dense or sparse; errors name ``source``."""

    @abstractmethod
    def describe(self) -> Description:
        """The column as JSON."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of features."""

    @abstractmethod
    def check(self) -> None:
        """Raise a ValueError unless the column, which comes from a file, can encode."""


@dataclass(frozen=True)
class NumberColumn(Column):
    """A number, as its distance from the mean in standard deviations."""

    kind: ClassVar[str] = "number"
    name: str
    mean: float = 0.0
    scale: float = 1.0

    @classmethod
    def fitted(cls, name: str, values: Array, source: str) -> NumberColumn:
        known = values
        if values.dtype == object:
            known = pd.to_numeric(pd.Series(values), errors="coerce").to_numpy(np.float64)
        known = known[np.isfinite(known)]
        mean = float(known.mean()) if len(known) and np.abs(known).max() < LARGEST else 0.0
        numbers = cls(name, mean).encode(values, source)
        return cls(name, mean, float(numbers.std()) or 1.0)

    def encode(self, values: Array, source: str) -> Array:
        numbers = values
        if values.dtype == object:
            numbers = pd.to_numeric(pd.Series(values), errors="coerce").to_numpy(np.float64)
            for row in np.flatnonzero(np.isnan(numbers)):
                if not _is_missing(values[row]):
                    raise InputError(
                        f"{source}: the column {self.name!r} has the text {values[row][:60]!r} in "
                        f"row {row} (the first row is 0), where a number is expected; correct it, "
                        f"or declare the column by --category or --text"
                    )
        numbers = np.where(np.isnan(numbers), self.mean, numbers)  # missing: as on average
        bad = np.flatnonzero(~(np.abs(numbers) < LARGEST))
        if len(bad):
            raise InputError(
                f"{source}: the column {self.name!r} has {bad_number(numbers[bad[0]])} in row "
                f"{bad[0]} (the first row is 0), and {len(bad):,} such values in all; fill them in "
                f"or remove the rows"
            )
        return ((numbers - self.mean) / self.scale).reshape(-1, 1)

    def describe(self) -> Description:
        return {"name": self.name, "kind": self.kind, "mean": self.mean, "scale": self.scale}

    @property
    def width(self) -> int:
        return 1

    def check(self) -> None:
        numbers = (self.mean, self.scale)
        if (
            not all(type(n) in (int, float) and abs(n) < LARGEST for n in numbers)
            or self.scale <= 0
        ):
            raise ValueError(f"the column {self.name!r} has the mean and scale {numbers!r}")


@dataclass(frozen=True)
class CategoryColumn(Column):
    """One feature for each known value, 1 where the column has it; unknown values are all 0.

    TRUE, True and true are the same value, because programs that read files make truth values of
    them, from which it cannot be told how they were written.
    """

    kind: ClassVar[str] = "category"
    name: str
    values: Sequence[str]

    @classmethod
    def fitted(cls, name: str, values: Array) -> CategoryColumn:
        found = sorted(set(_as_text(values)))
        if all(value.lower() in _TRUTH or _is_missing(value) for value in found):
            found = sorted({value.lower(): value for value in found}.values())
        return cls(name, found)

    def encode(self, values: Array, source: str) -> Any:
        places = {value: place for place, value in enumerate(self.values)}
        texts = _as_text(values)
        truths = {v.lower(): place for v, place in places.items() if v.lower() in _TRUTH}
        for value in set(texts) - places.keys() if truths else ():
            if value.lower() in truths:
                places[value] = truths[value.lower()]
        codes = np.array([places.get(value, -1) for value in texts])
        known = codes >= 0
        ends = np.concatenate([[0], np.cumsum(known)])
        entries = np.ones(ends[-1]), codes[known], ends
        return sparse.csr_array(entries, shape=(len(values), len(self.values)))

    def describe(self) -> Description:
        return {"name": self.name, "kind": self.kind, "values": list(self.values)}

    @property
    def width(self) -> int:
        return len(self.values)

    def check(self) -> None:
        _check_names(self.name, self.values)


@dataclass(frozen=True)
class TextColumn(Column):
    """The words of a text by TF-IDF: (1 + log count) * idf, scaled to unit length."""

    kind: ClassVar[str] = "text"
    name: str
    vocabulary: Sequence[str]
    idf: Array

    @classmethod
    def fitted(cls, name: str, values: Array) -> TextColumn | None:
        """The fitted column, or None if no word occurs in two texts."""
        vectorizer = _vectorizer(min_df=2, max_features=_MOST_WORDS)
        try:
            vectorizer.fit(_as_text(values))
        except ValueError:  # scikit-learn refuses an empty vocabulary
            return None
        return cls(name, vectorizer.get_feature_names_out().tolist(), vectorizer.idf_)

    def encode(self, values: Array, source: str) -> Any:
        vectorizer = _vectorizer(vocabulary=list(self.vocabulary))
        vectorizer.idf_ = self.idf
        return sparse.csr_array(vectorizer.transform(_as_text(values)))

    def describe(self) -> Description:
        return {"name": self.name, "kind": self.kind, "vocabulary": list(self.vocabulary)}

    @property
    def width(self) -> int:
        return len(self.vocabulary)

    def check(self) -> None:
        _check_names(self.name, self.vocabulary)
        if self.idf.shape != (len(self.vocabulary),) or self.idf.dtype.kind != "f":
            raise ValueError(f"the column {self.name!r} has not one idf for each word")


def _check_names(column: str, names: Any) -> None:
    """Raise a ValueError unless they are different pieces of text, of which there are some."""
    texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not texts or not names or len(set(names)) < len(names):
        raise ValueError(f"the column {column!r} has not a list of different texts")


def fit_column(name: str, values: Array, source: str, choices: ColumnChoices) -> Column | None:
    """The column, of the kind that the user chose or that its values suggest.

    None: nothing can be learned from the column, because nothing in it occurs twice.
    """
    if name in choices.category:
        return CategoryColumn.fitted(name, values)
    if name in choices.text:
        return TextColumn.fitted(name, values)
    if values.dtype != object:
        return NumberColumn.fitted(name, values, source)
    present = [value for value in values if not _is_missing(value)]
    numbers = np.mean(pd.notna(pd.to_numeric(np.array(present, dtype=object), errors="coerce")))
    if numbers >= _NUMERIC_SHARE:
        return NumberColumn.fitted(name, values, source)
    if len(set(values)) <= min(_MOST_CATEGORIES, len(values) / 2):
        return CategoryColumn.fitted(name, values)
    return TextColumn.fitted(name, values)


def unhelpful(name: str, values: Array) -> str | None:
    """Why nothing can be learned from the column for other rows, in words, if that is so."""
    if values.dtype == object and all(_is_missing(value) for value in values):
        return "it is empty"
    if len(values) < _FEWEST_ROWS:
        return None
    if values.dtype != object:
        whole = np.isfinite(values).all() and (values == np.round(values)).all()
        if whole and (np.diff(values) == 1).all():
            return "it numbers the rows"
        named = re.search(r"(^|[_\W])(id|uuid|key|index)$", name.lower())
        if whole and named and len(np.unique(values)) == len(values):
            return "it identifies the rows"
        return None
    present = [value.strip() for value in values if not _is_missing(value)]
    dates = sum(bool(_DATE.match(value)) for value in present)
    if present and dates >= _NUMERIC_SHARE * len(present):
        return "it holds dates"
    return None


def bad_number(value: float) -> str:
    """What is wrong with a number that is not below LARGEST, in words."""
    if np.isnan(value):
        return "a missing value (NaN)"
    if np.isinf(value):
        return "an infinite value"
    return f"the value {value:g}, too large to work with"


def _vectorizer(**options: Any) -> TfidfVectorizer:
    return TfidfVectorizer(sublinear_tf=True, strip_accents="unicode", **options)


def _is_missing(value: str) -> bool:
    return value.strip().lower() in _MISSING


def _as_text(values: Array) -> list[str]:
    """Values of text as they are, and numbers as people write them."""
    if values.dtype == object:
        return [str(value) for value in values]
    return ["" if v != v else str(int(v)) if v.is_integer() else repr(v) for v in values.tolist()]
