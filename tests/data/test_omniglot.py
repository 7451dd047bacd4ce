"""Both forms of the files, made here; Omniglot itself where ``BILEVEL_DATA`` has it."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import bilevel
from bilevel.data import read_omniglot
from bilevel.errors import CorruptDataError, MissingDataError

RNG = np.random.default_rng(0)
NAMES = ["Greek/character01", "Latin/character01", "Latin/character02"]
INK = RNG.random((3, 20, 105, 105)) < 0.1
KEPT = [int(3.75 * (i + 0.5)) for i in range(28)]


def png(ink: np.ndarray, *, row_filter: int = 0, depth: int = 1) -> bytes:
    rows = np.packbits(~ink, axis=1)
    data = zlib.compress(b"".join(bytes([row_filter]) + row.tobytes() for row in rows))
    header = struct.pack(">IIBBBBB", *ink.shape[::-1], depth, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"tIME", bytes(7)), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(content))
        for kind, content in chunks
    )


def archive(path: Path, characters: list[int], **options: int) -> Path:
    with zipfile.ZipFile(path, "w") as out:
        for character in reversed(characters):
            out.writestr(f"{path.stem}/{NAMES[character]}/", "")
            for person in reversed(range(20)):
                name = f"{path.stem}/{NAMES[character]}/0001_{person + 1:02}.png"
                out.writestr(name, png(INK[character, person], **options))
    return path


def test_both_forms_are_read(tmp_path: Path) -> None:
    known = INK[..., KEPT, :][..., KEPT]
    bits = np.packbits(known.reshape(3, 20, -1), axis=-1)
    marks = np.array([False, True, False])
    np.savez(tmp_path / "o.npz", bits=bits, char=NAMES, is_evaluation=marks)
    archives = [
        archive(tmp_path / "images_background.zip", [0, 2]),
        archive(tmp_path / "images_evaluation.zip", [1]),
    ]
    for found in (read_omniglot(tmp_path / "o.npz"), read_omniglot(*archives)):
        assert found.images.dtype == torch.bool
        assert (found.images.numpy() == known).all()
        assert found.names == NAMES
        assert found.is_evaluation.tolist() == [False, True, False]


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "images_background.zip"
    for options, said in (
        ({"row_filter": 1}, "filtered"),
        ({"depth": 8}, "black and white"),
    ):
        archive(path, [0], **options)
        with pytest.raises(CorruptDataError, match=said):
            read_omniglot(path)
    archive(path, [0])
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    with pytest.raises(CorruptDataError, match=r"images_background\.zip is not a whole file"):
        read_omniglot(path)
    with zipfile.ZipFile(path, "w") as out:
        out.writestr(f"images/{NAMES[0]}/0001_01.png", png(INK[0, 0]))
    with pytest.raises(CorruptDataError, match="20 drawings of every character"):
        read_omniglot(path)
    np.savez(tmp_path / "o.npz", bits=np.zeros((3, 20, 98), np.uint8))
    with pytest.raises(CorruptDataError, match="char"):
        read_omniglot(tmp_path / "o.npz")


def test_a_folder_without_it_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"images_background\.zip, images_evaluation\.zip"):
        bilevel.data.omniglot(tmp_path)


@pytest.mark.skipif(not os.environ.get("BILEVEL_DATA"), reason="needs BILEVEL_DATA")
def test_omniglot_is_what_it_is_known_to_be() -> None:
    found = bilevel.data.omniglot()
    assert found.images.shape == (1623, 20, 28, 28)
    assert found.is_evaluation.sum() == 659
    assert found.names == sorted(found.names)
    assert len({name.split("/")[0] for name in found.names}) == 50
    assert 0.05 < found.images.float().mean() < 0.15
