"""Both forms of the file, made here; the text itself where ``BILEVEL_DATA`` has it."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

import bilevel
from bilevel.data import read_shakespeare
from bilevel.errors import CorruptDataError, MissingDataError

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n"


def test_both_forms_are_read(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_bytes(TEXT.encode())
    (tmp_path / "input.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    assert read_shakespeare(tmp_path / "input.txt") == TEXT
    assert read_shakespeare(tmp_path / "input.txt.gz") == TEXT


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("input.txt.gz", gzip.compress(TEXT.encode())[:-12]),
        ("input.txt.gz", TEXT.encode()),
        ("input.txt", "na\u00efve".encode()),
    ],
    ids=["cut off", "not gzipped", "not ASCII"],  # gzipped bytes hold the time
)
def test_what_is_cut_off_or_something_else_is_refused(
    name: str, content: bytes, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorruptDataError, match="not a whole plain text"):
        read_shakespeare(tmp_path / name)


def test_a_folder_without_it_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"input\.txt"):
        bilevel.data.shakespeare(tmp_path)


@pytest.mark.skipif(not os.environ.get("BILEVEL_DATA"), reason="needs BILEVEL_DATA")
def test_the_text_is_what_it_is_known_to_be() -> None:
    text = bilevel.data.shakespeare()
    assert (len(text), text.count("\n"), len(set(text))) == (1_115_394, 40_000, 65)
