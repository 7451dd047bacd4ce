"""``bilevel bench table`` as a script: ``python benchmarks/table.py [--json FILE]``."""

from __future__ import annotations

import sys

from bilevel.cli.app import app

if __name__ == "__main__":
    app(["bench", "table", *sys.argv[1:]])
