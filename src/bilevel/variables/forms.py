"""Forms: what a saved state must look like, declared by the object that is to load it.

A checkpoint whose checksum is right may still come from anywhere. So whoever loads a state declares
in ``state_form`` which fields it has and what each of them may hold, and everything is checked
before anything is changed. A form is a function of a value and of the path to it in the state; it
raises :class:`~bilevel.errors.StateError`, which names the path, the value and what is expected.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from bilevel.errors import StateError
from bilevel.variables.state import Stateful

Form: TypeAlias = Callable[[Any, str], None]

LARGEST = 2**63 - 1
"""The largest count: what a tensor of whole numbers holds."""


@runtime_checkable
class Declared(Protocol):
    """Anything that says what its saved state must look like."""

    def state_form(self) -> Form: ...


def refuse(value: Any, path: str, expected: str) -> NoReturn:
    """Raise for a value that is not what is expected."""
    shown = reprlib.repr(value)
    if isinstance(value, Tensor):
        shown = f"a tensor of {value.dtype} and the shape {tuple(value.shape)}"
    raise StateError(
        f"the saved {path} is {shown}, where {expected} is expected: it was changed, or saved by "
        f"something else; load another state, or begin anew"
    )


def anything(value: Any, path: str) -> None:
    """For what its owner checks while loading it."""


def flag(value: Any, path: str) -> None:
    """True or False."""
    if type(value) is not bool:
        refuse(value, path, "True or False")


def text(value: Any, path: str) -> None:
    """Any text."""
    if type(value) is not str:
        refuse(value, path, "text")


def word(*choices: str) -> Form:
    """One of these."""

    def check(value: Any, path: str) -> None:
        if type(value) is not str or value not in choices:
            refuse(value, path, f"one of {', '.join(map(repr, choices))}")

    return check


def whole(least: int = 0, most: int = LARGEST) -> Form:
    """A whole number, by default a count."""

    def check(value: Any, path: str) -> None:
        if type(value) is not int or not least <= value <= most:
            refuse(value, path, f"a whole number from {least} to {most}")

    return check


def real(
    least: float = -math.inf, *, above: bool = False, nan: bool = False, infinite: bool = False
) -> Form:
    """A number of at least ``least``, or above it; finite unless said otherwise."""

    def check(value: Any, path: str) -> None:
        known = type(value) in (int, float) and abs(value) <= LARGEST**16
        if type(value) is float:
            known = math.isfinite(value) or (nan if math.isnan(value) else infinite)
        if not known or (value <= least if above else value < least):
            kind = "a number" if infinite else "a finite number"
            bound = "" if least == -math.inf else f" {'above' if above else 'of at least'} {least}"
            refuse(value, path, f"{kind}{bound}{' or NaN' if nan else ''}")

    return check


def maybe(form: Form) -> Form:
    """None, or what the form says."""

    def check(value: Any, path: str) -> None:
        if value is not None:
            form(value, path)

    return check


def many(form: Form, *, most: int = LARGEST) -> Form:
    """A list of such values."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, list | tuple) or len(value) > most:
            refuse(value, path, "a list" if most == LARGEST else f"a list of at most {most}")
        for index, part in enumerate(value):
            form(part, f"{path}/{index}")

    return check


def each(forms: Sequence[Form]) -> Form:
    """A list with one value for each form."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, list | tuple) or len(value) != len(forms):
            refuse(value, path, f"a list of {len(forms)}")
        for index, (form, part) in enumerate(zip(forms, value, strict=True)):
            form(part, f"{path}/{index}")

    return check


def record(fields: Mapping[Any, Form]) -> Form:
    """A dict with exactly these fields."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict) or value.keys() != fields.keys():
            found = sorted(value, key=str) if isinstance(value, dict) else value
            refuse(found, path, f"all of {sorted(fields, key=str)} and nothing else")
        for name, form in fields.items():
            form(value[name], f"{path}/{name}")

    return check


def empty_or(form: Form) -> Form:
    """An empty dict, or what the form says."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict) or value:
            form(value, path)

    return check


def tensor(shape: Iterable[int], like: Tensor | None = None) -> Form:
    """A tensor of that shape, in which -1 stands for any size, and of the kind of ``like``.

    Kinds are floating point numbers, of any precision, and whatever else, of one type.
    """
    due = tuple(shape)

    def check(value: Any, path: str) -> None:
        fits = isinstance(value, Tensor) and value.layout == torch.strided
        if fits:
            sizes = tuple(value.shape)
            fits = len(sizes) == len(due) and all(
                a in (-1, b) for a, b in zip(due, sizes, strict=True)
            )
        if fits and (like is None or like.is_floating_point()):
            fits = value.is_floating_point()
        elif fits and like is not None:
            fits = value.dtype == like.dtype
        if not fits:
            kind = "floating point numbers" if like is None else str(like.dtype)
            refuse(value, path, f"a tensor of {kind} and the shape {due}")

    return check


def form_of(mine: Any) -> Form:
    """The form of the state of an object: as it declares it, or of its fields as they are now."""
    if isinstance(mine, Declared):
        return mine.state_form()
    if isinstance(mine, Stateful):
        return form_of(mine.state_dict())
    if isinstance(mine, Tensor):
        return tensor(mine.shape, mine)
    if isinstance(mine, dict):
        return record({name: form_of(part) for name, part in mine.items()})
    if isinstance(mine, list | tuple):
        return each([form_of(part) for part in mine])
    if isinstance(mine, bool):
        return flag
    if isinstance(mine, int):
        return whole(-LARGEST)
    if isinstance(mine, float):
        return real(nan=True, infinite=True)
    return text if isinstance(mine, str) else anything
