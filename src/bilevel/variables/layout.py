"""How the tensors of a variable lie on several ranks, and who averages their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bilevel.errors import ArgumentError
from bilevel.errors.extras import torch_version
from bilevel.variables.shards import is_sharded, row_sharded
from bilevel.variables.table import Table

OLDEST_TORCH = (2, 11)
"""Older ones fail with what is divided over ranks (2.4, 2.6), or give wrong numbers (2.8)."""


class Averaging(Enum):
    """Who makes the gradient of a leaf the mean over the ranks.

    Attributes:
        who: in words, for messages.
        sharded: whether each rank holds only a part of the leaf.
    """

    BY_RUN = ("every rank holds it, and its run averages", False)
    BY_DDP = ("DistributedDataParallel", False)
    BY_FSDP = ("fully_shard", True)
    NONE = ("the rows are of this rank alone", True)
    OWN = ("every rank has one of its own", False)

    def __init__(self, who: str, sharded: bool) -> None:
        self.who = who
        self.sharded = sharded


class Layout:
    """How the leaves of a variable lie on several ranks.

    Attributes:
        averaging: for each leaf who averages its gradient over the ranks.
        wrappers: the ``DistributedDataParallel`` modules.
        sharded_modules: the modules that ``fully_shard`` has divided.
    """

    def __init__(self, modules: Sequence[nn.Module], leaves: Sequence[Tensor]) -> None:
        parts = [part for module in modules for part in module.modules()]
        self.wrappers = [part for part in parts if isinstance(part, DistributedDataParallel)]
        self.sharded_modules = [part for part in parts if callable(getattr(part, "reshard", None))]
        # Known by a method of its own: importing its class would load torch.distributed.fsdp.
        self._older_fsdp = any(hasattr(part, "summon_full_params") for part in parts)
        self._tables = {
            id(part.values): part for part in parts if isinstance(part, Table) and part.divided
        }
        wrapped = {id(leaf) for wrapper in self.wrappers for leaf in wrapper.parameters()}
        self.averaging = [self._averaging(leaf, wrapped) for leaf in leaves]

    def _averaging(self, leaf: Tensor, wrapped: set[int]) -> Averaging:
        if is_sharded(leaf):
            return Averaging.BY_FSDP
        if id(leaf) in self._tables:
            return Averaging.NONE
        return Averaging.BY_DDP if id(leaf) in wrapped else Averaging.BY_RUN

    def check(self, name: str, leaves: Iterable[tuple[str, Tensor]]) -> None:
        """Refuse what cannot be run on several ranks, in the variable ``name``."""
        if torch_version() < OLDEST_TORCH:
            self._refuse_for_torch(name)
        if self._older_fsdp:
            raise ArgumentError(
                f"{name} holds FullyShardedDataParallel, which is not supported; divide the module "
                f"by its successor fully_shard, in a function that builds it, such as "
                f"{name}0=lambda: fully_shard(build())"
            )
        for path, leaf in leaves:
            if is_sharded(leaf) and not (self.sharded_modules and _sharded_by_rows(leaf)):
                raise ArgumentError(
                    f"{path} is a DTensor with the placements "
                    f"{getattr(leaf, 'placements', None)}; only modules that fully_shard has "
                    f"divided along the first dimension are supported"
                )
        for wrapper in self.wrappers:
            for option in ("gradient_as_bucket_view", "static_graph"):
                if getattr(wrapper, option):
                    raise ArgumentError(
                        f"{name} holds DistributedDataParallel({option}=True), but a step has "
                        f"several backward passes and keeps the gradients of each; leave it out"
                    )

    def _refuse_for_torch(self, name: str) -> None:
        """Refuse what works with newer versions of torch alone."""
        for what, found in (
            ("a module that fully_shard has divided", bool(self.sharded_modules)),
            ("a Table that is divided over ranks", bool(self._tables)),
        ):
            if found:
                needed = ".".join(map(str, OLDEST_TORCH))
                raise ArgumentError(
                    f"{name} holds {what}, which needs torch {needed} or later, not "
                    f"{torch.__version__}"
                )

    def reshard(self) -> None:
        """Make ``fully_shard`` drop the whole tensors it keeps, and gather its shards anew."""
        for module in self.sharded_modules:
            module.reshard()  # type: ignore[operator]

    def to_global(self, leaf: Tensor, part: Tensor) -> Tensor:
        """``part``, shaped as ``leaf``; as a DTensor if that is a table divided over the ranks."""
        table = self._tables.get(id(leaf))
        return part if table is None else row_sharded(part, table.rows)

    def global_shape(self, leaf: Tensor) -> tuple[int, ...]:
        """The shape of ``leaf``, with the rows that other ranks hold."""
        table = self._tables.get(id(leaf))
        return tuple(leaf.shape) if table is None else (table.rows, *leaf.shape[1:])


def _sharded_by_rows(leaf: Any) -> bool:
    """Whether each rank holds consecutive rows of a DTensor."""
    return len(leaf.placements) == 1 and leaf.placements[0].is_shard(0)
