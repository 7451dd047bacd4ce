"""Run one benchmark from a checkout: ``python -m benchmarks NAME [options]``."""

from __future__ import annotations

from benchmarks.commands import app

# The guard matters: processes that kill_resume starts import this module again.
if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
