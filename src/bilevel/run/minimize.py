"""minimize: the loop around a Solver, and its Result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from bilevel.engine.ranks import GroupChoice
from bilevel.errors import (
    ArgumentTypeError,
    CheckpointError,
    DivergenceError,
    MissingExtraError,
    RunError,
)
from bilevel.errors.checks import check_choice, check_count, check_flag
from bilevel.methods import Info, Method
from bilevel.problem import Problem
from bilevel.run.checkpoint import Folder, Interrupts
from bilevel.run.checkpoint.folder import CheckpointLike, checkpoint_of
from bilevel.run.checkpoint.settings import differences
from bilevel.run.divergence import REACTIONS, Guard, Reaction
from bilevel.run.solver import MISFITS, Solver, refuse_others
from bilevel.sampling import DirectionSize
from bilevel.variables.state import Stateful

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
    INTERRUPTED = "Ctrl-C or SIGTERM asked to stop"
    BROKEN = "an error ended the run"
    DIVERGED = "the run diverged"


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
        steps: how many outer steps were taken, those before a checkpoint included.
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
    checkpoint: CheckpointLike | None = None,
    on_divergence: Reaction = "warn",
    process_group: GroupChoice = "default",
) -> Result:
    """Solve min_x f(x, y*(x)), y*(x) = argmin_y g(x, y), in one call.

    Args:
        problem, x0, y0, method, upper_data, lower_data, batch_size, direction_batch_size,
            chunk_size, seed, compile, device: as :class:`bilevel.Solver` takes them.
        steps: K, how many outer steps to take.
        progress: show a bar with the losses and the multiplier (needs ``bilevel[cli]``).
        callback: called as ``callback(solver, info)`` at every recorded step; returning what is
            true ends the run. One with ``state_dict`` and ``load_state_dict`` is saved in
            checkpoints too.
        record_every: record every that many steps, and the last.
        select: which iterate to return. "last"; "best": with the lowest recorded f (on
            minibatches, a noisy choice); "random": x_R with R uniform over the steps taken, the
            iterate for which the paper's theorems are stated.
        checkpoint: a folder in which the run is saved every minute, at its start and at its end
            (needs ``bilevel[checkpoint]``), or a :class:`bilevel.Checkpoint`, which says how often.
            Called again with the same arguments, the run goes on from the newest file that is there
            and sound, and ends with the same bits as one that was never stopped; a run that is
            complete returns at once, and with more ``steps`` goes on, as does one that its callback
            ended. Files of another run are
            refused, see :meth:`bilevel.Solver.load`. If a file cannot be written later on (the disk
            is full, say), the run goes on after a :class:`bilevel.errors.CheckpointWarning`.
            With a checkpoint Ctrl-C or SIGTERM ends the run after the step that is being taken,
            with everything saved and the outcome INTERRUPTED; a second one ends it at once. (This
            is so in the main thread, where the program has no handlers of its own.)
        process_group: as :class:`bilevel.Solver` takes it. All ranks take the same number of steps
            and return the same result; the callback is called on each, and what ends the run on
            one ends it on all; they save together, into a folder that all of them can see.
        on_divergence: what to do where the recorded steps show that the run diverges, see
            :mod:`bilevel.run.divergence`. "warn": say what is wrong and what to change in a
            :class:`bilevel.errors.DivergenceWarning`, and go on, since signs can deceive; a run
            that ends like that has the outcome DIVERGED. "raise": the same as an error,
            :class:`bilevel.errors.DivergenceError`. "backtrack": go back to the last good state,
            which is kept for this, and halve the step that is to blame, or both where it cannot be
            told, with a warning each time, ten times at most; then raise.

    Returns:
        A :class:`Result`. A run that meets a non-finite number (unless it can backtrack), or whose
        data ends, raises an error that carries the result so far, see
        :class:`bilevel.errors.RunError`.

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
    check_choice("on_divergence", on_divergence, REACTIONS)
    check_flag("progress", progress)
    if callback is not None and not callable(callback):
        raise ArgumentTypeError(f"callback must be a function of (solver, info), not {callback!r}")
    choices = None if checkpoint is None else checkpoint_of(checkpoint)
    interrupts = Interrupts()
    with nullcontext() if choices is None else interrupts:
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
            process_group=process_group,
        )
        team = solver.team
        if team is not None:
            counts = {"steps": int(steps), "record_every": int(record_every), "select": select}
            also = {"checkpoint": choices is not None, "on_divergence": on_divergence}
            team.same(counts | also, differences)
        recorder = _Recorder(solver, steps, record_every)
        selector = SELECTORS[select](solver, seed)
        clock = _Clock()
        guard = Guard(solver, recorder, selector, on_divergence)
        keeper = None
        if choices is not None:
            parts: dict[str, Stateful] = {
                "recorder": recorder,
                "selector": selector,
                "clock": clock,
                "guard": guard,
            }
            if isinstance(callback, Stateful):
                parts["callback"] = callback
            keeper = _Keeper(Folder(choices, team=team), solver, parts)
            made = {"record_every": int(record_every), "select": select}
            keeper.begin(steps, made | {"on_divergence": on_divergence})
        guard.begin()
        meter = meter_of(steps) if progress and (team is None or team.rank == 0) else None
        outcome = Outcome.COMPLETED

        def agreed(*wishes: bool) -> list[bool]:
            """What any rank wants; without callback and checkpoint nobody can want anything."""
            idle = team is None or (callback is None and choices is None)
            return list(wishes) if idle or team is None else team.any(*wishes)

        def result() -> Result:
            x, y, selected = selector.point()
            return Result(x, y, recorder.history(), solver.k, clock.seconds, outcome, selected)

        @contextmanager
        def telling() -> Iterator[None]:
            """For steps: one that breaks hands over the run up to there, unless it is undone."""
            nonlocal outcome
            try:
                yield
            except RunError as error:
                if guard.broke(error):
                    return
                diverged = isinstance(error, DivergenceError)
                outcome = Outcome.DIVERGED if diverged else Outcome.BROKEN
                error.result = result()
                raise

        [asked] = agreed(interrupts.asked)
        alone = solver.undisturbed() if callback is None else nullcontext()
        with meter or nullcontext(), alone:
            while (k := solver.k) < steps and not asked:
                last = k == steps - 1  # which is saved below
                recorded = k % record_every == 0 or last
                selector.before(recorded)
                due = False
                with telling():
                    info = solver.step(measure=recorded)
                    due = keeper is not None and not last and keeper.folder.due(k + 1)
                    look = recorded and guard.due(recorder.rows + 1, last=last)
                    if last or callback is not None or due or look or not selector.patient:
                        solver.settle()
                    selector.after(info)
                    if recorded:
                        recorder.add(info, clock.seconds)
                    if look:
                        guard.look()
                if solver.k <= k:  # it was taken back
                    continue
                stop = False
                if recorded:
                    if meter is not None:
                        meter.show(info)
                    stop = callback is not None and bool(callback(solver, info))
                due, stop, asked = agreed(due, stop, interrupts.asked)
                if stop:
                    outcome = Outcome.STOPPED
                    break
                if due and keeper is not None:
                    with telling():
                        solver.settle()
                    keeper.save()
            with telling():
                solver.settle()
            if keeper is not None:
                keeper.save()
        if guard.diverged and outcome is Outcome.COMPLETED:
            outcome = Outcome.DIVERGED
        if asked or (team is None and interrupts.asked):
            outcome = Outcome.INTERRUPTED
        return result()


class _Clock:
    """The seconds of a run, those before a checkpoint included."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = time.perf_counter() - state["seconds"]


class _Keeper:
    """Saves a run to its folder, and brings it to where the newest file there was saved."""

    def __init__(self, folder: Folder, solver: Solver, parts: Mapping[str, Stateful]) -> None:
        self.folder = folder
        self._solver = solver
        self._parts = parts
        self._settings: dict[str, Any] = {}

    def begin(self, steps: int, settings: dict[str, Any]) -> None:
        """Go on from the newest file; where there is none, write the first."""
        self._settings = settings
        newest = self.folder.newest()
        if newest is None:
            self.folder.save(0, self._content)  # what cannot be saved should not be begun
            return
        path, content = newest
        if "run" not in content:
            raise CheckpointError(path, "it was written by Solver.save, not by minimize")
        try:
            refuse_others(path, content["run"]["settings"], settings)
            self._solver.restore(path, content)
            if self._solver.k > steps:
                raise CheckpointError(
                    path, f"{self._solver.k} steps were taken, which is more than steps={steps}"
                )
            for name, part in self._parts.items():
                part.load_state_dict(content["run"][name])
        except CheckpointError:
            raise
        except MISFITS as error:
            raise CheckpointError(
                path, f"its run does not fit this one ({type(error).__name__}: {error})"
            ) from error

    def save(self) -> None:
        """Write a file for the steps taken so far, if that can be done."""
        self.folder.try_to_save(self._solver.k, self._content)

    def _content(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return {**self._solver.snapshot(), "run": {"settings": self._settings, **parts}}


class _Recorder:
    """The history of a run, kept on its device in arrays of fixed size."""

    def __init__(self, solver: Solver, steps: int, every: int) -> None:
        self._solver = solver
        self._steps = steps
        self._every = every
        rows = -(-steps // every) + 1
        device = solver.state.x.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._measured = torch.empty((rows, len(MEASURED)), dtype=dtype, device=device)
        self._told = np.empty((rows, 2 + len(TOLD)))
        self._rows = 0

    @property
    def rows(self) -> int:
        """How many steps were recorded."""
        return self._rows

    def forget(self, rows: int) -> None:
        """Keep only the first rows."""
        self._rows = rows

    def add(self, info: Info, seconds: float) -> None:
        row = torch.stack([getattr(info, name).detach() for name in MEASURED])
        self._measured[self._rows] = row
        told = [getattr(info, name) for name in TOLD]
        self._told[self._rows] = info.step, seconds, *told
        self._rows += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "measured": self._measured[: self._rows].clone(),
            "told": torch.from_numpy(self._told[: self._rows].copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        steps = state["told"][:, 0]
        # the last step of a run that was to be shorter is none that this one records
        kept = (steps % self._every == 0) | (steps == self._steps - 1)
        self._rows = int(kept.sum())
        self._measured[: self._rows] = state["measured"][kept].to(self._measured)
        self._told[: self._rows] = state["told"][kept].numpy()

    def history(self) -> History:
        """All columns."""
        return self.block(0)

    def block(self, first: int) -> History:
        """The columns from that row on."""
        told = self._told[first : self._rows]
        told = told[told[:, 0] < self._solver.k]  # a step may turn out later to be broken
        measured = self._measured[first : first + len(told)].cpu().numpy()
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

    def state_dict(self) -> dict[str, Any]:
        """What the choice so far depends on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


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

    def state_dict(self) -> dict[str, Any]:
        return {"x": self._x.state_dict(), "y": self._y.state_dict(), "k": self._k}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._x.load_state_dict(state["x"])
        self._y.load_state_dict(state["y"])
        self._k = state["k"]


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

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"choice": self._choice.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._choice.bit_generator.state = state["choice"]


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

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"lowest": self._lowest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._lowest = state["lowest"]


SELECTORS: dict[str, type[_Last]] = {"last": _Last, "best": _Best, "random": _Random}


def meter_of(steps: int) -> Any:
    """A bar for that many steps."""
    try:
        from bilevel.run.progress import Meter
    except ImportError:
        raise MissingExtraError("rich", "cli") from None
    return Meter(steps)
