"""Every exception and warning that the library raises.

All exceptions derive from :class:`BilevelError`. Those that report a bad argument are also
``ValueError`` or ``TypeError``, so code that knows nothing of this library can still catch them.
"""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType
from typing import Any


class BilevelError(Exception):
    """Base class of the library's exceptions."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By default unpickling would call __init__ with the message, which it may not take.
        return _unpickled, (type(self), self.args), self.__dict__


def _unpickled(kind: type[BilevelError], args: tuple[Any, ...]) -> BilevelError:
    return kind.__new__(kind, *args)


class ArgumentError(BilevelError, ValueError):
    """An argument has a value that cannot work; the message names the argument and its value."""


class ArgumentTypeError(BilevelError, TypeError):
    """An argument has a type that cannot work; the message names the argument and its value."""


class RowError(ArgumentError, IndexError):
    """A row was looked up that a :class:`~bilevel.Table` does not have.

    Attributes:
        row: the number of the row.
        rows: the number of rows of the table.
        held: the first row that this rank holds, and the first after these; None: it holds all.
    """

    def __init__(self, row: int, rows: int, held: tuple[int, int] | None = None) -> None:
        self.row = row
        self.rows = rows
        self.held = held
        message = f"row {row} was looked up in a Table of {rows} rows, "
        if held is None or not 0 <= row < rows:
            message += f"which are numbered from 0 to {rows - 1}"
        else:
            message += (
                f"of which this rank holds those from {held[0]} to {held[1] - 1}; give each rank "
                f"the data of its own rows, see bilevel.distributed.rows"
            )
        super().__init__(message)


class ObjectiveError(BilevelError, ValueError):
    """``upper`` or ``lower`` returned something that is not a scalar function of the variables."""


class StateError(BilevelError, ValueError):
    """A saved state does not fit the solver that is asked to load it."""


class InterruptedRunError(BilevelError):
    """Ctrl-C or SIGTERM ended a run before it had a result.

    Attributes:
        steps: how many steps were taken; they are saved.
    """

    def __init__(self, steps: int) -> None:
        super().__init__(
            f"interrupted after {steps} steps, which are saved; the same call, or the same command "
            f"with --resume, goes on from there"
        )
        self.steps = steps


class CheckpointError(StateError):
    """A checkpoint is damaged or belongs to another run; nothing was loaded from it.

    Attributes:
        path: the file.
        reason: what is wrong with the file.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"the checkpoint {os.fspath(path)!r} was refused: {reason}")


class NotConvergedError(BilevelError, RuntimeError):
    """A reference computation (an exact lower solution, say) did not reach its tolerance."""


class MissingExtraError(BilevelError, ImportError):
    """A feature needs a package that only an extra of this library installs."""

    def __init__(self, package: str, extra: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(
            f"this needs the package {package!r}, which is not installed; "
            f"pip install 'bilevel[{extra}]' brings it"
        )


class MissingDataError(BilevelError, FileNotFoundError):
    """Files of a data set are not where they were looked for, and could not be downloaded."""


class CorruptDataError(BilevelError, ValueError):
    """A file of a data set has unexpected content; nothing was loaded from it."""


class InputError(BilevelError, ValueError):
    """Files or samples that were given cannot be used; the message names them and what to do."""


class OutputError(BilevelError, OSError):
    """Results cannot be written; the message names the folder."""


class DistributedError(BilevelError, RuntimeError):
    """The ranks of a run do not agree, or one of them has ended; all ranks raise it."""


class RunError(BilevelError):
    """A run had to stop before its end; its state is not lost.

    Attributes:
        state: the state when it stopped, for :meth:`bilevel.Solver.load_state_dict`.
        result: the :class:`bilevel.Result` up to there, if :func:`bilevel.minimize` started the
            run; otherwise None.
    """

    state: dict[str, Any] | None = None
    result: Any = None


class DataExhaustedError(RunError, RuntimeError):
    """An iterable of batches ended before the run did."""


class NonFiniteError(RunError, ArithmeticError):
    """A loss or a gradient became infinite or NaN; the run stopped before using it.

    Its ``state`` is the last finite one, unless an optimizer of the user's own made what is not
    finite of what was.

    Attributes:
        step: the outer step k in which it happened.
        quantity: what was not finite, such as ``"lower(x, z)"`` or ``"the gradient of y"``.
        kept: whether ``state`` is finite.
        diagnosis: which step size is the cause and what to use instead, if
            :func:`bilevel.minimize` started the run and could tell; otherwise None.
        advice: what helps in general, with the arguments that the run was given, if
            :func:`bilevel.minimize` started it; otherwise None.
    """

    diagnosis: str | None = None
    advice: str | None = None

    def __init__(self, step: int, quantity: str, *, kept: bool = True) -> None:
        self.step = step
        self.quantity = quantity
        self.kept = kept
        super().__init__(f"{quantity} is not finite at step {step}")

    def __str__(self) -> str:
        message = (
            f"{super().__str__()}; the last finite state is in this exception's 'state'. Usual "
            f"causes: steps that are too long for the curvature, or data or a function that is not "
            f"finite there"
            if self.kept
            else f"{super().__str__()}; a variable itself is not finite, as an optimizer or the "
            f"start of a task left it, and what it was before is in a checkpoint, if there are any"
        )
        if self.diagnosis is not None:
            return f"{message}. Here: {self.diagnosis}"
        return message if self.advice is None else f"{message}. What helps: {self.advice}"


class DivergenceError(RunError, ArithmeticError):
    """A run diverges; the message says what was seen, what is wrong and what to change.

    Attributes:
        step: how many outer steps were taken.
        diagnosis: the message without the step.
    """

    def __init__(self, step: int, diagnosis: str) -> None:
        self.step = step
        self.diagnosis = diagnosis
        super().__init__(f"the run diverges at step {step}: {diagnosis}")


class BilevelWarning(UserWarning):
    """Base class of the library's warnings."""


class MultiplierWarning(BilevelWarning):
    """The multiplier decreased, which no theorem covers and which increases the bias."""


class ImpracticalDesignWarning(BilevelWarning):
    """A step-size design satisfies the theorem but cannot be run in practice."""


class FlatWarning(BilevelWarning):
    """Neither objective changes with x, so that x cannot move."""


class TiedWarning(BilevelWarning):
    """One tensor stands twice in a variable, where it is one variable; two may have been meant."""


class HookWarning(BilevelWarning):
    """A parameter has hooks on its gradient, which its copies have not."""


class UnrepeatableWarning(BilevelWarning):
    """An objective has another value when it is called again with the same arguments."""


class CompileWarning(BilevelWarning):
    """``compile=True`` was asked for, but something cannot be compiled; the message says what."""


class UnbatchedWarning(BilevelWarning):
    """:func:`bilevel.minimize_many` cannot batch its runs and runs them one after another."""


class DivergenceWarning(BilevelWarning):
    """A run seems to diverge; the message says what is wrong and what to change."""


class PrecisionWarning(BilevelWarning):
    """A run stalls because of rounding; the message says what to change."""


class WorsenedWarning(BilevelWarning):
    """A run ended with f clearly above its start or its best; the message says what to try."""


class CheckpointWarning(BilevelWarning):
    """A checkpoint could not be written or read; the message says how the run continues."""


class NotConvergedWarning(BilevelWarning):
    """A layer such as :func:`bilevel.argmin`, or y in a run, did not come near its minimum."""


class RanksWarning(BilevelWarning):
    """Several ranks were launched, but they are not in one process group."""


class CleaningWarning(BilevelWarning):
    """Label cleaning did not help, or lacks trusted samples; the message says what was done."""


def warn(warning: BilevelWarning) -> None:
    """Warn, with the line of the user's code that called the library."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _package(frame) in {"bilevel", "contextlib", "torch"}:
        frame, level = frame.f_back, level + 1
    warnings.warn(warning, stacklevel=level)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def add_note(error: Exception, note: str) -> None:
    """Say more below the message of an error that is not the library's own."""
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(note)
