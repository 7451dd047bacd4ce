"""Draw a picture for each example of the gallery from gallery/results.json; ``make figures``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from draw_figures import BLUE, GREY, new_plot, save

FOLDER = Path(__file__).parent / "gallery"
RESULTS = FOLDER / "results.json"


def draw_example(found: dict[str, Any], path: Path) -> None:
    """The seeds as dots and their mean as a line, one row per competitor; bilevel in blue."""
    plt = new_plot()
    names = list(found["rows"][0]["values"])
    figure, axis = plt.subplots(figsize=(7, 0.8 + 0.5 * len(names)), constrained_layout=True)
    for place, name in enumerate(names):
        values = np.array([row["values"][name] for row in found["rows"]])
        colour = BLUE if place == 0 else GREY
        height = np.full(len(values), len(names) - 1.0 - place)
        axis.plot(values, height, "o", color=colour, markersize=6, alpha=0.6, markeredgewidth=0)
        axis.vlines(values.mean(), height[0] - 0.3, height[0] + 0.3, color=colour, linewidth=2.5)
    axis.set_yticks(range(len(names))[::-1], names)
    axis.get_yticklabels()[0].set(color=BLUE, fontweight="bold")
    axis.set_ylim(-0.6, len(names) - 0.4)
    better = "less" if found["better"] == "min" else "more"
    axis.set_xlabel(f"{found['measure']} ({better} is better)")
    axis.grid(visible=True, axis="x", alpha=0.25)
    save(plt, figure, path)


def draw(folder: Path = FOLDER) -> None:
    """All pictures, into a folder."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, found in results.items():
        draw_example(found, folder / f"{name}.png")


if __name__ == "__main__":
    draw()
