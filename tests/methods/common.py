"""What several tests of methods need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class OnceDifferentiable(torch.autograd.Function):
    """y^2 / 2 whose backward has no backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return 0.5 * (y * y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y
