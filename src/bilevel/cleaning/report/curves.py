"""The coordinates of the loss curves, so that the page needs no script to show them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

WIDTH, HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 12, 30


def curves(history: Mapping[str, Any], settings: Mapping[str, float]) -> dict[str, Any]:
    """The coordinates of the curves, the ticks and the chosen step in the SVG drawing.

    The curves are the losses on trusted samples, on held-back ones (if there are any), and the
    weighted training loss, each against the step.
    """
    steps = np.asarray(history["step"], dtype=float) + 1
    wanted = {
        "trusted": ("on trusted samples", history["upper"]),
        "held": ("on held-back trusted samples", history["held_back"]),
        "train": ("on training samples, weighted", history["lower"]),
    }
    lines = {
        name: (title, np.asarray(values, dtype=float))
        for name, (title, values) in wanted.items()
        if np.isfinite(np.asarray(values, dtype=float)).all()
    }
    high = max(float(values.max()) for _, values in lines.values())
    ticks = _ticks(high)
    top = max(ticks[-1], high)
    last = max(float(steps[-1]), 2.0)

    def across(step: float) -> float:
        return round(_LEFT + (step - 1) / (last - 1) * (WIDTH - _LEFT - _RIGHT), 1)

    def down(loss: float) -> float:
        return round(_TOP + (1 - loss / top) * (HEIGHT - _TOP - _BOTTOM), 1)

    chosen = settings["selected_step"] if "held" in lines else settings["steps"]
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": _LEFT,
        "right": WIDTH - _RIGHT,
        "top": _TOP,
        "bottom": HEIGHT - _BOTTOM,
        "rows": [(down(tick), f"{tick:g}") for tick in ticks],
        "columns": [(across(step), str(step)) for step in _whole_ticks(int(last))],
        "lines": [
            {
                "name": name,
                "title": title,
                "points": " ".join(
                    f"{across(s)},{down(v)}" for s, v in zip(steps, values, strict=True)
                ),
                "last": f"{values[-1]:.3f}",
            }
            for name, (title, values) in lines.items()
        ],
        "chosen": {"step": int(chosen), "x": across(float(chosen))},
    }


def _ticks(high: float, most: int = 5) -> list[float]:
    """Round numbers from 0 to at least ``high``."""
    step = 10.0 ** math.floor(math.log10(high / most)) if high > 0 else 1.0
    step *= next((m for m in (1, 2, 5) if high / (step * m) <= most), 10)
    return [round(i * step, 10) for i in range(math.ceil(high / step) + 1)]


def _whole_ticks(last: int) -> list[int]:
    """Round whole numbers from 1 to at most ``last``."""
    step = max(1, int(_ticks(float(last))[1]))
    return [1, *(step * i for i in range(1, last // step + 1) if step * i > 1)]
