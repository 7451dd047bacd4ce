"""State dictionaries: what a run carries, copied into plain types, and taken over again."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from bilevel.variables.shards import fill


@runtime_checkable
class Stateful(Protocol):
    """Anything that saves and loads itself."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def saved(value: Any) -> Any:
    """``value`` as it goes into a state dict: copied, and of plain types and tensors only."""
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
    """``mine`` after it has taken over what :func:`saved` made of its like, in place if it can."""
    if isinstance(mine, Stateful):
        mine.load_state_dict(theirs)
        return mine
    if isinstance(mine, Tensor):
        fill(mine, theirs)
        return mine
    if isinstance(mine, list | tuple):
        return type(mine)(loaded(part, other) for part, other in zip(mine, theirs, strict=True))
    return theirs
