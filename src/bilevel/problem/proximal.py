"""A problem whose lower level has a non-smooth term, as one run sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel.problem.problem import Problem
from bilevel.problem.prox import Term
from bilevel.problem.sets import Projection
from bilevel.variables import Variable


@dataclass(frozen=True)
class ProximalMap:
    """What follows a step of one leaf of y, in the place of a projection.

    Without a step there is nothing to follow, and a tensor stays as it is.

    Attributes:
        term: the non-smooth term.
        x: the upper variable, of which its weight may be a function.
        each: whether the leaf stacks several tensors, each with its own term.
    """

    term: Term
    x: Variable
    each: bool = False

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor

    def after(self, step: float, tensor: Tensor) -> Tensor:
        """The proximal map of a step of that length; differentiable in x."""
        weight = step * self.term.at(self.x.value).to(tensor)
        if not self.each:
            return self.term.prox(tensor, weight)
        return torch.stack([self.term.prox(part, weight) for part in tensor])


class ProximalProblem(Problem):
    """A problem with a non-smooth term, in a run whose upper variable is ``x``."""

    def __init__(self, problem: Problem, x: Variable) -> None:
        super().__init__(problem.upper, problem.lower, problem.x_set, problem.y_set, problem.y_prox)
        self._x = x

    def y_projections(self, y: Variable) -> list[Projection | None]:
        sets, terms = super().y_projections(y), self.y_terms(y)
        return [
            project if term is None else ProximalMap(term, self._x)
            for project, term in zip(sets, terms, strict=True)
        ]
