"""Lower steps that follow from their own path, where every evaluation is of the same function.

At each inner step the gradients at two points of the path give the curvature between them,

    L_t = ||d_t - d_{t-1}|| / ||w_t - w_{t-1}||,

and the step is never longer than 1/L_t: that x has moved to where g is steeper is felt one inner
step later. A step that led uphill is taken again from where it began, shorter. Between the steps
the last ones are combined by Anderson acceleration (:mod:`bilevel.variables.anderson`), which
follows long valleys: all copies with one length and in one combination, so that their difference
obeys the same recursion. A combination that leads uphill, or from which the next steps are longer,
is given up for the plain step; what is combined starts afresh there, where the length changes, and
where x or y was moved in between. Inner steps go on until the copies have *settled*: what is left
of their gradients is small beside ||grad_y f|| / lam, the pull that keeps y and z apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bilevel.problem import Number
from bilevel.stepping.updates import Update
from bilevel.variables import Past, flatten, inner, lengths, unflatten_like

MEMORY = 8
"""Steps that are combined: more of them cost more than they gain where gradients are cheap."""

SETTLED = 0.3
"""Of ||grad_y f|| / lam: the x direction is then wrong by about a third at most."""

LONGEST = 3
"""An outer step has at most so many times T inner steps; then x rests, and the next one goes on."""

SHORTEST = 0.1
"""Of a step that led uphill: where g is steep at its end only, as exp is, 1/L is far too short."""


class Moving(Protocol):
    """A copy that is about to move against ``gain`` times the gradient on its leaves."""

    @property
    def update(self) -> Update:
        """How it moves."""

    @property
    def gain(self) -> Number:
        """From the gradient on the leaves to the direction in the scale of g."""


class AcceleratedSteps:
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
        self._before: tuple[Tensor, Tensor] | None = None
        self._past = Past(MEMORY)

    def begin(self, rate: float, signal: float, *, goes_on: bool = False) -> None:
        """Start an outer step: the longest step that is safe, and ||grad_y f|| / lam.

        ``goes_on``: nothing has moved since the last one, whose steps are still combined.
        """
        self._signal = signal
        self.settled = False
        self._taken = 0
        self._before = None
        if goes_on:
            self.rate = min(rate, self.rate)
            return
        self.rate = rate
        self._past.clear()

    @property
    def done(self) -> bool:
        """Whether no further inner step is worth its cost."""
        return self.settled or self._taken >= self._most

    @torch.no_grad()
    def move(self, moves: Sequence[Moving]) -> None:
        """One inner step of all copies, from the gradients on their leaves."""
        copies = [m.update.variable for m in moves]
        leaves = [leaf for copy in copies for leaf in copy.leaves]
        points = flatten(leaves).view(len(copies), -1)
        slopes = flatten([grad for copy in copies for grad in copy.grads()]).view_as(points)
        gains = [float(m.gain) for m in moves]
        if any(gain != 1.0 for gain in gains):
            slopes *= slopes.new_tensor(gains)[:, None]
        if self._before is not None:
            old, before = self._before
            ways = points - old
            uphill = inner(ways, slopes + before) > 0  # by the trapezoidal rule
            rounding = torch.finfo(points.dtype).eps ** 0.5
            sizes = map(lengths, (ways, slopes - before, points))
            shorter = [
                way / turn
                for way, turn, size in zip(*sizes, strict=True)
                # of a shorter way the turn is mostly rounding
                if turn * self.rate > way > rounding * size
            ]
            if uphill and (shorter or len(self._past) > 1):
                self.step_again(moves, min(shorter, default=0.0))
                return
            if shorter:
                self.rate = min(shorter)
                self._past.clear()
        self._before = points, slopes
        for m in moves:
            m.update.apply(self.rate, m.gain)
        ends = flatten(leaves)
        ways = ends.view_as(points) - points
        # not the gradients themselves, which do not vanish at the edge of a set
        self.settled = max(lengths(ways)) <= SETTLED * self._signal * self.rate
        self._taken += 1
        if len(self._past) > 1 and self._past.lengthened_by(ways.view(-1)):
            ends = self._past.last
            self._past.clear()
        else:
            self._past.add(ways.view(-1), ends)
            ends = self._past.combined()
        torch._foreach_copy_(leaves, unflatten_like(ends, leaves))
        for m in moves:
            m.update.project()

    @torch.no_grad()
    def step_again(self, moves: Sequence[Moving], rate: float = 0.0) -> bool:
        """Go back and take the plain step in the place of a combination, or a shorter one.

        That is one of length ``rate``, but of no less than a tenth of the last. Whether there was a
        step in this outer step.
        """
        if self._before is None:
            return False
        if len(self._past) <= 1:
            self.rate = max(SHORTEST * self.rate, rate)
        self._past.clear()
        self.settled = False
        self._taken += 1
        for m, point, slope in zip(moves, *self._before, strict=True):
            copy = m.update.variable
            torch._foreach_copy_(copy.leaves, unflatten_like(point, copy.leaves))
            copy.set_grads(unflatten_like(slope / float(m.gain), copy.leaves))
            m.update.apply(self.rate, m.gain)
        return True

    def state_dict(self) -> dict[str, Any]:
        """What an outer step that goes on needs of the last one."""
        return {"rate": self.rate, **self._past.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.rate = state["rate"]
        self._past.load_state_dict(state)
