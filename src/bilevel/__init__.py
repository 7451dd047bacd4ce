"""Bilevel optimization with gradients alone, on PyTorch.

    min_x  f(x, y*(x))   with   y*(x) = argmin_y g(x, y)

Start with :class:`Problem` and :func:`minimize`; step by hand with :class:`Solver`; choose an
algorithm with :class:`F2SA` or another of :data:`METHODS`; trust the result with
:func:`check_hypergradient`.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bilevel import errors
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
from bilevel.problem import FixedPoint, Problem, argmin, fixed_point, prox, sets
from bilevel.run import Checkpoint, Outcome, Result, Solver, loggers, minimize
from bilevel.run._version import __version__
from bilevel.sampling import Episodes
from bilevel.stepping import Nesterov, SharedAdamW, schedules
from bilevel.variables import Table

if TYPE_CHECKING:
    from bilevel import cleaning, data, diagnostics, mixing, problems, testing, theory
    from bilevel.cleaning import LabelCleaner
    from bilevel.diagnostics import check_hypergradient, hypergradient
    from bilevel.mixing import DataMixer, Mixture
    from bilevel.run.many import minimize_many
    from bilevel.run.results import Results

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
    "Episodes",
    "FixedPoint",
    "Info",
    "LabelCleaner",
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
    "argmin",
    "check_hypergradient",
    "cleaning",
    "data",
    "diagnostics",
    "distributed",
    "errors",
    "fixed_point",
    "hypergradient",
    "loggers",
    "minimize",
    "minimize_many",
    "mixing",
    "problems",
    "prox",
    "schedules",
    "sets",
    "testing",
    "theory",
]

# Modules that are public under a shorter name than that of their room: `bilevel.sets`.
for _name in ("distributed", "loggers", "prox", "schedules", "sets"):
    sys.modules[f"{__name__}.{_name}"] = globals()[_name]

_LATER_MODULES = {
    "cleaning": "bilevel.cleaning",
    "data": "bilevel.data",
    "diagnostics": "bilevel.diagnostics",
    "mixing": "bilevel.mixing",
    "problems": "bilevel.problems",
    "testing": "bilevel.testing",
    "theory": "bilevel.theory",
}
_LATER_NAMES = {
    "DataMixer": "bilevel.mixing",
    "LabelCleaner": "bilevel.cleaning",
    "Mixture": "bilevel.mixing",
    "Results": "bilevel.run.results",
    "check_hypergradient": "bilevel.diagnostics",
    "hypergradient": "bilevel.diagnostics",
    "minimize_many": "bilevel.run.many",
}
"""What is imported when it is first asked for, and from where.

These modules need more than PyTorch and NumPy, or time to be imported that few programs need.
"""


def __getattr__(name: str) -> Any:
    if name in _LATER_MODULES:
        return import_module(_LATER_MODULES[name])
    if name in _LATER_NAMES:
        return getattr(import_module(_LATER_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
