"""A folder of results that is there whole or not at all."""

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
    """Refuse a folder that results cannot go to; to be asked before the work is done.

    Args:
        folder: where they are to go.
        overwrite: whether it may hold something already.
        inputs: folders that are read, of which it may be no part.
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
        raise OutputError(f"{name} cannot be made: {printable(there)} cannot be written to")


def printable(path: Path | str) -> str:
    """A path as text that can be written anywhere, whatever bytes its name has."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def read_description(path: Path, what: str, format: str, version: int) -> dict[str, Any]:
    """The JSON file in which a folder of results says what it holds.

    Raises:
        InputError: it cannot be read, does not describe ``what`` or is of another version.
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
            f"{name} is of version {found.get('version')!r}, and only version {version} is known; "
            f"it was written by bilevel {found.get('bilevel')}"
        )
    return found


@contextmanager
def written(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside ``folder``, which becomes it in the end.

    If what is done within fails, nothing is left of it. Where ``folder`` holds files already, only
    those of the same names are replaced.
    """
    check(folder, overwrite)
    folder = folder.absolute()
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
    """Make the folders that ``folder`` is to lie in; those that were made, innermost first."""
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
