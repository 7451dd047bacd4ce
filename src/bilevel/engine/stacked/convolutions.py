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

from bilevel.engine.stacked.unwrapping import behind, temporarily_pop_interpreter_stack

FEW = 32
"""As many numbers as a pixel of the result may depend on for a convolution to be a product."""

KEPT = 2
"""How many sets of patches are kept: a step sees the lower and the upper batch."""

POOLS = (functional.max_pool2d, torch.max_pool2d, functional.avg_pool2d)
"""What treats every channel alike."""


class Window(NamedTuple):
    """The options of a convolution, as ``torch.conv2d`` takes them."""

    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1


class Convolutions:
    """``torch.conv2d`` of all tasks, with the patches of the first layers kept."""

    def __init__(self) -> None:
        self._patches: list[tuple[Tensor, Any, Tensor]] = []

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
        found = behind(input, weight) if bias is None else behind(input, weight, bias)
        if found is None or None in found.places or input.device.type != "cpu":
            return None
        if groups != 1 or isinstance(padding, str) or input.ndim != 4:
            return None
        window = Window(stride, padding, dilation)
        images, place = found.tensors[0], found.places[0]
        assert place is not None
        with temporarily_pop_interpreter_stack():
            kernels = found.stacked(1)
            shift = None if bias is None else found.stacked(2)
            if kernels[0, 0].numel() <= FEW and not images.requires_grad:
                rows, shape = self._rows(images, place, kernels.shape[3:], window)
                made = _product(rows, shape, kernels, shift)
            else:
                made = _grouped(found.stacked(0, 1), kernels, shift, window)
        return found.shown(made, 1)

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


def pooled(pool: Callable[..., Tensor], input: Tensor, *args: Any, **options: Any) -> Any:
    """The pools of all tasks; None: they are left to torch."""
    found = behind(input)
    if found is None or input.ndim != 4 or input.device.type != "cpu":
        return None
    with temporarily_pop_interpreter_stack():
        images = found.stacked(0, 1)
        side_by_side = images.flatten(1, 2).contiguous(memory_format=torch.channels_last)
        made = torch.unflatten(pool(side_by_side, *args, **options), 1, (images.shape[1], -1))
    return found.shown(made, 1)


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
