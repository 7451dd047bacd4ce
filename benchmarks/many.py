"""``bilevel bench many`` as a script: ``python benchmarks/many.py [--json FILE]``."""

from __future__ import annotations

import sys

from bilevel.cli.app import app

if __name__ == "__main__":
    app(["bench", "many", *sys.argv[1:]])
