"""What a command prints and writes: progress, errors, figures and finished parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, Protocol

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bilevel import __version__
from bilevel.cli.experiments import Ledger, torch_threads
from bilevel.data.output import check_file, file_written
from bilevel.errors import BilevelError, OutputError

P = ParamSpec("P")

console, errors = Console(), Console(stderr=True)


class Found(Protocol):
    """The result of a command that works on files: ``bilevel clean`` and ``bilevel mix``."""

    @property
    def seconds(self) -> float:
        """How long the work took."""

    def summary(self) -> list[str]:
        """Return the result in a few lines."""


def reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Let an error of the library end the command with its message, without a traceback."""

    @wraps(command)
    def reporting(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BilevelError as error:
            with suppress(OSError):  # where nobody listens, the exit status still tells
                _print(errors, f"[red]error:[/red] {escape(str(error))}")
            raise typer.Exit(1) from error

    return reporting


def _print(where: Console, text: str) -> None:
    """Print text without breaking its lines and without colouring its numbers."""
    where.print(text, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a result or what is going on."""
    try:
        _print(console, text)
    except OSError as error:
        raise OutputError(f"standard output cannot be written to: {error.strerror}") from error


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Show the current stage of the work and the time; yields the function that names the stage.

    torch uses one thread inside the block: steps on minibatches are too small to gain from a
    second one, and the results are then the same on every machine.
    """
    with torch_threads(1):
        if not console.is_terminal:  # where rich would print an empty line
            yield lambda stage: None
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=None)
            yield lambda stage: progress.update(task, description=stage)


@contextmanager
def parts_done(total: int) -> Iterator[Callable[[str], None]]:
    """Show how many of ``total`` parts remain; yields the function that prints a finished one."""
    with Progress(console=console) as progress:
        task = progress.add_task("running", total=total)

        def done(line: str) -> None:
            _print(progress.console, line)
            progress.advance(task)

        yield done


def say_found(found: Found, written: str) -> None:
    """Print the summary of a result; the last line says where it was written."""
    lines = [*found.summary(), f"{written} ({found.seconds:.1f} s)."]
    say("\n".join(map(escape, lines)))


def open_ledger(command: str, folder: Path | None, resume: bool, **options: Any) -> Ledger:
    """Open the ledger of a long command; its finished parts depend on ``options``."""
    if resume and folder is not None and not folder.exists():
        say(f"There is nothing to resume in {escape(str(folder))}; starting from the beginning.")
    options = {"command": command, "version": __version__, **options}
    return Ledger(folder=folder, options=options, resume=resume)


def check_files(*paths: Path | None, apart: Collection[Path] = ()) -> None:
    """Refuse files that cannot be written, or are among ``apart``, before the work is done."""
    for path in paths:
        if path is not None:
            check_file(path, apart)


def write_json(path: Path | None, figures: Any) -> None:
    """Write the figures to the file of ``--json``, if it was given.

    Before anything is said of what was found, because nobody may listen any more.
    """
    if path is None:
        return
    with file_written(path) as part:
        part.write_text(json.dumps(figures, indent=2) + "\n")
    say(f"figures: {escape(str(path))}")
