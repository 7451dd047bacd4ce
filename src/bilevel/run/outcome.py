"""What a run returns: the point it found, its history, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from bilevel.errors.extras import needed
from bilevel.run.history import History

if TYPE_CHECKING:
    import pandas as pd


class Outcome(Enum):
    """How a run ended; the values are the messages.

    A run that diverged or worsened has that outcome, whatever else ended it, unless it was stopped
    from outside.

    Example:
        >>> import bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> result = bilevel.minimize(
        ...     problem, problem.x0, problem.y0, callback=lambda solver, info: info.step == 3)
        >>> result.outcome is bilevel.Outcome.STOPPED, result.outcome.value
        (True, 'the callback asked to stop')
    """

    COMPLETED = "all steps were taken"
    CONVERGED = "x came to rest within the tolerance"
    OUT_OF_TIME = "max_seconds were over"
    OUT_OF_PATIENCE = "nothing better was recorded for as long as patience says"
    WORSENED = "f ended clearly above its start or its best"
    STOPPED = "the callback asked to stop"
    INTERRUPTED = "Ctrl-C or SIGTERM asked to stop"
    BROKEN = "an error ended the run"
    DIVERGED = "the run diverged"


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """What a run found.

    Attributes:
        x: the upper variable, in the structure of x0.
        y: the lower solution of x itself, in the structure of y0: the copy that solves the lower
            level, never the penalised one. For the last iterate an extra step, which is not counted
            and not recorded, fits it; a run that an error ended returns the copy that it had then.
            See :meth:`bilevel.Solver.lower_solution`.
        history: arrays of one length, one entry per recorded step: "step", "seconds", "upper",
            "lower", "gap", "multiplier", "direction_norm", "lower_lr", "upper_lr"; see
            :class:`bilevel.methods.Info`.
        steps: how many outer steps were taken, those before a checkpoint included.
        seconds: how long they took.
        outcome: how the run ended.
        selected_step: k of the returned point x_k; equals ``steps`` for the last iterate, unless
            steps that "auto" found had failed their test, so that x went back.

    Example:
        >>> import bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> result = bilevel.minimize(problem, problem.x0, problem.y0, steps=20, record_every=5)
        >>> result.x.shape, result.steps, result.outcome.name
        (torch.Size([5]), 20, 'COMPLETED')
        >>> result.to_frame()["step"].tolist()
        [0, 5, 10, 15, 19]
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
        with needed("pandas", "pandas"):
            import pandas as pd
        return pd.DataFrame(self.history)
