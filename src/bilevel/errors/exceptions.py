"""Every exception and warning that the library raises.

All exceptions derive from :class:`BilevelError`. Those that report a bad argument are also
``ValueError`` or ``TypeError``, so code that knows nothing of this library can still catch them.
"""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bilevel.run import Result


class BilevelError(Exception):
    """Base class of the library's exceptions."""


class ArgumentError(BilevelError, ValueError):
    """An argument has a value that cannot work; the message names both."""


class ArgumentTypeError(BilevelError, TypeError):
    """An argument is of a kind that cannot work; the message names both."""


class RowError(ArgumentError, IndexError):
    """A row was looked up that a :class:`~bilevel.Table` does not have.

    Attributes:
        row: its number.
        rows: how many rows there are.
        held: the first that this rank holds, and the first after them; None: it holds all.
    """

    def __init__(self, row: int, rows: int, held: tuple[int, int] | None = None) -> None:
        self.row = row
        self.rows = rows
        self.held = held
        said = f"row {row} was looked up in a Table of {rows} rows, "
        if held is None or not 0 <= row < rows:
            said += f"which are numbered from 0 to {rows - 1}"
        else:
            said += (
                f"of which this rank holds those from {held[0]} to {held[1] - 1}; give each rank "
                f"the data of its own rows, see bilevel.distributed.rows"
            )
        super().__init__(said)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.row, self.rows, self.held)


class ObjectiveError(BilevelError, ValueError):
    """``upper`` or ``lower`` returned something that is not a scalar function of the variables."""


class StateError(BilevelError, ValueError):
    """A saved state does not fit the solver that is asked to load it."""


class InterruptedRunError(BilevelError):
    """Ctrl-C or SIGTERM ended a run before its result was there.

    Attributes:
        steps: that were taken, and are saved.
    """

    def __init__(self, steps: int) -> None:
        super().__init__(
            f"interrupted after {steps} steps, which are saved; the same call, or the same command "
            f"with --resume, goes on from there"
        )
        self.steps = steps


class CheckpointError(StateError):
    """A checkpoint is damaged, or belongs to another run; nothing of it was loaded.

    Attributes:
        path: the file.
        reason: what is wrong with it.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"the checkpoint {os.fspath(path)!r} was refused: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.reason)


class NotConvergedError(BilevelError, RuntimeError):
    """A reference computation (an exact lower solution, say) did not reach its tolerance."""


class MissingExtraError(BilevelError, ImportError):
    """A feature needs a package that the plain installation does not bring."""

    def __init__(self, package: str, extra: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(
            f"this needs the package {package!r}, which is not installed; "
            f"pip install 'bilevel[{extra}]' brings it"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.package, self.extra)


class MissingDataError(BilevelError, FileNotFoundError):
    """Files of a data set are not where they were looked for, and could not be downloaded."""


class CorruptDataError(BilevelError, ValueError):
    """A file of a data set is not what it should be; nothing of it was loaded."""


class InputError(BilevelError, ValueError):
    """Samples that were to be cleaned cannot be; the message names the file and what to do."""


class OutputError(BilevelError, OSError):
    """Results cannot be written where they were to go; the message names the folder."""


class DistributedError(BilevelError, RuntimeError):
    """The ranks of a run do not agree, or one of them is gone; it is raised on every rank."""


class RunError(BilevelError):
    """A run had to stop in the middle; what it had reached is not lost.

    Attributes:
        state: the state when it stopped, as :meth:`bilevel.Solver.load_state_dict` takes it.
        result: the run up to there, when it was started by :func:`bilevel.minimize`.
    """

    state: dict[str, Any] | None = None
    result: Result | None = None


class DataExhaustedError(RunError, RuntimeError):
    """An iterable of batches ended before the run did."""


class NonFiniteError(RunError, ArithmeticError):
    """A loss or a gradient became infinite or NaN; the run stopped before it was used.

    Attributes:
        step: the outer step k in which it happened.
        quantity: what was not finite, such as ``"lower(x, z)"`` or ``"the gradient of y"``.
        state: the last finite state, as :meth:`bilevel.Solver.load_state_dict` takes it.
        result: the run up to there, when it was started by :func:`bilevel.minimize`.
        diagnosis: which step size is to blame, and what to use instead, when the run was started
            by :func:`bilevel.minimize`.
    """

    diagnosis: str | None = None

    def __init__(self, step: int, quantity: str) -> None:
        self.step = step
        self.quantity = quantity
        super().__init__(
            f"{quantity} is not finite at step {step}; the last finite state is in this "
            f"exception's 'state'. Usual causes: a step size too large for the curvature (a "
            f"smaller lower_lr or upper_lr, or a larger multiplier, helps), or data or a function "
            f"that is not finite there"
        )

    def __str__(self) -> str:
        told = super().__str__()
        return told if self.diagnosis is None else f"{told}. Here: {self.diagnosis}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.quantity), self.__dict__


class DivergenceError(RunError, ArithmeticError):
    """A run diverges; the message says what was seen, what is wrong and what to change.

    Attributes:
        step: how many outer steps were taken.
        diagnosis: the message without the step.
        state: the state when it was noticed, as :meth:`bilevel.Solver.load_state_dict` takes it.
        result: the run up to there.
    """

    def __init__(self, step: int, diagnosis: str) -> None:
        self.step = step
        self.diagnosis = diagnosis
        super().__init__(f"the run diverges at step {step}: {diagnosis}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.diagnosis), self.__dict__


class BilevelWarning(UserWarning):
    """Base class of the library's warnings."""


class MultiplierWarning(BilevelWarning):
    """The multiplier decreased, which no theorem covers and the bias bound does not forgive."""


class ImpracticalDesignWarning(BilevelWarning):
    """A step-size design satisfies the theorem but cannot be run in practice."""


class CompileWarning(BilevelWarning):
    """``compile=True`` was asked for, but something cannot be compiled; the message says what."""


class UnbatchedWarning(BilevelWarning):
    """Runs that :func:`bilevel.minimize_many` was to take at once are taken one after another."""


class DivergenceWarning(BilevelWarning):
    """A run seems to diverge; the message says what is wrong and what to change."""


class CheckpointWarning(BilevelWarning):
    """A checkpoint could not be written or read, but the run goes on; the message says how."""


class RanksWarning(BilevelWarning):
    """Several ranks were launched, but they do not know of each other."""


def warn(warning: BilevelWarning) -> None:
    """Warn, at the line of the user's code from which the library was called."""
    frame, level = sys._getframe(), 1
    between = {"bilevel", "contextlib", "torch"}
    while frame.f_back is not None and _package(frame) in between:
        frame, level = frame.f_back, level + 1
    warnings.warn(warning, stacklevel=level)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
