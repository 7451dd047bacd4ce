"""Samples as numbers, encoded in the same way every time.

An encoder is fitted to the samples to be cleaned. It then keeps how a number is scaled, which
categories and words there are, and to what size images are brought. It is saved as plain JSON and
tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from scipy import sparse

from bilevel.cleaning.columns import (
    LARGEST,
    CategoryColumn,
    Column,
    ColumnChoices,
    Description,
    NumberColumn,
    TextColumn,
    bad_number,
    fit_column,
    unhelpful,
)
from bilevel.cleaning.samples import (
    Array,
    ArraySamples,
    ImageSamples,
    Samples,
    TableSamples,
    open_image,
    size_and_greyness,
)
from bilevel.cleaning.wording import listed
from bilevel.errors import InputError

SIDE = 32
"""Images larger than this, or of several sizes, are brought to SIDE x SIDE pixels."""

_WIDEST_DENSE = 2000  # with more one-hot columns than this, a table is encoded as a sparse matrix


class Encoder(ABC):
    """Samples of one kind as a matrix of features.

    Attributes:
        notices: sentences that tell the user how the samples were interpreted.
    """

    kind: ClassVar[str]
    notices: Sequence[str] = ()

    @abstractmethod
    def encode(self, samples: Samples) -> Any:
        """The features, dense or sparse, with one row for each sample."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of features."""

    @abstractmethod
    def describe(self) -> Description:
        """The encoder as JSON, without its tensors."""

    def tensors(self) -> dict[str, Array]:
        """The tensors of the encoder by name."""
        return {}

    @classmethod
    @abstractmethod
    def restored(cls, description: Description, tensors: Mapping[str, Array]) -> Encoder:
        """The encoder that gave this description and these tensors."""

    def shown(self, samples: Samples) -> list[str]:
        """The columns to show to people, the most informative first."""
        return samples.columns

    @property
    def text(self) -> list[str]:
        """The columns whose values are text, even if they look like numbers."""
        return []

    def in_words(self) -> str | None:
        """How the columns were read, if there are any."""
        return None


def fit(samples: Samples, choices: ColumnChoices | None = None) -> Encoder:
    """An encoder for samples of this kind, fitted to them."""
    choices = choices or ColumnChoices()
    if isinstance(samples, TableSamples):
        return TableEncoder.fitted(samples, choices)
    if choices.named:
        raise InputError(
            f"{samples.name} is not a table and has no columns to choose from; leave out --text, "
            f"--category and --ignore"
        )
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


@dataclass(frozen=True)
class ArrayEncoder(Encoder):
    """Arrays of one shape, flattened."""

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
        bad = ~(np.abs(flat) < LARGEST)
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise InputError(
                f"{samples.name}: X has {bad_number(flat[row, column])} in row {row}, feature "
                f"{column} (both counted from 0); all features have to be finite"
            )
        return flat

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def describe(self) -> Description:
        return {"kind": self.kind, "shape": list(self.shape)}

    @classmethod
    def restored(cls, description: Description, tensors: Mapping[str, Array]) -> ArrayEncoder:
        shape = tuple(description["shape"])
        check_counts(shape)
        return cls(shape)


@dataclass(frozen=True)
class ImageEncoder(Encoder):
    """The pixels of images in [0, 1], with all images brought to one size."""

    kind: ClassVar[str] = "images"
    width: int
    height: int
    mode: str
    notices: Sequence[str] = field(default=(), compare=False)

    @classmethod
    def fitted(cls, samples: ImageSamples) -> ImageEncoder:
        seen = set(map(size_and_greyness, samples.files))
        sizes = {size for size, _ in seen}
        mode = "L" if all(grey for _, grey in seen) else "RGB"
        if len(sizes) == 1 and max(next(iter(sizes))) <= SIDE:
            return cls(*next(iter(sizes)), mode)
        notice = f"Images were resized to {SIDE} x {SIDE} pixels."
        return cls(SIDE, SIDE, mode, notices=(notice,))

    def encode(self, samples: Samples) -> Array:
        _check_kind(samples, ImageSamples, "a folder of images")
        assert isinstance(samples, ImageSamples)
        pixels = []
        for file in samples.files:
            image = open_image(file).convert(self.mode)
            if image.size != (self.width, self.height):
                image = image.resize((self.width, self.height), Image.Resampling.BOX)
            pixels.append(np.asarray(image, dtype=np.uint8).reshape(-1))
        return np.stack(pixels).astype(np.float32) / 255

    @property
    def size(self) -> int:
        return self.width * self.height * len(self.mode)  # "L" or "RGB"

    def describe(self) -> Description:
        return {"kind": self.kind, "width": self.width, "height": self.height, "mode": self.mode}

    @classmethod
    def restored(cls, description: Description, tensors: Mapping[str, Array]) -> ImageEncoder:
        found = cls(description["width"], description["height"], description["mode"])
        check_counts((found.width, found.height))
        if found.mode not in ("L", "RGB"):
            raise ValueError(f"the mode of images must be 'L' or 'RGB', not {found.mode!r}")
        return found


@dataclass(frozen=True)
class TableEncoder(Encoder):
    """The features of the columns of a table, side by side."""

    kind: ClassVar[str] = "table"
    columns: Sequence[Column]
    notices: Sequence[str] = field(default=(), compare=False)

    @classmethod
    def fitted(cls, samples: TableSamples, choices: ColumnChoices) -> TableEncoder:
        choices.check(samples)
        columns: list[Column] = []
        notices = []
        for name in samples.columns:
            if name in choices.ignore:
                continue
            samples.check_readable(name)
            values = samples.table[name]
            why = None if name in choices.named else unhelpful(name, values)
            if why is not None:
                notices.append(f"The column {name!r} was left out: {why}.")
                continue
            column = fit_column(name, values, samples.name, choices)
            if column is None:
                notices.append(f"The column {name!r} was left out: nothing in it occurs twice.")
            else:
                columns.append(column)
        if not columns:
            raise InputError(f"{samples.name} has no column to learn from")
        return cls(columns, tuple(notices))

    def encode(self, samples: Samples) -> Any:
        _check_kind(samples, TableSamples, "a table")
        assert isinstance(samples, TableSamples)
        missing = [c.name for c in self.columns if c.name not in samples.table]
        if missing:
            raise InputError(
                f"{samples.name} has no column {listed(missing)}, which the training samples have; "
                f"its columns are {listed(samples.columns, 20)}"
            )
        for column in self.columns:
            samples.check_readable(column.name)
        blocks = [c.encode(samples.table[c.name], samples.name) for c in self.columns]
        if self._sparse:
            return sparse.hstack(blocks, format="csr")
        return np.hstack([b if isinstance(b, np.ndarray) else b.toarray() for b in blocks])

    @property
    def size(self) -> int:
        return sum(column.width for column in self.columns)

    @property
    def _sparse(self) -> bool:
        coded = sum(c.width for c in self.columns if not isinstance(c, NumberColumn))
        return any(isinstance(c, TextColumn) for c in self.columns) or coded > _WIDEST_DENSE

    def describe(self) -> Description:
        return {"kind": self.kind, "columns": [column.describe() for column in self.columns]}

    def tensors(self) -> dict[str, Array]:
        texts = (column for column in self.columns if isinstance(column, TextColumn))
        return {f"idf.{i}": text.idf for i, text in enumerate(texts)}

    @classmethod
    def restored(cls, description: Description, tensors: Mapping[str, Array]) -> TableEncoder:
        columns: list[Column] = []
        texts = 0
        for described in description["columns"]:
            fields = dict(described)
            kind = fields.pop("kind")
            if kind == TextColumn.kind:
                columns.append(TextColumn(**fields, idf=tensors[f"idf.{texts}"]))
                texts += 1
            else:
                kinds = {c.kind: c for c in (NumberColumn, CategoryColumn)}
                columns.append(kinds[kind](**fields))
            columns[-1].check()
        return cls(columns)

    @property
    def text(self) -> list[str]:
        return [column.name for column in self.columns if not isinstance(column, NumberColumn)]

    def in_words(self) -> str | None:
        kinds: dict[str, list[str]] = {}
        for column in self.columns:
            kinds.setdefault(column.kind, []).append(column.name)
        return f"Columns: {'; '.join(f'{kind} {listed(v)}' for kind, v in kinds.items())}."

    def shown(self, samples: Samples) -> list[str]:
        texts = [column.name for column in self.columns if isinstance(column, TextColumn)]
        return [*texts, *(name for name in samples.columns if name not in texts)]


def check_counts(counts: Sequence[Any]) -> None:
    """Raise a ValueError unless all are whole numbers of at least 1."""
    if not counts or not all(type(count) is int and count >= 1 for count in counts):
        raise ValueError(f"the size of a sample must be whole numbers, not {list(counts)!r}")


def _check_kind(samples: Samples, kind: type[Samples], wanted: str) -> None:
    if not isinstance(samples, kind):
        raise InputError(f"{samples.name} is {samples.description}, where {wanted} is expected")
