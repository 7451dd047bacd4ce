"""Bilevel optimization with gradients alone, on PyTorch.

    min_x  f(x, y*(x))   with   y*(x) = argmin_y g(x, y)

Start with :class:`Problem` and :func:`minimize`; step by hand with :class:`Solver`; choose an
algorithm with :class:`F2SA` or another of :data:`METHODS`; trust the result with
:func:`check_hypergradient`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bilevel import (
    data,
    diagnostics,
    distributed,
    errors,
    loggers,
    problems,
    schedules,
    sets,
    theory,
)
from bilevel.checkpoint import Checkpoint
from bilevel.diagnostics import check_hypergradient, hypergradient
from bilevel.loss_scale import LossScale
from bilevel.many import Results, minimize_many
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
    Nesterov,
    NoBilevel,
)
from bilevel.minimize import Outcome, Result, minimize
from bilevel.mixing import DataMixer, Mixture
from bilevel.problem import Problem
from bilevel.shared_adamw import SharedAdamW
from bilevel.solver import Solver
from bilevel.table import Table

if TYPE_CHECKING:
    from bilevel.cleaning import LabelCleaner as LabelCleaner

__version__ = "0.1.0"

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
    "LossScale",
    "Mixture",
    "Nesterov",
    "NoBilevel",
    "Outcome",
    "Problem",
    "Result",
    "Results",
    "SharedAdamW",
    "Solver",
    "Table",
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
