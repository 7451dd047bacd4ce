"""Convolutions of several tasks as one with a group for each, and so their derivatives.

Torch takes the second derivatives of such a convolution one group after another, which is much of
the time of an unrolled step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Way(NamedTuple):
    """How kernels move over images."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def over(self, images: Tensor, kernels: Tensor, shift: Tensor | None) -> Tensor:
        """The convolution."""
        return torch.convolution(
            *(images, kernels, shift, self.stride, self.padding, self.dilation),
            *(False, (0, 0), self.groups),
        )

    def back(
        self, grad: Tensor, images: Tensor, kernels: Tensor, wanted: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """What a gradient is taken back to: images, kernels and shift, as far as wanted."""
        found: Sequence[Tensor | None] = torch.ops.aten.convolution_backward(
            *(grad, images, kernels, [len(kernels)], self.stride, self.padding, self.dilation),
            *(False, [0, 0], self.groups, list(wanted)),
        )
        return found


def grouped(
    images: Tensor,
    kernels: Tensor,
    shift: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """The convolutions of all tasks, with their channels side by side in memory.

    Args:
        images, kernels, shift: of all tasks.
        stride, padding, dilation: as those of ``torch.conv2d``, for rows and for columns.
    """
    side_by_side = torch.channels_last
    found: Any = _Grouped.apply(  # type: ignore[no-untyped-call]
        images.transpose(0, 1).flatten(1, 2).contiguous(memory_format=side_by_side),
        kernels.flatten(0, 1).contiguous(memory_format=side_by_side),
        None if shift is None else shift.flatten(),
        _Way(stride, padding, dilation, len(kernels)),
    )
    made: Tensor = torch.unflatten(found, 1, (len(kernels), -1)).transpose(0, 1)
    return made


class _Grouped(torch.autograd.Function):
    """The convolution."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, kernels: Tensor, shift: Tensor | None, way: _Way
    ) -> Tensor:
        ctx.save_for_backward(images, kernels)
        ctx.way = way
        return way.over(images, kernels, shift)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        images, kernels = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if not torch.is_grad_enabled():
            return *ctx.way.back(grad, images, kernels, wanted), None
        return *_GroupedBack.apply(grad, images, kernels, ctx.way, wanted), None  # type: ignore[no-untyped-call]


class _GroupedBack(torch.autograd.Function):
    """Its gradients, each linear in two of the three tensors given."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, images: Tensor, kernels: Tensor, way: _Way, wanted: Sequence[bool]
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad, images, kernels)
        ctx.way = way
        return way.back(grad, images, kernels, wanted)

    @staticmethod
    def backward(
        ctx: Any, to_images: Tensor | None, to_kernels: Tensor | None, to_shift: Tensor | None
    ) -> Any:
        grad, images, kernels = ctx.saved_tensors
        way: _Way = ctx.way
        parts, of_images, of_kernels = [], None, None
        if to_kernels is not None:
            parts.append(way.over(images, to_kernels, to_shift))
            if ctx.needs_input_grad[1]:
                of_images = way.back(grad, images, to_kernels, (True, False, False))[0]
        elif to_shift is not None:
            parts.append(to_shift[:, None, None].expand_as(grad))
        if to_images is not None:
            parts.append(way.over(to_images, kernels, None))
            of_kernels = way.back(grad, to_images, kernels, (False, True, False))[1]
        of_grad = parts[0] + parts[1] if len(parts) > 1 else next(iter(parts), None)
        return of_grad, of_images, of_kernels, None, None
