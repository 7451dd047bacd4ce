"""Both forms of the file, made here; Covertype itself where ``BILEVEL_DATA`` has it."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import bilevel
from bilevel.data import read_covertype
from bilevel.errors import CorruptDataError, MissingDataError

RNG = np.random.default_rng(0)
PARTS: dict[str, np.ndarray] = {
    "quant": RNG.integers(-100, 7000, (6, 10)).astype(np.int16),
    "wilderness": np.array([0, 3, 1, 2, 2, 0], np.uint8),
    "soil": np.array([0, 39, 7, 7, 1, 20], np.uint8),
    "y": np.array([1, 7, 2, 3, 5, 1], np.uint8),
}


def table() -> np.ndarray:
    rows = np.zeros((6, 55), int)
    rows[:, :10], rows[:, 54] = PARTS["quant"], PARTS["y"]
    rows[np.arange(6), 10 + PARTS["wilderness"]] = 1
    rows[np.arange(6), 14 + PARTS["soil"]] = 1
    return rows


def as_text(rows: np.ndarray) -> bytes:
    return gzip.compress("\n".join(",".join(map(str, row)) for row in rows).encode())


def test_both_forms_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", **PARTS)
    (tmp_path / "c.gz").write_bytes(as_text(table()))
    for name in ("c.npz", "c.gz"):
        found = read_covertype(tmp_path / name)
        assert found.features.dtype == torch.float32
        assert (found.features.numpy() == table()[:, :54]).all()
        assert found.labels.tolist() == [0, 6, 1, 2, 4, 0]


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    whole = as_text(table())
    for name, content in (
        ("c.gz", whole[:-9]),
        ("c.gz", b"1,2,3"),
        ("c.gz", gzip.compress(b"1,2\n1,two")),
        ("c.npz", whole),
        ("c.gz", as_text(table()[:, 1:])),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CorruptDataError, match=r"c\.(gz|npz) (is not a whole|has 53 features)"):
            read_covertype(tmp_path / name)
    np.savez(tmp_path / "c.npz", quant=PARTS["quant"])
    with pytest.raises(CorruptDataError, match="wilderness"):
        read_covertype(tmp_path / "c.npz")


def test_a_folder_without_it_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"covtype\.data\.gz"):
        bilevel.data.covertype(tmp_path)


@pytest.mark.skipif(not os.environ.get("BILEVEL_DATA"), reason="needs BILEVEL_DATA")
def test_covertype_is_what_it_is_known_to_be() -> None:
    found = bilevel.data.covertype()
    assert found.features.shape == (581_012, 54)
    assert found.labels.bincount().tolist() == [211840, 283301, 35754, 2747, 9493, 17367, 20510]
    assert (found.features[:, 10:14].sum(1) == 1).all()
    assert (found.features[:, 14:].sum(1) == 1).all()
    assert found.features[0, :3].tolist() == [2596, 51, 3]
