"""Finished parts of a long command, kept in a folder so that they need not be computed again.

A long command computes many parts one after another (curves, runs, choices of settings), each of
which depends only on the command's options. With ``--checkpoint FOLDER`` each part is saved there
as a JSON file when it is done; with ``--resume``, saved parts are read and the rest is computed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bilevel.data.output import file_written
from bilevel.errors import ArgumentError, CheckpointError, OutputError
from bilevel.run.checkpoint import settings

T = TypeVar("T")

OPTIONS = "options.json"


class Ledger:
    """The finished parts of one command.

    Args:
        folder: where the parts are saved; None: they are not saved.
        options: all options of the command on which its parts depend; plain numbers and text.
        resume: whether the folder may already hold parts. These must have the same options.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = Ledger(folder, {"seed": 0})
        ...     squares = [first.part(str(n), lambda n=n: n * n) for n in (2, 3)]
        ...     again = Ledger(folder, {"seed": 0}, resume=True)
        ...     again.part("3", lambda: print("not computed again"))
        9
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        options: Mapping[str, Any],
        *,
        resume: bool = False,
    ) -> None:
        self._folder = None if folder is None else Path(folder)
        if self._folder is None:
            if resume:
                raise ArgumentError(
                    "--resume needs --checkpoint FOLDER, the folder to continue from"
                )
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            there = any(self._folder.iterdir())
        except OSError as error:
            raise OutputError(
                f"{str(self._folder)!r} cannot be used as a folder: {error.strerror or error}"
            ) from error
        if there and not resume:
            raise ArgumentError(
                f"{str(self._folder)!r} is not empty; give --resume to continue from its contents, "
                f"or another folder with --checkpoint"
            )
        known = self._folder / OPTIONS
        if known.exists():
            found = settings.differences(_read(known), json.loads(json.dumps(dict(options))))
            if found:
                raise CheckpointError(
                    known, f"it belongs to another command: {'; '.join(found[:3])}"
                )
        else:
            _write(known, dict(options))

    def inside(self, name: str) -> Path | None:
        """A folder for what a part itself saves while it runs; None: nothing is saved."""
        return None if self._folder is None else self._folder / name

    def has(self, name: str) -> bool:
        """Whether that part is saved."""
        return self._folder is not None and self._file(name).exists()

    def part(
        self,
        name: str,
        make: Callable[[], T],
        *,
        to_json: Callable[[T], Any] = lambda part: part,
        from_json: Callable[[Any], T] = lambda found: found,
    ) -> T:
        """The part of that name: read if it is saved, otherwise made and saved.

        Raises:
            CheckpointError: the saved part is damaged, or not a part of this command.
            OutputError: the part cannot be written.
        """
        if self._folder is None:
            return make()
        file = self._file(name)
        if file.exists():
            found = _read(file)
            try:
                return from_json(found)
            except (LookupError, TypeError, ValueError) as error:
                raise CheckpointError(
                    file, f"it is not a part of this command ({error})"
                ) from error
        made = make()
        _write(file, to_json(made))
        return made

    def _file(self, name: str) -> Path:
        assert self._folder is not None
        plain = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in name)
        return self._folder / f"{plain}.json"


def _write(path: Path, content: Any) -> None:
    """Write atomically, with a checksum."""
    text = json.dumps(content)
    with file_written(path) as part:
        part.write_text(json.dumps({"sha256": _digest(text), "content": text}), encoding="utf-8")


def _read(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        text, digest = found["content"], found["sha256"]
        if _digest(text) != digest:
            raise CheckpointError(path, "its checksum is wrong: it was changed or damaged")
        return json.loads(text)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            path, f"it cannot be read ({type(error).__name__}: {error})"
        ) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
