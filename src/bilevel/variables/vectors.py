"""Lists of tensors as one vector: flattening, and the method of conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bilevel.errors import NotConvergedError
from bilevel.variables.sparse import to_dense


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All entries as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in to_dense(tensors)])


def length(vector: Tensor) -> float:
    """The Euclidean norm; in single precision squares overflow from 1e19 on and vanish at 1e-23."""
    return float(torch.linalg.vector_norm(vector.detach(), dtype=_wide(vector)))


def lengths(rows: Tensor) -> list[float]:
    """The Euclidean norm of each row, as :func:`length` has it."""
    found: list[float] = torch.linalg.vector_norm(rows, dim=1, dtype=_wide(rows)).tolist()
    return found


def inner(a: Tensor, b: Tensor) -> float:
    """The sum of the products of all entries, for the same reason in double precision."""
    wide = _wide(a)
    return float((a.to(wide) * b.to(wide)).sum())


def _wide(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.device.type == "mps" else torch.float64  # which MPS has not


def unflatten_like(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat vector, in the shapes and dtypes of the tensors ``like``."""
    parts = torch.split(vector, [tensor.numel() for tensor in like])
    return [
        part.reshape(tensor.shape).to(tensor.dtype)
        for part, tensor in zip(parts, like, strict=True)
    ]


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    b: Tensor,
    *,
    steps: int | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """The solution of H v = b for a positive definite H given by its products.

    Args:
        product: v -> H v.
        b: the right hand side.
        steps: the most iterations; a direction without positive curvature ends them early, and
            the iterate so far is the answer. None: to machine precision, and such a direction
            raises :class:`~bilevel.errors.NotConvergedError`.
        start: where to start. None: at zero, which saves a product.
    """
    solution = torch.zeros_like(b) if start is None else start
    residual = b.clone() if start is None else b - product(start)
    direction = residual.clone()
    squared = residual @ residual
    eps = torch.finfo(b.dtype).eps
    target = (10 * eps) ** 2 * (b @ b)
    steepest = 0.0
    # To machine precision, rounding errors may require many more iterations than len(b).
    for _ in range(10 * len(b) + 10_000 if steps is None else steps):
        if squared <= target:
            break
        image = product(direction)
        curvature = float(direction @ image / (direction @ direction))
        steepest = max(steepest, abs(curvature))
        if steps is not None and not curvature > 0:
            break
        if steps is None and not curvature > 10 * eps * steepest:
            kind = "convex" if curvature < -10 * eps * steepest else "strongly convex"
            raise NotConvergedError(
                f"the lower level is not {kind} here: its Hessian has the curvature "
                f"{curvature:.2e} along a direction"
            )
        length = squared / (direction @ image)
        solution = solution + length * direction
        residual = residual - length * image
        before, squared = squared, residual @ residual
        direction = residual + (squared / before) * direction
    return solution
