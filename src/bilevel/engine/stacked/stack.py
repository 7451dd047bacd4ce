"""Stacked runs: which of them go on, functions of all of them, and their variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bilevel.engine.stacked.streams import UnbatchableError
from bilevel.errors import NonFiniteError
from bilevel.variables import Variable

try:  # the functions that torch.vmap is made of; seen in torch 2.11 and 2.13
    from torch._C._functorch import (
        _add_batch_dim,
        _remove_batch_dim,
        _vmap_decrement_nesting,
        _vmap_increment_nesting,
    )
    from torch._functorch.vmap import lazy_load_decompositions  # type: ignore[attr-defined]

    _HAS_PARTS = True
except ImportError:  # another version of torch: torch.vmap itself is called
    _HAS_PARTS = False


class Runs:
    """Which of the stacked runs still go on.

    Attributes:
        count: R.
        going: for each run whether it goes on, on the device.
        ended: the runs that do not, and what ended them.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count = count
        self.going = torch.ones(count, dtype=torch.bool, device=device)
        self.ended: dict[int, NonFiniteError] = {}

    def require(self, good: Tensor, step: int, culprit: Callable[[int], str]) -> None:
        """End the runs that are not ``good``; ``culprit`` names what is not finite in one."""
        if bool((good | ~self.going if self.ended else good).all()):
            return
        for run in (self.going & ~good).nonzero()[:, 0].tolist():
            self.ended[run] = NonFiniteError(step, culprit(run))
        self.going = self.going & good

    def only_going(self, moved: Tensor, before: Tensor | float) -> Tensor:
        """``moved`` in the runs that go on, ``before`` in the others."""
        if not self.ended:
            return moved
        return torch.where(per_run(self.going, moved), moved, before)


def per_run(numbers: Tensor, like: Tensor) -> Tensor:
    """One number per run, shaped so that it meets every entry of ``like`` of that run."""
    return numbers.reshape(-1, *[1] * (like.ndim - 1))


def each(name: Callable[[], str], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of one run as a function of all runs; ``name`` says what it was evaluating."""

    def of_all(*tensors: Tensor) -> Any:
        try:
            return _vmap(function, tensors)
        except Exception as error:
            # whatever the user's code raises under vmap: the runs are then taken one by one, where
            # a mistake of the user's own is raised as it is
            said = (str(error).splitlines() or [""])[0].split(". ")[0]
            raise UnbatchableError(
                f"{name()} cannot be evaluated for all runs at once "
                f"({type(error).__name__}: {said})"
            ) from error

    return of_all


def _vmap(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    """``torch.vmap(function)(*tensors)``, where it returns one tensor or a tuple of them.

    All that torch.vmap does for other arguments takes as long as ten small operations.
    """
    if not _HAS_PARTS:
        return torch.vmap(function)(*tensors)
    lazy_load_decompositions()
    runs = len(tensors[0])
    level = _vmap_increment_nesting(runs, "error")
    try:
        found = function(*[_add_batch_dim(tensor, 0, level) for tensor in tensors])
        if isinstance(found, Tensor):
            return _remove_batch_dim(found, level, runs, 0)
        if not isinstance(found, tuple):
            raise TypeError(f"it returned a {type(found).__name__}, not a tensor")
        return tuple([_remove_batch_dim(value, level, runs, 0) for value in found])
    finally:
        _vmap_decrement_nesting()


class StackedVariable(Variable):
    """One point of every run.

    Attributes:
        template: the same point of one run, in whose structure the objectives receive each.
        runs: which of them go on; None: what is stacked are not runs.
    """

    runs: Runs

    def __init__(
        self,
        template: Variable,
        leaves: Sequence[Tensor],
        runs: Runs | None,
        name: str | None = None,
    ) -> None:
        super().__init__(list(leaves), template.name if name is None else name)
        self.template = template
        if runs is not None:
            self.runs = runs
        self.names = [self.name + path.removeprefix(template.name) for path in template.names]
        self.gradient_names = [f"the gradient of {path}" for path in self.names]
        self.requires_grad_(True)

    def clone(self, name: str | None = None) -> StackedVariable:
        leaves = [leaf.detach().clone() for leaf in self.leaves]
        return StackedVariable(
            self.template, leaves, self.runs, self.name if name is None else name
        )

    def of_run(self, run: int) -> Any:
        """A copy of the value of one run, for the user to keep."""
        with torch.no_grad():
            for mine, leaf in zip(self.template.leaves, self.leaves, strict=True):
                mine.copy_(leaf[run])
        return self.template.detached()

    def gradient_norm(self, grads: list[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in grads]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        return total
