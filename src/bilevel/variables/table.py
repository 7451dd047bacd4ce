"""Table: per-sample parameters, looked up by number."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bilevel.errors import ArgumentError, ArgumentTypeError, RowError
from bilevel.errors.checks import check_count
from bilevel.variables.sparse import by_rows


class Table(nn.Module):
    """One row of parameters for each sample, of which a step moves only those it looked up.

    In an objective ``table[index]`` are the rows with the numbers ``index``, in its shape, followed
    by that of a row. Their gradients come back by row, however often a row is looked up, and the
    step of the variable, its set and its optimizer see these rows alone. So time per step and
    memory beside the rows themselves depend on the batch, not on the number of rows.

    A table may be x, y, a part of a tree, or a part of an ``nn.Module``. What is handed back is a
    table again; ``table.values`` is the tensor. The whole of it may be used in an objective as
    well, at the cost of the whole. A number that is no row is refused (on a GPU by the device, as
    for any tensor, because to look at it first would mean to wait for it).

    Some things touch every row by their nature, and then cost the table in every step: a
    ``direction_batch_size="all"``, momentum (``F3SA``, ``MASOBA``, ``F2BA`` with ``acceleration``),
    and ``select="best"`` or ``"random"``, each of which also holds whole copies. Where y is a
    table: ``F2SA`` with another scheme than "forward", ``MEHA``, ``BOME``, ``VPBGD`` with
    ``start="y"``, all methods that need second derivatives, and now and then ``lower_lr="auto"``.

    The step of x has to be given, as ``upper_lr`` or by an optimizer, unless every direction is
    over all samples: "auto" learns it from directions that have rows in common. An optimizer has to
    know sparse gradients: ``torch.optim.SparseAdam`` (two more numbers for each parameter),
    ``Adagrad`` (one more), and ``SGD`` without momentum do. A set has to treat each row alone, see
    :mod:`bilevel.sets`.

    On several ranks a table is divided by rows: each rank gives ``values`` of its own rows, which
    :func:`bilevel.distributed.rows` names, and looks up only these, by their numbers in the whole.
    No other rank ever needs them, so they are not sent anywhere.

    Args:
        values: the rows to start from, a floating point tensor whose first dimension counts them.
            It is not copied here; a run copies it once.
        first: the number of the first of these rows.
        rows: how many rows there are on all ranks together. None: no more than these.

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
        """Whether there are rows that another rank holds."""
        return self.rows > len(self.values)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> torch.Size:
        """That of the values: the number of rows, then the shape of a row."""
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """That of the values."""
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
    """Rows of a tensor, whose gradient is that of these rows alone."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = values.shape
        ctx.is_leaf = values.is_leaf
        return values.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        # what is to be differentiated again, or passed on to where the values came from, is dense
        if ctx.is_leaf and not torch.is_grad_enabled():
            return by_rows(rows, gradient, ctx.shape), None
        return gradient.new_zeros(ctx.shape).index_put((rows,), gradient, accumulate=True), None


def _row_numbers(index: Any, count: int, device: torch.device) -> Tensor:
    """What stands in the brackets as a tensor of whole numbers."""
    if isinstance(index, slice):
        return torch.arange(*index.indices(count), device=device)
    if not isinstance(index, Tensor | np.ndarray | np.integer | int | list):
        raise ArgumentTypeError(
            f"a Table is looked up by the numbers of its rows, a tensor of whole numbers, not by "
            f"{index!r}; what is inside a row is taken afterwards, as in table[index][..., 0]"
        )
    numbers = torch.as_tensor(index, device=device)
    if numbers.dtype in _NOT_NUMBERS or numbers.is_floating_point() or numbers.is_complex():
        raise ArgumentTypeError(
            f"a Table is looked up by the numbers of its rows, but the index has dtype "
            f"{numbers.dtype}; give whole numbers (.long()), and for a mask mask.nonzero()[:, 0]"
        )
    return numbers.long()


_NOT_NUMBERS = (torch.bool, torch.uint8)
"""Both are masks to torch."""
