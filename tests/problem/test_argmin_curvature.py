"""Minima of functions that are more curved on the way than at the end, and from far away."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel

TYPES = [torch.float32, torch.float64]


def bound(dtype: torch.dtype) -> float:
    """The relative error that a gradient may have."""
    return 1e-3 if dtype is torch.float32 else 1e-6


def solve_strictly(g: Any, x: Tensor, y0: Tensor, **options: Any) -> Tensor:
    """y*, after the backward pass of its sum, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y: Tensor = bilevel.argmin(g, x, y0, **options)
        y.sum().backward()
    return y.detach()


def poisson(dtype: torch.dtype) -> tuple[Any, Tensor, float]:
    """Poisson regression with a log-strength x of its ridge; y* at x = 0 and the sum's slope."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    y = torch.tensor([0.5, -0.3, 0.2], dtype=torch.float64)
    t = torch.poisson((A @ y).exp(), generator=generator)
    for _ in range(50):  # Newton's method
        rate = (A @ y).exp()
        H = A.T @ (rate[:, None] * A) + 2 * torch.eye(3, dtype=torch.float64)
        y = y - torch.linalg.solve(H, A.T @ (rate - t) + 2 * y)
    slope = -float(torch.linalg.solve(H, 2 * y).sum())
    A, t = A.to(dtype), t.to(dtype)

    def g(x: Tensor, y: Tensor) -> Tensor:
        z = A @ y
        return (z.exp() - t * z).sum() + x.exp() * (y**2).sum()

    return g, y, slope


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("start", [0.0, 1.5, 2.0, 3.0, 6.0])
def test_poisson_regression_from_where_it_is_steep(start: float, dtype: torch.dtype) -> None:
    g, exact, slope = poisson(dtype)
    x = torch.zeros((), dtype=dtype, requires_grad=True)
    y = solve_strictly(g, x, torch.full((3,), start, dtype=dtype))
    torch.testing.assert_close(y.double(), exact, rtol=bound(dtype) / 50, atol=0)
    assert x.grad is not None
    assert float(x.grad) == pytest.approx(slope, rel=bound(dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", [1e2, 1e3, 1e4, 1e5, 1e6])
def test_the_logarithm_of_a_variance(scale: float, dtype: torch.dtype) -> None:
    """y + x S exp(-y) is least at log(S x), whose derivative is 1/x."""
    x = torch.ones((), dtype=dtype, requires_grad=True)
    y = solve_strictly(lambda x, y: y + x * scale * (-y).exp(), x, torch.zeros((), dtype=dtype))
    assert float(y) == pytest.approx(math.log(scale), rel=bound(dtype) / 100)
    assert x.grad is not None
    assert float(x.grad) == pytest.approx(1, rel=bound(dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("way", [1.0, 30.0, 100.0, 1000.0])
def test_a_fourth_power_from_far_away(way: float, dtype: torch.dtype) -> None:
    x = torch.full((3,), way, dtype=dtype, requires_grad=True)
    y = solve_strictly(
        lambda x, y: ((y - x) ** 2 + (y - x + 1) ** 4).sum(), x, torch.zeros(3, dtype=dtype)
    )
    # the root of 2 d + 4 (d + 1)^3
    root = torch.full_like(x, -0.41024548769854) + x.detach()
    torch.testing.assert_close(y, root, rtol=bound(dtype) / 100, atol=0)
    torch.testing.assert_close(x.grad, torch.ones_like(x), rtol=bound(dtype), atol=0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("start", [1e3, 1e4, 1e5, 1e6, 1e8])
def test_a_quadratic_from_far_away_is_as_exact(start: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    b = torch.randn(20, generator=generator, dtype=torch.float64)
    exact = torch.linalg.solve(A.T @ A + torch.eye(6, dtype=torch.float64), A.T @ b)
    A, b = A.to(dtype), b.to(dtype)
    x = torch.ones((), dtype=dtype, requires_grad=True)
    y = solve_strictly(
        lambda x, y: ((A @ y - b) ** 2).sum() + x * (y**2).sum(),
        x,
        torch.full((6,), start, dtype=dtype),
    )
    eps = torch.finfo(dtype).eps
    assert float((y.double() - exact).norm() / exact.norm()) < 30 * eps


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("held", ["set", "prox"])
def test_an_exponential_with_a_set_or_a_term(held: str, dtype: torch.dtype) -> None:
    """exp(y) - exp(x) y is least at x; an L1 term of weight 1 puts it at log(exp(x) - 1)."""
    options: Any = {"y_prox": bilevel.prox.L1(1.0)}
    if held == "set":
        options = {"y_set": bilevel.sets.Box(-1.0, 40.0)}
    x = torch.tensor([1.0, 1.5, 2.0], dtype=dtype, requires_grad=True)
    y0 = torch.full((3,), 20.0, dtype=dtype)
    y = solve_strictly(lambda x, y: (y.exp() - x.exp() * y).sum(), x, y0, **options)
    e = x.detach().exp() - float(held == "prox")
    torch.testing.assert_close(y, e.log(), rtol=bound(dtype) / 100, atol=0)
    torch.testing.assert_close(x.grad, x.detach().exp() / e, rtol=bound(dtype), atol=0)


def test_steps_stay_where_g_is_defined() -> None:
    """The derivative of log(y) is finite below 0, where it is not that of a function."""
    x = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64, requires_grad=True)
    y = solve_strictly(
        lambda x, y: ((y - x) ** 2 - 0.1 * y.log()).sum(), x, torch.full((3,), 1e-4).double()
    )
    root = (x.detach() ** 2 + 0.2).sqrt()  # of 2 y (y - x) = 0.1
    torch.testing.assert_close(y, (x.detach() + root) / 2)
    torch.testing.assert_close(x.grad, (1 + x.detach() / root) / 2, rtol=1e-6, atol=0)


def test_the_check_costs_few_gradients() -> None:
    """The curvature at the minimum of a quadratic is seen by one or two gradients."""
    calls = 0
    h = torch.linspace(1, 10, 6, dtype=torch.float64)

    def g(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 0.5 * (h * (y - x) ** 2).sum()

    x = torch.linspace(1, 2, 6, dtype=torch.float64, requires_grad=True)
    solve_strictly(g, x, torch.zeros(6, dtype=torch.float64))
    assert calls <= 30
