"""minimize: the loop around a Solver."""

from __future__ import annotations

import reprlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from bilevel.engine import LossScale
from bilevel.engine.ranks import GroupChoice
from bilevel.errors import (
    ArgumentTypeError,
    DistributedError,
    DivergenceError,
    NonFiniteError,
    NotConvergedWarning,
    RunError,
    WorsenedWarning,
    warn,
)
from bilevel.errors.checks import (
    check_choice,
    check_count,
    check_flag,
    check_function,
    checked_number,
)
from bilevel.errors.extras import needed
from bilevel.methods import Info, Method
from bilevel.problem import Problem
from bilevel.run.advice import Source, choices_of
from bilevel.run.checkpoint import Folder, Interrupts
from bilevel.run.checkpoint.folder import Checkpoint, CheckpointLike, checkpoint_of
from bilevel.run.checkpoint.settings import differences
from bilevel.run.convergence import Convergence
from bilevel.run.divergence import REACTIONS, Guard, Reaction
from bilevel.run.history import Recorder, add_direction_samples
from bilevel.run.monitor import MODES, Monitor
from bilevel.run.outcome import Outcome, Result
from bilevel.run.precision import warn_if_stalled
from bilevel.run.resuming import Clock, SavedRun
from bilevel.run.selection import SELECTORS
from bilevel.run.solver import Point, Solver
from bilevel.run.worsening import Worsening, rise_between, worsening
from bilevel.sampling import DirectionSize, Episodes
from bilevel.variables import Stateful, local_part

Callback: TypeAlias = Callable[[Solver, Info], bool | None]
"""Called as ``callback(solver, info)`` at every recorded step; True ends the run."""


def minimize(
    problem: Problem,
    x0: Any,
    y0: Any,
    *,
    method: str | Method[Any] = "f2sa",
    steps: int = 1000,
    tolerance: float | None = None,
    max_seconds: float | None = None,
    upper_data: Any = None,
    lower_data: Any = None,
    data: Episodes | None = None,
    batch_size: int | None = None,
    direction_batch_size: DirectionSize = None,
    seed: int = 0,
    compile: bool = False,
    accumulate: bool | torch.dtype = False,
    loss_scale: LossScale | None = None,
    chunk_size: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
    callback: Callback | None = None,
    record_every: int = 1,
    select: Literal["last", "best", "random"] = "last",
    monitor: str = "upper",
    monitor_mode: Literal["min", "max"] = "min",
    patience: int | None = None,
    checkpoint: CheckpointLike | None = None,
    on_divergence: Reaction | None = None,
    process_group: GroupChoice = "default",
) -> Result:
    """Solve min_x f(x, y*(x)), y*(x) = argmin_y g(x, y), in one call.

    Args:
        problem, x0, y0, ...: what is not named below is as :class:`bilevel.Solver` takes it.
        steps: K, how many outer steps to take at most.
        tolerance, max_seconds, patience: end the run with the outcome CONVERGED, when x's direction
            stayed below this part of what it was at first (:mod:`bilevel.run.convergence`);
            OUT_OF_TIME, after so many seconds, those before a checkpoint included; OUT_OF_PATIENCE,
            after so many recorded steps without a better ``monitor``.
        progress, record_every: show a bar (needs ``bilevel[cli]``); record every so many steps.
        callback: called as ``callback(solver, info)`` at every recorded step; returning what is
            true ends the run. One with ``state_dict`` and ``load_state_dict`` is saved with it.
        select: which iterate to return: "last"; "best" by ``monitor``; "random": x_R with R uniform
            over the steps taken, for which the paper's theorems are stated.
        monitor, monitor_mode: the recorded number that tells which iterate is best, "upper", which
            is f, or a metric such as "upper/accuracy"; and whether "min" or "max" is the best.
        checkpoint: a folder, or a :class:`bilevel.Checkpoint`: the run is saved there, the same
            call goes on from there with the same bits, and Ctrl-C ends it after a whole step.
        on_divergence: "warn", "raise", "backtrack" or None (:mod:`bilevel.run.divergence`).

    Returns:
        A :class:`Result`. If a number is not finite and the run cannot go back, or the data ends, a
        :class:`bilevel.errors.RunError` carries the result so far. The outcome of a run that ends
        with f clearly above its start or its best is WORSENED (:mod:`bilevel.run.worsening`).

    Example:
        >>> import bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, steps=50)
        >>> result.outcome.name, result.steps, result.history["upper"].shape
        ('COMPLETED', 50, (50,))
    """
    interrupts, saved = Interrupts(), None if checkpoint is None else checkpoint_of(checkpoint)
    options = Options(
        steps, tolerance, max_seconds, record_every, select, monitor, monitor_mode, patience,
        on_divergence, progress, callback, saved,
    )  # fmt: skip
    with nullcontext() if checkpoint is None else interrupts:
        solver = Solver(
            problem, x0, y0, method=method, upper_data=upper_data, lower_data=lower_data,
            data=data, batch_size=batch_size, direction_batch_size=direction_batch_size,
            seed=seed, device=device, compile=compile, accumulate=accumulate,
            loss_scale=loss_scale, chunk_size=chunk_size, process_group=process_group,
        )  # fmt: skip
        if solver.ranks is not None:
            solver.ranks.require_same(options.shared(), differences)
        folder = None if saved is None else Folder(saved, ranks=solver.ranks)
        with folder.locked() if folder else nullcontext():
            return _Loop(solver, options, seed, interrupts, folder).run()


@dataclass(frozen=True)
class Options:
    """What :func:`minimize` takes and :class:`Solver` does not."""

    steps: int
    tolerance: float | None
    max_seconds: float | None
    record_every: int
    select: str
    monitor: str
    monitor_mode: str
    patience: int | None
    on_divergence: Reaction | None
    progress: bool
    callback: Callback | None
    checkpoint: Checkpoint | None

    def __post_init__(self) -> None:
        check_count("steps", self.steps, least=0)
        if self.tolerance is not None:
            checked_number("tolerance", self.tolerance, above=True)
        if self.max_seconds is not None:
            checked_number("max_seconds", self.max_seconds, above=True)
        check_count("record_every", self.record_every)
        check_choice("select", self.select, SELECTORS)
        check_choice("monitor_mode", self.monitor_mode, MODES)
        if self.patience is not None:
            check_count("patience", self.patience)
        if self.on_divergence is not None:
            check_choice("on_divergence", self.on_divergence, REACTIONS)
        check_flag("progress", self.progress)
        if self.callback is not None:
            check_function("callback", self.callback, "solver", "info")

    def shared(self) -> dict[str, Any]:
        """What may not differ between ranks."""
        return self.described() | {
            "steps": int(self.steps),
            "tolerance": self.tolerance,
            "max_seconds": self.max_seconds,
            "patience": self.patience,
            "checkpoint": self.checkpoint is not None,
        }

    def described(self) -> dict[str, Any]:
        """What may not differ between a checkpoint and the run that goes on from it.

        What ends a run may: steps, tolerance, max_seconds, patience.
        """
        return {
            "record_every": int(self.record_every),
            "select": self.select,
            "monitor": self.monitor,
            "monitor_mode": self.monitor_mode,
            "on_divergence": self.on_divergence,
        }


class _Loop:
    """Takes the steps of a run and does what is due between them: record, inspect, save, stop."""

    def __init__(
        self,
        solver: Solver,
        options: Options,
        seed: int,
        interrupts: Interrupts,
        folder: Folder | None,
    ) -> None:
        self._solver = solver
        self._options = options
        self._interrupts = interrupts
        self._stopped = self._interrupted = self._converged = self._late = self._impatient = False
        called = options.callback is not None
        # one rank alone may have a callback, such as a logger
        self._called = called if solver.ranks is None else solver.ranks.any(called)[0]
        self._recorder = Recorder(
            options.steps,
            options.record_every,
            solver.state.x.device,
            metrics=solver.evaluator.metric_names,
        )
        self._monitor = Monitor(solver, options.monitor, options.monitor_mode, options.patience)
        self._selector = SELECTORS[options.select](solver, seed, self._monitor)
        self._clock = Clock()
        self._guard = Guard(solver, self._recorder, self._selector, options.on_divergence)
        self._convergence = Convergence(solver, options.tolerance)
        self._saved = None if folder is None else self._resumed(folder)
        self._guard.begin()
        first = solver.ranks is None or solver.ranks.rank == 0
        self._meter = meter_of(options.steps) if options.progress and first else None

    def _resumed(self, folder: Folder) -> SavedRun:
        """The checkpoints of the run, which is brought to where the newest was saved."""
        options = self._options
        parts: dict[str, Stateful] = {
            "recorder": self._recorder,
            "selector": self._selector,
            "monitor": self._monitor,
            "clock": self._clock,
            "guard": self._guard,
            "convergence": self._convergence,
        }
        if isinstance(options.callback, Stateful):
            parts["callback"] = options.callback
        saved = SavedRun(folder, self._solver, parts, options.described())
        saved.begin(options.steps)
        return saved

    def run(self) -> Result:
        """All steps, or as many as are wanted."""
        with (
            self._meter or nullcontext(),
            nullcontext() if self._called else self._solver.assume_unchanged(),
        ):
            self._begin()
            while self._solver.k < self._options.steps and not self._ended:
                self._advance()
            with self._errors_with_result():
                self._solver.settle()
                self._require_sound_variables()
            if self._saved is not None:
                self._saved.save()
        point = self._selector.point(sound=True)
        result = self._result(self._outcome(point), point)
        warn_if_stalled(self._solver, result.history)
        return result

    def _begin(self) -> None:
        """See whether a run that goes on from a checkpoint has anything left to do."""
        k, asked = self._solver.k, self._interrupts.asked
        judged = self._convergence.due(self._recorder.rows, last=k >= self._options.steps)
        late, moving = k > 0 and self._out_of_time, not (judged and self._convergence.reached)
        self._interrupted, self._late, moving = self._on_any_rank(asked, late, moving)
        self._impatient = self._monitor.exhausted
        self._converged = not moving

    @property
    def _ended(self) -> bool:
        """Whether anything but the number of steps ended the run."""
        return any((self._stopped, self._interrupted, self._converged, self._late, self._impatient))

    @property
    def _out_of_time(self) -> bool:
        most = self._options.max_seconds
        return most is not None and self._clock.seconds >= most

    def _advance(self) -> None:
        """One step, and what is due after it."""
        solver, k = self._solver, self._solver.k
        last = k == self._options.steps - 1
        recorded = self._recorder.due(k)
        due, moving = False, True
        self._selector.before(recorded)
        if recorded:
            self._convergence.before()
        with self._errors_with_result():
            info = solver.step(measure=recorded)
            # The last step is saved when the loop has ended.
            due = self._saved is not None and not last and self._saved.folder.due(k + 1)
            inspected = recorded and self._guard.due(self._recorder.rows + 1, last=last)
            judged = recorded and self._convergence.due(self._recorder.rows + 1, last=last)
            known = self._selector.accepts_unsettled and not self._called
            if last or due or inspected or judged or not known:
                solver.settle()
            if last:
                self._require_sound_variables()
            self._selector.after(info)
            if recorded:
                self._recorder.add(info, self._clock.seconds)
                self._convergence.after(info)
                self._monitor.after(info)
            if solver.state.policy.returned:
                self._recorder.take_back(solver.state.policy.step_of(solver.state))
            if inspected:
                self._guard.look()
            if judged:
                moving = not self._convergence.reached
        if solver.k <= k:  # the guard went back to an earlier state
            return
        if recorded and self._meter is not None:
            self._meter.show(info)
        stop, error = self._called_back(info) if recorded else (False, None)
        asked, late, failed = self._interrupts.asked, self._out_of_time, error is not None
        due, self._stopped, self._interrupted, self._late, moving, failed = self._on_any_rank(
            due, stop, asked, late, moving, failed
        )
        if error is not None:
            raise error
        if failed:
            raise DistributedError(f"the callback raised on another rank after step {k}")
        self._converged = not moving
        self._impatient = self._monitor.exhausted  # of means over ranks, so that all agree
        if due and not self._stopped and self._saved is not None:
            with self._errors_with_result():
                solver.settle()
                self._require_sound_variables()
            self._saved.save()

    def _require_sound_variables(self) -> None:
        """Raise for an x that is not finite, or for variables that the ranks do not share.

        An optimizer may have made such an x of finite gradients, which only the next step would
        see; nothing would see the second.
        """
        solver = self._solver
        x, ranks = solver.state.x, solver.ranks
        if not solver.state.x_update.plain:
            bad = not all(bool(torch.isfinite(local_part(leaf)).all()) for leaf in x.leaves)
            if bad if ranks is None else ranks.any(bad)[0]:
                raise NonFiniteError(solver.k - 1, "x as its optimizer left it", kept=False)
        if ranks is not None:
            ranks.require_same_leaves(solver.state.variables())

    def _called_back(self, info: Info) -> tuple[bool, Exception | None]:
        """Whether the callback ends the run, and what it raised, which all ranks must know."""
        callback = self._options.callback
        if callback is None:
            return False, None
        try:
            return _is_true(callback(self._solver, info)), None
        except Exception as error:  # raised again once the other ranks know of it
            return False, error

    def _on_any_rank(self, *flags: bool) -> list[bool]:
        """For each flag whether it is set on any rank."""
        ranks, options = self._solver.ranks, self._options
        # Without one of these all ranks have the same flags, and no message is needed.
        own = (options.checkpoint, options.max_seconds, options.tolerance)
        if ranks is None or not (self._called or any(option is not None for option in own)):
            return list(flags)
        return ranks.any(*flags)

    @contextmanager
    def _errors_with_result(self) -> Iterator[None]:
        """Add the result so far to what a step raises, unless the guard undoes the step."""
        try:
            yield
        except RunError as error:
            if self._guard.undo(error):
                return
            diverged = isinstance(error, DivergenceError)
            outcome = Outcome.DIVERGED if diverged else Outcome.BROKEN
            error.result = self._result(outcome, self._selector.point(sound=False))
            raise

    def _outcome(self, point: Point) -> Outcome:
        """How a run ended that no error ended."""
        alone = self._solver.ranks is None
        if self._interrupted or (alone and self._interrupts.asked):
            return Outcome.INTERRUPTED
        worse = self._warn_if_worse(point)
        if self._stopped:
            return Outcome.STOPPED
        if self._guard.diverged:
            return Outcome.DIVERGED
        if worse:
            return Outcome.WORSENED
        if self._converged:
            return Outcome.CONVERGED
        early = self._solver.k < self._options.steps
        if self._impatient and early:
            return Outcome.OUT_OF_PATIENCE
        return Outcome.OUT_OF_TIME if self._late and early else Outcome.COMPLETED

    def _warn_if_worse(self, point: Point) -> bool:
        """Whether f ended clearly above its start or its best, which is told unless that is known.

        Where F at the start and at the end was compared, the history says no more about the start.
        It is known where the run was told to diverge, and it does no harm where the best is what
        is returned.
        """
        choices = choices_of(self._solver)
        if not point.moved:
            self._warn_if_unsettled(choices.against_resting)
            return False

        def worsened_by(k: int) -> Worsening | None:
            history = self._recorder.standing(k)
            return worsening(history, by_optimizer=choices.upper is Source.OPTIMIZER)

        found = worsened_by(self._solver.k)
        if found is not None and not self._guard.diverged:
            final = point if self._options.select == "last" else self._solver.final_point()
            found = worsened_by(final.k)  # the last steps may have failed their test
        if point.compared is not None and (found is None or found.since == "start"):
            found = rise_between(*point.compared)
        if found is None or self._guard.diverged:
            return False
        if self._options.select != "best":
            warn(
                WorsenedWarning(
                    f"{found}. select='best' returns the x with the lowest f that was recorded. "
                    f"What may help besides: {choices.against_rising}"
                )
            )
        return True

    def _warn_if_unsettled(self, advice: str) -> None:
        """Tell that x never moved, if it had somewhere to go."""
        steps, history = self._solver.k, self._recorder.history(self._solver.k)
        if history["direction_norm"][-1] > 0:
            warn(
                NotConvergedWarning(
                    f"x hardly moved in {steps} steps: 'auto' moves it once y is near the lower "
                    f"solution, and y was not. What may help: {advice}"
                )
            )

    def _result(self, outcome: Outcome, point: Point) -> Result:
        steps, seconds = self._solver.k, self._clock.seconds
        history = self._recorder.history(steps)
        add_direction_samples(history, self._solver.draw)
        return Result(point.x, point.y, history, steps, seconds, outcome, point.k)


def _is_true(answer: Any) -> bool:
    """What a callback returned, as whether the run is to end."""
    try:
        if isinstance(answer, Awaitable):  # of an async function that has not even begun
            raise TypeError("nothing here awaits it")
        return bool(answer)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"callback must return True to end the run, or None, not {reprlib.repr(answer)}"
        ) from error


def meter_of(steps: int) -> Any:
    """A progress bar for that many steps."""
    with needed("cli", "rich"):
        from bilevel.run.progress import Meter
    return Meter(steps)
