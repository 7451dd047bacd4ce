"""Convolutions and pools of several tasks on a CPU, in the layout that suits them.

The rule of ``torch.vmap`` for convolutions is a grouped one, with the channels of a pixel far apart
in memory and with its bias added afterwards, which takes up to twice as long. Here the channels of
all tasks lie side by side for every pixel, from layer to layer without a copy; pools take them for
the channels of one image, which is several times as fast. A first layer, whose few channels are
data without a gradient, is a product of matrices for each task; its patches are the same in all
inner steps, and are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

FEW = 32
"""As many numbers as a pixel of the result may depend on for a convolution to be a product."""

KEPT = 2
"""How many sets of patches are kept: a step sees the lower and the upper batch."""

try:  # what torch.vmap makes of a tensor; seen in torch 2.11 and 2.13
    from torch._C._functorch import (
        _add_batch_dim,
        get_unwrapped,
        is_batchedtensor,
        maybe_get_bdim,
        maybe_get_level,
    )
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

    _HAS_PARTS = True
except ImportError:  # another version of torch, whose own rule is used
    _HAS_PARTS = False


POOLS = (functional.max_pool2d, torch.max_pool2d, functional.avg_pool2d)
"""What treats every channel alike."""


class Window(NamedTuple):
    """The options of a convolution, as ``torch.conv2d`` takes them."""

    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1


class SideBySide(TorchFunctionMode):
    """Inside, convolutions of stacked images with stacked kernels are evaluated as above."""

    def __init__(self) -> None:
        super().__init__()
        self._patches: list[tuple[Tensor, Any, Tensor]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.conv2d:
            found = self._convolved(*args, **options)
        elif func in POOLS and not options.get("return_indices"):
            found = _pooled(func, *args, **options)
        else:
            found = None
        return func(*args, **options) if found is None else found

    def _convolved(
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
        tensors = [input, weight] if bias is None else [input, weight, bias]
        inner = _stacks(*tensors)
        if inner is None or groups != 1 or isinstance(padding, str) or input.ndim != 4:
            return None
        window = Window(stride, padding, dilation)
        places = [maybe_get_bdim(t) for t in tensors]
        with temporarily_pop_interpreter_stack():
            kernels = inner[1].movedim(places[1], 0)
            shift = None if bias is None else inner[2].movedim(places[2], 0)
            if kernels[0, 0].numel() <= FEW and not inner[0].requires_grad:
                rows, shape = self._rows(inner[0], places[0], kernels.shape[3:], window)
                found = _product(rows, shape, kernels, shift)
            else:
                found = _grouped(inner[0].movedim(places[0], 1), kernels, shift, window)
        return _add_batch_dim(found, 1, maybe_get_level(input))

    def _rows(
        self, images: Tensor, place: int, size: torch.Size, window: Window
    ) -> tuple[Tensor, tuple[int, ...]]:
        """The patches, (tasks, samples x pixels, numbers), and how many samples, rows, columns."""
        lengths = images.movedim(place, 0).shape[-2:]
        options = [[o] * 2 if isinstance(o, int) else list(o) for o in window]
        high, wide = (
            (length + 2 * p - d * (k - 1) - 1) // s + 1
            for length, k, s, p, d in zip(lengths, size, *options, strict=True)
        )
        key = images._version, place, size, window
        found = (rows for of, its, rows in self._patches if of is images and its == key)
        rows = next(found, None)
        if rows is None:
            stacked = images.movedim(place, 0)
            patches = functional.unfold(
                stacked.flatten(0, 1), size, window.dilation, window.padding, window.stride
            )
            rows = torch.unflatten(patches, 0, stacked.shape[:2]).transpose(2, 3).flatten(1, 2)
            self._patches = [*self._patches[1 - KEPT :], (images, key, rows)]
        return rows, (rows.shape[1] // (high * wide), high, wide)


def _stacks(*tensors: Tensor) -> list[Tensor] | None:
    """The tensors of all tasks behind those of one; None: there are none, or not on a CPU."""
    if not _HAS_PARTS or not all(is_batchedtensor(t) and t.device.type == "cpu" for t in tensors):
        return None
    inner = [get_unwrapped(t) for t in tensors]
    # where the user's objective calls vmap itself there is more than one level
    return None if any(map(is_batchedtensor, inner)) else inner


def _pooled(pool: Callable[..., Tensor], input: Tensor, *args: Any, **options: Any) -> Any:
    """The pools of all tasks; None: they are left to torch."""
    inner = _stacks(input)
    if inner is None or input.ndim != 4:
        return None
    place = maybe_get_bdim(input)
    with temporarily_pop_interpreter_stack():
        images = inner[0].movedim(place, 1)
        side_by_side = images.flatten(1, 2).contiguous(memory_format=torch.channels_last)
        pooled = pool(side_by_side, *args, **options)
        found = torch.unflatten(pooled, 1, (images.shape[1], -1))
    return _add_batch_dim(found, 1, maybe_get_level(input))


def _product(rows: Tensor, shape: tuple[int, ...], kernels: Tensor, shift: Tensor | None) -> Tensor:
    """The patches of each task times its kernels; the result is (samples, tasks, channels, ...)."""
    columns = kernels.flatten(2).transpose(1, 2)
    found = rows @ columns if shift is None else torch.baddbmm(shift[:, None], rows, columns)
    by_pixel = torch.unflatten(found, 1, shape).permute(1, 2, 3, 0, 4).contiguous()
    return by_pixel.permute(0, 3, 4, 1, 2)


def _grouped(images: Tensor, kernels: Tensor, shift: Tensor | None, window: Window) -> Tensor:
    """One convolution with a group for each task, from and to (samples, tasks, channels, ...)."""
    side_by_side = torch.channels_last
    found = torch.conv2d(
        images.flatten(1, 2).contiguous(memory_format=side_by_side),
        kernels.flatten(0, 1).contiguous(memory_format=side_by_side),
        None if shift is None else shift.flatten(),
        *window,
        len(kernels),
    )
    return torch.unflatten(found, 1, (len(kernels), -1))
