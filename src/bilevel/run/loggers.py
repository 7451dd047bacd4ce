"""Loggers: where the figures of a run go, such as TensorBoard or Weights & Biases.

A :class:`Logger` is given as ``callback=`` to :func:`bilevel.minimize` or to
:meth:`bilevel.DataMixer.fit`, which also tells it the weights. Another is one method::

    class Printed(bilevel.loggers.Logger):
        def log(self, step, values):
            print(step, dict(values))

To log and to do something else, call it: ``logger(solver, info)`` in a callback of your own.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from bilevel.errors import ArgumentTypeError, OutputError
from bilevel.errors.checks import checked_path
from bilevel.errors.extras import needed
from bilevel.methods import Info
from bilevel.run.solver import Solver

__all__ = ["Logger", "TensorBoard", "WandB", "figures"]

_FIGURES = ("upper", "lower", "gap", "direction_norm", "multiplier", "lower_lr", "upper_lr")


class Logger(ABC):
    """Takes numbers with names, step by step."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the ``values`` of the step ``step``."""

    def __call__(self, solver: Solver, info: Info) -> None:
        self.log(info.step, figures(info))


def figures(info: Info) -> dict[str, float]:
    """The numbers of one step by their names, without those that were not measured or are NaN.

    Example:
        >>> from bilevel.methods import Info
        >>> figures(Info(step=3, multiplier=float("nan"), lower_lr=0.5, upper_lr=0.1))
        {'lower_lr': 0.5, 'upper_lr': 0.1}
    """
    told = {name: getattr(info, name) for name in _FIGURES} | dict(info.metrics)
    numbers = {name: float(value) for name, value in told.items() if value is not None}
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


class TensorBoard(Logger):
    """Writes event files that TensorBoard shows (needs ``bilevel[tensorboard]``).

    Args:
        folder: where the files go; it is made where it is not there.
        prefix: of every name, such as ``"ridge/"``.

    :meth:`close`, or the end of a ``with``, writes what is still waiting.

    Example:
        >>> import bilevel, tempfile
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with bilevel.loggers.TensorBoard(folder) as logger:
        ...         result = bilevel.minimize(
        ...             problem, problem.x0, problem.y0, steps=5, callback=logger)
        >>> result.steps
        5
    """

    def __init__(self, folder: str | os.PathLike[str], *, prefix: str = "") -> None:
        self._path, self._prefix = checked_path("folder", folder), _checked_prefix(prefix)
        with needed("tensorboard", "tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        with self._written():
            self._writer: Any = SummaryWriter(str(self._path))

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"folder={str(self._path)!r} cannot be written to: {error.strerror or error}"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with self._written():
            for name, value in values.items():
                self._writer.add_scalar(self._prefix + name, value, step)

    def close(self) -> None:
        """Write everything, and close the files."""
        with self._written():
            self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class WandBRun(Protocol):
    """The part of a run of Weights & Biases that is used."""

    def log(self, data: dict[str, Any], *, step: int) -> Any:
        """Log ``data`` under the step."""


class WandB(Logger):
    """Hands everything to a run of Weights & Biases, which stays the caller's to finish.

    Args:
        run: what ``wandb.init(...)`` returns (``pip install wandb``).
        prefix: of every name, such as ``"ridge/"``.

    Example:
        >>> import bilevel, wandb  # doctest: +SKIP
        >>> with wandb.init(project="ridge") as run:  # doctest: +SKIP
        ...     bilevel.minimize(problem, x0, y0, callback=bilevel.loggers.WandB(run))
    """

    def __init__(self, run: WandBRun, *, prefix: str = "") -> None:
        if not callable(getattr(run, "log", None)):
            raise ArgumentTypeError(f"run must be what wandb.init() returns, not {run!r}")
        self._run = run
        self._prefix = _checked_prefix(prefix)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({self._prefix + name: value for name, value in values.items()}, step=step)


def _checked_prefix(prefix: Any) -> str:
    if not isinstance(prefix, str):
        raise ArgumentTypeError(f"prefix must be text, not {prefix!r}")
    return prefix
