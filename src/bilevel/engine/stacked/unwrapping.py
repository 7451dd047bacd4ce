"""The tensors of all tasks behind those that ``torch.vmap`` shows to an objective."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

try:  # what torch.vmap makes of a tensor; seen in torch 2.11 and 2.13
    from torch._C._functorch import (
        _add_batch_dim,
        get_unwrapped,
        is_batchedtensor,
        maybe_get_bdim,
        maybe_get_level,
    )
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

    _HAS_PARTS = True
except ImportError:  # another version of torch, whose own rules are used
    _HAS_PARTS = False

__all__ = ["Behind", "behind", "temporarily_pop_interpreter_stack", "whole"]


class Behind(NamedTuple):
    """What lies behind the tensors of one task, the first of which is that of the images.

    Attributes:
        tensors: the tensors of all tasks, or the one that all tasks share.
        places: which dimension of each counts the tasks; None: they share it.
        level: of the call of vmap.
    """

    tensors: list[Tensor]
    places: list[int | None]
    level: int

    @property
    def tasks(self) -> int:
        """How many there are."""
        place = self.places[0]
        assert place is not None
        return self.tensors[0].shape[place]

    def stacked(self, which: int, place: int = 0) -> Tensor:
        """One of the tensors with its tasks counted by the dimension ``place``."""
        tensor, at = self.tensors[which], self.places[which]
        if at is None:
            return tensor.unsqueeze(place).expand(
                *tensor.shape[:place], self.tasks, *tensor.shape[place:]
            )
        return tensor if at == place else tensor.movedim(at, place)

    def shown(self, found: Tensor, place: int) -> Tensor:
        """A tensor of all tasks, as vmap shows it to an objective."""
        shown: Tensor = _add_batch_dim(found, place, self.level)
        return shown


def behind(*tensors: Tensor) -> Behind | None:
    """The tensors of all tasks behind those of one; None: the first is not stacked.

    None too where the user's objective calls vmap itself, which makes more than one level.
    """
    if not _HAS_PARTS or not is_batchedtensor(tensors[0]):
        return None
    stacked = [is_batchedtensor(tensor) for tensor in tensors]
    inner = [get_unwrapped(t) if s else t for t, s in zip(tensors, stacked, strict=True)]
    if any(map(is_batchedtensor, inner)):
        return None
    places = [maybe_get_bdim(t) if s else None for t, s in zip(tensors, stacked, strict=True)]
    return Behind(inner, places, maybe_get_level(tensors[0]))


def whole(found: Any) -> tuple[Tensor, int] | None:
    """The tensor of all tasks behind a result, and which of its dimensions counts them."""
    if not isinstance(found, Tensor) or not is_batchedtensor(found):
        return None
    return get_unwrapped(found), maybe_get_bdim(found)
