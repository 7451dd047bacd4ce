"""What several tests of methods need."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.problems import Quadratic
from bilevel.variables import gradients

Array = npt.NDArray[np.float64]


@dataclass
class Oracle:
    """Gradients of a quadratic by hand, in NumPy; ``n`` is noise that is added."""

    A: Array
    B: Array
    t: Array
    rho: float

    @classmethod
    def of(cls, problem: Quadratic) -> Oracle:
        return cls(problem.A.numpy(), problem.B.numpy(), problem.t.numpy(), problem.rho)

    def f_y(self, y: Array, n: Any = 0.0) -> Array:
        return y - self.t + n

    def f_x(self, x: Array, n: Any = 0.0) -> Array:
        return self.rho * x + n

    def g_y(self, x: Array, y: Array, n: Any = 0.0) -> Array:
        return self.A @ (y - self.B @ x) + n

    def g_x(self, x: Array, y: Array, n: Any = 0.0) -> Array:
        return -self.B.T @ (self.A @ (y - self.B @ x)) + n


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


def assert_equals_its_reference(method: Any, problem: Any, steps: int, **options: Any) -> None:
    """Hold the steps of a method to its reference on minibatches of a problem with data."""
    run, twin = (
        bilevel.Solver(
            problem,
            problem.x0,
            problem.y0,
            method=method,
            upper_data=problem.upper_data,
            lower_data=problem.lower_data,
            **options,
        )
        for _ in range(2)
    )
    known = method.reference(problem.upper, problem.lower, problem.x0, problem.y0, twin.draw)
    for x, y in islice(known, steps):
        run.step(measure=run.k % 2 == 0)
        torch.testing.assert_close(run.x, x, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(run.y, y, rtol=1e-10, atol=1e-12)
    assert run.k == steps
