"""Non-smooth terms of the lower level, each declared by its value and its proximal map.

A lower level g(x, y) + w(x) r(y) with a smooth g is followed by proximal gradient steps,

    y <- prox( y - s grad_y g(x, y), s w(x) ),     prox(v, t) = argmin_u t r(u) + ||u - v||^2 / 2,

which reach the minimum at a kink of r, where gradient steps go to and fro. The weight w is a
number, a tensor, or a function of x such as ``lambda x: x.exp()``, which is differentiated.

A term stands for one tensor; for a lower variable that is a tree, one term for the whole tree is
applied to each of its tensors, and a tree of terms in the same shape gives each part its own
(``None`` leaves a part smooth).

Example:
    >>> L1(2.0).prox(torch.tensor([3.0, -1.0]), torch.tensor(2.0))
    tensor([1., -0.])
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bilevel.errors import ArgumentError, ArgumentTypeError, ObjectiveError
from bilevel.errors.checks import check_function
from bilevel.variables import Variable

Weight: TypeAlias = float | Tensor | Callable[[Any], Any]
"""A number, a tensor, or a function of x."""


@dataclass(frozen=True)
class Term:
    """A non-smooth term w(x) r(y); to declare another one, derive from this class.

    Args:
        weight: w, at least 0.
    """

    weight: Weight = 1.0

    def __post_init__(self) -> None:
        if callable(self.weight):
            check_function("weight", self.weight, "x")
            return
        if isinstance(self.weight, bool) or not isinstance(self.weight, Real | Tensor):
            raise ArgumentTypeError(
                f"weight must be a number, a tensor or a function of x, not {self.weight!r}"
            )
        if not bool((_as_tensor(self.weight) >= 0).all()):  # also refuses NaN
            raise ArgumentError(f"weight must be at least 0, not {self.weight!r}")

    def at(self, x: Any) -> Tensor:
        """The weight w(x)."""
        weight = self.weight(x) if callable(self.weight) else self.weight
        if isinstance(weight, bool) or not isinstance(weight, Real | Tensor):
            raise ObjectiveError(
                f"the weight of {type(self).__name__} must be a number or a tensor, but the "
                f"function of x returned {weight!r}"
            )
        tensor = _as_tensor(weight)
        # On another device to look at the numbers would be to wait for them in every step.
        looked_at = callable(self.weight) and tensor.device.type == "cpu"
        if looked_at and bool((tensor.detach() < 0).any()):
            raise ObjectiveError(
                f"the weight of {type(self).__name__} must be at least 0, but the function of x "
                f"returned {reprlib.repr(weight)}"
            )
        return tensor

    def value(self, y: Tensor, weight: Tensor) -> Tensor:
        """The scalar w r(y)."""
        raise NotImplementedError

    def prox(self, y: Tensor, weight: Tensor) -> Tensor:
        """The minimum over u of weight * r(u) + ||u - y||^2 / 2."""
        raise NotImplementedError


@dataclass(frozen=True)
class L1(Term):
    """w ||y||_1, for sparse entries; the weight may have one entry for each of y."""

    def value(self, y: Tensor, weight: Tensor) -> Tensor:
        return (weight * y.abs()).sum()

    def prox(self, y: Tensor, weight: Tensor) -> Tensor:
        return y.sign() * (y.abs() - weight).clamp_min(0)


@dataclass(frozen=True)
class Group(Term):
    """w times the sum of the Euclidean norms along a dimension, for groups that vanish together.

    Args:
        weight: w; it may have one entry for each group.
        dim: the dimension whose entries form a group.
    """

    dim: int = -1

    def value(self, y: Tensor, weight: Tensor) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(y, dim=self.dim)
        return (weight * norms).sum()

    def prox(self, y: Tensor, weight: Tensor) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(y, dim=self.dim)
        tiny = torch.finfo(y.dtype).tiny
        shares = ((norms - weight) / norms.clamp_min(tiny)).clamp_min(0)
        return y * shares.unsqueeze(self.dim)


@dataclass(frozen=True)
class Nuclear(Term):
    """w times the sum of the singular values of a matrix, for a low rank."""

    def value(self, y: Tensor, weight: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.matrix_norm(y, ord="nuc")
        return weight * norm

    def prox(self, y: Tensor, weight: Tensor) -> Tensor:
        u, s, v = torch.linalg.svd(y, full_matrices=False)
        low: Tensor = (u * (s - weight).clamp_min(0).unsqueeze(-2)) @ v
        return low


@dataclass(frozen=True)
class Prox(Term):
    """w r(y) with r and its proximal map given as functions.

    Args:
        weight: w.
        function: y -> r(y), a scalar.
        map: (v, t) -> argmin_u t r(u) + ||u - v||^2 / 2, a tensor like v.

    Example:
        >>> ridge = Prox(1.0, lambda y: (y ** 2).sum() / 2, lambda v, t: v / (1 + t))
        >>> ridge.prox(torch.tensor([3.0]), torch.tensor(2.0))
        tensor([1.])
    """

    function: Callable[[Tensor], Tensor] | None = None
    map: Callable[[Tensor, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, given in (("function", self.function), ("map", self.map)):
            if not callable(given):
                raise ArgumentTypeError(f"{name} must be a function, not {given!r}")

    def value(self, y: Tensor, weight: Tensor) -> Tensor:
        assert self.function is not None
        return weight * self.function(y)

    def prox(self, y: Tensor, weight: Tensor) -> Tensor:
        assert self.map is not None
        return self.map(y, weight)


def _as_tensor(weight: Any) -> Tensor:
    """The weight; a number keeps all its digits, and is on the CPU, whatever the default is."""
    if isinstance(weight, Tensor):
        return weight
    return torch.tensor(weight, dtype=torch.float64, device="cpu")


def terms_of(y: Variable, given: Any) -> list[Term | None]:
    """For each leaf of y the term that ``given`` (a y_prox) has for it."""
    found: list[Term | None] = y.match(
        "y_prox", given, lambda part: isinstance(part, Term), "a term such as bilevel.prox.L1(0.1)"
    )
    return found


def check_terms(x: Variable, y: Variable, terms: Sequence[Term | None]) -> None:
    """Refuse terms that do not go with the shape of y, or whose map gives another shape."""
    for name, leaf, term in zip(y.names, y.leaves, terms, strict=True):
        if term is None:
            continue
        shape = f"{name}, which has the shape {tuple(leaf.shape)}"
        with torch.no_grad():
            weight = term.at(x.value).to(leaf)
            try:
                value, moved = term.value(leaf, weight), term.prox(leaf.clone(), weight)
            except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
                raise ArgumentError(
                    f"y_prox={term!r} cannot be computed for {shape} ({error})"
                ) from error
        if not isinstance(value, Tensor) or value.ndim:
            raise ArgumentError(f"y_prox={term!r} is not a scalar for {shape}, but {value!r}")
        if not isinstance(moved, Tensor) or moved.shape != leaf.shape:
            raise ArgumentError(
                f"the proximal map of y_prox={term!r} must have the shape of its argument, but "
                f"gives {_described(moved)} for {shape}; does the weight have the shape of y?"
            )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return reprlib.repr(value)


def refuse_both(y: Variable, sets: Sequence[Any], terms: Sequence[Term | None]) -> None:
    """Refuse a set and a term for one leaf, and a term for a table."""
    for name, by_rows, project, term in zip(y.names, y.row_sparse, sets, terms, strict=True):
        if term is not None and by_rows:
            raise ArgumentTypeError(
                f"y_prox={term!r} is for {name}, of which a step moves only some rows; a term "
                f"needs all of them"
            )
        if project is not None and term is not None:
            raise ArgumentError(
                f"y_set={project!r} and y_prox={term!r} are both for {name}; the projection of a "
                f"proximal step is not the proximal step of the sum: give one, and where both are "
                f"needed their common map as bilevel.prox.Prox(...)"
            )
