"""Readers: CSV, Parquet, NPZ, and folders of images, one folder for each class.

The content of a file has to be what its name says, and nothing is ever unpickled. Labels are text,
as they are written.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bilevel.cleaning.samples import (
    IMAGE_FORMATS,
    Array,
    ArraySamples,
    ImageSamples,
    Labels,
    Samples,
    TableSamples,
)
from bilevel.cleaning.table_files import TABLE_READERS, apparent_kind, check_columns_differ
from bilevel.cleaning.values import numbers_or_text
from bilevel.cleaning.wording import listed
from bilevel.data.output import printable
from bilevel.errors import InputError

LONGEST_LABEL = 1000
"""The most characters of a label, which is a name."""


def read(
    path: Path,
    *,
    label: str | None,
    id_column: str | None = None,
    labelled: bool = True,
    text: Collection[str] = (),
) -> Samples:
    """Read the samples in a file or a folder; the ending of the name chooses the format.

    Args:
        path: a ``.csv``, ``.tsv``, ``.parquet`` or ``.npz`` file, or a folder ``class/name.png``.
        label: the column of labels; for NPZ the array of labels, by default ``y``.
        id_column: the column with the names of the rows.
        labelled: whether the samples must have labels.
        text: columns whose values stay as they are written, even if they look like numbers.

    Raises:
        InputError: the file is not what its name says, or lacks something that is needed.
    """
    try:
        return _read(path, label, id_column, labelled, text)
    except OSError as error:
        raise InputError(f"{printable(path)} cannot be read: {error.strerror}") from error


def _read(
    path: Path, label: str | None, id_column: str | None, labelled: bool, text: Collection[str]
) -> Samples:
    if path.is_dir():
        if label is not None or id_column is not None:
            raise InputError(
                f"{printable(path)} is a folder: its images are labelled by their folders and "
                f"known by their file names, so leave out --label and --id"
            )
        return _read_images(path, labelled)
    if not path.exists():
        raise InputError(f"{printable(path)} does not exist")
    if not path.is_file():
        raise InputError(
            f"{printable(path)} is neither a file nor a folder; save what it gives to a file"
        )
    suffix = path.suffix.lower()
    if suffix == ".npz":
        if id_column is not None:
            raise InputError(
                f"{printable(path)}: samples in NPZ are known by their numbers; leave out --id"
            )
        return _read_npz(path, label or "y", labelled)
    if suffix not in TABLE_READERS:
        raise InputError(
            f"{printable(path)} ends in {suffix or 'nothing'!r}; a file ends in "
            f"{', '.join([*TABLE_READERS, '.npz'])}, and images lie in a folder with one folder "
            f"for each class"
        )
    if labelled and label is None:
        raise InputError(f"which column of {printable(path)} holds the labels? Name it by --label")
    table = TABLE_READERS[suffix](
        path, label, {*text, *(name for name in (label, id_column) if name)}
    )
    return from_frame(
        table.frame,
        printable(path.name),
        label=label if labelled else None,
        id_column=id_column,
        original=table.pieces,
    )


def from_frame(
    frame: pd.DataFrame,
    name: str,
    *,
    label: str | None = None,
    id_column: str | None = None,
    original: Callable[[], Iterable[pd.DataFrame]] | None = None,
) -> TableSamples:
    """Samples from the rows of a table, with columns of numbers or text.

    Args:
        frame: the table.
        name: its name in messages.
        label: the column of labels.
        id_column: the column with the names of the rows.
        original: gives the table as it is in its file, some rows at a time; None: it is ``frame``.
    """
    check_columns_differ(name, frame.columns)
    frame = frame.rename(columns=str)
    for option, wanted in (("--label", label), ("--id", id_column)):
        if wanted is not None and wanted not in frame.columns:
            raise InputError(
                f"{name} has no column {wanted!r} ({option}); its columns are "
                f"{listed(list(frame.columns), 20)}"
            )
    if not len(frame):
        raise InputError(f"{name} has no rows")
    labels, forms = None, {}
    if label is not None:
        given = frame[label].to_numpy(dtype=object)
        labels = _labels(given, name, label)
        forms = dict(zip(labels.tolist(), given, strict=True))
    ids = None
    if id_column is not None:
        ids = [str(value) for value in frame[id_column]]
    elif "" in frame.columns:  # the index of a DataFrame that was written with it
        ids = _index(frame[""], name)
    others = frame.drop(columns=[c for c in (label, id_column, "") if c in frame.columns])
    if not len(others.columns):
        raise InputError(f"{name} has no column beside the labels, and so nothing to learn from")
    found = {str(column): numbers_or_text(series, name) for column, series in others.items()}
    return TableSamples(
        name,
        {column: one.values for column, one in found.items()},
        labels,
        ids,
        original=original or (lambda: [frame]),
        label=label,
        forms=forms,
        unreadable={column: one.why for column, one in found.items() if one.why is not None},
    )


def _index(series: pd.Series[Any], name: str) -> list[str] | None:
    """The names of rows in the column without a name; None if it is empty.

    An empty one is what a comma at the end of every line makes. Fractions name no rows.
    """
    texts = [
        "" if missing else str(value) for value, missing in zip(series, series.isna(), strict=True)
    ]
    if not any(texts):
        return None
    values = pd.to_numeric(series, errors="coerce").to_numpy(np.float64)
    fractions = np.flatnonzero(np.isfinite(values) & (values != np.round(values)))
    if len(fractions):
        raise InputError(
            f"{name} has a column without a name, which would be taken for the names of the rows, "
            f"but it holds {texts[fractions[0]]} in row {fractions[0]} (the first row is 0); give "
            f"the column a name, or remove it"
        )
    return texts


def _labels(values: Array, name: str, where: str) -> Labels:
    """Labels as text; refuses missing labels, and numbers that are not whole."""
    missing = np.flatnonzero(pd.isna(values) | (values == ""))
    if len(missing):
        raise InputError(
            f"{name} has no label in {len(missing):,} rows of {where!r}, first in row {missing[0]} "
            f"(the first row is 0); remove these rows or label them"
        )
    for row, value in enumerate(values):
        if isinstance(value, float | np.floating) and not float(value).is_integer():
            raise InputError(
                f"{name} has the label {value!r} in row {row} of {where!r}: a label is a class, "
                f"not a quantity"
            )
    labels = [str(int(v)) if isinstance(v, float | np.floating) else str(v) for v in values]
    for row, text in enumerate(labels):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError(
                f"{name} has the label {text!a} in row {row} of {where!r}, which is not "
                f"Unicode and cannot be written to any file"
            )
    row = max(range(len(labels)), key=lambda row: len(labels[row]))
    if len(labels[row]) > LONGEST_LABEL:
        raise InputError(
            f"{name} has a label of {len(labels[row]):,} characters in row {row} of {where!r}, and "
            f"{LONGEST_LABEL:,} at most are expected of the name of a class"
        )
    return np.array(labels, dtype=str)


def _read_npz(path: Path, label: str, labelled: bool) -> ArraySamples:
    name = printable(path.name)
    if not zipfile.is_zipfile(path):
        raise InputError(f"{printable(path)} is not an NPZ file{apparent_kind(path)}")
    found: dict[str, Array] = {}
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            for wanted in ("X", label) if labelled else ("X",):
                if wanted not in arrays.files:
                    raise InputError(
                        f"{name} has no array {wanted!r}; it has {listed(arrays.files)}"
                    )
                _check_member(name, arrays, wanted)
                found[wanted] = arrays[wanted]
    except (
        *(ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error),
        *(NotImplementedError, RuntimeError),  # unknown compression, or encrypted
        *(SyntaxError, TypeError, KeyError, MemoryError),  # of the header of an array
    ) as error:
        if isinstance(error, InputError):
            raise
        hint = "; arrays of Python objects are never loaded" if "pickle" in str(error) else ""
        reason = textwrap.shorten(str(error), 300)  # it may hold what the file says, at any length
        raise InputError(f"{printable(path)} cannot be read as NPZ: {reason}{hint}") from error
    X = found["X"]
    if X.dtype.kind not in "iufb" or X.ndim < 2:
        raise InputError(
            f"{name}: X is an array of {X.dtype} of shape {X.shape}, where numbers of shape "
            f"(samples, features) or (samples, height, width) are expected"
        )
    if not X.size:
        raise InputError(f"{name}: X is of shape {X.shape}, and so holds no numbers")
    labels = _array_labels(found[label], len(X), name, label) if labelled else None
    return ArraySamples(name, X, labels)


def _check_member(name: str, arrays: Any, wanted: str) -> None:
    """Refuse a member that is no array, or that claims more numbers than it or the memory holds."""
    member = wanted if wanted in arrays.zip.namelist() else f"{wanted}.npy"
    info = arrays.zip.getinfo(member)
    with arrays.zip.open(member) as file:
        try:
            version = np.lib.format.read_magic(file)
        except ValueError as error:
            raise InputError(f"{name}: {wanted} is not an array") from error
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        if version not in readers:  # those of the third have names of fields, and so no numbers
            raise InputError(f"{name}: {wanted} is not an array of numbers or text")
        shape, _, dtype = readers[version](file)
        start = file.tell()
    claimed = math.prod(shape) * dtype.itemsize
    # pickled objects, which numpy then refuses to load, may be of any size
    short = claimed > info.file_size - start and not dtype.hasobject
    if short or info.file_size > _memory():
        raise InputError(
            f"{name}: {wanted} claims to be of shape {shape}, which takes {claimed:,} bytes; the "
            f"file has {info.file_size:,} for it, and this machine {_memory():,} in all"
        )


def _memory() -> int:
    """The bytes of memory of this machine; where that is not known, more than any has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


def _array_labels(y: Array, count: int, name: str, label: str) -> Labels:
    if y.shape != (count,):
        raise InputError(
            f"{name}: {label} is of shape {y.shape}, where one label for each of the {count:,} "
            f"samples of X is expected, ({count},)"
        )
    if y.dtype.kind not in "iufbUS":
        raise InputError(f"{name}: {label} is an array of {y.dtype}, not of numbers or text")
    if y.dtype.kind == "S":
        y = np.char.decode(y, "utf-8", "backslashreplace")
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise InputError(f"{name}: {label} has labels that are not finite")
    return _labels(y.astype(object), name, label)


def _read_images(folder: Path, labelled: bool) -> ImageSamples:
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in IMAGE_FORMATS
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not files:
        raise InputError(
            f"{printable(folder)} has no images in it; images are expected as class/name.png"
        )
    places = [file.relative_to(folder) for file in files]
    loose = [place for place in places if len(place.parts) < 2]
    if labelled and loose:
        raise InputError(
            f"{printable(folder)} has {len(loose):,} images in no folder of a class, such as "
            f"{printable(loose[0])!r}; images are expected as class/name.png"
        )
    labels = np.array([printable(place.parts[0]) for place in places]) if labelled else None
    ids = [printable(place.as_posix()) for place in places]
    return ImageSamples(printable(folder.name or folder), files, labels, ids)
