"""20 Newsgroups: 18,846 messages to 20 groups, split by date (Lang 1995; Rennie)."""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from bilevel.data.files import DataSet, RemoteFile, existing_file
from bilevel.errors import CorruptDataError

NEWSGROUPS = DataSet(
    "20news",
    (
        RemoteFile(
            "20news-bydate.tar.gz",
            "8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610",
            ("https://ndownloader.figshare.com/files/5975967",),
        ),
    ),
    ("http://qwone.com/~jason/20Newsgroups",),
    repacked=(
        RemoteFile(
            "20news-bydate.tar.xz",
            "0fdd8fc84df170645cd15d503e0000d4b9d90e566ee010472e920f2fef737b4c",
        ),
    ),
)
"""The archive (14 MB) and its sources."""


class Newsgroups(NamedTuple):
    """The messages with their headers; labels int64, indices into ``names``."""

    train_texts: list[str]
    train_labels: Tensor
    test_texts: list[str]
    test_labels: Tensor
    names: list[str]


def newsgroups(data_dir: str | os.PathLike[str] | None = None) -> Newsgroups:
    """The 11,314 training and the 7,532 test messages, in the order of groups and file names.

    Args:
        data_dir: a folder that holds the archive or a folder ``20news`` with it. None: the folder
            named by ``BILEVEL_DATA`` if that is set, otherwise the cache, into which the archive
            is downloaded once.

    Example:
        >>> messages = newsgroups()  # doctest: +SKIP
        >>> len(messages.train_texts), messages.names[0]  # doctest: +SKIP
        (11314, 'alt.atheism')
    """
    (path,) = NEWSGROUPS.paths(data_dir)
    return read_newsgroups(path)


def read_newsgroups(path: str | os.PathLike[str]) -> Newsgroups:
    """The messages of an archive of files ``20news-bydate-train/GROUP/NUMBER`` and ``-test/``.

    Raises:
        CorruptDataError: the file is not such an archive, or incomplete.
    """
    path = existing_file(path)
    messages: dict[str, dict[tuple[str, str], str]] = {"train": {}, "test": {}}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                *folders, name = member.name.split("/")
                part = folders[0].rpartition("-")[2] if len(folders) == 2 else ""
                file = archive.extractfile(member)
                if part in messages and file is not None:
                    messages[part][folders[1], name] = file.read().decode("latin1")
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise CorruptDataError(f"{path} is not a whole archive: {error}") from error
    names = sorted({group for part in messages.values() for group, _ in part})
    if not all(messages.values()):
        raise CorruptDataError(f"{path} has no training messages, or none to test with")
    texts, labels = {}, {}
    for part, found in messages.items():
        places = sorted(found)
        texts[part] = [found[place] for place in places]
        labels[part] = torch.tensor([names.index(group) for group, _ in places])
    return Newsgroups(texts["train"], labels["train"], texts["test"], labels["test"], names)
