"""DTensors: tensors of which each rank holds a part, as ``fully_shard`` makes them.

An operation entry by entry works on the part that this rank holds.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    # where the module was not imported there is no DTensor; that of torch 2.4 has none of that name
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_part(tensor: Any) -> Tensor:
    """The part of a tensor that this rank holds, as a view; of a plain tensor, itself."""
    part: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor
    return part


def redistribute_like(value: Tensor, like: Any) -> Tensor:
    """``value``, plain or a DTensor, with the placement of ``like``, which has the same shape."""
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
        local_part(value), mesh, placements, shape=value.shape, stride=value.stride()
    )
    return made


def row_sharded(part: Tensor, rows: int) -> Tensor:
    """The DTensor of ``rows`` rows over all ranks, of which this rank holds ``part``."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(part.device.type, (torch.distributed.get_world_size(),))
    shape = torch.Size((rows, *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    whole: Tensor = DTensor.from_local(part, mesh, [Shard(0)], shape=shape, stride=stride)
    return whole


def empty_row_sharded(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A DTensor of that shape, divided by rows over all ranks, with undefined values."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    share = -(-shape[0] // ranks)
    held = max(0, min(share, shape[0] - rank * share))
    return row_sharded(torch.empty((held, *shape[1:]), dtype=dtype), shape[0])


@torch.no_grad()
def overwrite(here: Tensor, there: Tensor) -> None:
    """Copy the values of ``there`` into ``here``; either may be a DTensor."""
    local_part(here).copy_(local_part(redistribute_like(there, here)))
