"""Where y starts in each outer step of a run in episodes."""

from __future__ import annotations

from typing import Any

import torch

from bilevel.methods import State
from bilevel.sampling import EpisodicDraw
from bilevel.variables import Variable


class Restart:
    """Puts every copy of y where a new lower level begins.

    Args:
        y: the lower variable at y0, which is kept.
        draw: the episodes.
    """

    def __init__(self, y: Variable, draw: EpisodicDraw) -> None:
        self._start = y
        self._draw = draw

    def __call__(self, state: State) -> None:
        """Begin an outer step of the run."""
        function = self._draw.start
        if function is None and self._draw.episodes.start == "warm":
            return
        if function is not None:
            with torch.no_grad():
                given = function(state.x.value)
                tensors = self._start.tensors_like(given, "the result of start")
                torch._foreach_copy_(self._start.leaves, tensors)
        state.restart(self._start)

    def state_dict(self) -> dict[str, Any]:
        """Where y starts."""
        return self._start.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that over."""
        self._start.load_state_dict(state)
