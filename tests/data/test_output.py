"""Folders of results: all files or none, and refusals before the work."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from bilevel.cli.output import write_json
from bilevel.data.output import check, check_file, file_written, written
from bilevel.errors import OutputError


def write(folder: Path, *, overwrite: bool = False, **files: str) -> None:
    with written(folder, overwrite) as part:
        for name, text in (files or {"a": "new a", "b": "new b"}).items():
            (part / name).write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir() if file.is_file()}


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, to whom no folder is closed."""
    me = os.geteuid()
    if me:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(me)


def test_a_link_to_an_empty_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    check(tmp_path / "link", overwrite=False)
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "real") == {"a": "new a", "b": "new b"}
    assert {file.name for file in tmp_path.iterdir()} == {"real", "link"}


def test_a_link_to_nothing_leads_to_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    check(tmp_path / "link", overwrite=False)
    assert not (tmp_path / "real").exists()
    write(tmp_path / "link")
    assert contents(tmp_path / "real") == {"a": "new a", "b": "new b"}


def test_the_current_folder_and_its_rights_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir(mode=0o700)
    monkeypatch.chdir(here)
    before = here.stat()
    write(Path())
    assert Path.cwd() == here
    assert here.stat().st_ino == before.st_ino
    assert stat.S_IMODE(here.stat().st_mode) == 0o700
    assert contents(here) == {"a": "new a", "b": "new b"}


def test_a_writable_folder_in_a_parent_that_is_not(open_folder: Path) -> None:
    """As a mount point is, too: it can be written into, and neither renamed nor replaced."""
    (open_folder / "out").mkdir()
    (open_folder / "out").chmod(0o777)
    open_folder.chmod(0o555)
    with as_nobody():
        check(open_folder / "out", overwrite=False)
        write(open_folder / "out")
        assert contents(open_folder / "out") == {"a": "new a", "b": "new b"}
        with pytest.raises(OutputError, match="Permission denied"):
            check(open_folder / "another", overwrite=False)


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_work(open_folder: Path) -> None:
    (open_folder / "out").mkdir(mode=0o555)
    with as_nobody(), pytest.raises(OutputError, match="out cannot be written to: Permission"):
        check(open_folder / "out", overwrite=False)


@pytest.mark.parametrize(("length", "fits"), [(250, True), (255, True), (256, False)])
def test_long_names_are_tried_before_the_work(tmp_path: Path, length: int, fits: bool) -> None:
    folder = tmp_path / "new" / ("n" * length)
    if fits:
        check(folder, overwrite=False)
        write(folder)
        assert contents(folder) == {"a": "new a", "b": "new b"}
    else:
        with pytest.raises(OutputError, match="File name too long"):
            check(folder, overwrite=False)
    assert (tmp_path / "new").exists() == fits


def test_a_check_leaves_nothing(tmp_path: Path) -> None:
    check(tmp_path / "deep" / "out", overwrite=False)
    check_file(tmp_path / "figures.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("known", [True, False])
def test_a_folder_in_the_place_of_a_file_is_refused_before_anything_is_replaced(
    tmp_path: Path, known: bool
) -> None:
    (tmp_path / "a").write_text("old a")
    (tmp_path / "b").mkdir()
    refused = partial(check, files=["a", "b"]) if known else write
    with pytest.raises(OutputError, match="b is a folder, where a file"):
        refused(tmp_path, overwrite=True)
    assert contents(tmp_path) == {"a": "old a"}
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b"}


def test_what_fails_half_way_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("old a")
    (tmp_path / "c").write_text("old c")
    rename = Path.rename

    def fails_at_last(self: Path, target: Path) -> Path:
        if self.name == "c" and Path(target).parent == tmp_path:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_at_last)
    with pytest.raises(OutputError, match="Input/output error"):
        write(tmp_path, overwrite=True, a="new a", b="new b", c="new c")
    assert contents(tmp_path) == {"a": "old a", "c": "old c"}
    assert {file.name for file in tmp_path.iterdir()} == {"a", "c"}


def test_a_folder_that_the_work_fills_may_not_lie_among_the_results(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"checkpoints lies in .*out"):
        check(tmp_path / "out", overwrite=False, apart=[None, tmp_path / "out" / "checkpoints"])


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    check_file(tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "mine"
    with pytest.raises(OutputError, match="is a folder, not a file"):
        check_file(tmp_path)
    with pytest.raises(OutputError, match=r"File exists|Not a directory"):
        check_file(tmp_path / "mine" / "figures.json")
    with pytest.raises(OutputError, match="File name too long"):
        check_file(tmp_path / ("n" * 256))


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few bytes."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("before", [None, "{}\n"])
def test_figures_on_a_full_disk_are_not_written_by_half(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "figures.json"
    if before is not None:
        path.write_text(before)
    with full_disk(), pytest.raises(OutputError, match=r"figures.json cannot be written"):
        write_json(path, {"loss": 0.5})
    assert contents(tmp_path) == ({} if before is None else {"figures.json": before})


def test_a_file_that_is_written_anew_stays_the_file_that_it_was(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "real.json").chmod(0o600)
    (tmp_path / "link.json").symlink_to("real.json")
    with file_written(tmp_path / "link.json") as part:
        assert part.suffix == ".json"
        part.write_text("new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "real.json").stat().st_mode) == 0o600
    write_json(tmp_path / "new.json", {})
    assert (tmp_path / "new.json").stat().st_mode & 0o444 == 0o444 & ~_umask()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_in_a_closed_folder_is_written_where_it_is(open_folder: Path) -> None:
    (open_folder / "mine").write_text("old")
    (open_folder / "mine").chmod(0o666)
    open_folder.chmod(0o555)
    with as_nobody():
        with file_written(open_folder / "mine") as part:
            part.write_text("new")
        with pytest.raises(OutputError, match="Permission"), file_written(open_folder / "other"):
            pass
    assert (open_folder / "mine").read_text() == "new"


def test_a_device_stays_a_device() -> None:
    with file_written(Path(os.devnull)) as part:
        part.write_text("gone")
    assert not Path(os.devnull).is_file()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
