"""Arguments that a method does not have: why not, and what to do instead.

What one method takes a user will try on another. Python's own answer, "unexpected keyword
argument", does not say whether it was a slip of the pen or a thing that cannot be; this one does.
Where a method has a reason of its own, its class says so in ``lacks``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from bilevel.errors import ArgumentTypeError

_RUN = "it belongs to the run: give it to bilevel.minimize or bilevel.Solver"
_DATA = "data belongs to the run: give it to bilevel.minimize or bilevel.Solver"
_SETS = "sets belong to the problem: give it to bilevel.Problem"
_STENCIL = (
    "the finite difference behind the x direction can be chosen in F2SA and F2BA, and is fixed or "
    "absent elsewhere"
)
_CG = "conjugate gradients are how AID solves for the adjoint, and it alone"
_SERIES = "the Neumann series is how SOBO solves for the adjoint, and it alone"
_BARRIER = "the barrier that finds a multiplier is BOME's"

REASONS: Mapping[str, str] = {
    # of sister methods
    "upper_lr": "it never moves x",
    "upper_optimizer": "it never moves x",
    "multiplier": "it holds no penalised copy of y, so there is nothing to multiply",
    "penalty_lr": "it holds no penalised copy of y; its one copy moves with lower_lr",
    "coupling": "it holds one copy of y, so there is nothing to couple",
    "inner_steps": (
        "it is a single loop, in which y takes one step for each step of x; to give y more time, "
        "lower upper_lr"
    ),
    "inner_lr": "only BOME has a rate for its inner steps alone; here lower_lr is their rate",
    "scheme": _STENCIL,
    "order": _STENCIL,
    "single_pass": (
        "only F2SA and F2BA can take the x direction from the last inner evaluation instead of one "
        "of its own"
    ),
    "accumulate": "only F2SA and F2BA can differentiate the terms of Phi one after another",
    "loss_scale": "only F2SA and F2BA can scale Phi before they differentiate it",
    "momentum": (
        "recursive momentum of the gradients is F3SA's; for momentum of the steps give an "
        "optimizer that has it"
    ),
    "recursion": "recursive estimators are F3SA's",
    "acceleration": (
        "accelerated steps with restarts are F2BA's; for momentum of the steps give an optimizer "
        "that has it"
    ),
    "barrier": _BARRIER,
    "eta": f"{_BARRIER}, and eta is its weight; the step sizes are lower_lr and upper_lr",
    "start": "where z starts can be chosen in VPBGD alone",
    "proximal": "the proximal term is MEHA's",
    "neumann_steps": _SERIES,
    "neumann_lr": _SERIES,
    "cg_steps": _CG,
    "warm_start": _CG,
    "adjoint_lr": "only SOBA and MASOBA move an adjoint by steps",
    "averaging": "the moving average of x directions is MASOBA's",
    # of other places
    "lr": "the two levels have a rate each: lower_lr and upper_lr",
    "learning_rate": "the two levels have a rate each: lower_lr and upper_lr",
    "optimizer": "the two levels have an optimizer each: lower_optimizer and upper_optimizer",
    "steps": "how many outer steps there are is for bilevel.minimize to know",
    "batch_size": _RUN,
    "direction_batch_size": _RUN,
    "chunk_size": _RUN,
    "seed": _RUN,
    "device": _RUN,
    "upper_data": _DATA,
    "lower_data": _DATA,
    "x_set": _SETS,
    "y_set": _SETS,
}
"""Why a method that lacks the argument lacks it, unless its class says otherwise."""


def refuse_foreign(method: type, given: Mapping[str, Any]) -> None:
    """Raise, with the reason, if any of the ``given`` is not an argument of the method."""
    _, *parameters = inspect.signature(method.__init__).parameters.values()  # type: ignore[misc]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return  # a class with its own idea of arguments
    known = [p.name for p in parameters]
    for name, value in given.items():
        if name not in known:
            reason = _reason(method, name, known)
            raise ArgumentTypeError(f"{name}={value!r} is not for {method.__name__}: {reason}")


def _reason(method: type, name: str, known: list[str]) -> str:
    for cls in method.__mro__:
        own: Mapping[str, str] = vars(cls).get("lacks", {})
        if name in own:
            return own[name]
    if name in REASONS:
        return REASONS[name]
    close = get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"it is not one of {', '.join(known)}{hint}"
