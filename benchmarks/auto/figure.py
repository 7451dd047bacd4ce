"""The performance profiles: the share of problems solved against the budget."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from benchmarks.auto.row import BUDGET, Row, profile
from benchmarks.auto.trajectory import Clock

TOLERANCES = (0.1, 0.01)
CLOCKS: dict[Clock, str] = {"seconds": "processor time", "evaluations": "evaluations of f and g"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a panel for each clock; dashed lines are the tuned runs on their way to their end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    multiples = np.geomspace(1 / 16, BUDGET, 200).tolist()
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, constrained_layout=True)
    for axis, (clock, title) in zip(panels, CLOCKS.items(), strict=True):
        for colour, within in enumerate(TOLERANCES):
            for tuned, name in ((False, "nothing set"), (True, "tuned")):
                shares = profile(rows, clock, within, multiples, tuned=tuned)
                axis.step(
                    multiples,
                    shares,
                    where="post",
                    color=f"C{colour}",
                    linestyle="--" if tuned else "-",
                    label=f"{name}, to within {within:.0%}",
                )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: str(Fraction(value)))
        axis.axvline(1, color="grey", linewidth=0.8)
        axis.set_xlabel(f"{title}, as a multiple of the tuned run's")
        axis.set_ylim(0, 1)
        axis.grid(visible=True, alpha=0.3)
    count = len({row.problem for row in rows})
    panels[0].set_ylabel(f"share of {count} problems, {len(rows)} runs")
    panels[0].legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)
