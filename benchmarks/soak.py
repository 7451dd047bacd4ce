"""``bilevel bench soak`` as a script: ``python benchmarks/soak.py [--json FILE]``."""

from __future__ import annotations

import sys

from bilevel.cli.app import app

if __name__ == "__main__":
    app(["bench", "soak", *sys.argv[1:]])
