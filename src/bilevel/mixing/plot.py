"""The weights over time as a figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from bilevel.data.output import file_written
from bilevel.errors.extras import needed


def draw(
    path: Path,
    steps: npt.NDArray[Any],
    target_loss: npt.NDArray[Any],
    curves: Mapping[str, npt.NDArray[Any]],
    weights: Mapping[str, float],
) -> None:
    """Draw the weights above and the loss on the target below, both against the step.

    Args:
        path: the file to write; its ending chooses the format.
        steps, target_loss: one entry for each recorded step.
        curves: the weight of each source at these steps.
        weights: the weight of each source at the end; the legend starts with the heaviest source.
    """
    with needed("mix", "matplotlib"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for source in sorted(weights, key=lambda name: -weights[name]):
        above.plot(steps, curves[source], label=f"{_legend_text(source)}: {weights[source]:.3f}")
    above.axhline(1 / len(weights), color="grey", linestyle=":", linewidth=1)
    above.set_ylim(0, 1)
    above.set_ylabel("weight")
    above.legend(loc="center right", title="at the end")
    below.plot(steps, target_loss, color="black")
    below.set_ylabel("loss on the target")
    below.set_xlabel("step")
    for axis in (above, below):
        axis.grid(visible=True, alpha=0.3)
    with file_written(path) as part:
        figure.savefig(part, dpi=150)


def _legend_text(name: str) -> str:
    """A short name that matplotlib shows literally.

    A dollar sign would start a formula, and a leading underscore would hide the legend entry.
    """
    short = name if len(name) <= 40 else f"{name[:39]}…"
    shown = short.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
