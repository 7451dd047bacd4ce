"""State dictionaries: the state of a run, saved as plain types and tensors, and loaded again."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

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
