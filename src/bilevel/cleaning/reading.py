"""Readers: CSV, Parquet, NPZ, and folders of images, one folder for each class.

A file is what its content says, and its content has to be what its name says. Nothing is ever
unpickled. Labels are text, as they are written.
"""

from __future__ import annotations

import csv
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bilevel.cleaning.samples import (
    Array,
    ArraySamples,
    ImageSamples,
    Labels,
    Samples,
    TableSamples,
)
from bilevel.data.output import printable
from bilevel.errors import InputError, MissingExtraError

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
"""The endings of file names that are taken for images."""

_KNOWN = {  # what files of other kinds begin with
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"PAR1": "a Parquet file",
    b"PK\x03\x04": "a zip archive (NPZ, or a spreadsheet)",
    b"\x93NUMPY": "a NumPy array (NPY)",
    b"\x1f\x8b": "gzipped",
    b"%PDF": "a PDF",
    b"\x80": "a Python pickle",
}
_MOST_NAMED = 10

MOST_COLUMNS = 100_000
"""Of a table, whose columns are looked at one by one."""


def read(
    path: Path,
    *,
    label: str | None,
    id_column: str | None = None,
    labelled: bool = True,
    text: Collection[str] = (),
) -> Samples:
    """The samples in a file or a folder, chosen by what the name ends in.

    Args:
        path: a ``.csv``, ``.tsv``, ``.parquet`` or ``.npz`` file, or a folder ``class/name.png``.
        label: the column of labels; of NPZ the array of labels, ``y`` unless another is named.
        id_column: the column by which rows are known.
        labelled: whether there have to be labels.
        text: columns whose values stay as they are written, even where they look like numbers.

    Raises:
        InputError: the file is not what its name says, or has not what is needed.
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
                f"{printable(path)} is a folder: its images are labelled by the folder they are "
                f"in and known by their names, so leave out --label and --id"
            )
        return _read_images(path, labelled)
    if not path.exists():
        raise InputError(f"{printable(path)} does not exist")
    suffix = path.suffix.lower()
    if suffix == ".npz":
        if id_column is not None:
            raise InputError(f"{printable(path)}: samples of NPZ are known by their numbers (--id)")
        return _read_npz(path, label or "y", labelled)
    if suffix not in _TABLES:
        raise InputError(
            f"{printable(path)} ends in {suffix or 'nothing'!r}; a file ends in "
            f"{', '.join([*_TABLES, '.npz'])}, and images are in a folder with one folder for each "
            f"class"
        )
    if labelled and label is None:
        raise InputError(f"which column of {printable(path)} is the label? Name it by --label")
    return from_frame(
        _TABLES[suffix](path, label, {*text, *(name for name in (label, id_column) if name)}),
        printable(path.name),
        label=label if labelled else None,
        id_column=id_column,
    )


def from_frame(
    frame: pd.DataFrame, name: str, *, label: str | None = None, id_column: str | None = None
) -> TableSamples:
    """The rows of a table, with columns of numbers or of text."""
    twice = [str(column) for column, count in Counter(frame.columns).items() if count > 1]
    if twice:
        raise InputError(f"{name} has more than one column named {listed(twice)}; rename them")
    frame = frame.rename(columns=str)
    for option, wanted in (("--label", label), ("--id", id_column)):
        if wanted is not None and wanted not in frame.columns:
            raise InputError(
                f"{name} has no column {wanted!r} ({option}); its columns are "
                f"{listed(list(frame.columns), 20)}"
            )
    if not len(frame):
        raise InputError(f"{name} has no rows")
    labels = None if label is None else _labels(frame[label].to_numpy(dtype=object), name, label)
    ids = None
    if id_column is not None:
        ids = [str(value) for value in frame[id_column]]
    elif "" in frame.columns:  # the index of a table that was written with it
        ids = [str(value) for value in frame[""]]
    others = frame.drop(columns=[c for c in (label, id_column, "") if c in frame.columns])
    if not len(others.columns):
        raise InputError(f"{name} has no column beside that of the labels")
    tidy = {column: _tidy(others[column], name) for column in others.columns}
    return TableSamples(name, pd.DataFrame(tidy), labels, ids)


def _tidy(series: pd.Series[Any], name: str) -> Any:
    """Numbers as float64, text as text; nothing else goes."""
    if isinstance(series.dtype, pd.CategoricalDtype):
        series = series.astype(object)
    if pd.api.types.is_bool_dtype(series.dtype):
        return series.astype(object).map(str).to_numpy(dtype=object)
    if pd.api.types.is_numeric_dtype(series.dtype) and not pd.api.types.is_complex_dtype(series):
        return series.to_numpy(dtype=np.float64, na_value=np.nan)
    values = series.to_numpy(dtype=object)
    missing = pd.isna(series).to_numpy()
    kinds = {type(value) for value in values[~missing]}
    if kinds <= {str}:
        return np.where(missing, "", values)
    if kinds <= {int, float, np.float64, np.int64}:
        return np.where(missing, np.nan, values).astype(np.float64)
    raise InputError(
        f"{name}: the column {str(series.name)!r} holds {listed(sorted(k.__name__ for k in kinds))}"
        f", neither numbers nor text; leave it out by --ignore, or convert it"
    )


def _labels(values: Array, name: str, where: str) -> Labels:
    """Labels as text; refuses those that are missing, and numbers that are no classes."""
    missing = np.flatnonzero(pd.isna(values) | (values == ""))
    if len(missing):
        raise InputError(
            f"{name} has no label in {len(missing):,} rows of {where!r}, first in row {missing[0]} "
            f"(the first row is 0); remove them or label them"
        )
    for row, value in enumerate(values):
        if isinstance(value, float | np.floating) and not float(value).is_integer():
            raise InputError(
                f"{name} has the label {value!r} in row {row} of {where!r}: a label is a class, "
                f"not a quantity"
            )
    return np.array(
        [str(int(v)) if isinstance(v, float | np.floating) else str(v) for v in values], dtype=str
    )


def _read_csv(path: Path, label: str | None, text: Collection[str]) -> pd.DataFrame:
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    _refuse_other_kinds(path, "text")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader(file, delimiter=separator, strict=True), [])
        if not header:
            raise InputError(f"{printable(path)} is empty")
        if len(header) > MOST_COLUMNS:
            raise InputError(
                f"{printable(path)} has {len(header):,} columns, and {MOST_COLUMNS:,} at most are "
                f"read from a table; save so many numbers as NPZ, with the arrays X and y"
            )
        twice = [column for column, count in Counter(header).items() if count > 1]
        if twice:
            raise InputError(
                f"{printable(path)} has more than one column named {listed(twice)}; rename them"
            )
        frame = _parsed(path, separator, header, text)
        truths = frame.select_dtypes(bool).columns
        if len(truths):  # TRUE, true and True are the user's, and stay as they are written
            frame = _parsed(path, separator, header, {*text, *truths})
    except UnicodeDecodeError as error:
        raise InputError(
            f"{printable(path)} is not text in UTF-8 ({error}); save it as UTF-8"
        ) from error
    except (csv.Error, pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise InputError(
            f"{printable(path)} cannot be read as CSV: {' '.join(str(error).split())}"
        ) from error
    if label is not None and label not in header:
        for other in ";\t|":
            if any(label in column.split(other) for column in header):
                raise InputError(
                    f"{printable(path)} is separated by {other!r}, not by {separator!r}; save it "
                    f"with commas, or with tabs as .tsv"
                )
    return frame


def _parsed(path: Path, separator: str, header: list[str], text: Collection[str]) -> pd.DataFrame:
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        return pd.read_csv(
            path,
            sep=separator,
            encoding="utf-8-sig",
            header=0,
            names=header,
            index_col=False,
            # "NA" may well be a class; what is missing is for each kind of column to say
            keep_default_na=False,
            na_values=[],
            dtype={column: str for column in header if column in text},
            low_memory=False,
        )


def _read_parquet(path: Path, label: str | None, text: Collection[str]) -> pd.DataFrame:
    del label, text  # types are in the file
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise MissingExtraError("pyarrow", "parquet") from None
    with path.open("rb") as file:
        if file.read(4) != b"PAR1":
            raise InputError(f"{printable(path)} is not a Parquet file{_but(path)}")
    try:
        table = pyarrow.parquet.read_table(path)
        frame: pd.DataFrame = table.to_pandas(ignore_metadata=True)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{printable(path)} cannot be read as Parquet: {error}") from error
    return frame.drop(columns="__index_level_0__", errors="ignore")


_TABLES: dict[str, Callable[[Path, str | None, Collection[str]], pd.DataFrame]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


def _read_npz(path: Path, label: str, labelled: bool) -> ArraySamples:
    name = printable(path.name)
    if not zipfile.is_zipfile(path):
        raise InputError(f"{printable(path)} is not an NPZ file{_but(path)}")
    found: dict[str, Array] = {}
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            for wanted in ("X", label) if labelled else ("X",):
                if wanted not in arrays.files:
                    raise InputError(
                        f"{name} has no array {wanted!r}; it has {listed(arrays.files)}"
                    )
                found[wanted] = arrays[wanted]
    except (
        *(ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error),
        *(NotImplementedError, RuntimeError),  # compressed or encrypted as nothing here can read
    ) as error:
        if isinstance(error, InputError):
            raise
        hint = "; arrays of Python objects are never loaded" if "pickle" in str(error) else ""
        raise InputError(f"{printable(path)} cannot be read as NPZ: {error}{hint}") from error
    X = found["X"]
    if X.dtype.kind not in "iufb" or X.ndim < 2:
        raise InputError(
            f"{name}: X is an array of {X.dtype} of shape {X.shape}, where numbers of shape "
            f"(samples, features) or (samples, height, width) are expected"
        )
    if not len(X):
        raise InputError(f"{name} has no rows")
    if not labelled:
        return ArraySamples(name, X, None)
    y = found[label]
    if y.shape != (len(X),):
        raise InputError(
            f"{name}: {label} is of shape {y.shape}, where one label for each of the {len(X):,} "
            f"samples of X is expected, ({len(X)},)"
        )
    if y.dtype.kind not in "iufbUS":
        raise InputError(f"{name}: {label} is an array of {y.dtype}, not of numbers or text")
    if y.dtype.kind == "S":
        y = np.char.decode(y, "utf-8", "backslashreplace")
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise InputError(f"{name}: {label} has labels that are not finite")
    return ArraySamples(name, X, _labels(y.astype(object), name, label))


def _read_images(folder: Path, labelled: bool) -> ImageSamples:
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in IMAGES
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not files:
        raise InputError(
            f"{printable(folder)} has no images in it; they are expected as class/name.png"
        )
    places = [file.relative_to(folder) for file in files]
    loose = [place for place in places if len(place.parts) < 2]
    if labelled and loose:
        raise InputError(
            f"{printable(folder)} has {len(loose):,} images in no folder of a class, such as "
            f"{printable(loose[0])!r}; they are expected as class/name.png"
        )
    labels = np.array([printable(place.parts[0]) for place in places]) if labelled else None
    ids = [printable(place.as_posix()) for place in places]
    return ImageSamples(printable(folder.name or folder), files, labels, ids)


def _refuse_other_kinds(path: Path, wanted: str) -> None:
    with path.open("rb") as file:
        start = file.read(4096)
    if b"\0" in start or start.startswith(tuple(_KNOWN)):
        raise InputError(f"{printable(path)} is not {wanted}{_but(path)}")


def _but(path: Path) -> str:
    """What a file seems to be, judged by how it begins."""
    with path.open("rb") as file:
        start = file.read(16)
    if not start:
        return ": it is empty"
    for magic, kind in _KNOWN.items():
        if start.startswith(magic):
            return f": it is {kind}"
    if all(32 <= byte < 127 or byte in b"\t\r\n\f" for byte in start):
        return ": it is text"
    return f": it begins with the bytes {start[:8].hex(' ')}"


def listed(values: Sequence[Any], most: int = _MOST_NAMED) -> str:
    """The first of the values, quoted."""
    shown = ", ".join(repr(str(value)) for value in values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"
