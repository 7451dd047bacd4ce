"""The evaluator of a run on several ranks: objectives are means over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bilevel.engine.eager import EagerEvaluator
from bilevel.engine.execution import Execution
from bilevel.engine.finite import FiniteCheck
from bilevel.engine.ranks.batches import on_ranks
from bilevel.engine.ranks.check import RanksCheck
from bilevel.engine.ranks.group import Ranks
from bilevel.engine.ranks.passes import Passes, Usual
from bilevel.errors.exceptions import add_note
from bilevel.problem import Level, Problem
from bilevel.sampling import Draw
from bilevel.variables import Variable, buffers_copied, is_sharded

_BROKEN_OFF = (
    "This broke off between messages that the wrapper of a module (fully_shard or "
    "DistributedDataParallel) sends, and the other ranks wait for the rest of them: let this "
    "exception end the process, then they end as well."
)


class RanksEvaluator(EagerEvaluator):
    """Evaluates a run whose ranks have samples of their own, and average their gradients."""

    def __init__(
        self, problem: Problem, draw: Draw, execution: Execution, *, ranks: Ranks, defers: bool
    ) -> None:
        self._failures: list[Exception] = []
        self._usual: Usual = {}
        draw = draw if ranks.size == 1 else on_ranks(draw, self._failures)
        super().__init__(problem, draw, execution, defers=defers)
        self._ranks = ranks

    def use(self, draw: Draw) -> None:
        super().use(draw if self._ranks.size == 1 else on_ranks(draw, self._failures))

    def f(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        return self._evaluated(super().f, Level.UPPER, x, y, batch)

    def g(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        return self._evaluated(super().g, Level.LOWER, x, y, batch)

    def _evaluated(
        self, objective: Callable[..., Tensor], level: Level, x: Variable, y: Variable, batch: Any
    ) -> Tensor:
        """An objective; where it raises, NaN, so that the check of the step raises on all ranks.

        Otherwise the other ranks would wait for the messages of this one.
        """
        if self._ranks.size == 1:
            with _own_buffers(x, y):
                return objective(x, y, batch)
        leaves = [*x.leaves, *y.leaves]
        whole = [leaf for leaf in leaves if not is_sharded(leaf)]
        if len(whole) < len(leaves):
            return self._of_divided(partial(objective, x, y, batch), level, (x, y), whole)
        with _own_buffers(x, y):
            if self._failures:  # the batch that was to be drawn is not there
                return _not_a_number(leaves)
            try:
                return objective(x, y, batch)
            except Exception as error:  # raised again by the check, once the others know of it
                self._failures.append(error)
                return _not_a_number(leaves)

    def _of_divided(
        self,
        objective: Callable[[], Tensor],
        level: Level,
        variables: tuple[Variable, ...],
        whole: list[Tensor],
    ) -> Tensor:
        """An objective with divided modules, whose forward passes send messages of their own."""
        no_value = bool(self._failures)
        passes = Passes(variables, self._usual, self._failures)
        try:
            with _own_buffers(*variables):
                value = passes.evaluate(level, objective, whole)
        except Exception as error:
            self._failures.clear()
            add_note(error, _BROKEN_OFF)
            raise
        return value * math.nan if no_value else value

    def _backward_pass(
        self,
        values: Sequence[Tensor],
        leaves: Sequence[Tensor],
        wrappers: Sequence[Any],
        seeds: Sequence[Tensor],
    ) -> None:
        """A backward pass; where it raises, a bad number is noted, so that all ranks raise.

        The hooks of wrappers send messages in the middle of it, which nothing can make up for.
        """
        try:
            super()._backward_pass(values, leaves, wrappers, seeds)
        except Exception as error:  # raised again by the check, once the other ranks know of it
            if self._ranks.size == 1:
                raise
            if wrappers or any(map(is_sharded, leaves)):
                self._failures.clear()
                add_note(error, _BROKEN_OFF)
                raise
            self._failures.append(error)
            self._check.numbers(["the gradient"], [values[0].detach() * math.nan])

    def mean(self, value: Tensor) -> Tensor:
        return self._ranks.mean(value)

    def _new_check(self, k: int, *, at_once: bool, before: FiniteCheck | None) -> FiniteCheck:
        if self._ranks.size == 1:
            return super()._new_check(k, at_once=at_once, before=before)
        return RanksCheck(k, self._ranks, self._failures, at_once=at_once, before=before)


def _not_a_number(leaves: Sequence[Tensor]) -> Tensor:
    """NaN, with gradients of NaN in all leaves."""
    return math.nan * torch.stack([leaf.sum() for leaf in leaves]).sum()


@contextmanager
def _own_buffers(*variables: Variable) -> Iterator[None]:
    """Around the evaluation of a term whose graph is kept while other terms are evaluated.

    ``DistributedDataParallel`` writes the first rank's buffers into those of the others before each
    forward pass. A graph that holds them would then refuse to be differentiated (torch 2.11). And
    where an objective raises before its forward pass, the other ranks would wait for that message.
    So it is sent here, once for each evaluation.
    """
    synced = _synced(*variables)
    if not synced:
        yield
        return
    wrappers = [wrapper for variable in synced for wrapper in variable.wrappers]
    with buffers_copied(*synced):
        for wrapper in wrappers:
            # always: whether a wrapper would do it depends on its last pass, which may be missing
            if wrapper.broadcast_buffers and wrapper.modules_buffers:
                wrapper._sync_buffers()  # type: ignore[no-untyped-call]
            wrapper.will_sync_module_buffers = _never  # type: ignore[method-assign]
        try:
            yield
        finally:
            for wrapper in wrappers:
                del wrapper.__dict__["will_sync_module_buffers"]


def _never() -> bool:
    return False


def _synced(*variables: Variable) -> list[Variable]:
    """Those with buffers that ``DistributedDataParallel`` sends in forward passes."""
    return [
        v for v in variables if any(w.broadcast_buffers and w.modules_buffers for w in v.wrappers)
    ]
