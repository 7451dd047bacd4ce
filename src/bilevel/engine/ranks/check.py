"""Finite checks over several ranks, with the averages that they go along with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from bilevel.engine.finite import FiniteCheck
from bilevel.engine.ranks.group import Ranks
from bilevel.errors import DistributedError, NonFiniteError
from bilevel.problem import Number
from bilevel.variables import Averaging, Variable, largest_entries, stored_values


class RanksCheck(FiniteCheck):
    """Averages gradients over the ranks, and checks that the numbers of all ranks are finite.

    A bad number is noted, and reduced with the next gradients. Once one rank has met one, all raise
    :class:`~bilevel.errors.NonFiniteError`, at the same place. Where an objective raised on one,
    which then goes on with NaN, that rank raises what its objective raised, and the others a
    :class:`~bilevel.errors.DistributedError` that says what it was.
    """

    def __init__(
        self,
        step: int,
        ranks: Ranks,
        failures: list[Exception],
        *,
        at_once: bool,
        before: FiniteCheck | None = None,
    ) -> None:
        super().__init__(step, at_once=False, before=before)
        self._ranks = ranks
        self._failures = failures
        self._stops = at_once

    def gradients(
        self, moves: Sequence[tuple[Variable, Number]], *, averaged: bool = False
    ) -> None:
        ours: list[tuple[Variable, list[str], list[Tensor], Number]] = []
        alone = False
        for variable, rate in moves:
            names, mine = self._split(variable, variable.grads(), averaged)
            alone = self._note_unaveraged(variable, rate) or alone
            ours.append((variable, names, mine, rate))
        if alone or not averaged:
            tensors = [] if averaged else [grad for *_, mine, _ in ours for grad in mine]
            self._reduce_with_flag(tensors, moves[0][0].device)
        self.steps(ours)
        if self._stops:
            self.read()

    def complete(self, variable: Variable) -> None:
        self.average([(variable, variable.grads())])

    def average(self, parts: Sequence[tuple[Variable, list[Tensor]]]) -> None:
        ours: list[tuple[list[str], list[Tensor]]] = []
        for variable, tensors in parts:
            ours.append(self._split(variable, tensors, False))
            self._note_unaveraged(variable, 0.0, tensors)
        self._reduce_with_flag([tensor for _, mine in ours for tensor in mine], parts[0][0].device)
        for names, mine in ours:
            if mine:
                self.numbers(names, largest_entries(mine))
        if self._stops:
            self.read()

    def means(self, values: list[Tensor]) -> list[Tensor]:
        return list(self._ranks.mean(torch.stack(values)).unbind())

    def norm(self, variable: Variable, grads: list[Tensor]) -> Tensor:
        if all(kind is Averaging.BY_RUN for kind in variable.averaging):
            return variable.gradient_norm(grads)
        squares = torch.stack([part.square().sum() for part in stored_values(grads)])
        parted = torch.tensor([kind.sharded for kind in variable.averaging], device=squares.device)
        total: Tensor = torch.where(parted, self._ranks.size * squares, squares).sum()
        return self._ranks.mean(total).sqrt()

    def read(self) -> None:
        with suppress(NonFiniteError):
            super().read()
        if self._fine is None:  # the same on every rank, once it was reduced
            return
        failed = [f"{type(error).__name__}: {error}" for error in self._failures]
        told = self._ranks.gather((self._first_bad(), failed))
        if self._failures:
            error = self._failures[0]
            self._failures.clear()
            raise error
        for rank, (_, reasons) in enumerate(told):
            if reasons:
                raise DistributedError(
                    f"an objective or its data raised on rank {rank} at step {self._step}: "
                    f"{reasons[0]}"
                )
        # all ranks make the same notes; the earliest bad one is the cause of the others
        raise NonFiniteError(self._step, min(bad for bad, _ in told if bad is not None)[1])

    def _split(
        self, variable: Variable, tensors: list[Tensor], averaged: bool
    ) -> tuple[list[str], list[Tensor]]:
        """Names and tensors that are averaged here; rows of this rank alone get their weight."""
        names, ours = [], []
        kinds = zip(variable.gradient_names, tensors, variable.averaging, strict=True)
        for name, tensor, kind in kinds:
            if kind is Averaging.BY_RUN:
                names.append(name)
                ours.append(tensor)
            elif kind is Averaging.NONE and not averaged:
                stored_values([tensor])[0].div_(self._ranks.size)
        return names, ours

    def _note_unaveraged(
        self, variable: Variable, rate: Number, tensors: list[Tensor] | None = None
    ) -> bool:
        """Note the tensors that are not averaged here; returned is whether there are any."""
        tensors = variable.grads() if tensors is None else tensors
        found = [
            (name, stored_values([tensor])[0])
            for name, tensor, kind in zip(
                variable.gradient_names, tensors, variable.averaging, strict=True
            )
            if kind is not Averaging.BY_RUN
        ]
        self.steps([(variable, [name for name, _ in found], [t for _, t in found], rate)])
        return bool(found)

    def _reduce_with_flag(self, tensors: list[Tensor], device: torch.device) -> None:
        """Average the tensors, and reduce whether any rank has met a bad number."""
        dtype = tensors[0].dtype if tensors else torch.float32
        bad = torch.zeros(1, dtype=dtype, device=device)
        if self._fine is not None:
            bad.copy_(~self._fine)
        self._ranks.average_([*tensors, bad])
        self._fine = bad[0] == 0
        if self._stops:  # before the means are checked, whose bad numbers follow from it
            self.read()
