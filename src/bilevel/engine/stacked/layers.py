"""The layers of several tasks, each as few operations on the tensors of all tasks.

The rules of ``torch.vmap`` take some layers apart into many small operations, each with a dispatch
of its own in the forward pass and again in the backward pass: a normalisation over the batch into
one without weights, a product and a sum; a cross-entropy into a dozen. Together they cost more than
the numbers themselves. Inside :class:`SideBySide` each is the operation that one task has, on all
tasks; what is not known here is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bilevel.engine.stacked.convolutions import POOLS, Convolutions, pooled
from bilevel.engine.stacked.kept import Kept
from bilevel.engine.stacked.unwrapping import behind, temporarily_pop_interpreter_stack

PLAIN = frozenset({functional.relu, torch.relu, torch.tanh, torch.sigmoid, functional.leaky_relu})
"""Other layers that a body is made of, whose results are kept with those of its convolutions."""


LARGE = 1 << 18
"""From how many numbers on a normalisation has second derivatives of its own; those of fewer take
less time than an operation in Python."""


class SideBySide(TorchFunctionMode):
    """Inside, the layers of stacked tasks are evaluated as above.

    Attributes:
        convolutions: those that were.
        kept: the layers that need not be evaluated again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = Convolutions()
        self.kept = Kept()
        self._rules: dict[Any, Callable[..., Tensor | None]] = {
            torch.conv2d: self.convolutions,
            functional.batch_norm: _normalised,
            functional.cross_entropy: _cross_entropy,
            functional.linear: _linear,
            torch.flatten: _flattened,
            torch.Tensor.flatten: _flattened,
            **{pool: partial(pooled, pool) for pool in POOLS},
            **dict.fromkeys(PLAIN, _as_it_is),
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func in self._rules:
            return self.kept(self._evaluated, func, args, options)
        return func(*args, **options)

    def _evaluated(self, func: Callable[..., Any], args: Any, options: dict[str, Any]) -> Any:
        found = self._rules[func](*args, **options)
        return func(*args, **options) if found is None else found


def _as_it_is(*args: Any, **options: Any) -> None:
    """A layer that torch evaluates."""


def _normalised(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """Batch normalisation by the statistics of each task's own batch."""
    if not training or running_mean is not None or weight is None or bias is None:
        return None
    found = behind(input, weight, bias)
    if found is None or input.ndim < 2:
        return None
    with temporarily_pop_interpreter_stack():
        channels = found.stacked(0, 1).flatten(1, 2)
        if channels.ndim == 4 and channels.device.type == "cpu":
            channels = channels.contiguous(memory_format=torch.channels_last)
        scale, shift = found.stacked(1).flatten(), found.stacked(2).flatten()
        if channels.ndim == 4 and channels.device.type == "cpu" and channels.numel() >= LARGE:
            made: Any = _Normalised.apply(channels, scale, shift, eps)  # type: ignore[no-untyped-call]
        else:
            made = functional.batch_norm(channels, None, None, scale, shift, True, momentum, eps)
        made = torch.unflatten(made, 1, (found.tasks, -1))
    return found.shown(made, 1)


class _Normalised(torch.autograd.Function):
    """Batch normalisation whose second derivatives pass over the images a few times.

    Those of torch pass over them forty times, which takes most of an unrolled step of images that
    leave the cache.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        made, mean, inverse = torch.native_batch_norm(
            images, scale, shift, None, None, True, 0.0, eps
        )
        ctx.save_for_backward(images, scale)
        ctx.statistics = mean, inverse, eps
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        images, scale = ctx.saved_tensors
        return *_NormalisedBack.apply(grad, images, scale, *ctx.statistics), None  # type: ignore[no-untyped-call]


class _NormalisedBack(torch.autograd.Function):
    """The gradients of :class:`_Normalised`.

    With h the normalised images, r one over their deviation and P v = v - mean(v) - mean(v h) h
    they are scale * r * P grad, sum(grad h) and sum(grad), and the derivative of h is r P too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        images: Tensor,
        scale: Tensor,
        mean: Tensor,
        inverse: Tensor,
        eps: float,
    ) -> Any:
        found = torch.ops.aten.native_batch_norm_backward(
            grad, images, scale, None, None, mean, inverse, True, eps, [True, True, True]
        )
        ctx.save_for_backward(grad, images, scale, mean, inverse, *found[1:])
        ctx.eps = eps
        return found

    @staticmethod
    def backward(ctx: Any, back: Tensor, of_scale: Tensor, of_shift: Tensor) -> Any:
        grad, images, scale, mean, r, with_h, total = ctx.saved_tensors
        if torch.is_grad_enabled():  # third derivatives, where those of torch are wrong
            # each with a name of its own, as the first two depend on the same tensors
            given = [t.view_as(t) for t in (grad, images, scale)]
            given = [t if t.requires_grad else t.requires_grad_() for t in given]
            slopes, along = _taken_back(given, ctx.eps), (back, of_scale, of_shift)
            return *torch.autograd.grad(slopes, given, along, create_graph=True), None, None, None
        side_by_side = images.permute(0, 2, 3, 1)
        v, g, h = (t.permute(0, 2, 3, 1).flatten(0, 2) for t in (back, grad, images))
        count = len(h)
        h = (h * r).sub_(mean * r)
        product = v * h
        v_h, g_h = product.sum(0) / count, with_h / count
        v_mean, g_mean = v.sum(0) / count, total / count
        met = torch.mul(v, g, out=product).sum(0) - count * (v_mean * g_mean + v_h * g_h)
        step = scale * r
        along = of_scale - step * v_h
        of_grad = (step * v).addcmul_(along, h).add_(of_shift - step * v_mean)
        slope = step * r * (2 * v_h * g_h - met / count) - of_scale * r * g_h
        of_images = torch.mul(r * along, g, out=product).addcmul_(-r * step * g_h, v)
        of_images.addcmul_(slope, h).add_(r * (step * g_h * v_mean - along * g_mean))
        found = (t.view(side_by_side.shape).permute(0, 3, 1, 2) for t in (of_grad, of_images))
        return *found, r * met, None, None, None


def _taken_back(given: list[Tensor], eps: float) -> list[Tensor]:
    """The gradients of a normalisation, by operations that have derivatives of all orders."""
    grad, images, scale = given
    variance, mean = torch.var_mean(images, (0, 2, 3), correction=0, keepdim=True)
    r = (variance + eps).rsqrt()
    h = (images - mean) * r
    with_h, total = (part.sum((0, 2, 3)) for part in (grad * h, grad))
    count = images.numel() // len(scale)
    part = grad - (total[:, None, None] + with_h[:, None, None] * h) / count
    return [scale[:, None, None] * r * part, with_h, total]


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The cross-entropy of scores (samples, classes) with numbers of classes."""
    old = size_average is not None or reduce is not None
    if weight is not None or label_smoothing or old or input.ndim != 2 or target.ndim != 1:
        return None
    found = behind(input, target)
    if found is None or reduction not in ("mean", "sum"):
        return None
    with temporarily_pop_interpreter_stack():
        classes = found.stacked(1)
        losses = functional.cross_entropy(
            found.stacked(0).flatten(0, 1),
            classes.flatten(),
            ignore_index=ignore_index,
            reduction="none",
        )
        made = torch.unflatten(losses, 0, classes.shape).sum(1)
        if reduction == "mean":
            made = made / (classes != ignore_index).sum(1)
    return found.shown(made, 0)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """A linear layer of each task's own weights on rows (samples, numbers)."""
    found = behind(input, weight) if bias is None else behind(input, weight, bias)
    if found is None or None in found.places or input.ndim != 2:
        return None
    with temporarily_pop_interpreter_stack():
        rows, columns = found.stacked(0), found.stacked(1).transpose(1, 2)
        if bias is None:
            made = rows @ columns
        else:
            made = torch.baddbmm(found.stacked(2)[:, None], rows, columns)
    return found.shown(made, 0)


def _flattened(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor | None:
    """Images of channels side by side, each as one row of numbers."""
    found = behind(input)
    if found is None or input.ndim != 4 or start_dim != 1 or end_dim not in (-1, 3):
        return None
    with temporarily_pop_interpreter_stack():
        images = found.stacked(0)
        pixels = images.permute(1, 3, 4, 0, 2)
        if images.device.type != "cpu" or not pixels.is_contiguous():
            return None
        made: Any = _Flattened.apply(images)  # type: ignore[no-untyped-call]
    return found.shown(made, 0)


class _Flattened(torch.autograd.Function):
    """(tasks, samples, channels, rows, columns) to (tasks, samples, numbers).

    The gradient lies in memory as the images do. That of torch lies as the numbers, and what comes
    before on the way back takes several times as long on two different layouts.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        ctx.shape = images.shape[2:]
        return images.flatten(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        images = torch.unflatten(grad, 2, ctx.shape)
        return images.permute(1, 3, 4, 0, 2).contiguous().permute(3, 0, 4, 1, 2)
