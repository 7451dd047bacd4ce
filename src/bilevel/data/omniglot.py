"""Omniglot: 1,623 characters of 50 alphabets, each drawn by 20 people (Lake 2015)."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bilevel.data.files import DataSet, RemoteFile, existing_file
from bilevel.errors import CorruptDataError

DRAWN, SIDE, PEOPLE = 105, 28, 20
"""The side of a published image, that of the images returned, and the drawings of a character."""

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_UNREADABLE = (LookupError, ValueError, OSError, struct.error, zlib.error, zipfile.BadZipFile)
"""The errors that NumPy and the readers of archives and images raise for damaged files."""

OMNIGLOT = DataSet(
    "omniglot",
    (
        RemoteFile(
            "images_background.zip",
            "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640",
        ),
        RemoteFile(
            "images_evaluation.zip",
            "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee",
        ),
    ),
    ("https://github.com/brendenlake/omniglot/raw/master/python",),
    repacked=(
        RemoteFile(
            "omniglot28.npz", "6625bc421258d15ab430477389d19f2885c3c8ecb30e3ff688e6c660a253bd3f"
        ),
    ),
)
"""The two archives (16 MB) and their source."""


class Omniglot(NamedTuple):
    """The drawings: images bool (characters, 20, 28, 28), where True is ink.

    ``names`` are the alphabet and the number of each character; ``is_evaluation``, bool
    (characters), marks those of the published evaluation set.
    """

    images: Tensor
    names: list[str]
    is_evaluation: Tensor


def omniglot(data_dir: str | os.PathLike[str] | None = None) -> Omniglot:
    """The 964 background and the 659 evaluation characters, in the order of their names.

    Args:
        data_dir: a folder that holds the two archives or a folder ``omniglot`` with them. None:
            the folder named by ``BILEVEL_DATA`` if that is set, otherwise the cache, into which
            the archives are downloaded once.

    Example:
        >>> drawings = omniglot()  # doctest: +SKIP
        >>> drawings.images.shape  # doctest: +SKIP
        torch.Size([1623, 20, 28, 28])
    """
    return read_omniglot(*OMNIGLOT.paths(data_dir))


def read_omniglot(*paths: str | os.PathLike[str]) -> Omniglot:
    """The drawings of the published archives, or of an NPZ file with the same data.

    An archive, ``images_background.zip`` or ``images_evaluation.zip``, has the images
    ``FOLDER/ALPHABET/characterNN/DRAWING.png``, 105 pixels wide and high, of which every 3.75th is
    taken. The NPZ file has the arrays ``bits`` (characters, 20, 98), eight pixels in a byte,
    ``char``, the names, and ``is_evaluation``.

    Raises:
        CorruptDataError: a file is neither of the two, or incomplete.
    """
    parts = [_read(existing_file(path)) for path in paths]
    names = [name for _, of_file, _ in parts for name in of_file]
    order = sorted(range(len(names)), key=names.__getitem__)
    images, marks = (np.concatenate([part[place] for part in parts])[order] for place in (0, 2))
    return Omniglot(
        torch.from_numpy(images), [names[place] for place in order], torch.from_numpy(marks)
    )


def _read(path: Path) -> tuple[np.ndarray, list[str], np.ndarray]:
    try:
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                bits = np.unpackbits(arrays["bits"], axis=-1).reshape(-1, PEOPLE, SIDE, SIDE)
                names, marks = arrays["char"].tolist(), arrays["is_evaluation"].astype(bool)
            return bits.astype(bool), names, marks
        images, names = _read_archive(path)
    except _UNREADABLE as error:
        raise CorruptDataError(f"{path} is not a whole file of Omniglot: {error}") from error
    return images, names, np.full(len(names), "evaluation" in path.name)


def _read_archive(path: Path) -> tuple[np.ndarray, list[str]]:
    drawings: dict[str, list[str]] = {}
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            folders = name.split("/")
            if name.endswith(".png") and len(folders) == 4:
                drawings.setdefault("/".join(folders[1:3]), []).append(name)
        if not drawings or any(len(own) != PEOPLE for own in drawings.values()):
            raise ValueError(f"it has not {PEOPLE} drawings of every character")
        images = [[_smaller(archive.read(name)) for name in own] for own in drawings.values()]
    return np.array(images), list(drawings)


def _smaller(png: bytes) -> np.ndarray:
    """A drawing at 28 x 28, True where there is ink.

    The published images have one bit per pixel and rows that are not filtered, so that nothing but
    zlib is needed to read them.
    """
    header, data, place = b"", b"", len(_SIGNATURE)
    while place < len(png):
        length, kind = struct.unpack_from(">I4s", png, place)
        content = png[place + 8 : place + 8 + length]
        header, data = (content if kind == b"IHDR" else header), data + content * (kind == b"IDAT")
        place += length + 12
    if header != struct.pack(">IIBBBBB", DRAWN, DRAWN, 1, 0, 0, 0, 0):
        raise ValueError(f"an image is not one of {DRAWN} x {DRAWN} pixels in black and white")
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(DRAWN, -1)
    if rows[:, 0].any():
        raise ValueError("the rows of an image are filtered")
    kept = ((np.arange(SIDE) + 0.5) * DRAWN / SIDE).astype(int)
    ink: np.ndarray = np.unpackbits(rows[:, 1:], axis=1)[np.ix_(kept, kept)] == 0
    return ink
