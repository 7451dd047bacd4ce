"""Table files: CSV, TSV and Parquet, and what a file is judging by its first bytes.

The content of a file has to be what its name says, and nothing is ever unpickled.
"""

from __future__ import annotations

import codecs
import csv
import io
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from bilevel.cleaning.wording import listed
from bilevel.data.output import printable
from bilevel.errors import InputError, MissingExtraError

MOST_COLUMNS = 100_000
"""The most columns of a table, because columns are examined one by one."""

_BLOCK = 1 << 20
_PIECE = 2_000_000  # cells, about, of a piece of a table

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


@dataclass(frozen=True)
class Table:
    """A table that was read.

    Attributes:
        frame: its columns, as numbers where they hold numbers.
        pieces: gives all columns once more, some rows at a time, as they are in the file: CSV as
            the text that is written there, Parquet in its own types.
    """

    frame: pd.DataFrame
    pieces: Callable[[], Iterator[pd.DataFrame]]


def read_csv(path: Path, label: str | None, text: Collection[str]) -> Table:
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
        # The content is kept, so that it can be given once more even if the file is changed.
        content = path.read_bytes()
        frame = _parsed(content, separator, header, text)
        booleans = frame.select_dtypes(bool).columns
        if len(booleans):  # keep TRUE, true and True as they are written
            frame = _parsed(content, separator, header, {*text, *booleans})
    except UnicodeDecodeError as error:
        raise InputError(
            f"{printable(path)} is not text in UTF-8 ({error}); save it as UTF-8"
        ) from error
    except (csv.Error, pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise InputError(
            f"{printable(path)} cannot be read as CSV: {' '.join(str(error).split())}"
        ) from error
    return Table(frame, partial(_pieces_of_csv, content, separator, header))


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


def _parsed(
    content: bytes, separator: str, header: list[str], text: Collection[str]
) -> pd.DataFrame:
    types = {column: str for column in header if column in text}
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        frame: pd.DataFrame = pd.read_csv(
            io.BytesIO(content), dtype=types, **_parsing(separator, header)
        )
    return frame


def _parsing(separator: str, header: list[str]) -> dict[str, Any]:
    """The options of the parser, which must find the same rows every time."""
    return {
        "sep": separator,
        "encoding": "utf-8-sig",
        "header": 0,
        "names": header,
        "index_col": False,
        # "NA" may be a class; each kind of column decides for itself what is missing.
        "keep_default_na": False,
        "na_values": [],
        "low_memory": False,
    }


def _pieces_of_csv(content: bytes, separator: str, header: list[str]) -> Iterator[pd.DataFrame]:
    rows = max(1000, _PIECE // len(header))  # each piece of a wide table takes long, however short
    options = _parsing(separator, header)
    with pd.read_csv(io.BytesIO(content), dtype=str, chunksize=rows, **options) as pieces:
        yield from pieces


def read_parquet(path: Path, label: str | None, text: Collection[str]) -> Table:
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
        content = path.read_bytes()
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(content))
        frame: pd.DataFrame = table.to_pandas(ignore_metadata=True)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{printable(path)} cannot be read as Parquet: {error}") from error
    return Table(_without_index(frame), partial(_pieces_of_parquet, content))


def _pieces_of_parquet(content: bytes) -> Iterator[pd.DataFrame]:
    import pyarrow
    import pyarrow.parquet

    # By itself, pandas makes fractions of whole numbers, and objects of truth values, where some
    # are missing.
    types: dict[Any, Any] = {pyarrow.bool_(): pd.BooleanDtype()}
    for bits in (8, 16, 32, 64):
        types[getattr(pyarrow, f"int{bits}")()] = getattr(pd, f"Int{bits}Dtype")()
        types[getattr(pyarrow, f"uint{bits}")()] = getattr(pd, f"UInt{bits}Dtype")()
    file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content))
    rows = max(1000, _PIECE // max(1, len(file.schema_arrow)))
    for piece in file.iter_batches(rows):
        table = pyarrow.Table.from_batches([piece])
        yield _without_index(table.to_pandas(ignore_metadata=True, types_mapper=types.get))


def _without_index(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop(columns="__index_level_0__", errors="ignore")


TABLE_READERS: dict[str, Callable[[Path, str | None, Collection[str]], Table]] = {
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
