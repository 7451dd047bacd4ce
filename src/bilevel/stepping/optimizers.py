"""The user's optimizers: building them, stepping them, saving and loading their state."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.stepping.rates import OptimizerFactory
from bilevel.stepping.shared_adamw import SharedAdamW
from bilevel.variables import Variable, saved, to_row_sparse


def restore_types(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give loaded state its saved type again: torch casts it to the parameter's, losing bits."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, entries_of in state["state"].items():
        mine = optimizer.state[params[number]]
        for name, value in entries_of.items():
            if isinstance(value, Tensor) and mine[name].dtype != value.dtype:
                mine[name] = value.to(mine[name].device, copy=True)


def with_counters(mine: Any, theirs: Any) -> Any:
    """The saved plain types, with a Counter wherever the scheduler itself holds one."""
    if isinstance(mine, Counter):
        return Counter(theirs)
    if isinstance(mine, dict):
        return {key: with_counters(mine.get(key), value) for key, value in theirs.items()}
    if isinstance(mine, list | tuple):
        return type(mine)(map(with_counters, mine, theirs))
    return saved(theirs)


def skips_without_sync(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer can skip a step for a gradient scaler, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def skippable_step(optimizer: Any, gain: float, bad: Tensor | None) -> None:
    """A step along ``gain`` times the gradients, asked for as a gradient scaler would.

    The optimizer divides by the scale, and skips the step where something is infinite, in the one
    pass that it makes over the gradients anyway. Its pre-step hooks, which may clip, must see the
    gradients that it steps along, so with hooks the gain is applied first.
    """
    if optimizer._optimizer_step_pre_hooks and gain != 1.0:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        torch._foreach_mul_(grads, gain)
        gain = 1.0
    device = optimizer.param_groups[0]["params"][0].device
    optimizer.grad_scale = torch.full((), 1 / gain, device=device)
    optimizer.found_inf = torch.zeros((), device=device) if bad is None else bad.to(torch.float32)
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def plain_step(
    optimizer: torch.optim.Optimizer, variable: Variable, grads: Sequence[Tensor]
) -> None:
    """A step of the optimizer along the gradients on the leaves."""
    if not any(variable.row_sparse):
        optimizer.step()
        return
    if isinstance(optimizer, torch.optim.SparseAdam):
        variable.set_grads([g if g.is_sparse else to_row_sparse(g) for g in grads])
    # torch warns of sparse tensors made without saying whether to check their invariants
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    with checks(checks.is_enabled()):
        optimizer.step()


def build(
    factory: OptimizerFactory, variable: Variable
) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
    """What the user's factory makes for a variable, checked."""
    made = factory(variable.leaves)
    scheduler = made if isinstance(made, LRScheduler) else None
    optimizer = made.optimizer if isinstance(made, LRScheduler) else made
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(
            f"the optimizer factory of {variable.name} must return a torch.optim.Optimizer or a "
            f"learning-rate scheduler of one, not {reprlib.repr(optimizer)}"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ArgumentTypeError(
            f"the scheduler of {variable.name} is ReduceLROnPlateau, which needs a metric at every "
            f"step, and a run gives it none; choose one that counts steps"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentTypeError(
            f"the optimizer of {variable.name} is LBFGS, which evaluates the objective itself; "
            f"choose one whose step() needs only gradients"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != {id(leaf) for leaf in variable.leaves}:
        raise ArgumentError(
            f"the optimizer of {variable.name} was not built from the parameters that its factory "
            f"was given; return for example torch.optim.Adam(params, lr=1e-3)"
        )
    _check_sparse(optimizer, variable)
    return optimizer, scheduler


_SPARSE: dict[type, tuple[str, ...]] = {
    torch.optim.SparseAdam: (),
    torch.optim.Adagrad: ("weight_decay",),
    torch.optim.SGD: ("momentum", "weight_decay"),
}
"""torch's optimizers that know sparse gradients, and which options make them move every row."""


def _check_sparse(optimizer: torch.optim.Optimizer, variable: Variable) -> None:
    """Refuse one of torch's optimizers that would fail on the gradients of rows."""
    kind = next(
        base
        for base in type(optimizer).__mro__
        if base is SharedAdamW or base.__module__.startswith("torch.optim")
    )
    if kind is torch.optim.Optimizer or not any(variable.row_sparse):
        return  # an optimizer of the user's own is trusted with sparse gradients
    named = dict(zip(map(id, variable.leaves), variable.names, strict=True))
    sparse = {id(leaf) for leaf, by in zip(variable.leaves, variable.row_sparse, strict=True) if by}
    for group in optimizer.param_groups:
        options = [f"{name}={group[name]!r}" for name in _SPARSE.get(kind, ()) if group[name]]
        for leaf in group["params"]:
            if id(leaf) in sparse and (kind not in _SPARSE or options):
                raise ArgumentTypeError(
                    f"the optimizer of {named[id(leaf)]} is {kind.__name__}"
                    f"({', '.join(options) or '...'}), which would move every row of it, not only "
                    f"those that a batch looked up; use torch.optim.SparseAdam, "
                    f"torch.optim.Adagrad or torch.optim.SGD, without momentum and weight decay, "
                    f"or no optimizer"
                )
            if id(leaf) not in sparse and kind is torch.optim.SparseAdam:
                raise ArgumentTypeError(
                    f"the optimizer of {variable.name} is SparseAdam, which takes no dense "
                    f"gradients, as {named[id(leaf)]} has them; use torch.optim.Adagrad or "
                    f"torch.optim.SGD for both, or no optimizer"
                )
