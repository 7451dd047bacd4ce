"""The two objectives, and the scalar Phi whose one backward pass gives every direction.

The problem is  min_x f(x, y*(x))  with  y*(x) = argmin_y g(x, y).  The first-order methods keep
several copies y_j of the lower variable, one for each node j of a finite difference in the
strength of f, and look at one scalar:

    Phi(x, {y_j}) = sum_j a_j * ( j * f(x, y_j) + lam * g(x, y_j) )

Everything is in its gradient. In x it is the direction of descent; in y_j, divided by a_j * lam,
it is  grad_y g + (j / lam) grad_y f, the direction of that copy. F2SA is the forward difference:
node 1 is the paper's y, node 0 its z, and

    Phi = f(x, y) + lam * ( g(x, y) - g(x, z) ).

Nothing is ever differentiated twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bilevel.errors import ArgumentTypeError, NonFiniteError, ObjectiveError
from bilevel.sets import Projection, projections
from bilevel.streams import Sample
from bilevel.variables import Variable, buffers_kept, held, require_finite

Objective: TypeAlias = Callable[[Any, Any, Any], Tensor]
"""``objective(x, y, batch) -> scalar tensor``; batch is None where there is no data."""


class Problem:
    """min_x f(x, y*(x)) with y*(x) = argmin_y g(x, y).

    Args:
        upper: f, called as ``upper(x, y, batch)``; returns a scalar tensor.
        lower: g, called as ``lower(x, y, batch)``; returns a scalar tensor. The theory wants it
            strongly convex in y.
        x_set: a convex set to which x is confined, see :mod:`bilevel.sets`; None: all of space.
        y_set: the same for y. It may not depend on x.

    x and y reach the objectives in the structure in which the user gave the starting point: a
    tensor, nested dicts, lists and tuples of tensors, or an ``nn.Module``. An objective that is a
    mean over its batch has gradients that are right for any batch size.

    Example:
        >>> import torch, bilevel
        >>> problem = bilevel.Problem(
        ...     upper=lambda x, y, batch: 0.5 * ((y - 1) ** 2).sum(),
        ...     lower=lambda x, y, batch: 0.5 * ((y - x) ** 2).sum(),
        ... )
        >>> result = bilevel.minimize(problem, torch.zeros(2), torch.zeros(2), steps=300)
        >>> bool((result.x - 1).abs().max() < 1e-3)
        True
    """

    def __init__(
        self,
        upper: Objective,
        lower: Objective,
        x_set: Any = None,
        y_set: Any = None,
    ) -> None:
        for name, objective in (("upper", upper), ("lower", lower)):
            if not callable(objective):
                raise ArgumentTypeError(
                    f"{name} must be a function of (x, y, batch), not {objective!r}"
                )
        self.upper = upper
        self.lower = lower
        self.x_set = x_set
        self.y_set = y_set

    def f(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        """The upper objective, checked to be a scalar."""
        return _scalar("upper", self.upper(x.value, y.value, batch))

    def g(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        """The lower objective, checked to be a scalar."""
        return _scalar("lower", self.lower(x.value, y.value, batch))

    def x_projections(self, x: Variable) -> list[Projection | None]:
        """For each leaf of x the projection onto its set."""
        return projections(x, "x_set", self.x_set)

    def y_projections(self, y: Variable) -> list[Projection | None]:
        """For each leaf of y the projection onto its set."""
        return projections(y, "y_set", self.y_set)

    def check(self, x: Variable, y: Variable, upper_batch: Any, lower_batch: Any) -> None:
        """Evaluate the objectives and raise unless they are scalar functions of x and y."""
        with torch.enable_grad(), buffers_kept(x, y):
            with held(x):
                for name, value in (
                    ("upper", self.f(x, y, upper_batch)),
                    ("lower", self.g(x, y, lower_batch)),
                ):
                    if not _depends(value, y):
                        raise ObjectiveError(
                            f"{name}(x, y, batch) returned {value.item():.6g}, which does not "
                            f"depend on y through differentiable operations; check for detach(), "
                            f"item(), no_grad() or an unused y"
                        )
            with held(y):
                values = self.f(x, y, upper_batch), self.g(x, y, lower_batch)
                if not any(_depends(value, x) for value in values):
                    raise ObjectiveError(
                        "neither upper(x, y, batch) nor lower(x, y, batch) depends on x through "
                        "differentiable operations, so there is nothing to optimize"
                    )


@dataclass(frozen=True)
class Stencil:
    """A finite difference in the strength of f: the nodes j and their weights a_j."""

    nodes: tuple[int, ...]
    weights: tuple[float, ...]


FORWARD = Stencil(nodes=(1, 0), weights=(1.0, -1.0))
"""F2SA: the copies are the paper's y (node 1) and z (node 0)."""


@dataclass(frozen=True)
class Phi:
    """Phi = upper + lam * lower at one point on one sample per copy.

    Attributes:
        upper: sum_j a_j * j * f(x, y_j); None where the sample has no part for f.
        lower: sum_j a_j * g(x, y_j); None where the sample has no part for g.
        terms: f and g at each copy, as ``{"upper(x, y)": ..., "lower(x, y)": ..., ...}``, detached
            and weighted by the share of the sample, so that those of several parts add up.
        leaves: what a backward pass leaves gradients on; nothing else that the objectives use is
            given one.
    """

    upper: Tensor | None
    lower: Tensor | None
    terms: dict[str, Tensor]
    leaves: list[Tensor]

    def at(self, multiplier: float) -> Tensor:
        """The scalar for one multiplier."""
        if self.lower is None:
            assert self.upper is not None, "a sample without any term"
            return self.upper
        if self.upper is None:
            return multiplier * self.lower
        return torch.add(self.upper, self.lower, alpha=multiplier)

    def backward(self, multiplier: float, step: int) -> None:
        """Leave every direction on the leaves; a non-finite term stops the run by its name."""
        self.backward_of(self.at(multiplier), step)

    def backward_of(self, value: Tensor, step: int) -> None:
        """The same for another scalar made of the terms."""
        if not math.isfinite(value.item()):
            require_finite(step, list(self.terms), list(self.terms.values()))
            raise NonFiniteError(step, "Phi, the sum of " + ", ".join(self.terms) + ",")
        if value.requires_grad:  # a part of a larger batch may hold no term in which x occurs
            value.backward(inputs=self.leaves)  # type: ignore[no-untyped-call]


def evaluate(
    problem: Problem,
    stencil: Stencil,
    x: Variable,
    copies: Sequence[Variable],
    samples: Sequence[Sample],
) -> Phi:
    """Phi(x, {y_j}), where the terms of copy j are evaluated on ``samples[j]``."""
    upper = lower = None
    terms = {}
    for node, weight, y, sample in zip(
        stencil.nodes, stencil.weights, copies, samples, strict=True
    ):
        if node != 0 and sample.upper_share:
            f = _scaled(sample.upper_share, problem.f(x, y, sample.upper))
            upper = _added(upper, weight * node, f)
            terms[f"upper({x.name}, {y.name})"] = f.detach()
        if sample.lower_share:
            g = _scaled(sample.lower_share, problem.g(x, y, sample.lower))
            lower = _added(lower, weight, g)
            terms[f"lower({x.name}, {y.name})"] = g.detach()
    leaves = [leaf for v in (x, *copies) for leaf in v.leaves if leaf.requires_grad]
    return Phi(upper, lower, terms, leaves)


def _depends(value: Tensor, variable: Variable) -> bool:
    """Whether a gradient reaches any leaf; others that the objective uses may require one too."""
    if not value.requires_grad:
        return False
    grads = torch.autograd.grad(value, variable.leaves, allow_unused=True)
    return any(grad is not None for grad in grads)


def _added(total: Tensor | None, weight: float, value: Tensor) -> Tensor:
    """Total + weight * value in one operation."""
    return _scaled(weight, value) if total is None else torch.add(total, value, alpha=weight)


def _scaled(factor: float, value: Tensor) -> Tensor:
    return value if factor == 1 else factor * value


def _scalar(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ObjectiveError(
            f"{name}(x, y, batch) must return a scalar tensor, but returned "
            f"{type(value).__name__} {value!r}"
        )
    if value.ndim != 0:
        raise ObjectiveError(
            f"{name}(x, y, batch) must return a scalar, but returned a tensor of shape "
            f"{tuple(value.shape)}; reduce it with .mean() or .sum()"
        )
    if not value.is_floating_point():
        raise ObjectiveError(
            f"{name}(x, y, batch) must return a floating point scalar, but returned {value.dtype}"
        )
    return value
