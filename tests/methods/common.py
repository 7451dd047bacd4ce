"""What several tests of methods need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bilevel.variables import gradients


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


def counted_passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """Grows by what is differentiated with every backward pass from here on, whoever starts it."""
    engine = torch.autograd.graph._engine_run_backward
    passes: list[tuple[Tensor, ...]] = []

    def run(values: tuple[Tensor, ...], *args: Any, **options: Any) -> Any:
        passes.append(values)
        return engine(values, *args, **options)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run)
    monkeypatch.setattr(gradients, "_engine", run)
    return passes
