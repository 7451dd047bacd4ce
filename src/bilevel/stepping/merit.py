"""What "auto" tests the steps of x by: Phi, or f at the lower solution, on samples that stay."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bilevel.problem import FORWARD, Level, Objectives, Phi
from bilevel.sampling import Rewind
from bilevel.stepping.policy import Iterate
from bilevel.variables import Variable, values_only

TOLERATED = 0.1
"""The part of a value, or of what was promised, that a change must exceed to count."""

SURE = 3.0
"""The standard errors that a change must exceed to be told from noise."""


@dataclass(frozen=True)
class Merits:
    """What is tested.

    Attributes:
        values: the merit on each minibatch of the probe. On more than one the gap is left out of it
            where it is not above its standard error: it is then noise, lam times that of g.
        gap: the part lam * ( g(x, y) - g(x, z) ) of it. In schemes other than "forward" that may
            have any sign, and is 0 here.
        noise: the standard error of the gap; 0 where g is the same on all minibatches.
        upper: the part that is f.
        lower: g(x, z) on each minibatch.
        solution: f(x, z) on each, which the merit stands for; empty where g is not part of it.
        spread: f(x, z) - f(x, y) on each, what f changes by within the finite difference.
        multiplier: lam, with which g counts.
    """

    values: list[float]
    gap: float = 0.0
    noise: float = 0.0
    upper: float = 0.0
    lower: list[float] = field(default_factory=list)
    solution: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)
    multiplier: float = 0.0

    @property
    def mean(self) -> float:
        """That of the values; 0 where there are none."""
        return statistics.fmean(self.values) if self.values else 0.0


@torch.no_grad()
def merits_at(objectives: Objectives, state: Iterate, phi: Phi | None) -> Merits:
    """The merit here; without values where the data cannot be sampled again.

    It is infinite where any of the numbers is not finite, those at the lower solution included.
    """
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
    forward = phi is not None and phi.stencil is FORWARD
    # not part of the merit: whether y follows, and what the merit stands for
    terms.append((Level.UPPER if forward else Level.LOWER, state.solution, 0.0))
    uppers, lowers = draw.upper.wide_probe(), draw.lower.wide_probe()
    rewind = Rewind(x.device)
    places = range(max(len(uppers), len(lowers)))
    values: list[Tensor] = []
    with values_only(x, *(y for _, y, _ in terms)):
        for place in places:
            for level, y, _ in terms:
                upper = level is Level.UPPER
                batches = uppers if upper else lowers
                if place >= len(batches):  # it would be the same as on that batch before
                    values.append(values[-len(terms) * len(batches)])
                    continue
                rewind()
                objective = objectives.f if upper else objectives.g
                values.append(objective(x, y, batches[place]).detach())
    rewind()
    # all of them are read at once, because each reading waits for the device
    known = torch.stack(values).double().view(-1, len(terms))
    found = objectives.mean(known).T.tolist()
    f, gaps = [0.0 for _ in places], [0.0 for _ in places]
    solution, lower = list(f), list(f)
    for (level, y, weight), column in zip(terms, found, strict=True):
        part, at_solution = (f, solution) if level is Level.UPPER else (gaps, lower)
        if weight:
            part[:] = [total + weight * value for total, value in zip(part, column, strict=True)]
        if y is state.solution:
            at_solution[:] = column
    merits = [here + above for here, above in zip(f, gaps, strict=True)]
    if not all(map(math.isfinite, (*merits, *solution, *lower))):
        return Merits([math.inf])
    if phi is None or not forward:
        return Merits(merits, lower=lower)
    gap, noise = statistics.fmean(gaps), standard_error(gaps)
    hidden = len(gaps) > 1 and gap <= noise
    spread = [at_z - at_y for at_z, at_y in zip(solution, f, strict=True)]
    lam = float(phi.multiplier)
    at_y = statistics.fmean(f)
    return Merits(f if hidden else merits, gap, noise, at_y, lower, solution, spread, lam)


def is_noisy(objectives: Objectives, state: Iterate) -> bool:
    """Whether two evaluations at one point of a step may differ, by their samples or otherwise.

    That is by what they draw at random.
    """
    draw, x, y = objectives.draw, state.x, state.solution
    if not (draw.upper.constant_in_step and draw.lower.constant_in_step):
        return True
    rewind = Rewind(x.device)
    with values_only(x, y):
        objectives.f(x, y, draw.upper.in_step())
        objectives.g(x, y, draw.lower.in_step())
    moved = rewind.moved()
    rewind()
    return moved


def standard_error(rises: list[float]) -> float:
    """The standard error of their mean; 0 for one, which is exact."""
    count = len(rises)
    if count < 2:
        return 0.0
    # statistics.stdev computes in fractions, which takes as long as an evaluation of an objective
    mean = statistics.fmean(rises)
    return math.hypot(*(rise - mean for rise in rises)) / math.sqrt(count * (count - 1))


def lower_rose(found: Merits, rested: list[float], last: float) -> bool:
    """Whether g at the lower solution rose while x rested, at ``last`` with that merit."""
    least = abs(last) / found.multiplier if found.multiplier else 0.0
    return surely_rose(found.lower, rested, least=least)


def surely_rose(here: list[float], there: list[float], least: float = 0.0) -> bool:
    """Whether values on the same minibatches rose for sure, and by more than a tenth of them.

    Where y runs away the errors grow with the values; that all of them doubled is sure as well.
    """
    rises = [value - before for value, before in zip(here, there, strict=False)]
    if not rises:
        return False
    known = max(abs(statistics.fmean(there)), least)
    sure = statistics.fmean(rises) > TOLERATED * known + SURE * standard_error(rises)
    return sure or min(rises) > known
