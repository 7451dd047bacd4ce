"""Table: one row of parameters for each sample, looked up by number."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bilevel.errors import ArgumentError, ArgumentTypeError, RowError
from bilevel.errors.checks import check_count
from bilevel.variables.sparse import row_sparse_gradient


class Table(nn.Module):
    """One row of parameters for each sample; a step moves only the rows that were looked up.

    In an objective, ``table[index]`` has the shape of ``index`` followed by that of a row. The
    gradient holds the rows that were looked up, each once, and the step of the variable, its set
    and its optimizer see these rows alone. So the time of a step, and its memory beside the rows
    themselves, depend on the batch and not on the number of rows.

    A table may be x, y, a part of a tree, or a part of an ``nn.Module``. What is handed back is a
    table again; ``table.values`` is the tensor. An objective may also use all of it, at the cost
    of all of it. A number that is no row is refused (on a GPU by the device, as for any tensor,
    because checking it first would mean to wait for the device).

    Some settings touch every row by their nature, so that every step costs the whole table:
    ``direction_batch_size="all"``, momentum (``F3SA``, ``MASOBA``, ``F2BA`` with
    ``acceleration``), and ``select="best"`` or ``"random"``, each of which also holds whole
    copies. Where y is a table: ``F2SA`` with another scheme than "forward", ``MEHA``, ``BOME``,
    ``VPBGD`` with ``start="y"``, all methods that need second derivatives, and at times
    ``lower_lr="auto"``.

    The step size of x has to be given, as ``upper_lr`` or by an optimizer, unless every direction
    is over all samples: "auto" learns it from directions that have rows in common. An optimizer
    has to support sparse gradients: ``torch.optim.SparseAdam`` (two more numbers for each
    parameter), ``Adagrad`` (one more), and ``SGD`` without momentum do. A set has to treat each
    row alone, see :mod:`bilevel.sets`.

    On several ranks a table is divided by rows: each rank gives ``values`` of its own rows, which
    :func:`bilevel.distributed.rows` names, and looks up only these, by their numbers in the whole
    table. Rows are never sent to another rank.

    Args:
        values: the rows to start from, a floating point tensor whose first dimension counts them.
            It is not copied here; a run copies it once.
        first: the number of the first of these rows.
        rows: the number of rows on all ranks together. None: these are the last.

    Example:
        A weight for each of a million samples, a hundred of which are in a batch:

        >>> import torch, bilevel
        >>> def lower(x, y, index):  # sample i wants y to be i % 2, with weight x[i]
        ...     return (x[index] * (y - index % 2) ** 2).mean()
        >>> def upper(x, y, batch):  # what is really wanted is 1
        ...     return (y - 1) ** 2
        >>> result = bilevel.minimize(
        ...     bilevel.Problem(upper, lower, x_set=bilevel.sets.Box(0.1, 1)),
        ...     x0=bilevel.Table(torch.full((1_000_000,), 0.5)),
        ...     y0=torch.tensor(0.5),
        ...     lower_data=lambda generator: torch.randint(10**6, (100,), generator=generator),
        ...     method=bilevel.F2SA(lower_lr=0.2, upper_lr=100.0),
        ...     steps=50,
        ... )
        >>> weights = result.x.values
        >>> even, odd = weights[::2], weights[1::2]
        >>> bool(even.max() <= 0.5 <= odd.min()), int((weights != 0.5).sum()) <= 50 * 100
        (True, True)
    """

    values: nn.Parameter

    def __init__(self, values: Tensor, first: int = 0, rows: int | None = None) -> None:
        super().__init__()
        if not isinstance(values, Tensor):
            raise ArgumentTypeError(
                f"values must be a tensor with one row for each sample, not {values!r}; for n "
                f"numbers, for example, torch.zeros(n)"
            )
        if not values.is_floating_point():
            raise ArgumentTypeError(
                f"values has dtype {values.dtype}, but only floating point tensors can be moved"
            )
        if values.ndim == 0 or len(values) == 0 or values.layout != torch.strided:
            raise ArgumentError(
                f"values must be a dense tensor of at least one row, but has the shape "
                f"{tuple(values.shape)} and the layout {values.layout}"
            )
        check_count("first", first, least=0)
        self.first = first
        self.rows = first + len(values) if rows is None else rows
        check_count("rows", self.rows, least=first + len(values))
        self.values = nn.Parameter(values)

    @property
    def divided(self) -> bool:
        """Whether other ranks hold rows of it."""
        return self.rows > len(self.values)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> torch.Size:
        """The shape of the values, which is the number of rows and then the shape of a row."""
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """The type of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where the values lie."""
        return self.values.device

    def extra_repr(self) -> str:
        return f"shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r}"

    def __getitem__(self, index: Any) -> Tensor:
        values = self.values
        numbers = _row_numbers(index, self.rows, values.device)
        flat = numbers.reshape(-1) - self.first if self.first else numbers.reshape(-1)
        try:
            if values.requires_grad and torch.is_grad_enabled():
                rows: Tensor = _Lookup.apply(values, flat)  # type: ignore[no-untyped-call]
            else:
                rows = values.index_select(0, flat)
        except IndexError:
            outside = int(flat[(flat < 0) | (flat >= len(values))][0]) + self.first
            held = (self.first, self.first + len(values)) if self.divided else None
            raise RowError(outside, self.rows, held) from None
        return rows.reshape((*numbers.shape, *values.shape[1:]))

    def forward(self, index: Any) -> Tensor:
        """The rows with the numbers ``index``."""
        return self[index]


class _Lookup(torch.autograd.Function):
    """Looks up rows of a tensor; its gradient is sparse and holds these rows."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = values.shape
        ctx.is_leaf = values.is_leaf
        return values.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        # A gradient that is differentiated again or flows on into another graph must be dense.
        if ctx.is_leaf and not torch.is_grad_enabled():
            return row_sparse_gradient(rows, gradient, ctx.shape), None
        return gradient.new_zeros(ctx.shape).index_put((rows,), gradient, accumulate=True), None


def _row_numbers(index: Any, count: int, device: torch.device) -> Tensor:
    """The index of a lookup as a tensor of whole numbers."""
    if isinstance(index, slice):
        return torch.arange(*index.indices(count), device=device)
    if not isinstance(index, Tensor | np.ndarray | np.integer | int | list):
        raise ArgumentTypeError(
            f"a Table is looked up by the numbers of its rows, a tensor of whole numbers, not by "
            f"{index!r}; what is inside a row is taken afterwards, as in table[index][..., 0]"
        )
    numbers = torch.as_tensor(index, device=device)
    # bool and uint8 are masks to torch
    masks = (torch.bool, torch.uint8)
    if numbers.dtype in masks or numbers.is_floating_point() or numbers.is_complex():
        raise ArgumentTypeError(
            f"a Table is looked up by the numbers of its rows, but the index has dtype "
            f"{numbers.dtype}; give whole numbers (.long()), and for a mask mask.nonzero()[:, 0]"
        )
    return numbers.long()
