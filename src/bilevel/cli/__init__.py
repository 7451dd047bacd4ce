"""The command line, ``bilevel``."""

from __future__ import annotations

import io
import sys

from bilevel.errors import MissingExtraError

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say which extra to install if typer or rich is missing."""
    try:
        from bilevel.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in {"typer", "rich"}:
            raise
        sys.exit(f"bilevel: {MissingExtraError(error.name, 'cli')}")
    for stream in (sys.stdout, sys.stderr):
        # Names of labels and files may have characters that the terminal's encoding lacks; the
        # results, which may have taken hours, must not be lost for that.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()
