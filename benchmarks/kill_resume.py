"""``bilevel bench kill-resume`` as a script: ``python benchmarks/kill_resume.py [--json FILE]``."""

from __future__ import annotations

import sys

from bilevel.cli.app import app

if __name__ == "__main__":
    app(["bench", "kill-resume", *sys.argv[1:]])
