"""Curvatures from differences of gradients: against known ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.problem import Level
from bilevel.problems import Quadratic, WeightedLogistic
from bilevel.sampling import indexed
from bilevel.stepping.curvature import (
    Curvature,
    difference,
    has_kinks,
    mean_slope,
    probed_slopes,
    slope_of,
)
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


def weighted(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    """Linear regression with a weight for each sample."""
    rows, targets, index = batch
    return (x[index].sigmoid() * (rows @ y - targets) ** 2).mean() + 0.1 * (y * y).sum()


def fit(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    rows, targets = batch
    return ((rows @ y - targets) ** 2).mean()


def sampled(lower: Any = weighted, batch_size: int = 5) -> tuple[bilevel.Solver, list[int]]:
    """A run on minibatches, and the numbers of samples that g is evaluated on, as it goes on."""
    generator, seen = torch.Generator().manual_seed(0), []
    rows = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    targets = torch.randn(60, generator=generator, dtype=torch.float64)

    def g(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        seen.append(len(batch[0]))
        return lower(x, y, batch)

    solver = bilevel.Solver(
        bilevel.Problem(fit, g),
        torch.zeros(60, dtype=torch.float64),
        torch.ones(3, dtype=torch.float64),
        method=bilevel.F2SA(lower_lr="auto", upper_lr="auto"),
        upper_data=(rows[:20], targets[:20]),
        lower_data=(rows, targets, torch.arange(60)),
        batch_size=batch_size,
    )
    seen.clear()
    return solver, seen


@pytest.mark.parametrize("looks", [0, 1, 5])
def test_the_mean_of_probed_slopes_is_one_evaluation_where_the_objectives_are_means(
    looks: int,
) -> None:
    solver, seen = sampled()
    x, y = solver.state.x, solver.state.solution
    parts = [slope(y) for slope in probed_slopes(solver.evaluator, x, Level.LOWER, looks)]
    assert seen == [5] * len(parts) == [5] * (2 if looks else 8)
    seen.clear()
    found = mean_slope(solver.evaluator, x, Level.LOWER, looks)
    assert not seen  # nothing is evaluated, or gathered, before it is asked for
    torch.testing.assert_close(found(y), torch.stack(parts).mean(dim=0))
    assert seen == [5 * len(parts)]


def test_of_a_sum_over_the_batch_the_mean_is_that_of_the_minibatches() -> None:
    """A sum over more samples is another function."""
    solver, seen = sampled(lambda x, y, batch: len(batch[0]) * weighted(x, y, batch))
    assert solver.draw.batches == (1, 1)
    seen.clear()
    mean_slope(solver.evaluator, solver.state.x, Level.LOWER, 0)(solver.state.solution)
    assert seen == [5] * 8


def test_what_would_not_stay_in_the_caches_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "PART_BYTES", 5 * 5 * 8 * 4)  # rows are of three and two numbers
    solver, seen = sampled()
    assert solver.draw.batches != (1, 1)
    for looks, sizes in ((0, [5] * 8), (1, [10])):
        seen.clear()
        mean_slope(solver.evaluator, solver.state.x, Level.LOWER, looks)(solver.state.solution)
        assert seen == sizes


def test_the_first_look_takes_few_evaluations() -> None:
    """Eight power iterations on the whole probe were 64 evaluations of g before the first step."""
    solver, seen = sampled()
    solver.step()
    assert seen.count(40) >= 8
    # the inner steps, what x and its test see; none of it is eight times eight
    assert seen.count(5) < 64


@pytest.mark.parametrize(
    ("g", "kinked"),
    [
        (lambda y: (torch.tensor([1e4, 1.0, 1e-4]) * y**2).sum(), False),
        (lambda y: y.exp().sum(), False),
        (lambda y: (y**4).sum(), False),
        (lambda y: (y**2 + 0.3 * y.abs()).sum(), True),
        (lambda y: torch.relu(1 - y * torch.tensor([1.0, -0.5, 1.0])).sum() + (y**2).sum(), True),
    ],
)
def test_kinks_are_told_from_curvature(g: Any, kinked: bool) -> None:
    """The last number of y is at the kink of |y|, the first two at that of the hinge."""
    x, y = Variable.copy_of(torch.zeros(1), "x"), Variable.copy_of(torch.tensor([1, -2.0, 0]), "y")
    assert has_kinks(slope_of(lambda x, y, b: g(y.value), x, [None]), y) is kinked
