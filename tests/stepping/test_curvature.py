"""Curvatures from differences of gradients: against known ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bilevel
from bilevel.problems import Quadratic, WeightedLogistic
from bilevel.stepping.curvature import Curvature, difference, slope_of
from bilevel.stepping.updates import Update
from bilevel.variables import Variable


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e4])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_curvature_is_the_largest_eigenvalue(condition: float, scale: float) -> None:
    problem = Quadratic(dim_y=8, condition=condition, seed=3)
    x, y = (Variable.copy_of(start, name) for start, name in ((problem.x0, "x"), (problem.y0, "y")))
    slope = slope_of(lambda x, y, b: scale * problem.g(x, y, b), x, [None])
    curvature = Curvature(y, seed=0)
    curvature.refine(slope, y, 8)
    assert 0.8 * scale < curvature.value < 1.001 * scale  # A's is 1; eight iterations come near
    curvature.refine(slope, y, 100)
    assert curvature.value == pytest.approx(scale, rel=1e-4)
    assert torch.equal(y.value, problem.y0)
    assert y.leaves[0].grad is None


def test_a_difference_of_gradients_is_a_hessian_product() -> None:
    problem = WeightedLogistic(train=50, trusted=20, dim=4)
    x, y = Variable.copy_of(problem.x0, "x"), Variable.copy_of(problem.y0 + 0.3, "y")
    slope = slope_of(problem.g, x, [None])
    v = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = difference(slope, y, slope(y), v, scale=1.0)
    point = y.value.detach()
    hessian: Any = torch.autograd.functional.hessian(
        lambda at: problem.lower(problem.x0, at, None), point
    )
    torch.testing.assert_close(found, hessian @ v, rtol=1e-5, atol=1e-8)
    assert torch.equal(y.value, point)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_curvature_at_a_solution_that_is_zero(dtype: torch.dtype) -> None:
    """The gradient there is rounding, and says nothing of how far y may be expected to move."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(50, 4, generator=generator, dtype=torch.float64)

    def loss(y: torch.Tensor) -> torch.Tensor:  # towards equal probabilities of three classes
        rows = X.to(y.dtype)
        return -torch.log_softmax(rows @ y.view(4, 3), 1).mean() + 0.01 * (y * y).sum()

    hessian: Any = torch.autograd.functional.hessian(loss, torch.zeros(12, dtype=torch.float64))
    y = Variable.copy_of(torch.zeros(12, dtype=dtype), "y")
    x = Variable.copy_of(torch.zeros(()), "x")
    slope = slope_of(lambda x, y, b: loss(y.value), x, [None])
    curvature = Curvature(y, seed=0)
    curvature.refine(slope, y, 8)
    assert curvature.value == pytest.approx(float(torch.linalg.eigvalsh(hessian).max()), rel=0.1)


def test_a_linear_function_with_rounding_is_not_looked_at_from_ever_further_away() -> None:
    """Its estimates fall from one iteration to the next, because all of them are rounding."""
    y = Variable.copy_of(torch.zeros(5), "y")
    generator = torch.Generator().manual_seed(0)
    furthest = 0.0

    def slope(y: Variable) -> torch.Tensor:
        nonlocal furthest
        furthest = max(furthest, float(y.value.detach().norm()))
        return 1 + 1e-4 * torch.randn(5, generator=generator)

    Curvature(y, seed=0).refine(slope, y, 8)
    assert furthest < 1e6  # the first estimate is off by 10^4, and eight such factors are 10^32


@pytest.mark.parametrize(
    ("g", "least", "most"),
    [
        (lambda y: y.exp() - 10 * y, 2.0, 20.0),  # a step of 1 leads to e^9
        (lambda y: y.exp() - 1e4 * y, 1e2, 1e4),  # and here to what is not finite
        (lambda y: 0.5 * y * y - y, 1.0, 1.0),
        (lambda y: 3 * y.abs() - y, 1.0, 1.0),
    ],
    ids=["steep", "overflow", "quadratic", "kink"],
)
def test_a_step_that_meets_more_raises_the_estimate_unless_at_a_kink(
    g: Any, least: float, most: float
) -> None:
    x, y = (Variable.copy_of(torch.zeros(3), name) for name in "xy")
    slope = slope_of(lambda x, y, b: g(y.value).sum(), x, [None])
    curvature = Curvature(y, seed=0)
    curvature.value = 1.0
    curvature.hold_for_a_step(slope, Update(y, [None]), slope(y))
    assert least <= curvature.value <= most
    assert torch.equal(y.value, torch.zeros(3))


@pytest.mark.slow
def test_the_first_vector_is_made_where_its_generator_is() -> None:
    x, y = torch.zeros(2), torch.zeros(2)
    problem = bilevel.Problem(
        lambda x, y, batch: ((y - 1) ** 2).sum(), lambda x, y, batch: ((y - x) ** 2).sum()
    )
    with torch.device("meta"):
        found = bilevel.minimize(problem, x, y, steps=20)
    assert torch.allclose(found.x, torch.ones(2), atol=1e-3)
