"""What it takes each method to bring ||grad F||^2 to 1e-6 of its start on a quadratic.

Run ``python benchmarks/methods.py [--json FILE]``. The settings are those of the contract tests,
which a user could have chosen. What is counted are evaluations of f and of g, each differentiated
at least once; products with second derivatives come on top for the methods of order 2.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bilevel

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.methods.test_contract import CASES, Case


class Counted(bilevel.problems.Quadratic):
    """A quadratic that counts the evaluations of f and g."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls = {"f": 0, "g": 0}

    def _upper(self, x: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        self.calls["f"] += 1
        return super()._upper(x, y, noise)

    def _lower(self, x: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        self.calls["g"] += 1
        return super()._lower(x, y, noise)


def measure(case: Case, repeats: int = 3) -> dict[str, Any]:
    """Steps, gradients and the median of the seconds to the target."""
    seconds = []
    for _ in range(repeats):
        problem = Counted(seed=0)
        solver = bilevel.Solver(problem, case.method(), problem.x0, problem.y0)
        problem.calls = {"f": 0, "g": 0}
        target = 1e-6 * float((problem.gradient(problem.x0) ** 2).sum())
        start = time.perf_counter()
        while float((problem.gradient(solver.x) ** 2).sum()) > target:
            solver.step(measure=False)
            if solver.k > 2 * case.steps:
                raise RuntimeError(f"{case.name} did not get there in {solver.k} steps")
        seconds.append(time.perf_counter() - start)
    return {
        "method": case.name,
        "order": case.order,
        "settings": {key: repr(value) for key, value in case.settings.items()},
        "steps": solver.k,
        "evaluations of f": problem.calls["f"],
        "evaluations of g": problem.calls["g"],
        "seconds": sorted(seconds)[len(seconds) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(case) for case in CASES if case.name != "no-bilevel"]
    print(f"{'method':<10}{'order':>6}{'steps':>8}{'f':>8}{'g':>9}{'seconds':>9}")
    for row in rows:
        print(
            f"{row['method']:<10}{row['order']:>6}{row['steps']:>8}{row['evaluations of f']:>8}"
            f"{row['evaluations of g']:>9}{row['seconds']:>9.2f}"
        )
    if arguments.json:
        machine = f"{platform.machine()}, one thread, torch {torch.__version__}"
        figures = {"machine": machine, "rows": rows}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
