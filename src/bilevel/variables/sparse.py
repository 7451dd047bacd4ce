"""Gradients that touch a few rows of a tensor only.

Where rows are looked up, in a :class:`~bilevel.Table` or in an ``nn.Embedding(sparse=True)``, a
backward pass leaves a sparse gradient: the numbers of the rows, and a gradient for each. What is
done with it here costs those rows and never the whole tensor, unless a dense gradient comes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bilevel.variables.shards import is_sharded, part_of


def by_rows(rows: Tensor, values: Tensor, shape: torch.Size, *, once: bool = False) -> Tensor:
    """The gradient with ``values`` at ``rows``; ``once``: these ascend, each named once."""
    # not torch.sparse_coo_tensor, which in some versions warns that it does not check them
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
    """The gradient of a leaf of which no row was looked up."""
    rows = torch.empty(0, dtype=torch.int64, device=leaf.device)
    values = torch.empty((0, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)
    return by_rows(rows, values, leaf.shape, once=True)


def every_row(gradient: Tensor) -> Tensor:
    """A dense gradient as one that touches every row."""
    rows = torch.arange(len(gradient), device=gradient.device)
    return by_rows(rows, gradient, gradient.shape, once=True)


def touched(gradient: Tensor) -> Tensor:
    """The numbers of the rows that a sparse gradient touches, each once."""
    return gradient.coalesce().indices()[0]


def entries(gradients: Sequence[Tensor]) -> list[Tensor]:
    """What each gradient stores here: all its entries, those of the rows it touches, or its part.

    They are views: what is done to them in place is done to the gradients.
    """
    return [g.coalesce().values() if g.is_sparse else part_of(g) for g in gradients]


def dense(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The gradients with a number for every entry, zero in the rows that are not touched."""
    return [g.to_dense() if g.is_sparse else g for g in gradients]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The sum of gradients of one leaf, each dense or sparse; rows that meet are added up."""
    sparse = [part for part in parts if part.is_sparse]
    whole = [part for part in parts if not part.is_sparse]
    if sparse:
        # one concatenation for all, because every sum of two would copy what is there so far
        rows = torch.cat([part._indices()[0] for part in sparse])
        values = torch.cat([part._values() for part in sparse])
        # sorted before they are added up, and so in the same order on every device
        whole.append(by_rows(rows, values, sparse[0].shape).coalesce())
    total = whole[0]
    for part in whole[1:]:
        total = total + part
    return total


def converted(gradients: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Dense gradients in another type."""
    there = [torch.empty_like(gradient, dtype=dtype) for gradient in gradients]
    if there:  # few launches for many tensors
        torch._foreach_copy_(there, list(gradients))
    return there


def reduced(gradients: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """A copy of the gradients with the large ones in another type, to save memory."""
    if any(map(is_sharded, gradients)):
        return [g.to(dtype if g.numel() >= LARGE else g.dtype, copy=True) for g in gradients]
    large = [g for g in gradients if not g.is_sparse and g.numel() >= LARGE]
    small = [g for g in gradients if not g.is_sparse and g.numel() < LARGE]
    copies = iter(torch._foreach_mul(small, 1.0)) if small else iter(())
    there = iter(converted(large, dtype))
    return [
        g if g.is_sparse else next(copies) if g.numel() < LARGE else next(there) for g in gradients
    ]


def added(mine: Sequence[Tensor], others: Sequence[Tensor], alpha: float = 1.0) -> list[Tensor]:
    """``mine + alpha * others``, one by one; in place where all are dense."""
    mine, others = list(mine), list(others)
    if any(t.is_sparse for t in (*mine, *others)):
        return [joined([a, alpha * b]) for a, b in zip(mine, others, strict=True)]
    # of mixed types torch would add one tensor after another
    alike: list[tuple[Tensor, Tensor]] = []
    unlike: list[tuple[Tensor, Tensor]] = []
    for pair in zip(entries(mine), entries(others), strict=True):
        (alike if pair[0].dtype == pair[1].dtype else unlike).append(pair)
    for pairs in ([alike] if alike else []) + list(_blocks(unlike)):
        ours, theirs = ([pair[i] for pair in pairs] for i in (0, 1))
        if pairs is not alike:
            theirs = converted(theirs, ours[0].dtype)
        torch._foreach_add_(ours, theirs, alpha=alpha)
    return mine


LARGE = 1 << 16
"""Entries of a gradient that are worth being kept in another type."""

_BLOCK = 1 << 25  # entries that are converted at a time


def _blocks(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Neighbours whose first tensors have one type, and hold not much more than a block."""
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
    """A sum of gradients, one per leaf, over the parts of a batch."""

    def __init__(self) -> None:
        self._parts: list[list[Tensor]] = []

    def add(self, gradients: Sequence[Tensor]) -> None:
        """One more part; dense gradients are taken over and added up in place."""
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
