"""``bilevel bench auto`` as a script: ``python benchmarks/auto.py [--json FILE]``."""

from __future__ import annotations

import sys

from bilevel.cli.app import app

if __name__ == "__main__":
    app(["bench", "auto", *sys.argv[1:]])
