"""What the saved state of a user's optimizer must look like.

An optimizer does not declare what it keeps. But its options are known, and whether it can step with
a saved state is tried: with gradients of zero, on a copy of it and of its parameters.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from bilevel.errors import StateError
from bilevel.stepping.optimizers import restore_types
from bilevel.stepping.shared_adamw import SharedAdamW
from bilevel.variables import Form, Variable, form_of, to_row_sparse
from bilevel.variables.forms import anything, each, flag, real, record, refuse

LARGEST_TRIED = 1 << 24
"""Of more numbers than this no copy is made, and the optimizer finds out by itself."""


def optimizer_form(
    optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, variable: Variable
) -> Form:
    """The form of what an update with this optimizer saves."""
    mine = optimizer.state_dict()
    groups = each(
        [
            record({name: _option(value) for name, value in group.items()})
            for group in mine["param_groups"]
        ]
    )
    parts: dict[str, Form] = {"param_groups": groups, "state": _entries(mine["param_groups"])}
    if scheduler is not None:
        parts["scheduler"] = _scheduler_form(scheduler)
    declared = record(parts)

    def check(value: Any, path: str) -> None:
        declared(value, path)
        if isinstance(optimizer, SharedAdamW):
            optimizer.check_entries(value["state"], f"{path}/state")
            return  # a copy of it has no leader
        _try(optimizer, variable, value, path)

    return check


def _option(value: Any) -> Form:
    """An option of a group: finite numbers, and no negative one where it is not so by itself."""
    if isinstance(value, bool):
        return flag
    if isinstance(value, int | float):
        return real(0.0 if value >= 0 else -math.inf)
    if isinstance(value, list | tuple):
        return each([_option(part) for part in value])
    return form_of(value)


def _entries(groups: list[dict[str, Any]]) -> Form:
    """What is kept for each parameter, by its number."""
    numbers = {number for group in groups for number in group["params"]}

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict) or not value.keys() <= numbers:
            refuse(value, path, f"a dict by the numbers of the parameters, {sorted(numbers)},")
        for number, entries in value.items():
            if not isinstance(entries, dict):
                refuse(entries, f"{path}/{number}", "a dict of what the optimizer keeps")

    return check


def _scheduler_form(scheduler: LRScheduler) -> Form:
    known = {name: _loose(value) for name, value in scheduler.state_dict().items()}
    return record(known)


def _loose(value: Any) -> Form:
    """Numbers for numbers, lists for lists; counters of milestones lose their entries."""
    if isinstance(value, dict):
        return anything
    return _option(value)


def _try(
    optimizer: torch.optim.Optimizer, variable: Variable, state: dict[str, Any], path: str
) -> None:
    """Refuse a state with which the optimizer cannot step, where it can without."""
    if any(kind.sharded for kind in variable.averaging):
        return  # what is saved is of the whole, and here is a part
    if sum(leaf.numel() for leaf in variable.leaves) > LARGEST_TRIED:
        return
    sparse = dict(zip(map(id, variable.leaves), variable.row_sparse, strict=True))
    by_rows = [sparse[id(p)] for group in optimizer.param_groups for p in group["params"]]
    try:
        _steps(optimizer, by_rows, None)
    except Exception:  # whatever it may raise, a copy of it is not the whole of it
        return
    try:
        after = _steps(optimizer, by_rows, state)
    except Exception as error:  # an optimizer of the user's own may raise anything
        raise StateError(
            f"with the saved {path} the optimizer cannot step ({type(error).__name__}: {error})"
        ) from error
    if not all(bool(torch.isfinite(leaf).all()) for leaf in after):
        raise StateError(
            f"with the saved {path} the optimizer steps to numbers that are not finite"
        )


@torch.no_grad()
def _steps(
    optimizer: torch.optim.Optimizer, by_rows: list[bool], state: dict[str, Any] | None
) -> list[Tensor]:
    """Where a copy of the optimizer steps to from where it is, without gradients."""
    trial = copy.deepcopy(optimizer)
    params = [param for group in trial.param_groups for param in group["params"]]
    if state is not None:
        trial.load_state_dict(copy.deepcopy(state))
        restore_types(trial, state)
    with torch.random.fork_rng([]):
        for _ in range(2):  # a number such as beta^t may be 1 at every second step
            for param, sparse in zip(params, by_rows, strict=True):
                zeros = torch.zeros_like(param)
                param.grad = to_row_sparse(zeros) if sparse else zeros
            trial.step()
    return params
