"""The evaluator of a run on several ranks: objectives are means over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from bilevel.engine.eager import EagerEvaluator
from bilevel.engine.execution import Execution
from bilevel.engine.finite import FiniteCheck
from bilevel.engine.ranks.check import RanksCheck
from bilevel.engine.ranks.group import Ranks
from bilevel.problem import Problem
from bilevel.sampling import Draw
from bilevel.variables import Variable, buffers_copied, is_sharded


class RanksEvaluator(EagerEvaluator):
    """Evaluates a run whose ranks have samples of their own, and average their gradients."""

    def __init__(
        self, problem: Problem, draw: Draw, execution: Execution, *, ranks: Ranks, defers: bool
    ) -> None:
        super().__init__(problem, draw, execution, defers=defers)
        self._ranks = ranks
        self._failures: list[Exception] = []

    def f(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        return self._evaluated(super().f, x, y, batch)

    def g(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        return self._evaluated(super().g, x, y, batch)

    def _evaluated(
        self, objective: Callable[..., Tensor], x: Variable, y: Variable, batch: Any
    ) -> Tensor:
        """An objective; where it raises, NaN, so that the check of the step raises on all ranks.

        Otherwise the other ranks would wait for the messages of this one. Where modules send
        messages of their own in their forward passes, nothing can take the place of these.
        """
        try:
            with _own_buffers(x, y):
                return objective(x, y, batch)
        except Exception as error:  # raised again by the check, once the other ranks know of it
            leaves = [*x.leaves, *y.leaves]
            if self._ranks.size == 1 or _synced(x, y) or any(map(is_sharded, leaves)):
                raise
            self._failures.append(error)
            return math.nan * torch.stack([leaf.sum() for leaf in leaves]).sum()

    def mean(self, value: Tensor) -> Tensor:
        return self._ranks.mean(value)

    def _new_check(self, k: int, *, at_once: bool, before: FiniteCheck | None) -> FiniteCheck:
        if self._ranks.size == 1:
            return super()._new_check(k, at_once=at_once, before=before)
        return RanksCheck(k, self._ranks, self._failures, at_once=at_once, before=before)


def _own_buffers(*variables: Variable) -> AbstractContextManager[None]:
    """Around the evaluation of a term whose graph is kept while other terms are evaluated.

    ``DistributedDataParallel`` writes the first rank's buffers into those of the others before each
    forward pass. A graph that holds them would then refuse to be differentiated (torch 2.11).
    """
    synced = _synced(*variables)
    return buffers_copied(*synced) if synced else nullcontext()


def _synced(*variables: Variable) -> list[Variable]:
    """Those with buffers that ``DistributedDataParallel`` sends in forward passes."""
    return [
        v for v in variables if any(w.broadcast_buffers and w.modules_buffers for w in v.wrappers)
    ]
