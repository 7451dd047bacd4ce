"""State dictionaries: the state of a run, saved as plain types and tensors, and loaded again."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from bilevel.errors import StateError
from bilevel.variables.shards import overwrite


@runtime_checkable
class Stateful(Protocol):
    """Anything with a ``state_dict`` that it can load."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def saved(value: Any) -> Any:
    """A copy of ``value`` for a state dict: plain types and tensors only."""
    if isinstance(value, Stateful):
        return value.state_dict()
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: saved(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [saved(part) for part in value]
    return value


def loaded(mine: Any, theirs: Any) -> Any:
    """``mine`` with the values that :func:`saved` gave, in place if possible."""
    if isinstance(mine, Stateful):
        mine.load_state_dict(theirs)
        return mine
    if isinstance(mine, Tensor):
        overwrite(mine, theirs)
        return mine
    if isinstance(mine, list | tuple):
        return type(mine)(loaded(part, other) for part, other in zip(mine, theirs, strict=True))
    return theirs


def check_alike(mine: Any, theirs: Any, path: str) -> None:
    """Refuse a saved value that is of another kind than what is to take it over.

    Numbers take numbers, whole ones whole ones, and so on; None, for what was not known then or is
    not known now, goes with everything but whole numbers, which are counts. Shapes, lengths and the
    keys of dicts that grow are for those who load them.

    Raises:
        StateError: the message says where.
    """
    if mine is None or (theirs is None and type(mine) is not int):
        return
    if isinstance(mine, dict) and isinstance(theirs, dict):
        record = bool(mine) and all(type(value) in (int, float) for value in mine.values())
        if record and (mine.keys() != theirs.keys() or None in theirs.values()):
            raise StateError(f"the saved {path} is {theirs!r}, where all of {list(mine)} are due")
        for key in mine.keys() & theirs.keys():
            check_alike(mine[key], theirs[key], f"{path}/{key}")
    elif isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        for index, (one, other) in enumerate(zip(mine, theirs, strict=False)):
            check_alike(one, other, f"{path}/{index}")
    elif type(mine) is not type(theirs) and not (
        (type(mine) is float and type(theirs) is int)
        or (isinstance(mine, Tensor) and isinstance(theirs, Tensor))
    ):
        raise StateError(
            f"the saved {path} is {type(theirs).__name__} {theirs!r}, where "
            f"{type(mine).__name__} is expected"
        )
