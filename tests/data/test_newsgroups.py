"""Archives of messages, made here; 20 Newsgroups itself where ``BILEVEL_DATA`` has it."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

import bilevel
from bilevel.data import read_newsgroups
from bilevel.errors import CorruptDataError, MissingDataError

MESSAGES = {
    "20news-bydate-test/sci.space/9": "launch",
    "20news-bydate-train/sci.space/7": "orbit",
    "20news-bydate-train/rec.autos/8": "na\xefve",
    "20news-bydate-train/rec.autos/10": "motor",
    "README": "not a message",
}


def archive(path: Path, messages: dict[str, str], kind: Any) -> Path:
    mode: Any = f"w:{kind}"
    with tarfile.open(path, mode) as made:
        folder = tarfile.TarInfo("20news-bydate-train/rec.autos")
        folder.type = tarfile.DIRTYPE
        made.addfile(folder)
        for name, text in messages.items():
            content = text.encode("latin1")
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            made.addfile(entry, io.BytesIO(content))
    return path


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_messages_are_sorted_by_group_and_name(kind: str, tmp_path: Path) -> None:
    found = read_newsgroups(archive(tmp_path / "a.tar", MESSAGES, kind))
    assert found.names == ["rec.autos", "sci.space"]
    assert found.train_texts == ["motor", "na\xefve", "orbit"]
    assert found.train_labels.tolist() == [0, 0, 1]
    assert (found.test_texts, found.test_labels.tolist()) == (["launch"], [1])


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_an_archive_that_is_cut_off_or_has_no_messages_is_refused(
    kind: str, tmp_path: Path
) -> None:
    path = archive(tmp_path / "a.tar", MESSAGES, kind)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"nothing of the kind"):
        path.write_bytes(content)
        with pytest.raises(CorruptDataError, match=r"a\.tar is not a whole archive"):
            read_newsgroups(path)
    archive(path, {"20news-bydate-train/rec.autos/8": "motor"}, kind)
    with pytest.raises(CorruptDataError, match="none to test"):
        read_newsgroups(path)


def test_a_folder_without_it_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"20news-bydate\.tar\.gz"):
        bilevel.data.newsgroups(tmp_path)


@pytest.mark.skipif(not os.environ.get("BILEVEL_DATA"), reason="needs BILEVEL_DATA")
def test_20_newsgroups_is_what_it_is_known_to_be() -> None:
    found = bilevel.data.newsgroups()
    assert (len(found.train_texts), len(found.test_texts)) == (11_314, 7_532)
    assert (len(found.train_labels), len(found.test_labels)) == (11_314, 7_532)
    assert (len(found.names), found.names[0], found.names[-1]) == (
        20,
        "alt.atheism",
        "talk.religion.misc",
    )
    assert found.train_labels.bincount()[[0, 10, 19]].tolist() == [480, 600, 377]
