"""What a run with "auto" does at its end: F at both ends, or y fitted to the last x."""

from __future__ import annotations

import math

from torch import Tensor

from bilevel.problem import Objectives
from bilevel.sampling import EpisodicDraw
from bilevel.stepping.comparison import compare
from bilevel.stepping.fitting import fit
from bilevel.stepping.policy import Iterate


def conclude(
    objectives: Objectives,
    state: Iterate,
    rate: float,
    start: Tensor,
    inner_steps: int,
    noisy: bool,
) -> tuple[float, float] | None:
    """Compare F at the first x, ``start``, with F at the last, where steps of y are of ``rate``.

    None where that cannot be told, or where y is that of the few tasks of an episode. Under noise y
    is then fitted to the last x.
    """
    if isinstance(objectives.draw, EpisodicDraw):
        return None
    lower_steps = state.k * inner_steps
    # under noise the step of y is shorter than 1/L, which is therefore measured
    compared = compare(objectives, state, math.nan if noisy else rate, start, lower_steps)
    if compared is None and noisy:
        fit(objectives, state, rate, lower_steps)
    return compared
