"""The command ``bilevel``, also as ``python -m bilevel``."""

from __future__ import annotations

import sys

from bilevel.errors import MissingExtraError


def main() -> None:
    """Run the command line, or say what to install for it."""
    try:
        from bilevel.cli.app.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in {"typer", "rich"}:
            raise
        sys.exit(f"bilevel: {MissingExtraError(error.name, 'cli')}")
    app()


if __name__ == "__main__":
    main()
