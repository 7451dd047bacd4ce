"""Table files: CSV, TSV and Parquet, and what a file is judging by its first bytes.

The content of a file has to be what its name says, and nothing is ever unpickled.
"""

from __future__ import annotations

import codecs
import csv
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

import pandas as pd

from bilevel.cleaning.wording import listed
from bilevel.data.output import printable
from bilevel.errors import InputError, MissingExtraError

MOST_COLUMNS = 100_000
"""The most columns of a table, because columns are examined one by one."""

_BLOCK = 1 << 20

_SIGNATURES = {  # the first bytes of files of other kinds
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


def read_csv(path: Path, label: str | None, text: Collection[str]) -> pd.DataFrame:
    """Read a CSV file, or a TSV file by its ending.

    Args:
        path: the file.
        label: the column of labels, which shows whether the file has another separator.
        text: columns whose values stay as they are written.
    """
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    _check_is_text(path)
    try:
        header = _read_header(path, separator)
        _check_separator(path, separator, header, label)
        frame = _parsed(path, separator, header, text)
        booleans = frame.select_dtypes(bool).columns
        if len(booleans):  # keep TRUE, true and True as they are written
            frame = _parsed(path, separator, header, {*text, *booleans})
    except UnicodeDecodeError as error:
        raise InputError(
            f"{printable(path)} is not text in UTF-8 ({error}); save it as UTF-8"
        ) from error
    except (csv.Error, pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise InputError(
            f"{printable(path)} cannot be read as CSV: {' '.join(str(error).split())}"
        ) from error
    return frame


def _check_separator(path: Path, separator: str, header: list[str], label: str | None) -> None:
    """Refuse a file whose first line has the column of labels with another separator.

    Its rows may have commas for decimal points, so that no parser would get to their end.
    """
    if label is None or label in header:
        return
    for other in ";\t|":
        if any(label in column.split(other) for column in header):
            raise InputError(
                f"{printable(path)} is separated by {other!r}, not by {separator!r}; save it with "
                f"commas, or with tabs as .tsv, and with points for decimals"
            )


def _check_is_text(path: Path) -> None:
    """Refuse what is of another kind, and zero bytes, of which parsers make text or nothing."""
    lines = 1
    with path.open("rb") as file:
        start = block = file.read(4096)
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise InputError(f"{printable(path)} is text in UTF-16; save it as UTF-8")
        if start.startswith(tuple(_SIGNATURES)):
            raise InputError(f"{printable(path)} is not text{apparent_kind(path)}")
        while block:
            before, zero, _ = block.partition(b"\0")
            lines += before.count(b"\n")
            if zero:
                raise InputError(
                    f"{printable(path)} has a zero byte in line {lines}, which no text has: the "
                    f"file is damaged, or is not text in UTF-8"
                )
            block = file.read(_BLOCK)


def _read_header(path: Path, separator: str) -> list[str]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        header = next(csv.reader(file, delimiter=separator, strict=True), [])
    if not header:
        raise InputError(f"{printable(path)} is empty")
    if len(header) > MOST_COLUMNS:
        raise InputError(
            f"{printable(path)} has {len(header):,} columns, and {MOST_COLUMNS:,} at most are "
            f"read from a table; save so many numbers as NPZ, with the arrays X and y"
        )
    check_columns_differ(printable(path), header)
    return header


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
            # "NA" may be a class; each kind of column decides for itself what is missing.
            keep_default_na=False,
            na_values=[],
            dtype={column: str for column in header if column in text},
            low_memory=False,
        )


def read_parquet(path: Path, label: str | None, text: Collection[str]) -> pd.DataFrame:
    """Read a Parquet file; it stores the types of its columns, so ``text`` is not needed."""
    del label, text
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise MissingExtraError("pyarrow", "parquet") from None
    with path.open("rb") as file:
        if file.read(4) != b"PAR1":
            raise InputError(f"{printable(path)} is not a Parquet file{apparent_kind(path)}")
    try:
        table = pyarrow.parquet.read_table(path)
        frame: pd.DataFrame = table.to_pandas(ignore_metadata=True)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{printable(path)} cannot be read as Parquet: {error}") from error
    return frame.drop(columns="__index_level_0__", errors="ignore")


TABLE_READERS: dict[str, Callable[[Path, str | None, Collection[str]], pd.DataFrame]] = {
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
}
"""The reader for each ending of a file name."""


def check_columns_differ(name: str, columns: Collection[object]) -> None:
    """Refuse a table in which two columns have the same name."""
    twice = [str(column) for column, count in Counter(columns).items() if count > 1]
    if twice:
        raise InputError(f"{name} has more than one column named {listed(twice)}; rename them")


def apparent_kind(path: Path) -> str:
    """What a file seems to be judging by its first bytes, as the end of an error message."""
    with path.open("rb") as file:
        start = file.read(16)
    if not start:
        return ": it is empty"
    for signature, kind in _SIGNATURES.items():
        if start.startswith(signature):
            return f": it is {kind}"
    if all(32 <= byte < 127 or byte in b"\t\r\n\f" for byte in start):
        return ": it is text"
    return f": it begins with the bytes {start[:8].hex(' ')}"
