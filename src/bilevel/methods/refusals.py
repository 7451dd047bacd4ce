"""Arguments that a method does not have: who has them, or what was meant instead.

What one method takes a user will try on another. Python's own answer, "unexpected keyword
argument", does not say whether that was a slip of the pen or something the method cannot do.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from bilevel.errors import ArgumentTypeError

_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("steps", "batch_size", "direction_batch_size", "chunk_size", "seed", "device"),
            *("compile", "accumulate", "loss_scale", "upper_data", "lower_data"),
        ),
        "it belongs to the run: give it to bilevel.minimize or bilevel.Solver",
    ),
    **dict.fromkeys(("x_set", "y_set"), "sets belong to the problem: give it to bilevel.Problem"),
    **dict.fromkeys(
        ("lr", "learning_rate"), "each level has a rate of its own: lower_lr and upper_lr"
    ),
    "optimizer": "each level has an optimizer of its own: lower_optimizer and upper_optimizer",
}
"""Arguments of other places, and where they belong."""


def refuse_foreign(base: type, method: type, given: Mapping[str, Any]) -> None:
    """Raise, with the reason, if any of the ``given`` is not an argument of the method.

    ``base`` is the class of all methods, whose subclasses are looked through for the argument.
    """
    known = _arguments(method)
    for name, value in given.items():
        if known is not None and name not in known:
            reason = _reason(base, name, known)
            raise ArgumentTypeError(f"{name}={value!r} is not for {method.__name__}: {reason}")


def _reason(base: type, name: str, known: list[str]) -> str:
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    takers = sorted(
        cls.__name__
        for cls in _subclasses(base)
        if cls.__module__.startswith("bilevel.")
        and not inspect.isabstract(cls)
        and name in (_arguments(cls) or ())
    )
    if takers:
        return f"of the methods here only {', '.join(takers)} takes it"
    close = get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"it is not one of {', '.join(known)}{hint}"


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


def _arguments(method: type) -> list[str] | None:
    """The names of a method's arguments; None: it takes any."""
    _, *parameters = inspect.signature(method.__init__).parameters.values()  # type: ignore[misc]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters]
