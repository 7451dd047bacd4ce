"""``bilevel bench scale`` as a script: ``python benchmarks/scale.py [--json FILE]``."""

from __future__ import annotations

import sys

from bilevel.cli.app import app

if __name__ == "__main__":
    app(["bench", "scale", *sys.argv[1:]])
