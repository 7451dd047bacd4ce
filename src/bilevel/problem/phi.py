"""Phi, the one scalar whose gradient holds every direction of the first-order methods.

The first-order methods keep several copies y_i of the lower variable and look at

    Phi(x, {y_i}) = sum_i ( u_i * f(x, y_i) + lam * w_i * g(x, y_i) )

In x its gradient is the direction of descent; in y_i, divided by w_i * lam, it is
grad_y g + (j_i / lam) grad_y f  with  j_i = u_i / w_i, the direction of that copy. F2SA has two
copies, the paper's y and z, with u = (1, 0) and w = (1, -1):

    Phi = f(x, y) + lam * ( g(x, y) - g(x, z) ).

Other finite differences in the strength j / lam of f have other weights
(:class:`~bilevel.problem.stencil.Stencil`). Nothing is ever differentiated twice. This module says
what Phi is; the engine evaluates and differentiates it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bilevel.problem.problem import Objectives
from bilevel.problem.stencil import Stencil
from bilevel.sampling import Sample
from bilevel.variables import Variable

Number: TypeAlias = float | Tensor
"""A number, or with stacked runs a tensor that holds one number per run."""


class Level(Enum):
    """Which of the two objectives."""

    UPPER = "upper"
    LOWER = "lower"


# No methods of Level: PyTorch 2.11 cannot trace a method of a constant.
def batch_of(level: Level, sample: Sample) -> tuple[Any, float]:
    """The batch of that objective in a sample, and its share of a larger batch."""
    if level is Level.UPPER:
        return sample.upper, sample.upper_share
    return sample.lower, sample.lower_share


def objective_of(level: Level, objectives: Objectives) -> Callable[..., Tensor]:
    """That one of the two objectives, as they are evaluated there."""
    return objectives.f if level is Level.UPPER else objectives.g


class Term(NamedTuple):
    """One term of Phi.

    Attributes:
        level: f or g.
        y: where it is evaluated.
        batch: on what.
        share: of the batch in a larger one.
        weight: u_i or w_i.
        last: whether no further term is evaluated at the same point.
    """

    level: Level
    y: Variable
    batch: Any = None
    share: float = 1.0
    weight: float = 1.0
    last: bool = True

    def name(self, x: Variable) -> str:
        """What messages call it."""
        return f"{self.level.value}({x.name}, {self.y.name})"

    @property
    def key(self) -> tuple[Level, int]:
        """Which objective at which copy, whatever the sample."""
        return self.level, id(self.y)


@dataclass(frozen=True)
class Phi:
    """The function Phi at one multiplier.

    Attributes:
        stencil: its weights.
        x: the upper variable.
        points: the copies of the lower variable, and their centre where it is held apart.
        multiplier: lam.
        shared: whether all points are evaluated on the same samples.
    """

    stencil: Stencil
    x: Variable
    points: Sequence[Variable]
    multiplier: Number
    shared: bool = True

    def terms(self, samples: Sequence[Sample]) -> list[Term]:
        """Its terms, point by point; those of point i are evaluated on ``samples[i]``."""
        stencil, terms = self.stencil, []
        for u, w, y, sample in zip_longest(stencil.upper, stencil.lower, self.points, samples):
            if u and sample.upper_share:
                last = not (w and sample.lower_share)
                terms.append(Term(Level.UPPER, y, sample.upper, sample.upper_share, u, last))
            if w and sample.lower_share:
                terms.append(Term(Level.LOWER, y, sample.lower, sample.lower_share, w))
        return terms

    def leaves(self, *points: Variable) -> list[Tensor]:
        """The tensors of x and of the points that require gradients; without any, of all points."""
        among = points or self.points
        return [leaf for v in (self.x, *among) for leaf in v.leaves if leaf.requires_grad]

    def wrappers(self, *points: Variable) -> list[Any]:
        """The ``DistributedDataParallel`` modules in x and in the points."""
        return [wrapper for v in (self.x, *(points or self.points)) for wrapper in v.wrappers]


@dataclass(frozen=True)
class Evaluation:
    """The values of the terms of Phi on one sample per point.

    Attributes:
        phi: what was evaluated.
        parts: the terms and their values, weighted by the share of the sample, so that those of
            several samples add up.
    """

    phi: Phi
    parts: list[tuple[Term, Tensor]]

    def sum(self, level: Level) -> Tensor | None:
        """The weighted sum of the terms of f, or of g; None where the sample has none of them."""
        total = None
        for term, value in self.parts:
            if term.level is level:
                total = (
                    scaled(term.weight, value)
                    if total is None
                    else torch.add(total, value, alpha=term.weight)
                )
        return total


def scaled(factor: float, value: Tensor) -> Tensor:
    """``factor * value``, without an operation where the factor is 1."""
    return value if factor == 1 else factor * value
