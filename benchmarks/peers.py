"""``bilevel bench peers`` as a script: ``python benchmarks/peers.py [--json FILE]``."""

from __future__ import annotations

import sys

from bilevel.cli.app import app

if __name__ == "__main__":
    app(["bench", "peers", *sys.argv[1:]])
