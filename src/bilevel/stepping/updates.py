"""How variables move: rates, plain steps or the user's optimizer, projection."""

from __future__ import annotations

import math
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from bilevel.errors import ArgumentError, ArgumentTypeError, MultiplierWarning, StateError, warn
from bilevel.problem import Projection, RowNumbers, RowWise
from bilevel.stepping.schedules import Constant, Rate, Schedule, as_schedule, positive_at
from bilevel.stepping.shared_adamw import SharedAdamW
from bilevel.variables import (
    Variable,
    is_sharded,
    local_part,
    redistribute_like,
    stored_values,
    to_row_sparse,
    touched_rows,
)
from bilevel.variables.state import saved

OptimizerFactory: TypeAlias = Callable[[Iterable[Tensor]], torch.optim.Optimizer | LRScheduler]
"""``params -> torch.optim.Optimizer``, such as ``lambda p: torch.optim.Adam(p, lr=1e-3)``.

Or a learning-rate scheduler of one, which steps after each of its steps:
``lambda p: CosineAnnealingLR(torch.optim.Adam(p, lr=1e-3), T_max=1000)``.
"""

FoundRate: TypeAlias = Rate | Literal["auto"]
"""A rate, or that it is to be found on the way."""


@dataclass(frozen=True)
class Now:
    """The step sizes of one outer step.

    Attributes:
        lower: gamma_k, the step of the copy that solves the lower level; NaN: not known yet.
        penalty: beta_k, the step of a penalised copy; NaN: as lower.
        upper: the step of x; NaN where its update finds it.
        multiplier: lam_k; NaN where the method has none.
    """

    lower: float
    penalty: float
    upper: float
    multiplier: float


@dataclass(frozen=True)
class Rates:
    """The two step sizes as functions of k, and their checked values at one k.

    Attributes:
        lower: gamma_k, the step of the copy that solves the lower level; None: to be found.
        upper: the step of x; None: to be found.
    """

    lower: Schedule | None
    upper: Schedule | None

    @property
    def constant(self) -> bool:
        """Whether they are the same at every k."""
        return all(isinstance(schedule, Constant | None) for schedule in vars(self).values())

    def at(self, k: int, before: float) -> Now:
        """All of them at k; ``before`` is the multiplier of the step before."""
        lower = _at("lower_lr", self.lower, k)
        return Now(lower, lower, _at("upper_lr", self.upper, k), math.nan)


@dataclass(frozen=True)
class PenaltyRates(Rates):
    """With those of a penalised copy.

    Attributes:
        penalty: beta_k, the step of the penalised copies; None: as lower.
        multiplier: lam_k.
    """

    penalty: Schedule | None
    multiplier: Schedule

    def at(self, k: int, before: float) -> Now:
        lower = _at("lower_lr", self.lower, k)
        penalty = lower if self.penalty is None else _at("penalty_lr", self.penalty, k)
        upper = _at("upper_lr", self.upper, k)
        return Now(lower, penalty, upper, self._multiplier_at(k, before))

    def _multiplier_at(self, k: int, before: float) -> float:
        """lam_k; a warning when it is below lam_{k-1} (``before``)."""
        multiplier = positive_at("multiplier", self.multiplier, k)
        falling = k >= 2 and self.multiplier(k - 1) < self.multiplier(k - 2)
        if multiplier < before and not falling:  # one warning for each time that it turns down
            warn(
                MultiplierWarning(
                    f"multiplier({k}) = {multiplier!r} is below its value of {before!r} one step "
                    f"earlier; it must not decrease, or the bias of the direction grows again"
                )
            )
        return multiplier


def _at(name: str, schedule: Schedule | None, k: int) -> float:
    return math.nan if schedule is None else positive_at(name, schedule, k)


def rate_or_optimizer(
    name: str,
    rate: FoundRate | None,
    optimizer_name: str,
    optimizer: OptimizerFactory | None,
) -> Schedule | None:
    """The schedule of one rate, None where it is to be found or follows another.

    A rate beside an optimizer that would ignore it is refused; with an optimizer the rate is 1.
    """
    if optimizer is not None and not callable(optimizer):
        raise ArgumentTypeError(
            f"{optimizer_name} must be a function of the parameters that returns a "
            f"torch.optim.Optimizer, not {optimizer!r}"
        )
    if rate is None or (isinstance(rate, str) and rate == "auto"):
        return None if optimizer is None else Constant(1.0)
    if optimizer is not None:
        raise ArgumentError(
            f"{name}={rate!r} would be ignored, because {optimizer_name} brings its own "
            f"learning rate; give one of the two"
        )
    if isinstance(rate, str):
        raise ArgumentTypeError(
            f"{name} must be 'auto', a positive number or a function of the step k, not {rate!r}"
        )
    return as_schedule(name, rate)


class Update:
    """How one variable moves: by plain steps or by the user's optimizer, then back into its set.

    ``leader`` is how another copy of the variable moves, which always does so before this one.
    """

    def __init__(
        self,
        variable: Variable,
        projections: Sequence[Projection | None],
        factory: OptimizerFactory | None = None,
        leader: Update | None = None,
    ) -> None:
        self._variable = variable
        self._projections = [
            (index, variable.leaves[index], project)
            for index, project in enumerate(projections)
            if project is not None
        ]
        self._longest = min(float(torch.finfo(leaf.dtype).max) for leaf in variable.leaves)
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: LRScheduler | None = None
        if factory is not None:
            self._optimizer, self._scheduler = _built(factory, variable)
        first = None if leader is None else leader.optimizer
        if isinstance(self._optimizer, SharedAdamW) and isinstance(first, SharedAdamW):
            self._optimizer.follow(first)
        self.project()

    def choose(self, rate: float, gain: float = 1.0) -> float:
        """The step that :meth:`apply` is to take along ``gain`` times the gradients on the leaves.

        It is ``rate``, or with an optimizer what the first group of this has.
        """
        if self._optimizer is None:
            return rate
        return float(self._optimizer.param_groups[0].get("lr", 1.0))

    @property
    def variable(self) -> Variable:
        """What moves."""
        return self._variable

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's, if there is one."""
        return self._optimizer

    def slow_down(self) -> None:
        """Halve the steps that are not given by :class:`~bilevel.stepping.policy.Pace`."""
        for group in [] if self._optimizer is None else self._optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] / 2

    @property
    def scheduler(self) -> LRScheduler | None:
        """That of the optimizer's learning rate, if there is one."""
        return self._scheduler

    @property
    def plain(self) -> bool:
        """Whether it is a step of the given length and a projection, and nothing else."""
        return type(self) is Update and self._optimizer is None

    @property
    def can_stay(self) -> bool:
        """Whether :meth:`apply` can leave everything as it is without the device being asked.

        With an optimizer: one that can skip a step for a scaler of gradients, as torch's fused ones
        do. Others would still decay weights and follow their momentum, and a scheduler would count
        a step that was not taken.
        """
        if self._optimizer is None:
            return True
        return _skips(self._optimizer) and self._scheduler is None

    def apply(self, rate: float, gain: float = 1.0, *, bad: Tensor | None = None) -> None:
        """Move against ``gain`` times the gradients on the leaves, and clear these.

        A plain step has length ``rate``; an optimizer decides for itself. Where ``bad`` is true,
        on the device, the gradients are zero or, see :attr:`can_stay`, nothing moves at all.
        """
        grads = self._variable.grads()
        with torch.no_grad():
            if self._optimizer is not None and _skips(self._optimizer):
                _skippable_step(self._optimizer, gain, bad)
            else:
                if bad is not None:
                    for values in stored_values(grads):
                        values.masked_fill_(bad, 0.0)
                if self._optimizer is None:
                    self._step(grads, -rate * gain)
                else:
                    if gain != 1.0:
                        torch._foreach_mul_(stored_values(grads), gain)
                    _optimizer_step(self._optimizer, self._variable, grads)
            if self._scheduler is not None:
                self._scheduler.step()
        self._variable.clear_grads()
        self._variable.reshard()
        if self._projections:
            self.project(grads)

    def _step(self, grads: Sequence[Tensor], rate: float) -> None:
        """Add ``rate`` times the gradients, of a sparse one only in the rows that it touches."""
        if abs(rate) > self._longest:  # no number of some leaf's type, though the step is one
            grads, rate = [(rate * grad.double()).to(grad.dtype) for grad in grads], 1.0
        leaves, steps = [], []
        for leaf, grad in zip(self._variable.leaves, grads, strict=True):
            if grad.is_sparse:
                leaf.index_add_(0, touched_rows(grad), *stored_values([grad]), alpha=rate)
            else:
                leaves.append(local_part(leaf))
                steps.append(local_part(grad))
        if leaves:
            torch._foreach_add_(leaves, steps, alpha=rate)

    @torch.no_grad()
    def project(self, moved: Sequence[Tensor] | None = None) -> None:
        """Move back into the set; after a step along the gradients ``moved``, what it touched."""
        for index, leaf, project in self._projections:
            if not self._variable.row_sparse[index]:
                leaf.copy_(self._inside(project, leaf))
                continue
            assert isinstance(project, RowWise), "every set was checked when it was chosen"
            for rows in _places(leaf, None if moved is None else moved[index]):
                chosen = project.of_rows(rows, leaf.shape)
                assert chosen is not None
                leaf[rows] = self._inside(chosen, leaf[rows])

    def _inside(self, project: Projection, tensor: Tensor) -> Tensor:
        """The projection, checked."""
        inside = project(tensor)
        if not isinstance(inside, Tensor) or inside.shape != tensor.shape:
            raise ArgumentTypeError(
                f"the set of {self._variable.name} must project a tensor of shape "
                f"{tuple(tensor.shape)} to one of the same shape, not to {inside!r}"
            )
        if not bool(torch.isfinite(inside).all()):
            raise ArgumentError(
                f"the set of {self._variable.name} projected a finite tensor to one that is "
                f"not finite"
            )
        return inside

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, where there is one, and its scheduler's."""
        if self._optimizer is None:
            return {}
        state: dict[str, Any] = saved(self._optimizer.state_dict())
        for leaf, numbers in self._by_leaf(state):
            for name, value in numbers.items():
                if isinstance(value, Tensor) and value.shape == self._variable.leaves[leaf].shape:
                    numbers[name] = self._variable.to_global(leaf, value)
        if self._scheduler is not None:
            state["scheduler"] = saved(self._scheduler.state_dict())
        return state

    def _by_leaf(self, state: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
        """What a saved optimizer's state holds for each leaf."""
        assert self._optimizer is not None
        places = {id(leaf): place for place, leaf in enumerate(self._variable.leaves)}
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        for number, numbers in state["state"].items():
            yield places[id(params[number])], numbers

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved optimizer's state, and its scheduler's."""
        for there, mine, what in (
            (bool(state), self._optimizer, "an optimizer"),
            ("scheduler" in state, self._scheduler, "a learning-rate scheduler"),
        ):
            if there != (mine is not None):
                raise StateError(
                    f"the state of {self._variable.name} was saved {'with' if there else 'without'}"
                    f" {what}, but here it is the other way round"
                )
        if self._optimizer is not None:
            state = saved(state)
            for place, numbers in self._by_leaf(state):
                leaf = self._variable.leaves[place]
                for name, value in numbers.items():
                    whole = self._variable.to_global(place, leaf)
                    if isinstance(value, Tensor) and value.shape == whole.shape:
                        placed = redistribute_like(value, whole)
                        numbers[name] = placed if is_sharded(leaf) else local_part(placed)
            self._optimizer.load_state_dict(state)
            _restore_types(self._optimizer, state)
        if self._scheduler is not None:
            like = self._scheduler.state_dict()
            self._scheduler.load_state_dict(_with_counters(like, state["scheduler"]))


def updates_of_copies(
    copies: Sequence[Variable],
    projections: Callable[[Variable], Sequence[Projection | None]],
    factory: OptimizerFactory | None,
) -> list[Update]:
    """How copies of one variable move that always move in this order."""
    updates: list[Update] = []
    for copy in copies:
        leader = updates[0] if updates else None
        updates.append(Update(copy, projections(copy), factory, leader))
    return updates


_BLOCK = 1 << 20  # rows of a table that are projected at a time where all of them are


def _places(leaf: Tensor, gradient: Tensor | None) -> Iterator[RowNumbers]:
    """Where a step along the gradient moved the leaf (None: anywhere), in parts."""
    if gradient is not None and gradient.is_sparse:
        yield touched_rows(gradient)
        return
    for start in range(0, len(leaf), _BLOCK):
        yield slice(start, min(start + _BLOCK, len(leaf)))


def _restore_types(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Undo that torch converts what it loads to the type of the parameter: bits would be lost."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, entries_of in state["state"].items():
        mine = optimizer.state[params[number]]
        for name, value in entries_of.items():
            if isinstance(value, Tensor) and mine[name].dtype != value.dtype:
                mine[name] = value.to(mine[name].device, copy=True)


def _with_counters(mine: Any, theirs: Any) -> Any:
    """What was saved as plain types, with a Counter wherever there is one now."""
    if isinstance(mine, Counter):
        return Counter(theirs)
    if isinstance(mine, dict):
        return {key: _with_counters(mine.get(key), value) for key, value in theirs.items()}
    if isinstance(mine, list | tuple):
        return type(mine)(map(_with_counters, mine, theirs))
    return saved(theirs)


def _skips(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _skippable_step(optimizer: Any, gain: float, bad: Tensor | None) -> None:
    """A step along ``gain`` times the gradients, as a scaler of gradients asks for it.

    The optimizer divides by the scale and skips where something is infinite in the one pass that
    it makes over the gradients anyway; but its hooks, which clip perhaps, see what it steps along.
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


def _optimizer_step(
    optimizer: torch.optim.Optimizer, variable: Variable, grads: Sequence[Tensor]
) -> None:
    if not any(variable.row_sparse):
        optimizer.step()
        return
    if isinstance(optimizer, torch.optim.SparseAdam):
        variable.set_grads([g if g.is_sparse else to_row_sparse(g) for g in grads])
    # torch warns of sparse tensors that are made without a word on whether to check them
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    with checks(checks.is_enabled()):
        optimizer.step()


def _built(
    factory: OptimizerFactory, variable: Variable
) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
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
            f"the scheduler of {variable.name} is ReduceLROnPlateau, which waits for a number that "
            f"nobody gives it; choose one that goes by the count of steps"
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
        return  # the user's own is trusted to know what it is given
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
