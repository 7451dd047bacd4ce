"""Where y starts in each outer step of a run in episodes."""

from __future__ import annotations

from typing import Any

import torch

from bilevel.errors import ObjectiveError
from bilevel.methods import State
from bilevel.sampling import Episodes
from bilevel.variables import Variable


class Restart:
    """Puts every copy of y where a new lower level begins.

    Args:
        y: the lower variable at y0, which is kept.
        episodes: say where y starts.
    """

    def __init__(self, y: Variable, episodes: Episodes) -> None:
        self._start = y
        self._episodes = episodes

    def __call__(self, state: State) -> None:
        """Begin an outer step of the run."""
        start = self._episodes.start
        if start == "warm":
            return
        if callable(start):
            versions = [leaf._version for leaf in state.x.leaves]
            with torch.no_grad():
                given = start(state.x.value)
                if versions != [leaf._version for leaf in state.x.leaves]:
                    raise ObjectiveError(
                        "start(x) writes into x in place, and so moves it in every step; let it "
                        "return new tensors"
                    )
                tensors = self._start.tensors_like(given, "the result of start")
                torch._foreach_copy_(self._start.leaves, tensors)
        state.restart(self._start)

    def state_dict(self) -> dict[str, Any]:
        """Where y starts."""
        return self._start.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that over."""
        self._start.load_state_dict(state)
