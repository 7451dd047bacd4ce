"""Tensors of which each rank holds a part: DTensors, as ``fully_shard`` makes them.

What a method does with a tensor entry by entry, each rank does with the part that it holds.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

_USUAL = (Tensor, nn.Parameter)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    if type(tensor) in _USUAL:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # not imported: there can be none
    return module is not None and isinstance(tensor, module.DTensor)


def part_of(tensor: Any) -> Tensor:
    """What this rank holds of a tensor, as a view."""
    part: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor
    return part


def placed_as(value: Tensor, like: Any) -> Tensor:
    """``value``, whole or in parts, in the way in which ``like`` of the same shape lies."""
    if not is_sharded(like):
        if not is_sharded(value):
            return value
        whole: Tensor = value.full_tensor()  # type: ignore[attr-defined]
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = like.device_mesh, like.placements
    if not is_sharded(value):
        return distribute_tensor(value, mesh, placements, src_data_rank=None)
    if value.placements != placements:  # type: ignore[attr-defined]
        value = value.redistribute(placements=placements)  # type: ignore[attr-defined]
    made: Tensor = DTensor.from_local(
        part_of(value), mesh, placements, shape=value.shape, stride=value.stride()
    )
    return made


def row_part(part: Tensor, rows: int) -> Tensor:
    """The tensor of so many rows, divided over all ranks, of which this one holds ``part``."""
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((rows, *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    whole: Tensor = DTensor.from_local(part, _ranks(part), [Shard(0)], shape=shape, stride=stride)
    return whole


def row_parts(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of that shape, divided over all ranks by rows, not initialised."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    share = -(-shape[0] // ranks)
    held = max(0, min(share, shape[0] - rank * share))
    return row_part(torch.empty((held, *shape[1:]), dtype=dtype), shape[0])


def _ranks(like: Tensor) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(like.device.type, (torch.distributed.get_world_size(),))


@torch.no_grad()
def fill(here: Tensor, there: Tensor) -> None:
    """Copy ``there``, whole or in parts, into ``here``, whole or in parts."""
    part_of(here).copy_(part_of(placed_as(there, here)))
