"""``bilevel bench methods`` as a script: ``python benchmarks/methods.py [--json FILE]``."""

from __future__ import annotations

import sys

from bilevel.cli.app import app

if __name__ == "__main__":
    app(["bench", "methods", *sys.argv[1:]])
