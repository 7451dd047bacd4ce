"""Which iterate a run returns: the last, the best, or one chosen at random."""

from __future__ import annotations

from typing import Any

import numpy as np

from bilevel.errors import StateError
from bilevel.methods import Info
from bilevel.run.monitor import Monitor
from bilevel.run.solver import Point, Solver
from bilevel.variables import Form
from bilevel.variables.forms import maybe, real, record, whole


class Last:
    """Return the last iterate.

    Attributes:
        accepts_unsettled: whether :meth:`after` may be called with a step that may still turn out
            to be broken.
    """

    accepts_unsettled = True

    def __init__(self, solver: Solver, seed: int, monitor: Monitor) -> None:
        self.solver = solver
        self.monitor = monitor

    def before(self, recorded: bool) -> None:
        """Called before each step: x is x_k."""

    def after(self, info: Info) -> None:
        """Called after each step: the lower solution belongs to x_k."""

    def point(self, *, sound: bool) -> Point:
        """What is returned; not ``sound``: an error ended the run."""
        solver = self.solver
        return solver.final_point() if sound else Point(solver.x, solver.y, solver.k)

    def state_dict(self) -> dict[str, Any]:
        """What the choice so far depends on."""
        return {}

    def state_form(self) -> Form:
        """What a saved choice must look like."""
        return record(self._fields())

    def _fields(self) -> dict[str, Form]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class Kept(Last):
    """Return a kept pair (x_k, z_{k+1}): z_{k+1} is the lower solution that belongs to x_k.

    x_k is a candidate from before the step on; the pair is kept only when the step has succeeded.
    """

    accepts_unsettled = False

    def __init__(self, solver: Solver, seed: int, monitor: Monitor) -> None:
        super().__init__(solver, seed, monitor)
        self._x = solver.state.x.clone()
        self._y = solver.state.solution.clone()
        self._candidate = solver.state.x.clone()
        self._k: int | None = None

    def _keep(self, k: int) -> None:
        self._x.assign(self._candidate)
        self._y.assign(self.solver.state.solution)
        self._k = k

    def point(self, *, sound: bool) -> Point:
        if self._k is None:
            return super().point(sound=sound)
        return Point(self._x.detached(), self._y.detached(), self._k)

    def state_dict(self) -> dict[str, Any]:
        return {"x": self._x.state_dict(), "y": self._y.state_dict(), "k": self._k}

    def _fields(self) -> dict[str, Form]:
        points = {"x": self._x.state_form(), "y": self._y.state_form()}
        return points | {"k": maybe(whole())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._x.load_state_dict(state["x"])
        self._y.load_state_dict(state["y"])
        self._k = state["k"]


class Random(Kept):
    """x_R with R uniform over the steps taken, however many these turn out to be.

    Step k takes the place of the one chosen before with probability 1/(k + 1).
    """

    def __init__(self, solver: Solver, seed: int, monitor: Monitor) -> None:
        super().__init__(solver, seed, monitor)
        self._generator = np.random.default_rng([seed, 1])
        self._chosen = False

    def before(self, recorded: bool) -> None:
        self._chosen = bool(self._generator.integers(self.solver.k + 1) == 0)
        if self._chosen:
            self._candidate.assign(self.solver.state.x)

    def after(self, info: Info) -> None:
        if self._chosen:
            self._keep(info.step)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"choice": self._generator.bit_generator.state}

    def _fields(self) -> dict[str, Form]:
        return super()._fields() | {"choice": _fits_a_generator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._generator.bit_generator.state = state["choice"]


class Best(Kept):
    """The recorded iterate with the best number at its lower solution, by default the lowest f."""

    def __init__(self, solver: Solver, seed: int, monitor: Monitor) -> None:
        super().__init__(solver, seed, monitor)
        self._lowest = float("inf")

    def before(self, recorded: bool) -> None:
        if recorded:
            self._candidate.assign(self.solver.state.x)

    def after(self, info: Info) -> None:
        value = float("inf") if info.upper is None else self.monitor.value(info)
        if value < self._lowest:
            self._lowest = value
            self._keep(info.step)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"lowest": self._lowest}

    def _fields(self) -> dict[str, Form]:
        return super()._fields() | {"lowest": real(nan=True, infinite=True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._lowest = state["lowest"]


def _fits_a_generator(value: Any, path: str) -> None:
    """Only NumPy knows what the state of its generator must look like."""
    try:
        np.random.default_rng().bit_generator.state = value
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise StateError(f"the saved {path} is no state of a random generator: {error}") from error


SELECTORS: dict[str, type[Last]] = {"last": Last, "best": Best, "random": Random}
