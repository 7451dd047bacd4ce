"""Folders of results that are written completely or not at all, and paths in messages."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bilevel.errors import InputError, OutputError


def check(folder: Path, overwrite: bool, inputs: Collection[Path] = ()) -> None:
    """Refuse a folder that results cannot be written to; call this before the work is done.

    Args:
        folder: where the results are to go.
        overwrite: whether the folder may already hold files.
        inputs: paths that are read; the results may not go into any of them.

    Raises:
        OutputError: the results cannot go there; the message says why.
    """
    name = printable(folder)
    for given in inputs:
        if os.path.isdir(given) and folder.resolve().is_relative_to(given.resolve()):
            raise OutputError(f"{name} lies in {printable(given)}, which holds samples")
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{name} is a file, not a folder")
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise OutputError(
            f"{name} is not empty; name another folder, or replace the results in it by "
            f"--overwrite (overwrite=True)"
        )
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise OutputError(f"{name} cannot be created: {printable(there)} is not writable")


def printable(path: Path | str) -> str:
    """A path as valid Unicode, with bytes that are not UTF-8 shown as escapes."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


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
    """Give a temporary folder to write into, which becomes ``folder`` when the block ends.

    If the block fails, nothing of it is left. Where ``folder`` already holds files, only those of
    the same names are replaced.

    Raises:
        OutputError: ``folder`` is refused by :func:`check`, or a file cannot be written.
    """
    check(folder, overwrite)
    try:
        with _moved_into_place(folder.absolute()) as part:
            yield part
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{printable(folder)} cannot be written: {error}") from error


@contextmanager
def _moved_into_place(folder: Path) -> Iterator[Path]:
    made = _make_parents(folder)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield part
        part.chmod(0o777 & ~_umask())
        for file in part.iterdir():
            file.chmod(0o666 & ~_umask())
        if folder.is_dir() and any(folder.iterdir()):
            for file in sorted(part.iterdir()):
                file.replace(folder / file.name)
        else:
            if folder.is_dir():
                folder.rmdir()
            part.replace(folder)
            made.clear()
    finally:
        shutil.rmtree(part, ignore_errors=True)
        for parent in made:
            parent.rmdir()


def _make_parents(folder: Path) -> list[Path]:
    """Create the missing parents of ``folder``; returns those created, innermost first."""
    made: list[Path] = []
    for parent in folder.parents:
        if parent.exists():
            break
        made.append(parent)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return made


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
