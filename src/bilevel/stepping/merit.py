"""What "auto" tests the steps of x by: Phi, or f at the lower solution, on samples that stay."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import torch

from bilevel.problem import FORWARD, Level, Objectives, Phi
from bilevel.sampling import Rewind
from bilevel.stepping.policy import Iterate
from bilevel.variables import Variable, buffers_kept


@dataclass(frozen=True)
class Merits:
    """What is tested.

    Attributes:
        values: the merit on each minibatch of the probe. On more than one a gap below zero is left
            out of it: that is no gain but an error of z, which minimises g.
        gap: the part lam * ( g(x, y) - g(x, z) ) of it. In schemes other than "forward" that may
            have any sign, and is 0 here.
        upper: the part that is f.
        lower: g(x, z) on each minibatch; empty where it is not part of the merit.
        multiplier: lam, with which g counts.
    """

    values: list[float]
    gap: float = 0.0
    upper: float = 0.0
    lower: list[float] = field(default_factory=list)
    multiplier: float = 0.0


@torch.no_grad()
def merits_at(objectives: Objectives, state: Iterate, phi: Phi | None) -> Merits:
    """The merit here; it has no values where the data cannot be sampled again."""
    draw, x = objectives.draw, state.x
    if not (draw.upper.probed and draw.lower.probed):
        return Merits([])
    terms: list[tuple[Level, Variable, float]] = [(Level.UPPER, state.solution, 1.0)]
    if phi is not None:
        stencil, lam = phi.stencil, float(phi.multiplier)
        at_f = zip(stencil.upper, phi.points, strict=False)
        at_g = zip(stencil.lower, phi.points, strict=False)
        terms = [(Level.UPPER, y, u) for u, y in at_f if u]
        terms += [(Level.LOWER, y, lam * w) for w, y in at_g if w]
    uppers, lowers = draw.upper.probe(), draw.lower.probe()
    rewind = Rewind(x.device)
    values = []
    with buffers_kept(x, *(y for _, y, _ in terms)):
        for place in range(max(len(uppers), len(lowers))):
            total = torch.zeros(3, dtype=torch.float64, device=x.device)
            for level, y, weight in terms:
                rewind()
                upper = level is Level.UPPER
                objective = objectives.f if upper else objectives.g
                batches = uppers if upper else lowers
                value = objective(x, y, batches[place % len(batches)]).double()
                total[0 if upper else 1] += weight * value
                if not upper and y is state.solution:
                    total[2] = value
            values.append(total)
    rewind()
    found = objectives.mean(torch.stack(values))
    if phi is None or phi.stencil is not FORWARD:
        return Merits(found[:, :2].sum(dim=1).tolist())
    upper, gap = found[:, :2].mean(dim=0).tolist()
    merits = found[:, :2].sum(dim=1)
    if len(found) > 1:
        merits = merits - min(gap, 0.0)
    return Merits(merits.tolist(), gap, upper, found[:, 2].tolist(), float(phi.multiplier))


def is_noisy(objectives: Objectives, state: Iterate) -> bool:
    """Whether two evaluations at one point may differ: by their samples, or by what they draw."""
    draw, x, y = objectives.draw, state.x, state.solution
    if not (draw.upper.deterministic and draw.lower.deterministic):
        return True
    rewind = Rewind(x.device)
    with torch.no_grad(), buffers_kept(x, y):
        objectives.f(x, y, draw.upper.peek())
        objectives.g(x, y, draw.lower.peek())
    moved = rewind.moved()
    rewind()
    return moved


def standard_error(rises: list[float]) -> float:
    """The standard error of their mean; 0 for one, which is exact."""
    return statistics.stdev(rises) / math.sqrt(len(rises)) if len(rises) > 1 else 0.0
