"""``bilevel bench cleaning`` as a script: ``python benchmarks/cleaning.py [--json FILE]``."""

from __future__ import annotations

import sys

from bilevel.cli.app import app

if __name__ == "__main__":
    app(["bench", "cleaning", *sys.argv[1:]])
