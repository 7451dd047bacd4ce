"""Whether a run ended with f clearly above where it began, or above the best that it had seen.

What is judged is f at the lower solution, the column "upper" of the history, which noise may move
up and down, so that levels are compared and not single numbers:

- the *start* is the median of f while x made the first tenth of its way, or of its steps where that
  is sooner (steps may grow), over the later half of these recorded steps: in the earlier ones y is
  not fitted, and f may be low by accident. Where g shows that to fit y took longer, the start is as
  long as needed for its later half to come after that (but not more than half of the way, and not
  where f was higher before, since g may fall because of x as well). Where x rested at first, so
  that y was fitted, the start is also not below f there;
- what follows is cut into twenty blocks of one length, of which the medians are taken: a rare bad
  minibatch counts for nothing;
- the *best* is the lowest level that two blocks in succession stayed below, the *end* the lower of
  the last two: neither is one lucky or unlucky block;
- the *noise* of a level is that between successive blocks, by the median of their differences, so
  that a run which rises as a whole does not pass for a noisy one.

The end is clearly above the start where it is so by six times the noise of the two and by one per
cent of the values. It is clearly above the best where, besides, more than a quarter of the way from
the start down to the best was lost again. Of runs that only fluctuate, fewer than one in a thousand
is told that it worsened. (Where x itself wanders slowly, with the noise of its steps, f at its end
may truly be higher than it was, and then this is said.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from bilevel.run.history import History

Series = npt.NDArray[Any]

START = 0.1
"""The part of the way of x that counts as its start."""

LONGEST_START = 0.5
"""The part of the way of x that may count as its start while g falls."""

FITTED = 1e-3
"""The part of the fall of g that may be left when y is fitted: a distance of 3% to its solution."""

BLOCKS = 20
"""Into how many blocks the rest is cut: each is a twentieth, the end is judged by a tenth."""

FEWEST = 6
"""Fewer blocks than this say too little of the noise between them."""

SIGMAS = 6.0
"""By how many times the noise two levels must differ; the best is the lowest of twenty, which by
itself lies two of them below the mean."""

CLEARLY = 0.01
"""By which part of the larger value two levels must differ to matter to anybody."""

LOST = 0.25
"""Which part of the way down may be lost again before the end is no longer near the best."""

NORMAL = 1.4826
"""The standard deviation of a normal variable over its median absolute value."""


@dataclass(frozen=True)
class Worsening:
    """A run that ended worse than it had been.

    Attributes:
        since: what it was better at, "start" or "best".
        before: f there.
        step: k of a recorded step there.
        after: f at the end of the run.
    """

    since: str
    before: float
    step: int
    after: float

    def __str__(self) -> str:
        where = "where it began" if self.since == "start" else "the best that was recorded"
        return (
            f"f at the lower solution ended at {self.after:.4g}, clearly above {where}, "
            f"{self.before:.4g} around step {self.step}"
        )


def worsening(history: History, *, by_optimizer: bool = False) -> Worsening | None:
    """Whether f rose by more than noise; None: it did not, x never moved, or it cannot be told.

    ``by_optimizer``: an optimizer moves x, whose learning rate alone says how far.
    """
    f, steps = history["upper"], history["step"]
    rates = history["upper_lr"]
    norms = np.ones_like(rates) if by_optimizer else history["direction_norm"]
    # where x rested it went no way, also if its direction was not finite
    lengths = np.multiply(rates, norms, out=np.zeros_like(rates), where=rates != 0)
    way = np.concatenate([[0.0], np.cumsum(lengths)])
    if not (math.isfinite(way[-1]) and way[-1] > 0):
        return None
    moves = np.concatenate([[0], np.cumsum(lengths > 0)])
    least, most = (
        int(np.sum((way[:-1] <= part * way[-1]) & (moves[:-1] <= part * moves[-1])))
        for part in (START, LONGEST_START)
    )
    fitted = min(most, max(least, 2 * _fitted(history["lower"][:most])))
    rested = int(np.argmax(lengths > 0)) + 1  # "auto" fits y before x moves
    starts = (least, fitted) if rested == 1 else (rested, least, fitted)
    start, first = max((float(np.median(f[n // 2 : n])), n) for n in starts)
    rest = f[first:]
    cuts = np.linspace(0, len(rest), min(BLOCKS, len(rest)) + 1).astype(int)
    if len(cuts) - 1 < FEWEST:
        return None
    levels = np.array([np.median(rest[a:b]) for a, b in pairwise(cuts)])
    end = float(min(levels[-2:]))
    pairs = np.maximum(levels[1:], levels[:-1])
    lowest = int(np.argmin(pairs))
    best = float(pairs[lowest])
    noise = _deviation(levels)
    # the median of n numbers varies by about 1.25 / sqrt(n) of what one of them does
    noise_of_start = _deviation(f) * 1.25 / math.sqrt(first - first // 2)
    if _clearly_above(end, start, math.hypot(noise, noise_of_start)):
        return Worsening("start", start, int(steps[first // 2]), end)
    if _clearly_above(end, best, noise) and end - best > LOST * (start - best):
        return Worsening("best", best, int(steps[first + cuts[lowest + 1]]), end)
    return None


def rise_between(before: float, after: float) -> Worsening | None:
    """The same of F itself at the start and at the end of a run, which are without noise."""
    rose = _clearly_above(after, before, 0.0)
    return Worsening("start", before, 0, after) if rose else None


def _fitted(g: Series) -> int:
    """After how many recorded steps y was fitted, so that g had no longer to fall for that."""
    lowest = np.min(g)
    return int(np.argmax(g <= lowest + FITTED * (g[0] - lowest))) + 1


def _deviation(series: Series) -> float:
    """The standard deviation of the numbers about their trend."""
    return NORMAL * float(np.median(np.abs(np.diff(series)))) / math.sqrt(2)


def _clearly_above(after: float, before: float, noise: float) -> bool:
    rise = after - before
    return rise > SIGMAS * noise and rise > CLEARLY * max(abs(after), abs(before))
