"""Samples as numbers, in the same way whenever they come.

An encoder is fitted to the samples to be cleaned and then knows, for good, how a number is scaled,
which categories and which words there are, and to what size an image is brought. It is saved as
plain JSON and tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from PIL import Image
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer

from bilevel.cleaning.reading import listed
from bilevel.cleaning.samples import (
    Array,
    ArraySamples,
    ImageSamples,
    Samples,
    TableSamples,
    glance,
    open_image,
)
from bilevel.errors import InputError

Description = dict[str, Any]
Tensors = dict[str, Array]

SIDE = 32
"""Images larger than this, or of several sizes, are brought to SIDE x SIDE pixels."""

_CATEGORIES = 50  # most distinct values of a column of text that is taken for one of categories
_WIDEST = 2000  # one-hot columns that are still kept dense
_WORDS = 50_000
_LARGEST = 1e100  # beyond which squares are not finite
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_NUMERIC = 0.9  # the part of values that are numbers from which the others are mistakes


class Encoder(ABC):
    """Samples of one kind as a matrix of features.

    Attributes:
        notices: what the user should know of how columns were taken.
    """

    kind: ClassVar[str]
    notices: Sequence[str] = ()

    @abstractmethod
    def encode(self, samples: Samples) -> Any:
        """The features, dense or sparse, with one row for each sample."""

    @abstractmethod
    def describe(self) -> Description:
        """What goes to JSON."""

    def tensors(self) -> Tensors:
        """What goes beside it."""
        return {}

    @classmethod
    @abstractmethod
    def restored(cls, description: Description, tensors: Mapping[str, Array]) -> Encoder:
        """The encoder that was described."""

    def shown(self, samples: Samples) -> list[str]:
        """The columns to show, the most telling first."""
        return samples.columns

    @property
    def text(self) -> list[str]:
        """The columns whose values are text, even where they look like numbers."""
        return []


@dataclass(frozen=True)
class ColumnChoices:
    """Columns that the user says the kind of, by name; others are judged by what is in them."""

    text: Sequence[str] = ()
    category: Sequence[str] = ()
    ignore: Sequence[str] = ()

    def check(self, samples: TableSamples) -> None:
        """Refuse columns that are not there, or are named twice."""
        named = [*self.text, *self.category, *self.ignore]
        unknown = [name for name in named if name not in samples.frame.columns]
        if unknown:
            raise InputError(
                f"{samples.name} has no column {listed(unknown)} among its features, which are "
                f"{listed(samples.columns, 20)}"
            )
        if len(set(named)) < len(named):
            raise InputError("a column is named twice by --text, --category and --ignore")


def fit(samples: Samples, choices: ColumnChoices | None = None) -> Encoder:
    """The encoder for samples of this kind, fitted to them."""
    choices = choices or ColumnChoices()
    if isinstance(samples, TableSamples):
        return TableEncoder.fitted(samples, choices)
    if choices.text or choices.category or choices.ignore:
        raise InputError(f"{samples.name} has no columns to choose from; it is not a table")
    if isinstance(samples, ArraySamples):
        return ArrayEncoder(samples.features.shape[1:])
    assert isinstance(samples, ImageSamples)
    return ImageEncoder.fitted(samples)


def restored(description: Description, tensors: Mapping[str, Array]) -> Encoder:
    """The encoder that was saved."""
    kinds: dict[str, type[Encoder]] = {
        encoder.kind: encoder for encoder in (TableEncoder, ArrayEncoder, ImageEncoder)
    }
    return kinds[description["kind"]].restored(description, tensors)


# --- arrays ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArrayEncoder(Encoder):
    """Arrays of a shape, flattened."""

    kind: ClassVar[str] = "array"
    shape: tuple[int, ...]

    def encode(self, samples: Samples) -> Array:
        _check_kind(samples, ArraySamples, "an array")
        assert isinstance(samples, ArraySamples)
        features = samples.features
        if features.shape[1:] != self.shape:
            raise InputError(
                f"{samples.name}: samples of X are of shape {features.shape[1:]}, where "
                f"{self.shape} is expected"
            )
        flat = features.reshape(len(features), -1)
        if features.dtype.kind in "iub":
            return flat.astype(np.float32)
        flat = flat.astype(np.float64)
        bad = ~(np.abs(flat) < _LARGEST)
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise InputError(
                f"{samples.name}: X has {_what(flat[row, column])} in row {row}, feature {column} "
                f"(the first is 0); all features have to be finite"
            )
        return flat

    def describe(self) -> Description:
        return {"kind": self.kind, "shape": list(self.shape)}

    @classmethod
    def restored(cls, description: Description, tensors: Mapping[str, Array]) -> ArrayEncoder:
        return cls(tuple(description["shape"]))


# --- images ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageEncoder(Encoder):
    """The pixels of images, all brought to one size, in [0, 1]."""

    kind: ClassVar[str] = "images"
    width: int
    height: int
    mode: str
    notices: Sequence[str] = field(default=(), compare=False)

    @classmethod
    def fitted(cls, samples: ImageSamples) -> ImageEncoder:
        seen = set(map(glance, samples.files))
        sizes = {size for size, _ in seen}
        mode = "L" if all(grey for _, grey in seen) else "RGB"
        if len(sizes) == 1 and max(next(iter(sizes))) <= SIDE:
            return cls(*next(iter(sizes)), mode)
        notice = f"Images are seen at {SIDE} x {SIDE} pixels."
        return cls(SIDE, SIDE, mode, notices=(notice,))

    def encode(self, samples: Samples) -> Array:
        _check_kind(samples, ImageSamples, "a folder of images")
        assert isinstance(samples, ImageSamples)
        rows = []
        for file in samples.files:
            image = open_image(file).convert(self.mode)
            if image.size != (self.width, self.height):
                image = image.resize((self.width, self.height), Image.Resampling.BOX)
            rows.append(np.asarray(image, dtype=np.uint8).reshape(-1))
        return np.stack(rows).astype(np.float32) / 255

    def describe(self) -> Description:
        return {"kind": self.kind, "width": self.width, "height": self.height, "mode": self.mode}

    @classmethod
    def restored(cls, description: Description, tensors: Mapping[str, Array]) -> ImageEncoder:
        return cls(description["width"], description["height"], description["mode"])


# --- tables ---------------------------------------------------------------------------------------


class Column(ABC):
    """A column of a table as one or several features."""

    kind: ClassVar[str]
    name: str

    @abstractmethod
    def encode(self, values: Array, source: str) -> Any:
        """The features, of shape (n, width), dense or sparse."""

    @abstractmethod
    def describe(self) -> Description:
        """What goes to JSON."""

    @property
    @abstractmethod
    def width(self) -> int:
        """How many features."""


@dataclass(frozen=True)
class Number(Column):
    """A number, in units of its standard deviation from its mean."""

    kind: ClassVar[str] = "number"
    name: str
    mean: float = 0.0
    scale: float = 1.0

    @classmethod
    def fitted(cls, name: str, values: Array, source: str) -> Number:
        numbers = cls(name).encode(values, source)
        return cls(name, float(numbers.mean()), float(numbers.std()) or 1.0)

    def encode(self, values: Array, source: str) -> Array:
        numbers = values
        if values.dtype == object:
            numbers = pd.to_numeric(pd.Series(values), errors="coerce").to_numpy(np.float64)
            for row in np.flatnonzero(np.isnan(numbers)):
                if values[row].strip().lower() not in _MISSING:
                    raise InputError(
                        f"{source}: the column {self.name!r} has the text {values[row][:60]!r} in "
                        f"row {row} (the first is 0), where numbers are expected; correct it, or "
                        f"say by --category or --text that the column is none of numbers"
                    )
        bad = np.flatnonzero(~(np.abs(numbers) < _LARGEST))
        if len(bad):
            raise InputError(
                f"{source}: the column {self.name!r} has {_what(numbers[bad[0]])} in row {bad[0]} "
                f"(the first is 0), {len(bad):,} in all; fill them or remove the rows"
            )
        return ((numbers - self.mean) / self.scale).reshape(-1, 1)

    def describe(self) -> Description:
        return {"name": self.name, "kind": self.kind, "mean": self.mean, "scale": self.scale}

    @property
    def width(self) -> int:
        return 1


@dataclass(frozen=True)
class Category(Column):
    """One feature for each value, 1 where it is that one; an unknown value is none of them."""

    kind: ClassVar[str] = "category"
    name: str
    values: Sequence[str]

    @classmethod
    def fitted(cls, name: str, values: Array) -> Category:
        return cls(name, sorted(set(_as_text(values))))

    def encode(self, values: Array, source: str) -> Any:
        codes = pd.Index(self.values).get_indexer(pd.Index(_as_text(values)))
        rows = np.flatnonzero(codes >= 0)
        ones = np.ones(len(rows))
        return sparse.csr_array(
            (ones, (rows, codes[rows])), shape=(len(values), len(self.values)), dtype=np.float64
        )

    def describe(self) -> Description:
        return {"name": self.name, "kind": self.kind, "values": list(self.values)}

    @property
    def width(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Text(Column):
    """The words of a text by TF-IDF: (1 + log count) * idf, each text of unit length."""

    kind: ClassVar[str] = "text"
    name: str
    vocabulary: Sequence[str]
    idf: Array

    @classmethod
    def fitted(cls, name: str, values: Array) -> Text | None:
        """None: there are no words that occur twice."""
        vectorizer = _vectorizer(min_df=2, max_features=_WORDS)
        try:
            vectorizer.fit(_as_text(values))
        except ValueError:  # no words, or each but once
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


def _vectorizer(**options: Any) -> TfidfVectorizer:
    return TfidfVectorizer(sublinear_tf=True, strip_accents="unicode", **options)


@dataclass(frozen=True)
class TableEncoder(Encoder):
    """The columns of a table, side by side."""

    kind: ClassVar[str] = "table"
    parts: Sequence[Column]
    notices: Sequence[str] = field(default=(), compare=False)

    @classmethod
    def fitted(cls, samples: TableSamples, choices: ColumnChoices) -> TableEncoder:
        choices.check(samples)
        parts: list[Column] = []
        notices = []
        for name in samples.columns:
            if name in choices.ignore:
                continue
            part = _column(name, samples.frame[name].to_numpy(), samples.name, choices)
            if part is None:
                notices.append(f"The column {name!r} is left out: nothing in it occurs twice.")
            else:
                parts.append(part)
        if not parts:
            raise InputError(f"{samples.name} has no column to learn from")
        return cls(parts, tuple(notices))

    def encode(self, samples: Samples) -> Any:
        _check_kind(samples, TableSamples, "a table")
        assert isinstance(samples, TableSamples)
        missing = [p.name for p in self.parts if p.name not in samples.frame.columns]
        if missing:
            raise InputError(
                f"{samples.name} has no column {listed(missing)}, which the training samples have; "
                f"its columns are {listed(samples.columns, 20)}"
            )
        blocks = [p.encode(samples.frame[p.name].to_numpy(), samples.name) for p in self.parts]
        if self._sparse:
            return sparse.hstack(blocks, format="csr")
        return np.hstack([b if isinstance(b, np.ndarray) else b.toarray() for b in blocks])

    @property
    def _sparse(self) -> bool:
        coded = sum(part.width for part in self.parts if not isinstance(part, Number))
        return any(isinstance(part, Text) for part in self.parts) or coded > _WIDEST

    def describe(self) -> Description:
        return {"kind": self.kind, "columns": [part.describe() for part in self.parts]}

    def tensors(self) -> Tensors:
        texts = (part for part in self.parts if isinstance(part, Text))
        return {f"idf.{i}": text.idf for i, text in enumerate(texts)}

    @classmethod
    def restored(cls, description: Description, tensors: Mapping[str, Array]) -> TableEncoder:
        parts: list[Column] = []
        texts = 0
        for described in description["columns"]:
            about = dict(described)
            kind = about.pop("kind")
            if kind == Text.kind:
                parts.append(Text(**about, idf=tensors[f"idf.{texts}"]))
                texts += 1
            else:
                parts.append({Number.kind: Number, Category.kind: Category}[kind](**about))
        return cls(parts)

    @property
    def text(self) -> list[str]:
        return [part.name for part in self.parts if not isinstance(part, Number)]

    def shown(self, samples: Samples) -> list[str]:
        telling = [part.name for part in self.parts if isinstance(part, Text)]
        return [*telling, *(name for name in samples.columns if name not in telling)]


def _column(name: str, values: Array, source: str, choices: ColumnChoices) -> Column | None:
    """The column as what the user says it is, or as what its values look like."""
    if name in choices.category:
        return Category.fitted(name, values)
    if name in choices.text:
        return Text.fitted(name, values)
    if values.dtype != object:
        return Number.fitted(name, values, source)
    present = [value for value in values if value.strip().lower() not in _MISSING]
    if not present:
        return None
    numbers = pd.to_numeric(pd.Series(present, dtype=object), errors="coerce").notna().mean()
    if numbers >= _NUMERIC:
        return Number.fitted(name, values, source)
    if len(set(values)) <= min(_CATEGORIES, len(values) / 2):
        return Category.fitted(name, values)
    return Text.fitted(name, values)


def _as_text(values: Array) -> list[str]:
    if values.dtype == object:
        return [str(value) for value in values]
    return ["" if v != v else str(int(v)) if v.is_integer() else repr(v) for v in values.tolist()]


def _what(value: float) -> str:
    if np.isnan(value):
        return "a missing value (NaN)"
    return (
        "an infinite value" if np.isinf(value) else f"the value {value:g}, too large to work with"
    )


def _check_kind(samples: Samples, kind: type[Samples], wanted: str) -> None:
    if not isinstance(samples, kind):
        raise InputError(f"{samples.name} is {samples.description}, where {wanted} is expected")
