"""The evaluator of many runs that are one computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bilevel.engine.eager import EagerEvaluator
from bilevel.engine.finite import FiniteCheck
from bilevel.engine.stacked.stack import Runs, StackedVariable, each
from bilevel.engine.stacked.streams import UnbatchableError
from bilevel.problem import Level, Number, Problem, Term
from bilevel.sampling import Draw
from bilevel.variables import Variable, first_not_finite, longest_step, substituted


class StackedCheck(FiniteCheck):
    """Ends a run at its first number that is not finite; the others go on."""

    def __init__(self, step: int, runs: Runs) -> None:
        super().__init__(step, at_once=True)
        self._runs = runs

    def scalars(self, values: Sequence[Tensor], names: Callable[[], list[str]]) -> None:
        of_runs = torch.stack([value.detach() for value in values])
        if not math.isfinite(of_runs.sum().item()):
            named = dict(zip(names(), of_runs, strict=True))
            self._look(torch.isfinite(of_runs).all(0), named)

    @property
    def bad(self) -> Tensor | None:
        """For each run whether it has ended, and must not move; None: all go on."""
        return ~self._runs.going if self._runs.ended else None

    def numbers(self, names: list[str], values: list[Tensor]) -> None:
        named = dict(zip(names, values, strict=True))
        self._look(torch.isfinite(torch.stack(values)).all(0), named)

    def gradients(
        self, moves: Sequence[tuple[Variable, Number]], *, averaged: bool = False
    ) -> None:
        grads = [grad for variable, _ in moves for grad in variable.grads()]
        # the norm over all runs bounds that of each, and is several times as fast to get
        total = sum([norm.item() for norm in torch._foreach_norm(grads)])
        for variable, rate in moves:
            most = rate.abs().amax().item() if isinstance(rate, Tensor) else abs(rate)
            if not most * total <= longest_step(grads):  # also true for NaN
                self._each_run(variable, rate)

    def _each_run(self, variable: Variable, rate: Number) -> None:
        grads = variable.grads()
        longest = longest_step(grads)
        some = [g.reshape(len(g), -1) for g in grads if g.numel()]
        good = abs(rate) * torch.stack([g.abs().amax(1) for g in some]).amax(0) <= longest
        named = dict(zip(variable.gradient_names, grads, strict=True))
        self._look(good, named, f"the step of {variable.name}")

    def _look(self, good: Tensor, named: Mapping[str, Tensor], other: str = "a number") -> None:
        """End the runs that are not ``good``, by the first of the named that is not finite."""

        def culprit(run: int) -> str:
            of_run = [tensor[run] for tensor in named.values()]
            return first_not_finite(list(named), of_run) or other

        self._runs.require(good, self._step, culprit)


class StackedEvaluator(EagerEvaluator):
    """Evaluates all R runs at once: every objective gives R numbers.

    Runs are independent, so one backward pass of the sum of their Phi gives every direction of
    every run.
    """

    def __init__(self, problem: Problem, draw: Draw, runs: Runs) -> None:
        super().__init__(problem, draw)
        self._runs = runs

    def f(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        return self._values(x, [Term(Level.UPPER, y, batch)])[0]

    def g(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        return self._values(x, [Term(Level.LOWER, y, batch)])[0]

    def _new_check(self, k: int, *, at_once: bool, before: FiniteCheck | None) -> FiniteCheck:
        return StackedCheck(k, self._runs)

    def _values(
        self, x: Variable, terms: Sequence[Term], rewind: Callable[[], None] | None = None
    ) -> list[Tensor]:
        """R numbers for each term, all from one call of vmap, which costs as much as many terms."""
        stacks = {
            id(v): v for v in (x, *(term.y for term in terms)) if isinstance(v, StackedVariable)
        }
        batches = {id(term.batch): term.batch for term in terms}
        templates = {id(v.template): v.template for v in stacks.values()}
        counts = [len(v.leaves) for v in stacks.values()]
        of_x = stacks[id(x)].template
        name = "an objective"

        def of_one(*tensors: Tensor) -> tuple[Tensor, ...]:
            nonlocal name
            rest = iter(tensors)
            leaves = {key: list(islice(rest, n)) for key, n in zip(stacks, counts, strict=True)}
            own = {key: batch.of_one(rest) for key, batch in batches.items()}
            values = []
            with substituted(of_x, leaves[id(x)]):
                for term in terms:
                    name = f"{term.level.value}(x, y, batch)"
                    of_y = stacks[id(term.y)].template
                    with substituted(of_y, leaves[id(term.y)]):
                        batch = own[id(term.batch)]
                        upper = term.level is Level.UPPER
                        objective = self.problem.f if upper else self.problem.g
                        values.append(objective(of_x, of_y, batch))
            return tuple(values)

        before = _versions(templates.values())
        tensors = [leaf for v in stacks.values() for leaf in v.leaves]
        tensors += [tensor for batch in batches.values() for tensor in batch.tensors]
        values = each(lambda: name, of_one)(*tensors)
        if _versions(templates.values()) != before:
            raise UnbatchableError(
                "the objectives change the buffers of a module, of which every run has its own"
            )
        return list(values)


def _versions(variables: Iterable[Variable]) -> list[tuple[int, int]]:
    """What differs after a buffer was changed in place or replaced."""
    buffers = [buffer for variable in variables for buffer in variable.buffers]
    return [(id(buffer), buffer._version) for buffer in buffers]
