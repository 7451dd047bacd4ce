"""A lower level that is given as a map: y*(x) is its fixed point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from bilevel.errors import ObjectiveError
from bilevel.errors.checks import check_function


@dataclass(frozen=True)
class FixedPoint:
    """A lower level whose solution y*(x) is the fixed point of a map, y* = phi(x, y*).

    It is the objective

        g(x, y) = ||y - phi(x, y)||^2 / 2,

    which every method takes as it takes any other g.

    Where phi is a contraction in y, ||phi(x, y) - phi(x, y')|| <= q ||y - y'|| with q < 1, its
    fixed point is the only stationary point of g, and there the curvature of g lies between
    (1 - q)^2 and (1 + q)^2, which is the strong convexity that the theory asks for. With q near 1
    g is flat and takes many steps. What is needed is less: that I - d phi / d y is invertible, so
    that iterating phi may diverge. No y_set is needed for a phi that maps a set into itself, and
    one that does not contain the fixed point moves y* to its edge.

    First-order methods differentiate phi once. With minibatches g is the mean over them of the
    squared residual, and its minimum is the fixed point of the mean map only if phi is the same for
    all of them: where phi is a mean over samples, leave batch_size out.

    To differentiate one fixed point, without a run around it, use :func:`bilevel.fixed_point`,
    which iterates phi.

    Args:
        phi: called as ``phi(x, y, batch)``; returns another y in the same structure, and for a
            module a dict of all its parameters.

    Example:
        >>> import torch, bilevel
        >>> A = torch.tensor([[0.5, 0.2], [0.0, 0.4]])
        >>> problem = bilevel.Problem(
        ...     upper=lambda x, y, batch: ((y - 1) ** 2).sum(),
        ...     lower=bilevel.FixedPoint(lambda x, y, batch: A @ y + x),
        ... )
        >>> result = bilevel.minimize(problem, torch.zeros(2), torch.zeros(2), steps=30)
        >>> exact = torch.tensor([0.3, 0.6])  # there (I - A)^-1 x is 1
        >>> bool((result.x - exact).abs().max() < 1e-2)
        True
    """

    phi: Callable[[Any, Any, Any], Any]

    def __post_init__(self) -> None:
        check_function("phi", self.phi, "x", "y", "batch")

    def __call__(self, x: Any, y: Any, batch: Any) -> Tensor:
        """Half the squared residual."""
        squares = [(r**2).sum() for r in _residuals(y, self.phi(x, y, batch), "y")]
        return 0.5 * torch.stack(squares).sum()


def _residuals(y: Any, image: Any, path: str) -> Iterator[Tensor]:
    """The residual y - phi(x, y), for every tensor of y."""
    if isinstance(y, nn.Module):
        y = dict(y.named_parameters())
    if isinstance(y, Tensor):
        if not isinstance(image, Tensor) or image.shape != y.shape:
            _refuse(path, f"a tensor of shape {tuple(y.shape)}", image)
        yield y - image
    elif isinstance(y, dict):
        if not isinstance(image, dict) or image.keys() != y.keys():
            _refuse(path, f"a dict or a module with {list(y)}", image)
        for key, part in y.items():
            yield from _residuals(part, image[key], f"{path}[{key!r}]")
    elif isinstance(y, list | tuple):
        if not isinstance(image, list | tuple) or len(image) != len(y):
            _refuse(path, f"a list or tuple of {len(y)}", image)
        for index, (part, other) in enumerate(zip(y, image, strict=True)):
            yield from _residuals(part, other, f"{path}[{index}]")


def _refuse(path: str, wanted: str, image: Any) -> NoReturn:
    """Raise, because phi returned something that is not another y."""
    shown: Any = type(image).__name__
    if isinstance(image, Tensor):
        shown = f"a tensor of shape {tuple(image.shape)}"
    elif isinstance(image, dict):
        shown = f"a dict with {list(image)}"
    elif isinstance(image, list | tuple):
        shown = f"{shown} of {len(image)}"
    raise ObjectiveError(
        f"phi(x, y, batch) must return another y, but returned {shown} for {path}, which is "
        f"{wanted}"
    )
