"""The command ``bilevel`` as ``python -m bilevel``."""

from bilevel.cli import main

if __name__ == "__main__":
    main()
