"""The idx format, written byte by byte; MNIST itself where ``BILEVEL_DATA`` has it."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import bilevel
from bilevel.data import read_idx
from bilevel.errors import CorruptDataError, MissingDataError

HEADER = b"\0\0\x08\x02" + (2).to_bytes(4, "big") + (3).to_bytes(4, "big")


def written(folder: Path, content: bytes) -> Path:
    path = folder / "numbers.gz"
    path.write_bytes(gzip.compress(content))
    return path


def test_bytes_are_read_in_their_shape(tmp_path: Path) -> None:
    found = read_idx(written(tmp_path, HEADER + bytes([0, 1, 2, 253, 254, 255])))
    torch.testing.assert_close(
        found, torch.tensor([[0, 1, 2], [253, 254, 255]], dtype=torch.uint8), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("code", "kind"), [(9, "i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")]
)
def test_every_type_of_the_format_is_read(code: int, kind: str, tmp_path: Path) -> None:
    numbers = np.array([-7, 0, 100], dtype=kind)
    header = bytes([0, 0, code, 1]) + (3).to_bytes(4, "big")
    found = read_idx(written(tmp_path, header + numbers.tobytes()))
    assert found.dtype == torch.from_numpy(numbers.astype(kind.lstrip(">"))).dtype
    assert found.tolist() == [-7, 0, 100]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file"),
        (b"<html>", "not an idx file: it begins with '3c 68 74 6d'"),
        (b"\0\0\x07\x01\0\0\0\0", "not an idx file"),
        (HEADER[:9], "ends within its header of 12 bytes"),
        (HEADER + bytes(5), r"the shape \(2, 3\), which takes 18 bytes, but holds 17"),
        (HEADER + bytes(7), "but holds 19"),
    ],
)
def test_what_is_no_idx_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(CorruptDataError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def test_a_gzip_file_that_is_cut_off_damaged_or_none_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + bytes(6))
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[-8] ^= 1  # the checksum that gzip keeps of the content
    for content in (whole[:-9], whole[:14], bytes(damaged), HEADER + bytes(6)):
        path.write_bytes(content)
        with pytest.raises(CorruptDataError, match=r"numbers\.gz is (cut off|not a whole gzip)"):
            read_idx(path)


def test_a_folder_without_mnist_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"train-images-idx3-ubyte\.gz.*t10k-labels-idx1"):
        bilevel.data.mnist(tmp_path)


@pytest.mark.skipif(not os.environ.get("BILEVEL_DATA"), reason="needs BILEVEL_DATA")
def test_mnist_is_what_it_is_known_to_be() -> None:
    digits = bilevel.data.mnist()
    for images, labels, count in (
        (digits.train_images, digits.train_labels, 60_000),
        (digits.test_images, digits.test_labels, 10_000),
    ):
        assert images.shape == (count, 28, 28)
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert labels.shape == (count,)
        assert (int(images.min()), int(images.max())) == (0, 255)
    assert digits.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert digits.test_labels.bincount().tolist() == [
        980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009,
    ]  # fmt: skip
    # the mean and deviation of the pixels that everyone normalises by
    pixels = digits.train_images.double() / 255
    assert float(pixels.mean()) == pytest.approx(0.1307, abs=5e-5)
    assert float(pixels.std()) == pytest.approx(0.3081, abs=5e-5)
