"""One problem of the benchmark: what is solved, from where, and who judges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from bilevel import Problem


@dataclass(frozen=True)
class Case:
    """A problem with its start and its judge.

    Attributes:
        problem, x0, y0: the arguments of :func:`bilevel.minimize`.
        value: (x, y) -> F(x) = f(x, y*(x)), where the judge solves the lower level by itself and
            ignores the run's y. Networks have no such judge: there it is f(x, y) on all held-out
            samples.
        data: the further keywords of :func:`bilevel.minimize`: the data and the size of a batch.
        steps: the outer steps of each setting in the search.
        trials: the number of settings that the search draws.
        spacing: F is computed at steps that grow by this factor.
    """

    problem: Problem
    x0: Any
    y0: Any
    value: Callable[[Any, Any], float]
    data: dict[str, Any] = field(default_factory=dict)
    steps: int = 100
    trials: int = 32
    spacing: float = 1.3

    @cached_property
    def start(self) -> float:
        """F at the start."""
        return self.value(self.x0, self.y0)


Maker: TypeAlias = Callable[[int, Path | None], Case]
"""(seed, the folder with data sets) -> the case."""
