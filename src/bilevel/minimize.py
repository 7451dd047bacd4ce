"""minimize: the loop around a Solver, and its Result."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from bilevel.checks import check_choice, check_count
from bilevel.errors import ArgumentTypeError, MissingExtraError, RunError
from bilevel.methods import Info, Method
from bilevel.problem import Problem
from bilevel.solver import Solver
from bilevel.streams import DirectionSize

if TYPE_CHECKING:
    import pandas as pd

Callback: TypeAlias = Callable[[Solver, Info], bool | None]
"""Called as ``callback(solver, info)`` at every recorded step; True ends the run."""

History: TypeAlias = dict[str, npt.NDArray[Any]]

MEASURED = ("upper", "lower", "gap", "direction_norm")
TOLD = ("multiplier", "lower_lr", "upper_lr")


class Outcome(Enum):
    """How a run ended; the values are the messages."""

    COMPLETED = "all steps were taken"
    STOPPED = "the callback asked to stop"
    BROKEN = "an error ended the run"


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """What a run found.

    Attributes:
        x: the upper variable, in the structure of x0.
        y: the copy of the lower variable that solves the lower level, in the structure of y0; for
            the last iterate x_K it was fitted at x_{K-1}.
        history: arrays of one length, one entry per recorded step: "step", "seconds", "upper",
            "lower", "gap", "multiplier", "direction_norm", "lower_lr", "upper_lr"; see
            :class:`bilevel.methods.Info`.
        steps: how many outer steps were taken.
        seconds: how long they took.
        outcome: how the run ended.
        selected_step: k of the returned point x_k; equals ``steps`` for the last iterate.
    """

    x: Any
    y: Any
    history: History
    steps: int
    seconds: float
    outcome: Outcome
    selected_step: int

    def __repr__(self) -> str:
        return (
            f"Result(outcome={self.outcome.name}, steps={self.steps}, "
            f"seconds={self.seconds:.3g}, recorded={len(self.history['step'])})"
        )

    def to_frame(self) -> pd.DataFrame:
        """The history as a pandas DataFrame."""
        try:
            import pandas as pd
        except ImportError:
            raise MissingExtraError("pandas", "pandas") from None
        return pd.DataFrame(self.history)


def minimize(
    problem: Problem,
    x0: Any,
    y0: Any,
    *,
    method: str | Method[Any] = "f2sa",
    steps: int = 1000,
    upper_data: Any = None,
    lower_data: Any = None,
    batch_size: int | None = None,
    direction_batch_size: DirectionSize = None,
    chunk_size: int | None = None,
    seed: int = 0,
    compile: bool = False,
    device: torch.device | str | None = None,
    progress: bool = False,
    callback: Callback | None = None,
    record_every: int = 1,
    select: Literal["last", "best", "random"] = "last",
) -> Result:
    """Solve min_x f(x, y*(x)), y*(x) = argmin_y g(x, y), in one call.

    Args:
        problem, x0, y0, method, upper_data, lower_data, batch_size, direction_batch_size,
            chunk_size, seed, compile, device: as :class:`bilevel.Solver` takes them.
        steps: K, how many outer steps to take.
        progress: show a bar with the losses and the multiplier (needs ``bilevel[cli]``).
        callback: called as ``callback(solver, info)`` at every recorded step; returning True ends
            the run.
        record_every: record every that many steps, and the last.
        select: which iterate to return. "last"; "best": with the lowest recorded f (on
            minibatches, a noisy choice); "random": x_R with R uniform over the steps taken, the
            iterate for which the paper's theorems are stated.

    Returns:
        A :class:`Result`. A run that meets a non-finite number, or whose data ends, raises an
        error that carries the result so far, see :class:`bilevel.errors.RunError`.

    Example:
        >>> import torch, bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, steps=200)
        >>> result.outcome.name, result.steps, result.history["upper"].shape
        ('COMPLETED', 200, (200,))
    """
    check_count("steps", steps, least=0)
    check_count("record_every", record_every)
    check_choice("select", select, SELECTORS)
    if callback is not None and not callable(callback):
        raise ArgumentTypeError(f"callback must be a function of (solver, info), not {callback!r}")
    solver = Solver(
        problem,
        method,
        x0,
        y0,
        upper_data=upper_data,
        lower_data=lower_data,
        batch_size=batch_size,
        direction_batch_size=direction_batch_size,
        chunk_size=chunk_size,
        seed=seed,
        compile=compile,
        device=device,
    )
    recorder = _Recorder(solver, steps, record_every)
    selector = SELECTORS[select](solver, seed)
    meter = meter_of(steps) if progress else None
    outcome = Outcome.COMPLETED
    start = time.perf_counter()

    def result() -> Result:
        x, y, selected = selector.point()
        seconds = time.perf_counter() - start
        return Result(x, y, recorder.history(), solver.k, seconds, outcome, selected)

    with meter or nullcontext():
        for k in range(steps):
            recorded = k % record_every == 0 or k == steps - 1
            selector.before(recorded)
            try:
                info = solver.step(measure=recorded)
                if k == steps - 1 or callback is not None or not selector.patient:
                    solver.settle()
            except RunError as error:
                outcome = Outcome.BROKEN
                error.result = result()
                raise
            selector.after(info)
            if not recorded:
                continue
            recorder.add(info, time.perf_counter() - start)
            if meter is not None:
                meter.show(info)
            if callback is not None and callback(solver, info):
                outcome = Outcome.STOPPED
                break
    return result()


class _Recorder:
    """The history of a run, kept on its device in arrays of fixed size."""

    def __init__(self, solver: Solver, steps: int, every: int) -> None:
        self._solver = solver
        rows = -(-steps // every) + 1
        device = solver.state.x.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._measured = torch.empty((rows, len(MEASURED)), dtype=dtype, device=device)
        self._told = np.empty((rows, 2 + len(TOLD)))
        self._rows = 0

    def add(self, info: Info, seconds: float) -> None:
        row = torch.stack([getattr(info, name).detach() for name in MEASURED])
        self._measured[self._rows] = row
        told = [getattr(info, name) for name in TOLD]
        self._told[self._rows] = info.step, seconds, *told
        self._rows += 1

    def history(self) -> History:
        told = self._told[: self._rows]
        told = told[told[:, 0] < self._solver.k]  # a step may turn out later to be broken
        measured = self._measured[: len(told)].cpu().numpy()
        return {
            "step": told[:, 0].astype(np.int64),
            "seconds": told[:, 1].copy(),
            **{name: measured[:, i].copy() for i, name in enumerate(MEASURED)},
            **{name: told[:, 2 + i].copy() for i, name in enumerate(TOLD)},
        }


class _Last:
    """Return the last iterate.

    Attributes:
        patient: whether it may be told of a step that is not known yet to be sound.
    """

    patient = True

    def __init__(self, solver: Solver, seed: int) -> None:
        self.solver = solver

    def before(self, recorded: bool) -> None:
        """Called before each step: x is x_k."""

    def after(self, info: Info) -> None:
        """Called after each step: the lower solution belongs to x_k."""

    def point(self) -> tuple[Any, Any, int]:
        """x, y and the k of x."""
        return self.solver.x, self.solver.y, self.solver.k


class _Kept(_Last):
    """Return a kept pair (x_k, z_{k+1}): z_{k+1} is the lower solution that belongs to x_k."""

    patient = False

    def __init__(self, solver: Solver, seed: int) -> None:
        super().__init__(solver, seed)
        self._x = solver.state.x.clone()
        self._y = solver.state.solution.clone()
        self._k: int | None = None

    def _keep_y(self) -> None:
        self._y.assign(self.solver.state.solution)

    def point(self) -> tuple[Any, Any, int]:
        if self._k is None:
            return super().point()
        return self._x.detached(), self._y.detached(), self._k


class _Random(_Kept):
    """x_R with R uniform over the steps taken, however many these turn out to be."""

    def __init__(self, solver: Solver, seed: int) -> None:
        super().__init__(solver, seed)
        self._candidate = solver.state.x.clone()
        self._choice = np.random.default_rng([seed, 1])
        self._chosen = False

    def before(self, recorded: bool) -> None:
        k = self.solver.k
        self._chosen = bool(self._choice.integers(k + 1) == 0)
        if self._chosen:
            self._candidate.assign(self.solver.state.x)

    def after(self, info: Info) -> None:
        if self._chosen:  # only now: a step that breaks must not leave half a pair
            self._x.assign(self._candidate)
            self._keep_y()
            self._k = info.step


class _Best(_Kept):
    """The recorded iterate with the lowest f at its lower solution."""

    def __init__(self, solver: Solver, seed: int) -> None:
        super().__init__(solver, seed)
        self._candidate = solver.state.x.clone()
        self._lowest = float("inf")

    def before(self, recorded: bool) -> None:
        if recorded:
            self._candidate.assign(self.solver.state.x)

    def after(self, info: Info) -> None:
        if info.upper is None:
            return
        value = float(info.upper)
        if value < self._lowest:
            self._lowest = value
            self._x.assign(self._candidate)
            self._keep_y()
            self._k = info.step


SELECTORS: dict[str, type[_Last]] = {"last": _Last, "best": _Best, "random": _Random}


def meter_of(steps: int) -> Any:
    """A bar for that many steps."""
    try:
        from bilevel.progress import Meter
    except ImportError:
        raise MissingExtraError("rich", "cli") from None
    return Meter(steps)
