"""Tiny Shakespeare: 40,000 lines of the plays, 65 different characters (Karpathy 2015)."""

from __future__ import annotations

import gzip
import os
import zlib

from bilevel.data.files import DataSet, RemoteFile, existing_file
from bilevel.errors import CorruptDataError

SHAKESPEARE = DataSet(
    "tinyshakespeare",
    (RemoteFile("input.txt", "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),),
    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare",),
    repacked=(
        RemoteFile(
            "input.txt.gz", "bf237b9f5a05abe79d7a0caa809b6513fbcbc323e9521a77086d556e4c9bbed8"
        ),
    ),
)
"""The file (1.1 MB) and its sources."""


def shakespeare(data_dir: str | os.PathLike[str] | None = None) -> str:
    """The text, 1,115,394 characters.

    Args:
        data_dir: a folder that holds the file or a folder ``tinyshakespeare`` with it. None: the
            folder named by ``BILEVEL_DATA`` if that is set, otherwise the cache, into which the
            file is downloaded once.

    Example:
        >>> shakespeare()[:14]  # doctest: +SKIP
        'First Citizen:'
    """
    (path,) = SHAKESPEARE.paths(data_dir)
    return read_shakespeare(path)


def read_shakespeare(path: str | os.PathLike[str]) -> str:
    """The text of the published file, or of the same file gzipped.

    Raises:
        CorruptDataError: the file is neither of the two, or incomplete.
    """
    path = existing_file(path)
    content = path.read_bytes()
    try:
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("ascii")
    except (EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
        raise CorruptDataError(f"{path} is not a whole plain text: {error}") from error
    if not text or "\0" in text:
        raise CorruptDataError(
            f"{path} is not a whole plain text: it is empty or contains zero bytes"
        )
    return text
