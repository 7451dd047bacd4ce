"""Bilevel optimization with gradients alone, on PyTorch.

    min_x  f(x, y*(x))   with   y*(x) = argmin_y g(x, y)

Start with :class:`Problem` and :func:`minimize`; step by hand with :class:`Solver`; choose an
algorithm with :class:`F2SA` or another of :data:`METHODS`; trust the result with
:func:`check_hypergradient`.

Everything here is imported when it is first asked for, so that ``import bilevel`` takes no time.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from bilevel import cleaning, data, diagnostics, errors, mixing, problems, testing, theory
    from bilevel.cleaning import LabelCleaner
    from bilevel.diagnostics import check_hypergradient, hypergradient
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
    from bilevel.problem import FixedPoint, Problem, argmin, fixed_point, prox, sets
    from bilevel.run import Checkpoint, Outcome, Result, Solver, loggers
    from bilevel.run._version import __version__
    from bilevel.run.many import minimize_many
    from bilevel.run.minimize import minimize
    from bilevel.run.results import Results
    from bilevel.sampling import Episodes
    from bilevel.stepping import Nesterov, SharedAdamW, schedules
    from bilevel.variables import Table

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

# fmt: off
_ROOMS = (
    "cleaning", "data", "diagnostics", "engine", "errors", "methods", "mixing", "problem",
    "problems", "run", "sampling", "stepping", "testing", "theory", "variables",
)
# fmt: on
_SHORT_NAMES = {
    "distributed": "bilevel.engine.ranks",
    "loggers": "bilevel.run.loggers",
    "prox": "bilevel.problem.prox",
    "schedules": "bilevel.stepping.schedules",
    "sets": "bilevel.problem.sets",
}
"""Modules that are public under a shorter name than that of their place."""
_MODULES = {**{room: f"bilevel.{room}" for room in _ROOMS}, **_SHORT_NAMES}
_HOMES = {
    name: module
    for module, names in {
        "bilevel.cleaning": "LabelCleaner",
        "bilevel.diagnostics": "check_hypergradient hypergradient",
        "bilevel.engine": "LossScale",
        "bilevel.methods": "AID BOME F2BA F2SA F3SA ITD MASOBA MEHA METHODS SOBA SOBO VPBGD"
        " Info Method NoBilevel State",
        "bilevel.mixing": "DataMixer Mixture",
        "bilevel.problem": "FixedPoint Problem argmin fixed_point",
        "bilevel.run": "Checkpoint Outcome Result Solver minimize",
        "bilevel.run._version": "__version__",
        "bilevel.run.many": "minimize_many",
        "bilevel.run.results": "Results",
        "bilevel.sampling": "Episodes",
        "bilevel.stepping": "Nesterov SharedAdamW",
        "bilevel.variables": "Table",
    }.items()
    for name in names.split()
}
"""The module that has each of the other names."""


class _ShortNames(MetaPathFinder, Loader):
    """Makes ``from bilevel.sets import Box`` find the module that is elsewhere."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        known = package == __name__ and name in _SHORT_NAMES
        return spec_from_loader(fullname, self) if known else None

    def create_module(self, spec: ModuleSpec) -> "ModuleType":
        module = import_module(_SHORT_NAMES[spec.name.rpartition(".")[2]])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: "ModuleType") -> None:
        # The import system has given the module the other name's specification; it keeps its own.
        module.__spec__ = getattr(module.__spec__, "loader_state", None)


sys.meta_path.append(_ShortNames())


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
