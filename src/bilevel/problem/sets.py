"""Convex sets, each as the callable that projects a tensor onto it.

``Problem(..., x_set=..., y_set=...)`` takes one of these, any other callable ``tensor -> tensor``
that projects, or, for a variable that is a tree, a tree of them in the same shape (``None`` leaves
a part free). One callable for a whole tree is applied to each of its tensors. Every update of the
variable is followed by the projection, so that iterates never leave the set.

Of a :class:`~bilevel.Table` only the rows that moved are projected, so its set must be a condition
on each row alone: a :class:`Box`, a :class:`Simplex` over rows of several entries, or any other
within :class:`Rows`.

Example:
    >>> Box(0, 1)(torch.tensor([-0.5, 0.5, 2.0]))
    tensor([0.0000, 0.5000, 1.0000])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import as_float, check_function
from bilevel.variables import Variable

Projection: TypeAlias = Callable[[Tensor], Tensor]

RowNumbers: TypeAlias = Tensor | slice
"""Some rows of a table."""


@runtime_checkable
class RowWise(Protocol):
    """A set that may be a condition on each row of a table alone."""

    def of_rows(self, rows: RowNumbers, shape: torch.Size) -> Projection | None:
        """What projects these rows of a table of that shape; None: its rows are tied together."""


@dataclass(frozen=True)
class Box:
    """``{v : low <= v_i <= high}``; a bound is a number, which may be infinite, or a tensor."""

    low: float | Tensor
    high: float | Tensor

    def __post_init__(self) -> None:
        for name, bound in (("low", self.low), ("high", self.high)):
            if isinstance(bound, bool) or not isinstance(bound, int | float | Tensor):
                raise ArgumentTypeError(f"Box needs a number or a tensor as {name}, not {bound!r}")
            if isinstance(bound, Tensor) and (bound.is_complex() or bound.layout != torch.strided):
                raise ArgumentTypeError(f"Box needs real numbers in {name}, not {bound!r}")
        if isinstance(self.low, Tensor) and isinstance(self.high, Tensor):
            _common_shape(self.low.shape, self.high.shape, "low", "high")
        if not bool(torch.as_tensor(self.low <= self.high, device="cpu").all()):  # also refuses NaN
            raise ArgumentError(f"Box needs low <= high, not low={self.low!r}, high={self.high!r}")

    def __call__(self, tensor: Tensor) -> Tensor:
        for name, bound in (("low", self.low), ("high", self.high)):
            if isinstance(bound, Tensor):
                shape = _common_shape(bound.shape, tensor.shape, name, "the variable")
                if shape != tensor.shape:
                    raise ArgumentError(
                        f"Box needs a {name} for a variable of the shape {tuple(tensor.shape)}, "
                        f"not of the shape {tuple(bound.shape)}"
                    )
        return _clamped(tensor, self.low, self.high)

    def of_rows(self, rows: RowNumbers, shape: torch.Size) -> Projection:
        low, high = (
            bound[rows]
            if isinstance(bound, Tensor) and bound.ndim == len(shape) and len(bound) == shape[0]
            else bound
            for bound in (self.low, self.high)
        )
        return partial(_clamped, low=low, high=high)


def _clamped(tensor: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Between the bounds, of which one may be a number and one a tensor."""
    return tensor.clamp(min=low).clamp(max=high)


def _common_shape(a: torch.Size, b: torch.Size, of_a: str, of_b: str) -> torch.Size:
    try:
        return torch.Size(torch.broadcast_shapes(a, b))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ArgumentError(
            f"Box has {of_a} of the shape {tuple(a)}, which does not go with {of_b} of the shape "
            f"{tuple(b)}"
        ) from error


def _check_size(kind: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(f"{kind} needs a number as {name}, not {value!r}")
    if not 0 < as_float(value) < math.inf:
        raise ArgumentError(f"{kind} needs a finite {name} > 0, not {value!r}")


@dataclass(frozen=True)
class Ball:
    """``{v : ||v|| <= radius}`` with the Euclidean norm over the whole tensor."""

    radius: float

    def __post_init__(self) -> None:
        _check_size("Ball", "radius", self.radius)

    def __call__(self, tensor: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(tensor)
        # a point inside is left as it is, to the last bit
        return tensor * torch.where(length > self.radius, self.radius / length, 1.0)


@dataclass(frozen=True)
class Simplex:
    """``{v : v_i >= 0, sum v_i = total}`` along the last dimension.

    The projection subtracts one threshold and clips at zero; the threshold comes from the sorted
    entries (Held, Wolfe, Crowder 1974).
    """

    total: float = 1.0

    def __post_init__(self) -> None:
        _check_size("Simplex", "total", self.total)

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            raise ArgumentError("Simplex needs a tensor of at least one dimension, not a scalar")
        if not tensor.shape[-1]:
            raise ArgumentError(
                f"Simplex needs entries that can sum to {self.total:g}, but the shape is "
                f"{tuple(tensor.shape)}"
            )
        # relative to the largest entry, so that total is not lost beside large numbers
        tensor = tensor - tensor.amax(-1, keepdim=True)
        ordered = tensor.sort(dim=-1, descending=True).values
        excess = ordered.cumsum(-1) - self.total
        count = torch.arange(1, tensor.shape[-1] + 1, device=tensor.device, dtype=tensor.dtype)
        support = (ordered * count > excess).sum(-1, keepdim=True)
        threshold = excess.gather(-1, support - 1) / support.to(tensor.dtype)
        return (tensor - threshold).clamp_min(0)

    def of_rows(self, rows: RowNumbers, shape: torch.Size) -> Projection | None:
        return self if len(shape) > 1 else None


@dataclass(frozen=True)
class Rows:
    """Every row (every ``v[i]``) in the same set, for which ``project`` projects one row.

    Example:
        >>> Rows(Ball(1.0))(torch.tensor([[3.0, 4.0], [0.0, 0.5]]))
        tensor([[0.6000, 0.8000], [0.0000, 0.5000]])
    """

    project: Projection

    def __post_init__(self) -> None:
        if isinstance(self.project, type) or not callable(self.project):
            raise ArgumentTypeError(
                f"Rows needs a set or another callable that projects a row, not {self.project!r}"
            )

    def __call__(self, tensor: Tensor) -> Tensor:
        projected: Tensor = torch.vmap(self.project)(tensor)
        return projected

    def of_rows(self, rows: RowNumbers, shape: torch.Size) -> Projection:
        return self


def projections(variable: Variable, argument: str, wanted: Any) -> list[Projection | None]:
    """For each leaf of ``variable`` the projection that ``wanted`` (an x_set or y_set) gives it."""
    wished = variable.match(argument, wanted, callable, "a callable that projects a tensor")
    for project in wished:
        if project is not None:
            expected = "a callable that projects a tensor"
            check_function(argument, project, "tensor", expected=expected)
    for project, path, leaf, by_rows in zip(
        wished, variable.names, variable.leaves, variable.row_sparse, strict=True
    ):
        if by_rows and project is not None and not _row_wise(project, leaf.shape):
            raise ArgumentTypeError(
                f"{argument} is {project!r} for {path}, of which only the rows that moved are "
                f"projected, so that it must be a condition on each row alone, and be known as "
                f"such: use a Box, a Simplex over rows of several entries, or sets.Rows(...), "
                f"which projects every row on its own"
            )
    return wished


def _row_wise(project: Projection, shape: torch.Size) -> bool:
    return isinstance(project, RowWise) and project.of_rows(slice(0, 1), shape) is not None
