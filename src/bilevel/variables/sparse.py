"""Row-sparse gradients: sparse COO tensors that hold a few rows of a tensor.

Where rows are looked up, in a :class:`~bilevel.Table` or in an ``nn.Embedding(sparse=True)``, a
backward pass leaves a sparse gradient: the numbers of the rows, and a gradient for each. The
functions here cost those rows and never the whole tensor, unless a dense gradient takes part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bilevel.variables.shards import is_sharded, part_of

LARGE = 1 << 16
"""The least number of entries for which a gradient is kept in a smaller type."""

_BLOCK = 1 << 25  # entries that are converted to another type at a time


def by_rows(rows: Tensor, values: Tensor, shape: torch.Size, *, once: bool = False) -> Tensor:
    """The gradient with ``values`` at ``rows``; ``once``: these ascend, without repetition."""
    # torch.sparse_coo_tensor warns in some versions that it does not check its arguments.
    gradient: Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1,
        values.ndim - 1,
        shape,
        rows.unsqueeze(0),
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=once,
    )
    return gradient


def untouched(leaf: Tensor) -> Tensor:
    """The sparse gradient of a leaf of which no row was looked up."""
    rows = torch.empty(0, dtype=torch.int64, device=leaf.device)
    return by_rows(rows, leaf.new_empty((0, *leaf.shape[1:])), leaf.shape, once=True)


def every_row(gradient: Tensor) -> Tensor:
    """A dense gradient as a sparse one that holds every row."""
    rows = torch.arange(len(gradient), device=gradient.device)
    return by_rows(rows, gradient, gradient.shape, once=True)


def touched(gradient: Tensor) -> Tensor:
    """The numbers of the rows that a sparse gradient holds, ascending."""
    return gradient.coalesce().indices()[0]


def entries(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The entries that this rank stores of each gradient: of a sparse one, those of its rows.

    They are views: operations in place on them change the gradients.
    """
    return [g.coalesce().values() if g.is_sparse else part_of(g) for g in gradients]


def dense(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The gradients as dense tensors, zero in the rows that a sparse one does not hold."""
    return [g.to_dense() if g.is_sparse else g for g in gradients]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The sum of gradients of one leaf, each dense or sparse."""
    sparse = [part for part in parts if part.is_sparse]
    summands = [part for part in parts if not part.is_sparse]
    if sparse:
        # One concatenation of all; a sum of two at a time would copy the total every time.
        rows = torch.cat([part._indices()[0] for part in sparse])
        values = torch.cat([part._values() for part in sparse])
        # coalesce() sorts before it adds, so the order of the sum is the same on every device.
        summands.append(by_rows(rows, values, sparse[0].shape).coalesce())
    total = summands[0]
    for part in summands[1:]:
        total = total + part
    return total


def reduced(gradients: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """A copy of the gradients, to save memory with the large dense ones in another type."""
    if any(map(is_sharded, gradients)):
        return [g.to(dtype if g.numel() >= LARGE else g.dtype, copy=True) for g in gradients]
    large = [g for g in gradients if not g.is_sparse and g.numel() >= LARGE]
    small = [g for g in gradients if not g.is_sparse and g.numel() < LARGE]
    copies = iter(torch._foreach_mul(small, 1.0)) if small else iter(())
    there = iter(_converted(large, dtype))
    return [
        g if g.is_sparse else next(copies) if g.numel() < LARGE else next(there) for g in gradients
    ]


def _converted(gradients: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Dense gradients in another type."""
    there = [torch.empty_like(gradient, dtype=dtype) for gradient in gradients]
    if there:  # few launches for many tensors
        torch._foreach_copy_(there, list(gradients))
    return there


def added(mine: Sequence[Tensor], others: Sequence[Tensor], alpha: float = 1.0) -> list[Tensor]:
    """``mine + alpha * others``, one by one; in place where all are dense."""
    mine, others = list(mine), list(others)
    if any(t.is_sparse for t in (*mine, *others)):
        return [joined([a, alpha * b]) for a, b in zip(mine, others, strict=True)]
    # torch._foreach_add_ of mixed types would add one tensor after another.
    alike: list[tuple[Tensor, Tensor]] = []
    unlike: list[tuple[Tensor, Tensor]] = []
    for pair in zip(entries(mine), entries(others), strict=True):
        (alike if pair[0].dtype == pair[1].dtype else unlike).append(pair)
    for pairs in ([alike] if alike else []) + list(_blocks(unlike)):
        ours, theirs = ([pair[i] for pair in pairs] for i in (0, 1))
        if pairs is not alike:
            theirs = _converted(theirs, ours[0].dtype)
        torch._foreach_add_(ours, theirs, alpha=alpha)
    return mine


def _blocks(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Runs of pairs whose first tensors have one type and about ``_BLOCK`` entries at most."""
    block: list[tuple[Tensor, Tensor]] = []
    held = 0
    for pair in pairs:
        if block and (held >= _BLOCK or pair[0].dtype != block[0][0].dtype):
            yield block
            block, held = [], 0
        block.append(pair)
        held += pair[0].numel()
    if block:
        yield block


class Total:
    """A running sum of gradients, one per leaf, over the parts of a batch."""

    def __init__(self) -> None:
        self._parts: list[list[Tensor]] = []

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add one part; the dense gradients of the first are used as accumulators."""
        if not self._parts:
            self._parts = [[gradient] for gradient in gradients]
            return
        for parts, gradient in zip(self._parts, gradients, strict=True):
            if parts[-1].is_sparse or gradient.is_sparse:
                parts.append(gradient)
            else:
                parts[-1].add_(gradient)

    def gradients(self) -> list[Tensor]:
        """The sums."""
        return [joined(parts) for parts in self._parts]
