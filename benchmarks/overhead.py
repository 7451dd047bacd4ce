"""``bilevel bench overhead`` as a script: ``python benchmarks/overhead.py [--json FILE]``."""

from __future__ import annotations

import sys

from bilevel.cli.app import app

if __name__ == "__main__":
    app(["bench", "overhead", *sys.argv[1:]])
