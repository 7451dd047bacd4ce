"""The lower level solved further at a look, where the method's own lower steps do not follow it.

A method with a few plain steps of y between two steps of x may leave y far behind y*(x), and f at
that y says nothing about F(x) = f(x, y*(x)): it may fall for hundreds of steps while F rises. Where
nothing is sampled, "auto" therefore goes on from the lower solution with accelerated steps
(:mod:`bilevel.stepping.accelerated`) until f there stays as it is. A penalised copy moves along, by
the same way: what it differs by from the lower solution is the method's to find.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch

from bilevel.problem import Level, Objectives
from bilevel.sampling import Rewind
from bilevel.stepping.accelerated import AcceleratedSteps
from bilevel.stepping.curvature import probed_slopes
from bilevel.stepping.memory import Reference
from bilevel.stepping.merit import TOLERATED, Merits, merits_at
from bilevel.stepping.policy import Iterate
from bilevel.stepping.updates import Update
from bilevel.variables import flatten, unflatten_like

CHUNK, CHUNKS = 10, 3
"""The steps after which f is evaluated, together as many as an accelerated outer step may take."""


@dataclass(frozen=True)
class _Move:
    """The lower solution, about to move against the gradient on its leaves."""

    update: Update
    gain: float = 1.0


@torch.no_grad()
def settle(
    objectives: Objectives, state: Iterate, rate: float, before: Reference | None
) -> tuple[Merits, bool] | None:
    """Move the lower solution on, by steps of at most ``rate``; f there, and whether it rests.

    What f has left to change is estimated from its last two changes, as of a geometric series. It
    rests if that is no more than a tenth of what is to be judged, or its last change no more than a
    hundredth: its difference from the value ``before`` or the decrease that was promised there.
    None: the data cannot be sampled again.
    """
    x, y, other, draw = state.x, state.solution, state.penalised, objectives.draw
    if not (draw.upper.probed and draw.lower.probed):
        return None
    there, promised = 0.0, 0.0
    if before is not None:
        there = statistics.fmean(before.merits)
        promised = float((before.x - flatten(x.leaves)) @ before.direction)
    rewind = Rewind(x.device)
    [slope] = probed_slopes(objectives, x, Level.LOWER, 0)
    updates = {id(update.variable): update for update in state.updates()}
    start, move, steps = flatten(y.leaves).clone(), _Move(updates[id(y)]), AcceleratedSteps(CHUNK)
    steps.begin(rate, 0.0)
    found = merits_at(objectives, state, None)
    [value], change, settled = found.values, math.inf, False
    for _ in range(CHUNKS):
        for _ in range(CHUNK):
            y.set_grads(unflatten_like(slope(y), y.leaves))
            steps.move([move])
        if not bool(torch.isfinite(flatten(y.leaves)).all()):  # a gradient overflowed
            torch._foreach_copy_(y.leaves, unflatten_like(start, y.leaves))
            found, settled = merits_at(objectives, state, None), False
            break
        found = merits_at(objectives, state, None)
        last, value = value, found.values[0]
        before_that, change = change, abs(value - last)
        known = change < before_that < math.inf
        left = change * change / (before_that - change) if known else math.inf
        rounding = 10 * torch.finfo(start.dtype).eps * abs(value)
        judged = max(abs(value - there), min(promised, abs(value)))
        settled = change <= TOLERATED**2 * judged + rounding or left <= TOLERATED * judged
        if settled:
            break
    if other is not None:
        way = flatten(y.leaves) - start
        torch._foreach_add_(other.leaves, unflatten_like(way, other.leaves))
        updates[id(other)].project()
    rewind()
    return found, settled
