"""When a run has come to rest: what ``tolerance`` of minimize means.

A run has converged when in each of the last ten recorded steps in which x moved, its direction was
at most ``tolerance`` times what it was at first, the median over the first ten such steps (without
those that were zero). So it does not matter in which units f, g and x are, nor how long the steps
are: short steps alone are no rest. A step in which "auto" lets x rest (``upper_lr`` 0) says
nothing, and is not counted.

Where x has a set, the direction is taken as x could follow it, ||x_{k+1} - x_k|| / upper_lr: in a
corner of a box x is at rest although f would still fall outside of it. (With ``upper_optimizer``
and a set this is the way that the optimizer went, per learning rate.)

Nothing is evaluated for this. What minibatches add to each direction does not fall with it, so that
under noise a run only comes to rest where ``tolerance`` is larger than the part of noise in the
first directions; otherwise ``steps`` or ``max_seconds`` ends it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel.methods import Info
from bilevel.run.solver import Solver
from bilevel.variables import local_part

WINDOW = 10
"""How many recorded steps the first and the last direction are taken from: enough for a median, and
for x to pass the minimum of a valley, where the direction is short for a step or two, unnoticed."""


class Convergence:
    """Follows the directions of a run, and says when they have become short.

    Args:
        solver: the run.
        tolerance: the part of the first direction that counts as rest; None: nothing is followed.
    """

    def __init__(self, solver: Solver, tolerance: float | None) -> None:
        self._solver = solver
        self._tolerance = tolerance
        self._bounded = any(p is not None for p in solver.problem.x_projections(solver.state.x))
        self._before: list[Tensor] = []
        self._unread: list[tuple[int, Any, Tensor, Tensor]] = []  # what self._read takes apart
        self._first: list[tuple[int, float]] = []  # step, length of the direction
        self._last: list[tuple[int, float]] = []

    def before(self) -> None:
        """Called before each recorded step."""
        if self._tolerance is not None and self._bounded:
            leaves = self._solver.state.x.leaves
            self._before = [local_part(leaf).detach().clone() for leaf in leaves]

    @torch.no_grad()
    def after(self, info: Info) -> None:
        """Called after each recorded step; what is measured stays on its device."""
        if self._tolerance is None or info.direction_norm is None:
            return
        norm = way = info.direction_norm.detach()
        if self._bounded:
            leaves = [local_part(leaf) for leaf in self._solver.state.x.leaves]
            moved = torch._foreach_sub(leaves, self._before)
            way = torch.stack([part.double() for part in torch._foreach_norm(moved)]).norm()
        self._unread.append((info.step, info.upper_lr, norm, way))

    def due(self, rows: int, *, last: bool) -> bool:
        """Whether to ask for :attr:`reached` when so many rows are recorded."""
        return self._tolerance is not None and (last or rows % WINDOW == 0)

    @property
    def reached(self) -> bool:
        """Whether the run has come to rest; the solver has settled."""
        if self._tolerance is None:
            return False
        self._read()
        if len(self._last) < WINDOW or self._first[-1][0] >= self._last[0][0]:
            return False
        at_first = [length for _, length in self._first if length > 0]
        longest = max(length for _, length in self._last)
        return bool(at_first) and longest <= self._tolerance * float(np.median(at_first))

    def _read(self) -> None:
        for step, rate, norm, way in self._unread:
            rests = not float(rate) > 0
            if rests and float(norm) > 0:
                continue  # whatever the direction, x was not to follow it
            length = float(way) / float(rate) if self._bounded and not rests else float(way)
            # a step may come again, after the run went back
            for kept in (self._first, self._last):
                kept[:] = [(k, before) for k, before in kept if k < step]
            if len(self._first) < WINDOW:
                self._first.append((step, length))
            self._last = [*self._last, (step, length)][-WINDOW:]
        self._unread = []

    def state_dict(self) -> dict[str, Any]:
        """What was followed so far."""
        self._read()
        return {"first": [list(pair) for pair in self._first], "last": [*map(list, self._last)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._unread = []
        self._first = [(int(k), float(length)) for k, length in state["first"]]
        self._last = [(int(k), float(length)) for k, length in state["last"]]
