"""The weights over time as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bilevel.errors.extras import needed

with needed("mix", "matplotlib"):
    from matplotlib.figure import Figure

from bilevel.mixing.mixture import named

if TYPE_CHECKING:
    from bilevel.mixing.mixture import Mixture


def draw(mixture: Mixture, path: Path) -> None:
    """Weights above, the loss on the target below, both against the step."""
    steps = mixture.history["step"] + 1
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for source in sorted(mixture.weights, key=lambda name: -mixture.weights[name]):
        label = f"{_plain(source)}: {mixture.weights[source]:.3f}"
        above.plot(steps, mixture.history[named(source)], label=label)
    above.axhline(1 / len(mixture.weights), color="grey", linestyle=":", linewidth=1)
    above.set_ylim(0, 1)
    above.set_ylabel("weight")
    above.legend(loc="center right", title="in the end")
    below.plot(steps, mixture.history["upper"], color="black")
    below.set_ylabel("loss on the target")
    below.set_xlabel("step")
    for axis in (above, below):
        axis.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=150)


def _plain(name: str) -> str:
    """A name that is shown as it is: no formula, not too long, not hidden by an underscore."""
    short = name if len(name) <= 40 else f"{name[:39]}…"
    shown = short.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
