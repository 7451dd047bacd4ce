"""Folders of results that are written completely or not at all, and paths in messages."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from bilevel.errors import InputError, OutputError

STAGE = ".bilevel-"
"""What the names of temporary folders begin with."""


def check(
    folder: Path,
    overwrite: bool,
    inputs: Collection[Path] = (),
    apart: Collection[Path | None] = (),
    files: Collection[str] = (),
) -> None:
    """Refuse a folder that results cannot be written to; call this before the work is done.

    Whether it can be written to is found out by writing: a folder is made there, and removed.

    Args:
        folder: where the results are to go.
        overwrite: whether the folder may already hold files.
        inputs: paths that are read; the results may not go into any of them.
        apart: folders that the work itself fills; none of them may lie in ``folder``.
        files: the names of the files that are to be written, as far as they are known.

    Raises:
        OutputError: the results cannot go there; the message says why.
    """
    name = printable(folder)
    place = Path(os.path.realpath(folder))
    for given in inputs:
        if os.path.isdir(given) and place.is_relative_to(given.resolve()):
            raise OutputError(f"{name} lies in {printable(given)}, which holds samples")
    read = {os.path.realpath(given) for given in inputs}
    for file in files:
        if os.path.realpath(place / file) in read:
            raise OutputError(
                f"{printable(folder / file)} is read, and a file of results has its name; name "
                f"another folder"
            )
    for other in apart:
        if other is not None and other.resolve().is_relative_to(place):
            raise OutputError(
                f"{printable(other)} lies in {name}, which is for the results alone; name a folder "
                f"beside it"
            )
    if os.path.lexists(place) and not place.is_dir():
        raise OutputError(f"{name} is a file, not a folder")
    try:
        if not overwrite and place.is_dir() and any(place.iterdir()):
            raise OutputError(
                f"{name} is not empty; name another folder, or replace the results in it by "
                f"--overwrite (overwrite=True)"
            )
        _refuse_folders(place, files)
        made = _make_folders(place)
        try:
            Path(tempfile.mkdtemp(prefix=STAGE, dir=place)).rmdir()
        finally:
            for created in made:
                created.rmdir()
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{name} cannot be written to: {error.strerror or error}") from error


def check_file(path: Path, apart: Collection[Path] = ()) -> None:
    """Refuse a file that cannot be written, before the work is done, and make its parents.

    Args:
        path: the file.
        apart: files that are read, or written by something else; it may be none of these.

    Raises:
        OutputError: it cannot be written; the message says why.
    """
    name = printable(path)
    if os.path.realpath(path) in {os.path.realpath(other) for other in apart}:
        raise OutputError(f"{name} is read or written for something else; name another file")
    if os.path.isdir(path):
        raise OutputError(f"{name} is a folder, not a file; name a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        return  # a pipe or a device, which can be opened only once
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise OutputError(f"{name} cannot be written: {error.strerror or error}") from error


@contextmanager
def file_written(path: Path) -> Iterator[Path]:
    """Give a path to write to, whose file is at ``path`` when the block ends.

    Where it cannot be written, as on a full disk, what was at ``path`` before is there still. A
    link, and the permissions of an existing file, stay. A pipe, a device and a file in a folder
    that is closed to new ones are written as they are.

    Raises:
        OutputError: it cannot be written; the message says why.
    """
    place = Path(os.path.realpath(path))
    part: Path | None = None
    try:
        if place.is_file() or not os.path.lexists(place):
            part = _beside(place)
        yield part or place
        if part is not None:
            with open(part, "rb") as file:
                os.fsync(file.fileno())
            part.chmod(place.stat().st_mode & 0o777 if place.exists() else 0o666 & ~_umask())
            part.replace(place)
    except OSError as error:
        raise OutputError(
            f"{printable(path)} cannot be written: {error.strerror or error}"
        ) from error
    finally:
        if part is not None:
            with suppress(OSError):  # on a disk that fails it may not be removable either
                part.unlink(missing_ok=True)


def _beside(place: Path) -> Path | None:
    """A new empty file in the folder of ``place``; None: only that file itself can be written."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=STAGE, suffix=place.suffix, dir=place.parent)
    except PermissionError:
        if place.exists():
            return None
        raise
    os.close(descriptor)
    return Path(name)


def printable(path: Path | str) -> str:
    """A path as valid Unicode, with bytes that are not UTF-8 shown as escapes."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def harmless(value: Any) -> Any:
    """A cell of a table as it can be opened in a spreadsheet, which would compute a formula.

    Example:
        >>> harmless("=SUM(1+1)"), harmless("+1+1"), harmless("-1"), harmless("cat")
        ("'=SUM(1+1)", "'+1+1", '-1', 'cat')
    """
    if isinstance(value, str) and value.lstrip(" ").startswith(("=", "+", "-", "@", "\t", "\r")):
        return value if _NUMBER.fullmatch(value) else f"'{value}"
    return value


def read_description(path: Path, what: str, format: str, version: int) -> dict[str, Any]:
    """Read the JSON file that describes the contents of a folder of results.

    Args:
        path: the file.
        what: the kind of contents that is expected, in words for the error message.
        format, version: what the fields of these names in the file must be.

    Raises:
        InputError: the file cannot be read, describes something else or has another version.
    """
    name = printable(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{name} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != format:
        raise InputError(f"{name} does not describe {what}")
    if found.get("version") != version:
        raise InputError(
            f"{name} is of version {found.get('version')!r}, but this release reads only version "
            f"{version}; it was written by bilevel {found.get('bilevel')}"
        )
    return found


@contextmanager
def written(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Give a temporary folder to write into, whose files are in ``folder`` when the block ends.

    All of them are, or none. An existing folder stays the folder that it is, whether it is a link,
    a mount point or the current folder, with its permissions and with files of other names.

    Raises:
        OutputError: ``folder`` is refused by :func:`check`, or a file cannot be written.
    """
    check(folder, overwrite)
    try:
        with _moved_into_place(Path(os.path.realpath(folder))) as part:
            yield part
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{printable(folder)} cannot be written: {error}") from error


@contextmanager
def _moved_into_place(folder: Path) -> Iterator[Path]:
    there = folder.is_dir()
    made = _make_folders(folder if there else folder.parent)
    part = Path(tempfile.mkdtemp(prefix=STAGE, dir=folder if there else folder.parent))
    try:
        yield part
        part.chmod(0o777 & ~_umask())
        for file in part.iterdir():
            file.chmod(0o666 & ~_umask())
        if there:
            _refuse_folders(folder, [file.name for file in part.iterdir()])
            _replace_files(part, folder)
        else:
            part.replace(folder)
        made.clear()
    finally:
        shutil.rmtree(part, ignore_errors=True)
        for created in made:
            created.rmdir()


def _replace_files(part: Path, folder: Path) -> None:
    """Move all files of ``part`` into ``folder``, or none of them."""
    names = sorted(file.name for file in part.iterdir())
    before = Path(tempfile.mkdtemp(prefix=STAGE, dir=folder))
    try:
        for name in names:
            if os.path.lexists(folder / name):
                (folder / name).rename(before / name)
            (part / name).rename(folder / name)
    except BaseException:  # an interrupt too
        for name in names:
            if os.path.lexists(before / name):
                (before / name).replace(folder / name)
            elif not os.path.lexists(part / name):
                (folder / name).unlink()
        raise
    finally:
        shutil.rmtree(before, ignore_errors=True)


def _refuse_folders(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        if (folder / name).is_dir():
            raise OutputError(
                f"{printable(folder / name)} is a folder, where a file of that name is to be "
                f"written; remove it, or name another folder"
            )


def _make_folders(folder: Path) -> list[Path]:
    """Create ``folder`` and its parents where they are missing; those created, innermost first."""
    made: list[Path] = []
    with ExitStack() as undo:  # whatever ends this, a keyboard interrupt included
        for path in [*reversed(folder.parents), folder]:
            if not path.exists():
                path.mkdir()
                undo.callback(path.rmdir)
                made.insert(0, path)
        undo.pop_all()
    return made


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
