"""``bilevel bench lm`` as a script: ``python benchmarks/lm.py [--json FILE]``."""

from __future__ import annotations

import sys

from bilevel.cli.app import app

if __name__ == "__main__":
    app(["bench", "lm", *sys.argv[1:]])
