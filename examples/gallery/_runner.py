"""Run the examples of the gallery over seeds, and keep what they reached for the site.

    python -m examples.gallery                           every example, five seeds
    python -m examples.gallery lasso_strength --seeds 2  one of them, two seeds
    python -m examples.gallery --small --json FILE       the sizes of the tests, into another file

A seed is a process of its own with one thread. What was run is merged into the file: a seed that
is run again replaces its row, and rows that were measured with other code are dropped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from ._lines import fingerprint

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "docs" / "gallery" / "results.json"
Row = dict[str, Any]  # "seed", "values" by competitor, "cpu_seconds"


def module(name: str) -> Any:
    """The module of an example."""
    return importlib.import_module(f"examples.gallery.{name}")


def names() -> list[str]:
    """The examples: the modules of this folder that have ``compare``."""
    found = [info.name for info in pkgutil.iter_modules([str(FOLDER)])]
    return sorted(
        name for name in found if not name.startswith("_") and hasattr(module(name), "compare")
    )


def run_seed(name: str, seed: int, small: bool) -> Row:
    """One seed of an example, timed in seconds of the processor."""
    example = module(name)
    start = time.process_time()
    values = example.compare(seed, small=small)
    seconds = time.process_time() - start
    return {
        "seed": seed,
        "values": {competitor: float(value) for competitor, value in values.items()},
        "cpu_seconds": round(seconds, 2),
    }


def merge(results: dict[str, Any], name: str, row: Row, *, small: bool) -> None:
    """Put a row into the results, beside those of the same code, size and competitors."""
    example = module(name)
    head = {
        "measure": example.MEASURE,
        "better": example.BETTER.__name__,
        "small": small,
        "code": fingerprint((FOLDER / f"{name}.py").read_text()),
    }
    before = results.get(name, {"rows": []})
    same = all(before.get(key) == value for key, value in head.items())
    kept = [
        other
        for other in before["rows"]
        if same and other["seed"] != row["seed"] and list(other["values"]) == list(row["values"])
    ]
    results[name] = head | {"rows": sorted([*kept, row], key=lambda other: int(other["seed"]))}


def read(path: Path) -> dict[str, Any]:
    """The results in a file; none where there is no file."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def run(chosen: list[str], seeds: int, jobs: int, *, small: bool, path: Path) -> None:
    """Run the examples, and merge each row into the file as soon as it is there."""
    # The processes read this when they import PyTorch, which is after they have been started.
    os.environ["OMP_NUM_THREADS"] = "1"
    path.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        started = {
            pool.submit(run_seed, name, seed, small): name
            for name in chosen
            for seed in range(seeds)
        }
        for done in as_completed(started):
            row, name = done.result(), started[done]
            results = read(path)
            merge(results, name, row, small=small)
            path.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
            shown = ", ".join(f"{key} {value:.4g}" for key, value in row["values"].items())
            print(f"{name}, seed {row['seed']}: {shown} ({row['cpu_seconds']:.1f} s)", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.gallery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which examples; all of them")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds, from 0 on")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes at once")
    parser.add_argument("--small", action="store_true", help="the sizes of the tests")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    given = parser.parse_args()
    known = names()
    if unknown := sorted(set(given.names) - set(known)):
        parser.error(f"{', '.join(unknown)}: not in the gallery, which has {', '.join(known)}")
    run(given.names or known, given.seeds, given.jobs, small=given.small, path=given.json)
