"""What cannot be done on several ranks, refused with the reason."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from bilevel.engine.execution import refuse
from bilevel.engine.ranks.group import Ranks
from bilevel.errors import ArgumentError
from bilevel.methods import Ability, Method
from bilevel.problem import Problem
from bilevel.variables import Averaging, Variable


def refuse_on_ranks(
    ranks: Ranks, problem: Problem, method: Method[Any], x: Variable, y: Variable
) -> None:
    """Raise, with the reason, where something cannot be done on several ranks."""
    alone = "or process_group=None where each rank is to run for itself"
    refuse(method, Ability.RANKS, f"method={type(method).__name__} on several ranks", alone)
    for variable, given in ((x, problem.x_set), (y, problem.y_set)):
        _refuse_leaves(ranks, variable, given)
        if ranks.size > 1:
            _refuse_batch_norm(variable)
    kinds = [
        (name, kind)
        for variable in (x, y)
        for name, kind in zip(variable.names, variable.averaging, strict=True)
    ]
    for name, kind in kinds:
        if not kind.sharded:
            continue
        if ranks.size != dist.get_world_size():
            raise ArgumentError(
                f"{name} is divided, which is known here only over all ranks, not over a "
                f"process_group of {ranks.size} of {dist.get_world_size()}"
            )
        refuse(method, Ability.SHARDS, f"a variable such as {name}, divided over ranks,")
        if kind is Averaging.NONE:
            refuse(method, Ability.DIVIDED_TABLES, f"the divided table {name}")


def _refuse_leaves(ranks: Ranks, variable: Variable, given: Any) -> None:
    leaves = zip(variable.names, variable.averaging, variable.row_sparse, strict=True)
    for name, kind, by_rows in leaves:
        if by_rows and kind is Averaging.BY_RUN and ranks.size > 1:
            raise ArgumentError(
                f"of {name} every rank holds all rows, but gradients by row are not averaged; "
                f"divide a Table by rows, with mine = bilevel.distributed.rows(n) and "
                f"Table(values[mine], first=mine.start, rows=n), and of an nn.Embedding leave out "
                f"sparse=True"
            )
        if kind is Averaging.BY_FSDP and given is not None:
            raise ArgumentError(
                f"{variable.name}_set={given!r} needs whole tensors, but of {name} each rank holds "
                f"a part"
            )


def _refuse_batch_norm(variable: Variable) -> None:
    for name, module, wrapped in variable.named_modules():
        if (
            isinstance(module, _BatchNorm)
            and not isinstance(module, torch.nn.SyncBatchNorm)
            and module.track_running_stats
            and module.training
            and not wrapped
        ):
            raise ArgumentError(
                f"{name} is a {type(module).__name__}, whose running statistics would differ "
                f"between the ranks; wrap the module in DistributedDataParallel, which gives all "
                f"ranks those of the first, or use "
                f"torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)"
            )
