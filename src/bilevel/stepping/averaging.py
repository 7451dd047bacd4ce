"""Averages of the copies of y along their path, where minibatches keep y from resting.

The steps of y under noise shrink as 1/sqrt(n), with which the error of the *average* of y falls as
fast as that of any method (Polyak and Juditsky 1992), while y itself stays about as far from its
solution as a step takes it. With x is returned the better of the two: at the end of a run all
copies go to their averages if g at the lower solution is lower there, on the samples that x is
tested on, by more than its standard error. Otherwise, as where x has moved on too fast for an
average, they stay. x is tested before that: where x swings about, F at it may be high, and f at an
average low.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor

from bilevel.problem import Objectives
from bilevel.sampling import Rewind
from bilevel.stepping.merit import standard_error
from bilevel.stepping.policy import Iterate
from bilevel.variables import saved, values_only

AVERAGED = 16
"""Outer steps that count in an average: what samples add to y, as far as it is independent from one
to the next, falls to a sixth (1/sqrt(31) for weights that fade), and x moves little in so many."""


class Average:
    """The averages of all copies of y, in which older steps fade."""

    def __init__(self) -> None:
        self._count = 0
        self._means: list[Tensor] = []
        self._leaves: list[Tensor] = []

    def restart(self) -> None:
        """Forget everything: the copies were put elsewhere."""
        self._count, self._means = 0, []

    @torch.no_grad()
    def add(self, state: Iterate) -> None:
        """Count where the copies are now, at the end of an outer step."""
        self._count += 1
        if not self._leaves:  # to look them up takes longer than to add them
            self._leaves = leaves_of_copies(state)
        if self._count == 1:
            self._means = [leaf.detach().clone() for leaf in self._leaves]
        else:
            share = max(1 / AVERAGED, 1 / self._count)
            torch._foreach_lerp_(self._means, self._leaves, share)

    @torch.no_grad()
    def take(self, objectives: Objectives, state: Iterate) -> None:
        """Move all copies to their averages if g is lower at that of the lower solution."""
        if self._count < 2 or not objectives.draw.lower.probed:
            return
        here = _values(objectives, state)
        leaves = leaves_of_copies(state)
        places = [leaf.detach().clone() for leaf in leaves]
        torch._foreach_copy_(leaves, self._means)
        for update in state.updates():
            if update.variable is not state.x:  # a set need not hold the averages of its members
                update.project()
        falls = [now - there for now, there in zip(here, _values(objectives, state), strict=True)]
        known = all(map(math.isfinite, falls))
        if not (known and statistics.fmean(falls) > standard_error(falls)):
            torch._foreach_copy_(leaves, places)

    def state_dict(self) -> dict[str, Any]:
        """The averages, and how many steps are in them."""
        return {"count": self._count, "means": saved(self._means)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._count, self._means = state["count"], saved(state["means"])


def leaves_of_copies(state: Iterate) -> list[Tensor]:
    """The leaves of all copies of y, which stay the same tensors through a run."""
    copies = (variable for variable in state.variables() if variable is not state.x)
    return [leaf for copy in copies for leaf in copy.leaves]


def _values(objectives: Objectives, state: Iterate) -> list[float]:
    """The values of g at the lower solution, on each minibatch of the probe."""
    x, z, rewind = state.x, state.solution, Rewind(state.x.device)
    values = []
    with values_only(x, z):
        for batch in objectives.draw.lower.wide_probe():
            rewind()
            values.append(objectives.g(x, z, batch).detach().double())
    rewind()
    found: list[float] = objectives.mean(torch.stack(values)).tolist()
    return found
