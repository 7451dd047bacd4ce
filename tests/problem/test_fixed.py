"""Lower levels that are given as a map, against closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bilevel
from bilevel.errors import ObjectiveError

A = torch.tensor([[0.5, 0.2, 0.0], [0.0, 0.4, -0.3], [0.1, 0.0, 0.2]], dtype=torch.float64)
TARGET = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
ZEROS = torch.zeros(3, dtype=torch.float64)


def affine(x: Tensor, y: Tensor, batch: None) -> Tensor:
    """Its fixed point is (I - A)^-1 x."""
    return A @ y + x


def upper(x: Tensor, y: Tensor, batch: None) -> Tensor:
    return 0.5 * ((y - TARGET) ** 2).sum() + 0.05 * (x**2).sum()


def exact_gradient(x: Tensor) -> Tensor:
    inverse = torch.linalg.inv(torch.eye(3, dtype=torch.float64) - A)
    return inverse.T @ (inverse @ x - TARGET) + 0.1 * x


def test_the_hypergradient_against_its_closed_form() -> None:
    problem = bilevel.Problem(upper, bilevel.FixedPoint(affine))
    x = torch.tensor([0.3, -0.2, 0.7], dtype=torch.float64)
    found = bilevel.hypergradient(problem, x, ZEROS)
    torch.testing.assert_close(found, exact_gradient(x), rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["f2sa", "aid"])
def test_minimize_with_nothing_set_against_the_closed_form(method: str) -> None:
    problem = bilevel.Problem(upper, bilevel.FixedPoint(affine))
    result = bilevel.minimize(problem, ZEROS, ZEROS, method=method, steps=60)
    inverse = torch.linalg.inv(torch.eye(3, dtype=torch.float64) - A)
    torch.testing.assert_close(result.y, inverse @ result.x, rtol=1e-2, atol=1e-2)
    start = exact_gradient(ZEROS).norm()
    # the direction of F2SA is biased by O(1 / multiplier)
    assert exact_gradient(result.x).norm() < (0.1 if method == "f2sa" else 1e-2) * start


@pytest.mark.slow
def test_a_map_whose_iteration_diverges() -> None:
    """With phi = -3 y + x the iteration leaves the fixed point x / 4, and descent finds it."""
    problem = bilevel.Problem(
        lambda x, y, batch: ((y - 1) ** 2).sum(),
        bilevel.FixedPoint(lambda x, y, batch: x - 3 * y),
    )
    result = bilevel.minimize(problem, ZEROS, ZEROS, steps=60)
    torch.testing.assert_close(result.x, torch.full_like(ZEROS, 4.0), rtol=0.02, atol=0)


class Once(torch.autograd.Function):
    """tanh, whose backward pass has no backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        out = inputs.tanh()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grad * (1 - out**2)


@pytest.mark.slow
def test_the_map_is_differentiated_once() -> None:
    problem = bilevel.Problem(
        lambda x, y, batch: ((y - 0.5) ** 2).sum(),
        bilevel.FixedPoint(lambda x, y, batch: 0.5 * Once.apply(y) + x),
    )
    method = bilevel.F2SA(lower_lr=0.5, upper_lr=0.5, multiplier=100.0)
    result = bilevel.minimize(problem, ZEROS, ZEROS, method=method, steps=60)
    exact = 0.5 - 0.5 * torch.tensor(0.5).double().tanh()
    torch.testing.assert_close(result.x, exact.expand(3), rtol=0, atol=1e-2)


def test_trees_and_modules() -> None:
    net = nn.Linear(2, 1).double()
    y = {"net": net, "rest": [torch.ones(2).double()]}

    def phi(x: Tensor, y: Any, batch: None) -> Any:
        params = {name: 0.5 * p + x for name, p in y["net"].named_parameters()}
        return {"net": params, "rest": [0.25 * y["rest"][0]]}

    value = bilevel.FixedPoint(phi)(torch.ones(()).double(), y, None)
    params = torch.cat([p.flatten() for p in net.parameters()])
    expected = 0.5 * ((0.5 * params - 1) ** 2).sum() + 0.5 * 2 * 0.75**2
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.zeros(2), "shape"),
        ({"a": torch.zeros(3)}, "a dict with"),
        ([torch.zeros(3)], "list of 1"),
        (3.0, "float"),
    ],
)
def test_what_is_not_another_y_is_refused(image: Any, message: str) -> None:
    problem = bilevel.Problem(upper, bilevel.FixedPoint(lambda x, y, batch: image))
    with pytest.raises(ObjectiveError, match=message):
        bilevel.minimize(problem, ZEROS, ZEROS, steps=1)
