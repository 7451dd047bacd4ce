"""What tells which iterate is better: f, or a metric of the user's own."""

from __future__ import annotations

import math
from typing import Any

from bilevel.errors import ArgumentError
from bilevel.methods import Info
from bilevel.run.solver import Solver

MODES = ("min", "max")
OF_INFO = ("upper", "lower", "gap", "direction_norm")


class Monitor:
    """A recorded number of which the smallest, or the largest, is the best.

    Args:
        solver: the run, which knows its metrics.
        name: of the number in the history.
        mode: "min" or "max".
        patience: after how many recorded steps without a better one the run ends; None: never.
    """

    def __init__(self, solver: Solver, name: str, mode: str, patience: int | None) -> None:
        known = [*OF_INFO, *solver.evaluator.metric_names]
        if solver.state.penalised is None:  # its gap is NaN, so that no step would be the best
            known.remove("gap")
        if name not in known:
            raise ArgumentError(
                f"monitor must be one of {', '.join(map(repr, known))}, not {name!r}; a metric is "
                f"what an objective returns beside its loss"
            )
        self._name = name
        self._sign = 1.0 if mode == "min" else -1.0
        self._patience = patience
        self._best = math.inf
        self._since = 0

    def value(self, info: Info) -> float:
        """What is to be small; infinite where it was not measured."""
        found = getattr(info, self._name) if self._name in OF_INFO else info.metrics[self._name]
        value = math.inf if found is None else self._sign * float(found)
        return math.inf if math.isnan(value) else value

    def after(self, info: Info) -> None:
        """Called after each recorded step, where there is a patience."""
        if self._patience is None:
            return
        value = self.value(info)
        self._since = 0 if value < self._best else self._since + 1
        self._best = min(self._best, value)

    @property
    def exhausted(self) -> bool:
        """Whether the patience is at its end."""
        return self._patience is not None and self._since >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """The best number, and the recorded steps since."""
        return {"best": self._best, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._best, self._since = state["best"], state["since"]
