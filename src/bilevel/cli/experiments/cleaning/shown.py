"""The tables and the figure of the experiment."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from bilevel.cli.experiments.cleaning.contenders import CONTENDERS
from bilevel.cli.experiments.cleaning.reproduction import Lead, Reproduction, Spread, Summary
from bilevel.cli.experiments.cleaning.runs import BATCHES, CORRUPTIONS, Point
from bilevel.cli.experiments.judge import BEST, TARGETS
from bilevel.data.output import file_written

LABELS = {contender.name: contender.label for contender in CONTENDERS}
NO_BILEVEL = "no bilevel"

_PLACES = tuple(itertools.product(CORRUPTIONS, BATCHES))
_TICKS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)  # gaps
_STYLES = {
    "f2sa": ("C0", "-", 2.4),
    "f2sa-paper": ("C0", ":", 1.6),
    "f2sa-midpoint": ("C4", "--", 1.4),
    "f2sa-sweep": ("C2", "-", 1.8),
    "sobo": ("C3", "-", 1.8),
    "soba": ("C1", "-.", 1.4),
}


def tables(reproduction: Reproduction) -> list[Table]:
    """Means over seeds with deviations below them, a table for each corruption and batch size."""
    return [_table(reproduction, *place) for place in _PLACES]


def _table(reproduction: Reproduction, corruption: float, batch: int) -> Table:
    shown = Table(
        title=f"{corruption:.0%} wrong labels, batch {batch}: mean ± deviation over seeds",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    shown.add_column("method", min_width=17, max_width=17)
    for heading in ("F", "gap", "test", "AUC", *(f"{target:.0%}, s" for target in TARGETS)):
        shown.add_column(heading, justify="right", no_wrap=True)
    for summary in _of_place(reproduction, corruption, batch):
        shown.add_row(
            LABELS[summary.contender],
            _stated(summary.value, ".4f"),
            _stated(summary.gap, ".1%"),
            _stated(summary.accuracy, ".1%"),
            _stated(summary.auc, ".3f"),
            *(_stated(seconds, ".2f") for seconds in summary.seconds),
        )
    point = reproduction.without[corruption]
    shown.add_row(
        *(NO_BILEVEL, f"{point.value:.4f}", f"{point.gap:.1%}", f"{point.accuracy:.1%}"),
        *["-"] * (1 + len(TARGETS)),
    )
    return shown


def _of_place(reproduction: Reproduction, corruption: float, batch: int) -> list[Summary]:
    return [s for s in reproduction.summaries if (s.corruption, s.batch) == (corruption, batch)]


def leads(reproduction: Reproduction) -> list[str]:
    """F2SA compared with SOBO, a line for each corruption and batch size."""
    return [f"p {one.corruption}, batch {one.batch}: {_lead(one)}" for one in reproduction.leads]


def _lead(lead: Lead) -> str:
    if lead.least is None or lead.largest is None:
        return "SOBO was not evaluated after as few gradients as F²SA took"
    return (
        f"after as many gradients F²SA is ahead of SOBO at {lead.ahead} of {lead.points} "
        f"evaluations, by {lead.least:.2%} to {lead.largest:.1%} of the way to the best value"
    )


def plot(reproduction: Reproduction, path: Path) -> None:
    """Plot F against steps, gradients and seconds, a column for each corruption and batch size.

    The distance to the best value is shown on a logarithmic scale, labelled with F and the gap.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {
        "step": ("outer steps", 1.0),
        "gradients": ("minibatch gradients", 30.0),
        "seconds": ("seconds of one core", 0.03),
    }
    figure, panels = plt.subplots(
        len(rows), len(_PLACES), figsize=(14, 9.5), squeeze=False, constrained_layout=True
    )
    for line, (against, (label, first)) in zip(panels, rows.items(), strict=True):
        for axis, (corruption, batch) in zip(line, _PLACES, strict=True):
            for summary in _of_place(reproduction, corruption, batch):
                _draw(axis, summary, against)
            _scale(axis, BEST[corruption], reproduction.without[corruption])
            axis.set_xlabel(label)
            axis.set_xlim(left=first)
            if batch != BATCHES[0]:
                axis.set_yticklabels([])  # The panel to the left has the same scale.
    for axis, (corruption, batch) in zip(panels[0], _PLACES, strict=True):
        axis.set_title(f"{corruption:.0%} wrong labels, batch {batch}")
    for line in panels:
        line[0].set_ylabel("F at the exact lower solution")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    with file_written(path) as part:
        figure.savefig(part, dpi=110)
    plt.close(figure)


def _draw(axis: Any, summary: Summary, against: str) -> None:
    curve, best = summary.curve, BEST[summary.corruption]
    colour, style, width = _STYLES[summary.contender]
    moved = curve.step > 0
    x = getattr(curve, against)[moved]
    axis.plot(
        x,
        curve.value[moved] - best,
        color=colour,
        linestyle=style,
        linewidth=width,
        label=LABELS[summary.contender],
    )
    axis.fill_between(
        x, curve.low[moved] - best, curve.high[moved] - best, color=colour, alpha=0.15, linewidth=0
    )


def _scale(axis: Any, best: float, without: Point) -> None:
    way = without.value - best
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.axhline(way, color="black", linewidth=1, linestyle=(0, (1, 1)), label=NO_BILEVEL)
    axis.set_ylim(0.004 * way, 2.2 * way)
    axis.set_yticks(
        [gap * way for gap in _TICKS],
        [f"{best + gap * way:.3f} ({100 * gap:g}%)" for gap in _TICKS],
    )
    axis.minorticks_off()
    axis.tick_params(axis="y", labelsize="small")
    axis.grid(visible=True, alpha=0.3)


def _stated(spread: Spread | None, form: str) -> str:
    if spread is None:
        return "-"
    deviation = f"{spread.deviation:{form}}".removesuffix("%")
    return f"{spread.mean:{form}}\n±{deviation}" if np.isfinite(spread.mean) else "inf"
