"""Convolutions and pools of several tasks on a CPU, in the layout that suits them.

The rule of ``torch.vmap`` for convolutions is a grouped one, with the channels of a pixel far apart
in memory. On processors for which oneDNN makes kernels with groups, the channels of all tasks lie
side by side for every pixel, from layer to layer without a copy, also where all tasks share their
kernels: what comes between two layers would be copied otherwise. On others groups take longer than
the tasks one after another; there the numbers that a pixel of the result depends on are gathered
into a row, and the rows of all tasks meet their kernels in one batched product of matrices. A first
layer, whose few channels are data without a gradient, is such a product everywhere: its numbers are
the same in all inner steps, and are kept, in columns, which are faster to gather and to multiply
with gradients. Pools take the channels of all tasks for those of one image, which is several times
as fast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bilevel.engine.stacked.grouped import grouped
from bilevel.engine.stacked.unwrapping import behind, temporarily_pop_interpreter_stack

HAS_GROUPS = torch.backends.cpu.get_cpu_capability().startswith("AVX")
"""Whether oneDNN has kernels with groups for this processor."""

FEW = 32
"""As many numbers as a pixel may depend on for a layer to be a first one, whose images are data."""

MOST_GATHERED = 1 << 25
"""As many numbers as the rows of a layer may have, of which its images have a ninth or so; with
more they cost more memory than time is saved."""

KEPT = 2
"""How many sets of columns are kept: a step sees the lower and the upper batch."""

POOLS = (functional.max_pool2d, torch.max_pool2d, functional.avg_pool2d)
"""What treats every channel alike."""


class Window(NamedTuple):
    """What a pixel of the result sees; each is a pair, for rows and for columns."""

    size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    def result(self, shape: Sequence[int]) -> tuple[int, int]:
        """How many rows and columns the result has, of images (..., rows, columns)."""
        high, wide = (
            (length + 2 * p - d * (k - 1) - 1) // s + 1
            for length, k, s, p, d in zip(shape[-2:], *self, strict=True)
        )
        return high, wide


class Convolutions:
    """``torch.conv2d`` of all tasks, with the columns of the first layers kept.

    Attributes:
        widest: the most numbers that any of the results had, of kernels that each task has alone.
    """

    def __init__(self) -> None:
        _keep_freed_memory()
        self.widest = 0
        self._kept: list[tuple[Tensor, Any, Tensor]] = []

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        """``torch.conv2d`` of all tasks; None: it is left to torch."""
        if input.device.type != "cpu":
            return None
        found = behind(input, weight) if bias is None else behind(input, weight, bias)
        if found is None or (None in found.places and not HAS_GROUPS):
            return None
        if groups != 1 or isinstance(padding, str) or input.ndim != 4 or _mixed(input, weight):
            return None
        window = Window(weight.shape[2:], *map(_pair, (stride, padding, dilation)))
        with temporarily_pop_interpreter_stack():
            images, kernels = found.stacked(0), found.stacked(1)
            shift = None if bias is None else found.stacked(2)
            result = window.result(images.shape)
            if min(*result, len(images[0])) < 1:  # which torch refuses, or not, in its own words
                return None
            first = kernels[0, 0].numel() <= FEW and not images.requires_grad
            if HAS_GROUPS and not first:
                made = grouped(images, kernels, shift, *window[1:])
            elif kernels[:, 0].numel() * images.shape[1] * result[0] * result[1] > MOST_GATHERED:
                made = _one_by_one(images, kernels, shift, window)
            else:
                product: Any
                if first:
                    columns = self._columns(found.tensors[0], images, window)
                    product = _DataProduct.apply(columns, kernels, shift)  # type: ignore[no-untyped-call]
                else:
                    rows: Any = _Rows.apply(images.permute(0, 1, 3, 4, 2), window)  # type: ignore[no-untyped-call]
                    product = _Product.apply(rows, kernels, shift)  # type: ignore[no-untyped-call]
                made = torch.unflatten(product, 1, (-1, *result)).permute(0, 1, 4, 2, 3)
        if None not in found.places:
            self.widest = max(self.widest, made.numel())
        return found.shown(made, 0)

    def _columns(self, given: Tensor, images: Tensor, window: Window) -> Tensor:
        """The columns of data, of which ``images`` is a view."""
        key = given._version, images.shape, images.stride(), window
        found = next((made for of, its, made in self._kept if of is given and its == key), None)
        if found is None:
            found = _columns_of_data(images, window)
            self._kept = [*self._kept[1 - KEPT :], (given, key, found)]
        return found


def _keep_freed_memory() -> None:
    """Let the C library keep the activations that are freed, for those of the next step.

    glibc hands what is freed back to the system above a limit that follows the largest block that
    has been freed, up to 32 MiB. The system clears every page that it gives again, which takes a
    sixth of a step of eight tasks.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def _pair(option: Any) -> Sequence[int]:
    """An option of ``torch.conv2d`` for rows and for columns."""
    numbers = [option] if isinstance(option, int) else list(option)
    return numbers * 2 if len(numbers) == 1 else numbers


def _mixed(images: Tensor, kernels: Tensor) -> bool:
    """Whether torch has to choose a type of numbers, or to say what does not fit."""
    unlike = images.dtype != kernels.dtype or images.shape[1] != kernels.shape[1]
    return unlike or torch.is_autocast_enabled("cpu")


def pooled(pool: Callable[..., Tensor], input: Tensor, *args: Any, **options: Any) -> Any:
    """The pools of all tasks; None: they are left to torch."""
    if options.get("return_indices") or input.ndim != 4 or input.device.type != "cpu":
        return None
    found = behind(input)
    if found is None:
        return None
    with temporarily_pop_interpreter_stack():
        images = found.stacked(0, 1)
        side_by_side = images.flatten(1, 2).contiguous(memory_format=torch.channels_last)
        made = torch.unflatten(pool(side_by_side, *args, **options), 1, (images.shape[1], -1))
    return found.shown(made, 1)


def _one_by_one(images: Tensor, kernels: Tensor, shift: Tensor | None, window: Window) -> Tensor:
    """The convolutions of the tasks, one after another."""
    shifts = [None] * len(kernels) if shift is None else shift.unbind()
    given = zip(images.unbind(), kernels.unbind(), shifts, strict=True)
    return torch.stack([torch.conv2d(*of_one, *window[1:]) for of_one in given])


def _columns_of_data(images: Tensor, window: Window) -> Tensor:
    """(tasks, numbers, pixels of the result): for each number of a kernel what it meets.

    The last of the numbers is 1 everywhere, and meets the shift.
    """
    above, left = window.padding
    around = functional.pad(images, (left, left, above, above))
    task, sample, channel, row, column = around.stride()
    down, right, lower, further = *window.stride, *window.dilation
    shape = (
        *(len(images), images.shape[2], *window.size),
        *(images.shape[1], *window.result(images.shape)),
    )
    strides = task, channel, lower * row, further * column, sample, down * row, right * column
    seen = around.as_strided(shape, strides, around.storage_offset())
    made = images.new_ones(len(images), math.prod(shape[1:4]) + 1, math.prod(shape[4:]))
    made[:, :-1].view(shape).copy_(seen)
    return made


class _DataProduct(torch.autograd.Function):
    """The kernels of each task times its columns; in memory (pixels, tasks, channels)."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, kernels: Tensor, shift: Tensor | None) -> Tensor:
        ctx.save_for_backward(columns)
        ctx.shape = kernels.shape[2:]
        weights = kernels.flatten(2)
        if shift is None:
            columns = columns[:, :-1]
        else:
            weights = torch.cat([weights, shift[..., None]], 2)
        tasks, channels, _ = weights.shape
        made = columns.new_empty(columns.shape[2], tasks, channels).transpose(0, 1)
        return torch.bmm(columns.transpose(1, 2), weights.transpose(1, 2), out=made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (columns,) = ctx.saved_tensors
        of_all = columns @ grad
        of_kernels = torch.unflatten(of_all[:, :-1].transpose(1, 2).contiguous(), 2, ctx.shape)
        return None, of_kernels, of_all[:, -1] if ctx.needs_input_grad[2] else None


class _Product(torch.autograd.Function):
    """The rows of each task times its kernels; in memory (pixels, tasks, channels)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, kernels: Tensor, shift: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, kernels)
        columns = kernels.permute(0, 3, 4, 2, 1).flatten(1, 3)
        made = rows.new_empty(rows.shape[1], len(rows), kernels.shape[1]).transpose(0, 1)
        torch.bmm(rows, columns, out=made)
        return made if shift is None else made.add_(shift[:, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, kernels = ctx.saved_tensors
        by_window = kernels.permute(0, 1, 3, 4, 2)
        of_kernels = (grad.transpose(1, 2) @ rows).view(by_window.shape).permute(0, 1, 4, 2, 3)
        of_rows = grad @ by_window.flatten(2) if ctx.needs_input_grad[0] else None
        return of_rows, of_kernels, grad.sum(1) if ctx.needs_input_grad[2] else None


def _padded(shape: Sequence[int], like: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Zeros in place of padded images, and the part of them without the padding."""
    tasks, samples, high, wide, channels = shape
    above, left = window.padding
    around = like.new_zeros(tasks, samples, high + 2 * above, wide + 2 * left, channels)
    return around, around[:, :, above : above + high, left : left + wide]


def _seen(around: Tensor, shape: Sequence[int], window: Window, apart: Sequence[int]) -> Tensor:
    """A view of padded images: what windows so far apart see, in this shape."""
    task, sample, row, column, _ = around.stride()
    lower, further = window.dilation
    strides = apart[0] * row, apart[1] * column, lower * row, further * column
    return around.as_strided(shape, (task, sample, *strides, 1), around.storage_offset())


def _gather(pixels: Tensor, window: Window) -> Tensor:
    """(tasks, samples, rows, columns, channels) to (tasks, pixels of the result, numbers)."""
    around, inside = _padded(pixels.shape, pixels, window)
    inside.copy_(pixels)
    shape = *pixels.shape[:2], *window.result(pixels.shape[:-1]), *window.size, pixels.shape[-1]
    return _seen(around, shape, window, window.stride).flatten(4).flatten(1, 3)


def _overlay(rows: Tensor, shape: torch.Size, window: Window) -> Tensor:
    """The transpose of :func:`_gather`: what each pixel has in all rows, added up.

    Windows that do not overlap are added at once.
    """
    around, inside = _padded(shape, rows, window)
    parts = rows.view(*shape[:2], *window.result(shape[:-1]), *window.size, shape[-1])
    every = [d * (k - 1) // s + 1 for k, s, _, d in zip(*window, strict=True)]
    down, right = window.stride
    for i, j in itertools.product(*map(range, every)):
        part = parts[:, :, i :: every[0], j :: every[1]]
        origin = around[:, :, i * down :, j * right :]
        _seen(origin, part.shape, window, (down * every[0], right * every[1])).add_(part)
    return inside


class _Rows(torch.autograd.Function):
    """:func:`_gather`, which torch would differentiate number by number."""

    @staticmethod
    def forward(ctx: Any, pixels: Tensor, window: Window) -> Tensor:
        ctx.shape, ctx.window = pixels.shape, window
        return _gather(pixels, window)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Overlaid.apply(grad, ctx.shape, ctx.window), None  # type: ignore[no-untyped-call]


class _Overlaid(torch.autograd.Function):
    """:func:`_overlay`; it and :class:`_Rows` are linear, each the derivative of the other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shape: torch.Size, window: Window) -> Tensor:
        ctx.window = window
        return _overlay(rows.contiguous(), shape, window)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Rows.apply(grad, ctx.window), None, None  # type: ignore[no-untyped-call]
