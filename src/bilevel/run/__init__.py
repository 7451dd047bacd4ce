"""Runs: the solver, the loop around it, what is recorded, saved and reported."""

from bilevel.run import loggers
from bilevel.run.checkpoint.folder import Checkpoint, CheckpointLike
from bilevel.run.history import History
from bilevel.run.many import minimize_many
from bilevel.run.minimize import Callback, minimize
from bilevel.run.outcome import Outcome, Result
from bilevel.run.results import Results
from bilevel.run.solver import Solver

__all__ = [
    "Callback",
    "Checkpoint",
    "CheckpointLike",
    "History",
    "Outcome",
    "Result",
    "Results",
    "Solver",
    "loggers",
    "minimize",
    "minimize_many",
]
