"""How variables move: plain steps or the user's optimizer, then the projection onto the set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from bilevel.errors import ArgumentError, ArgumentTypeError, StateError
from bilevel.problem import Number, Projection, ProximalMap, RowNumbers, RowWise
from bilevel.problem.sets import Box
from bilevel.stepping.optimizer_forms import optimizer_form
from bilevel.stepping.optimizers import (
    build,
    plain_step,
    restore_types,
    skippable_step,
    skips_without_sync,
    with_counters,
)
from bilevel.stepping.rates import OptimizerFactory
from bilevel.stepping.shared_adamw import SharedAdamW
from bilevel.variables import (
    Form,
    Variable,
    is_sharded,
    largest_entries,
    length,
    local_part,
    redistribute_like,
    saved,
    stored_values,
    touched_rows,
)
from bilevel.variables.forms import refuse

_INEXACT = 0.01
"""The part of its length by which a projection that is found by iterations may miss its set."""


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
        self._given = list(projections)
        self._projections = [
            (index, variable.leaves[index], project)
            for index, project in enumerate(projections)
            if project is not None
        ]
        self._longest = min(float(torch.finfo(leaf.dtype).max) for leaf in variable.leaves)
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: LRScheduler | None = None
        if factory is not None:
            self._optimizer, self._scheduler = build(factory, variable)
        first = None if leader is None else leader.optimizer
        if isinstance(self._optimizer, SharedAdamW) and isinstance(first, SharedAdamW):
            self._optimizer.follow(first)
        self.project()
        self._require_projections()

    def choose(self, rate: Number, gain: Number = 1.0, longest: float = math.inf) -> Number:
        """The step that :meth:`apply` is to take along ``gain`` times the gradients on the leaves.

        It is ``rate``, or with an optimizer the learning rate of its first group. Where entries do
        not move by themselves, it is shortened so that none moves by more than ``longest``.
        """
        if self._optimizer is None and longest < math.inf and not self.entrywise:
            peaks = [float(peak) for peak in largest_entries(stored_values(self._variable.grads()))]
            most = max(peaks, default=0.0) * abs(float(gain))
            return min(float(rate), longest / most) if most else rate
        if self._optimizer is None:
            return rate
        return float(self._optimizer.param_groups[0].get("lr", 1.0))

    def cut_off(self, step: Number, longest: float) -> None:
        """Cut the gradients off, so that no entry moves by more than ``longest`` in that step.

        Nothing is done where entries do not move by themselves, as :meth:`choose` has shortened it.
        """
        if longest < math.inf and step and self.entrywise:
            most = longest / abs(float(step))
            for values in stored_values(self._variable.grads()):
                values.clamp_(-most, most)

    @property
    def variable(self) -> Variable:
        """What moves."""
        return self._variable

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's, if there is one."""
        return self._optimizer

    def restart(self, start: Variable) -> None:
        """Go to where a new variable starts, and forget what an optimizer knows of the old one."""
        self._variable.assign(start)
        if self._optimizer is not None:
            self._optimizer.state.clear()
        self.project()

    def slow_down(self) -> None:
        """Halve the learning rates of the optimizer; other steps are the policy's to halve."""
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
    def entrywise(self) -> bool:
        """Whether a step moves each entry by itself, so that each may have a rate of its own."""
        return self.plain and all(isinstance(project, Box) for *_, project in self._projections)

    @property
    def can_skip_without_sync(self) -> bool:
        """Whether :meth:`apply` can skip a bad step without waiting for the device.

        An optimizer has to be able to skip a step for a gradient scaler, as torch's fused ones do.
        Others would still decay weights and follow their momentum, and a scheduler would count a
        step that was not taken.
        """
        if any(isinstance(project, ProximalMap) for *_, project in self._projections):
            return False
        if self._optimizer is None:
            return True
        return skips_without_sync(self._optimizer) and self._scheduler is None

    def apply(self, rate: Number, gain: Number = 1.0, *, bad: Tensor | None = None) -> None:
        """Move against ``gain`` times the gradients on the leaves, and clear these.

        A plain step has length ``rate``; an optimizer decides for itself. Where ``bad``, a flag on
        the device, is true, nothing moves (see :attr:`can_skip_without_sync`).
        """
        grads = self._variable.grads()
        with torch.no_grad():
            if self._optimizer is not None and skips_without_sync(self._optimizer):
                skippable_step(self._optimizer, float(gain), bad)
            else:
                if bad is not None:
                    for values in stored_values(grads):
                        # of stacked runs each has a flag of its own
                        flags = bad.reshape(-1, *[1] * (values.ndim - 1)) if bad.ndim else bad
                        values.masked_fill_(flags, 0.0)
                if self._optimizer is None:
                    self._step(grads, -rate * gain)
                else:
                    if gain != 1.0:
                        torch._foreach_mul_(stored_values(grads), gain)
                    plain_step(self._optimizer, self._variable, grads)
            if self._scheduler is not None:
                self._scheduler.step()
        self._variable.clear_grads()
        self._variable.reshard()
        if self._projections:
            self.project(grads, rate)

    def _step(self, grads: Sequence[Tensor], rate: Number) -> None:
        """Add ``rate`` times the gradients; a sparse gradient moves only the rows it touches."""
        if isinstance(rate, Tensor):  # one rate per stacked run
            for leaf, grad in zip(self._variable.leaves, grads, strict=True):
                leaf.addcmul_(grad, rate.reshape(-1, *[1] * (leaf.ndim - 1)).to(leaf.dtype))
            return
        if abs(rate) > self._longest:  # too large for the leaf's type, though the step itself fits
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
    def project(self, moved: Sequence[Tensor] | None = None, rate: Number = 0.0) -> None:
        """Move back into the set; after a step along the gradients ``moved``, what it touched.

        A step of that ``rate`` may be followed by a proximal map in the place of a projection.
        """
        for index, leaf, project in self._projections:
            if isinstance(project, ProximalMap):
                if moved is not None:
                    leaf.copy_(self._inside(partial(project.after, float(rate)), leaf))
                continue
            if not self._variable.row_sparse[index]:
                leaf.copy_(self._inside(project, leaf))
                continue
            assert isinstance(project, RowWise), "every set was checked when it was chosen"
            for rows in _places(leaf, None if moved is None else moved[index]):
                chosen = project.of_rows(rows, leaf.shape)
                assert chosen is not None
                leaf[rows] = self._inside(chosen, leaf[rows])

    @torch.no_grad()
    def _require_projections(self) -> None:
        """Raise for a function that moves again what it has moved, so that it has no set."""
        for _, leaf, project in self._projections:
            if isinstance(project, ProximalMap | RowWise) or is_sharded(leaf):
                continue
            once = self._inside(project, leaf + 1)  # a point that may lie outside
            moved = length(self._inside(project, once.clone()) - once)
            if moved > _INEXACT * length(once):
                raise ArgumentError(
                    f"the set of {self._variable.name} is no projection: applied to what it gave, "
                    f"it moved that by {moved / length(once):.0%} again; give a function that "
                    f"leaves the points of its set where they are, or put the map into the "
                    f"objectives"
                )

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

    def stacked(self, variable: Variable, lift: Callable[[Projection], Projection]) -> Update:
        """Plain steps of a variable that stacks this one for many runs, with the sets lifted."""
        assert self.plain, "only plain steps can be stacked"
        return Update(variable, [None if p is None else lift(p) for p in self._given])

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

    def state_form(self) -> Form:
        """What :meth:`state_dict` gives; whether that has an optimizer is seen on loading."""

        def check(value: Any, path: str) -> None:
            if not isinstance(value, dict):
                refuse(value, path, "a dict")
            alike = ("scheduler" in value) == (self._scheduler is not None)
            if value and self._optimizer is not None and alike:
                optimizer_form(self._optimizer, self._scheduler, self._variable)(value, path)

        return check

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
            restore_types(self._optimizer, state)
        if self._scheduler is not None:
            like = self._scheduler.state_dict()
            self._scheduler.load_state_dict(with_counters(like, state["scheduler"]))


class NoUpdate(Update):
    """A variable that starts in its set and never moves."""

    def choose(self, rate: Number, gain: Number = 1.0, longest: float = math.inf) -> Number:
        return 0.0

    def apply(self, rate: Number, gain: Number = 1.0, *, bad: Tensor | None = None) -> None:
        self._variable.clear_grads()


def updates_of_copies(
    copies: Sequence[Variable],
    projections: Callable[[Variable], Sequence[Projection | None]],
    factory: OptimizerFactory | None,
) -> list[Update]:
    """The updates of copies of one variable, which always move in this order."""
    updates: list[Update] = []
    for copy in copies:
        leader = updates[0] if updates else None
        updates.append(Update(copy, projections(copy), factory, leader))
    return updates


_BLOCK = 1 << 20  # rows of a table that are projected at a time


def _places(leaf: Tensor, gradient: Tensor | None) -> Iterator[RowNumbers]:
    """The rows that a step along the gradient moved (None: all rows), in blocks."""
    if gradient is not None and gradient.is_sparse:
        yield touched_rows(gradient)
        return
    for start in range(0, len(leaf), _BLOCK):
        yield slice(start, min(start + _BLOCK, len(leaf)))
