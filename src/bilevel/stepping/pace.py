"""Lower steps that follow from their own path, where every evaluation is of the same function.

At each inner step the gradients at two points of the path give the curvature between them,

    L_t = ||d_t - d_{t-1}|| / ||w_t - w_{t-1}||,

and the step is never longer than 1/L_t: that x has moved to where g is steeper is felt one inner
step later. The steps are Nesterov's, all copies with one length and one momentum, so that their
difference obeys the same recursion; momentum starts afresh where a copy goes uphill (O'Donoghue
and Candes 2015), and where x or y was moved in between. Inner steps go on until the copies have
*settled*: what is left of their gradients is small beside ||grad_y f|| / lam, the pull that keeps y
and z apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bilevel.problem import Number
from bilevel.stepping.updates import Update
from bilevel.variables import flatten, length, unflatten_like

SETTLED = 0.3
"""Of ||grad_y f|| / lam: the x direction is then wrong by about a third at most."""

LONGEST = 3
"""An outer step has at most so many times T inner steps; then x rests, and the next one goes on."""


class Moving(Protocol):
    """A copy that is about to move against ``gain`` times the gradient on its leaves."""

    @property
    def update(self) -> Update:
        """How it moves."""

    @property
    def gain(self) -> Number:
        """From the gradient on the leaves to the direction in the scale of g."""


class Pace:
    """The steps of the copies in one outer step after the other.

    Attributes:
        rate: the length of the last step.
        settled: whether little was left of the gradients at the last evaluation.
    """

    def __init__(self, inner_steps: int) -> None:
        self._most = LONGEST * inner_steps
        self.rate = math.nan
        self.settled = False
        self._signal = 0.0
        self._taken = 0
        self._momentum = 1.0
        self._before: list[tuple[Tensor, Tensor]] = []
        self._ends: list[Tensor] = []

    def begin(self, rate: float, signal: float, *, goes_on: bool = False) -> None:
        """Start an outer step: the longest step that is safe, and ||grad_y f|| / lam.

        ``goes_on``: nothing has moved since the last one, and momentum is kept.
        """
        self._signal = signal
        self.settled = False
        self._taken = 0
        self._before = []
        if goes_on:
            self.rate = min(rate, self.rate)
            return
        self.rate = rate
        self._momentum = 1.0
        self._ends = []

    @property
    def done(self) -> bool:
        """Whether no further inner step is worth its cost."""
        return self.settled or self._taken >= self._most

    @torch.no_grad()
    def move(self, moves: Sequence[Moving]) -> None:
        """One inner step of all copies, from the gradients on their leaves."""
        here = [
            (flatten(m.update.variable.leaves), float(m.gain) * flatten(m.update.variable.grads()))
            for m in moves
        ]
        for (point, slope), (old, before) in zip(here, self._before, strict=False):
            way, turn = length(point - old), length(slope - before)
            # of a shorter way the turn is mostly rounding
            seen = torch.finfo(point.dtype).eps ** 0.5 * length(point)
            if turn * self.rate > way > seen:
                self.rate, self._momentum = way / turn, 1.0
        self._before = here
        for m in moves:
            m.update.apply(self.rate, m.gain)
        # not the gradients themselves, which do not vanish at the edge of a set
        ways = [
            flatten(m.update.variable.leaves) - point
            for m, (point, _) in zip(moves, here, strict=True)
        ]
        self.settled = max(length(way) for way in ways) <= SETTLED * self._signal * self.rate
        self._taken += 1
        self._extrapolate(moves, [slope for _, slope in here])

    def _extrapolate(self, moves: Sequence[Moving], slopes: Sequence[Tensor]) -> None:
        """Go on in the direction of the last step, unless a copy would go uphill."""
        ends = [flatten(m.update.variable.leaves) for m in moves]
        ways = [end - old for end, old in zip(ends, self._ends, strict=False)]
        self._ends = ends
        uphill = any(float(slope @ way) > 0 for slope, way in zip(slopes, ways, strict=False))
        if uphill or len(ways) < len(ends):
            self._momentum = 1.0
            return
        after = (1 + math.sqrt(1 + 4 * self._momentum**2)) / 2
        share, self._momentum = (self._momentum - 1) / after, after
        if not share:
            return
        for m, way in zip(moves, ways, strict=True):
            leaves = m.update.variable.leaves
            torch._foreach_add_(leaves, unflatten_like(way, leaves), alpha=share)
            m.update.project()

    def state_dict(self) -> dict[str, Any]:
        """What an outer step that goes on needs of the last one."""
        return {"rate": self.rate, "momentum": self._momentum, "ends": self._ends}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.rate, self._momentum = state["rate"], state["momentum"]
        self._ends = list(state["ends"])
