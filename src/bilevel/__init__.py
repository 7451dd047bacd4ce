"""Bilevel optimization with gradients alone, on PyTorch.

    min_x  f(x, y*(x))   with   y*(x) = argmin_y g(x, y)

Start with :class:`Problem` and :func:`minimize`; step by hand with :class:`Solver`; choose an
algorithm with :class:`F2SA` or another of :data:`METHODS`; trust the result with
:func:`check_hypergradient`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bilevel import data, errors, problems, theory
from bilevel.engine import LossScale
from bilevel.engine import ranks as distributed
from bilevel.methods import (
    AID,
    BOME,
    F2BA,
    F2SA,
    F3SA,
    ITD,
    MASOBA,
    MEHA,
    METHODS,
    SOBA,
    SOBO,
    VPBGD,
    Info,
    Method,
    NoBilevel,
    State,
)
from bilevel.mixing import DataMixer, Mixture
from bilevel.problem import Problem, sets
from bilevel.problems import diagnostics
from bilevel.problems.diagnostics import check_hypergradient, hypergradient
from bilevel.run import (
    Checkpoint,
    Outcome,
    Result,
    Results,
    Solver,
    loggers,
    minimize,
    minimize_many,
)
from bilevel.run._version import __version__
from bilevel.stepping import Nesterov, SharedAdamW, schedules
from bilevel.variables import Table

if TYPE_CHECKING:
    from bilevel.cleaning import LabelCleaner as LabelCleaner

__all__ = [
    "AID",
    "BOME",
    "F2BA",
    "F2SA",
    "F3SA",
    "ITD",
    "MASOBA",
    "MEHA",
    "METHODS",
    "SOBA",
    "SOBO",
    "VPBGD",
    "Checkpoint",
    "DataMixer",
    "Info",
    "LossScale",
    "Method",
    "Mixture",
    "Nesterov",
    "NoBilevel",
    "Outcome",
    "Problem",
    "Result",
    "Results",
    "SharedAdamW",
    "Solver",
    "State",
    "Table",
    "__version__",
    "check_hypergradient",
    "data",
    "diagnostics",
    "distributed",
    "errors",
    "hypergradient",
    "loggers",
    "minimize",
    "minimize_many",
    "problems",
    "schedules",
    "sets",
    "theory",
]


def __getattr__(name: str) -> Any:
    """What needs more than PyTorch and NumPy is imported when it is first asked for."""
    if name in ("LabelCleaner", "cleaning"):
        cleaning = import_module("bilevel.cleaning")
        return cleaning if name == "cleaning" else cleaning.LabelCleaner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
