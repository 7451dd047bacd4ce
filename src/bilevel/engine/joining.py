"""The lower objective at two copies of y as one evaluation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from bilevel.problem import Level, Problem, Term
from bilevel.variables import Variable


class JoinsCopies(Problem):
    """A problem that evaluates g at two copies of y faster at once than one after the other."""

    @abstractmethod
    def g_at_both(
        self, x: Variable, first: Variable, second: Variable, batch: Any
    ) -> tuple[Tensor, Tensor] | None:
        """The lower objective at two copies on one batch; None: one after the other is needed."""

    def of_g(self, x: Variable, terms: Sequence[Term]) -> Iterator[Tensor] | None:
        """The values of those terms that are of g; None: they are to be evaluated one by one."""
        lower = [term for term in terms if term.level is Level.LOWER]
        if len(lower) != 2 or lower[0].batch is not lower[1].batch:
            return None
        values = self.g_at_both(x, lower[0].y, lower[1].y, lower[0].batch)
        return None if values is None else iter(values)
