"""The flat valley: its closed forms, and what methods make of many lower minimisers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

import bilevel
from bilevel.errors import ArgumentError, NotConvergedError
from bilevel.methods.meha import MEHA
from bilevel.methods.vpbgd import VPBGD
from bilevel.problems.valley import FlatValley
from bilevel.stepping.schedules import Power


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


DIMENSIONS = [(3, 5, 2), (4, 2, 1), (1, 6, 5)]


@pytest.mark.parametrize(("dim_x", "dim_y", "valley"), DIMENSIONS)
def test_the_lower_level_is_flat_along_the_valley_and_only_there(
    dim_x: int, dim_y: int, valley: int
) -> None:
    problem = FlatValley(dim_x, dim_y, valley=valley, seed=1)
    x, y = normal(dim_x, seed=2), normal(dim_y, seed=3)
    hessian = torch.autograd.functional.hessian(lambda y: problem.lower(x, y, None), y)
    curvatures = torch.linalg.eigvalsh(hessian).numpy()
    np.testing.assert_allclose(curvatures, [0.0] * valley + [1.0] * (dim_y - valley), atol=1e-12)
    torch.testing.assert_close(
        problem.valley @ hessian, torch.zeros(valley, dim_y, dtype=torch.float64)
    )


@pytest.mark.parametrize(("dim_x", "dim_y", "valley"), DIMENSIONS)
def test_the_lower_solution_is_the_minimiser_that_is_best_for_f(
    dim_x: int, dim_y: int, valley: int
) -> None:
    problem = FlatValley(dim_x, dim_y, valley=valley, seed=1)
    x = normal(dim_x, seed=2)
    y = problem.lower_solution(x)
    assert problem.lower(x, y, None) < 1e-24
    assert float(problem.value(x)) == pytest.approx(float(problem.upper(x, y, None)), rel=1e-12)
    # along the valley, which holds all other minimisers, f has its minimum at y
    slope = torch.func.grad(problem.upper, argnums=1)(x, y, None)
    assert (problem.valley @ slope).abs().max() < 1e-12
    for other in normal(20, valley, seed=4) @ problem.valley:
        assert problem.lower(x, y + other, None) < 1e-24
        assert problem.upper(x, y + other, None) > problem.upper(x, y, None)


@pytest.mark.parametrize("lam", [0.5, 10.0, 1e4])
def test_the_penalised_solution_is_stationary_and_its_gradient_danskins(lam: float) -> None:
    problem = FlatValley(seed=1)
    x = normal(3, seed=2)
    y, z = problem.penalised_solution(x, lam), problem.lower_solution(x)
    f_x, f_y = torch.func.grad(problem.upper, argnums=(0, 1))(x, y, None)
    g_x, g_y = torch.func.grad(problem.lower, argnums=(0, 1))(x, y, None)
    assert (f_y + lam * g_y).abs().max() < 1e-9
    at_z = torch.func.grad(problem.lower)(x, z, None)
    torch.testing.assert_close(
        problem.penalised_gradient(x, lam), f_x + lam * (g_x - at_z), rtol=1e-9, atol=1e-9
    )


def test_gradient_and_solution() -> None:
    problem = FlatValley(seed=1)
    x = normal(3, seed=2)
    torch.testing.assert_close(problem.gradient(x), torch.func.grad(problem.value)(x))
    assert problem.gradient(problem.solution).norm() < 1e-12
    bias = [(problem.penalised_gradient(x, lam) - problem.gradient(x)).norm() for lam in (1e2, 1e4)]
    assert bias[0] == pytest.approx(100 * float(bias[1]), rel=0.02)
    found = scipy.optimize.minimize(
        lambda x: float(problem.value(torch.from_numpy(x))), problem.x0.numpy(), tol=1e-12
    )
    np.testing.assert_allclose(found.x, problem.solution.numpy(), atol=1e-5)


def test_the_assumptions_of_the_exact_hypergradient_fail() -> None:
    problem = FlatValley(seed=0)
    with pytest.raises(NotConvergedError, match="strongly convex"):
        bilevel.hypergradient(problem, problem.x0, problem.y0)


METHODS: dict[str, tuple[Any, int]] = {
    "meha": (MEHA(0.9, 1.0, multiplier=Power(1.0, 5, 0.9), proximal=10.0), 800),
    "vpbgd": (VPBGD(0.9, 1.0, multiplier=Power(1.0, 5, 0.9), inner_steps=3, start="y"), 800),
}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "steps"), METHODS.values(), ids=list(METHODS))
def test_meha_and_vpbgd_reach_the_optimistic_solution(method: Any, steps: int) -> None:
    problem = FlatValley(seed=0)
    result = bilevel.minimize(
        problem, problem.x0, problem.y0, method=method, steps=steps, record_every=steps
    )
    y = problem.lower_solution(problem.solution)
    assert (result.x - problem.solution).norm() < 0.01 * problem.solution.norm()
    assert (result.y - y).norm() < 0.01 * y.norm()
    assert problem.lower(result.x, result.y, None) < 1e-6
    best = float(problem.value(problem.solution))
    assert float(problem.upper(result.x, result.y, None)) == pytest.approx(best, rel=0.01)


@pytest.mark.slow
def test_f2sa_finds_x_but_the_wrong_minimiser() -> None:
    problem = FlatValley(seed=0)
    method = bilevel.F2SA(lower_lr=0.9, upper_lr=0.3, multiplier=100.0)
    result = bilevel.minimize(
        problem, problem.x0, problem.y0, method=method, steps=250, record_every=50
    )
    # grad_x g is the same at every minimiser, so x does not suffer
    assert (result.x - problem.solution).norm() < 0.05 * problem.solution.norm()
    # z solves the lower level, but nothing ever moves it along the valley
    assert problem.lower(result.x, result.y, None) < 1e-8
    torch.testing.assert_close(problem.valley @ result.y, problem.valley @ problem.y0)
    y = problem.lower_solution(problem.solution)
    assert (result.y - y).norm() > 0.5 * y.norm()
    assert result.history["upper"][-1] > 1.5 * problem.value(problem.solution)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim_x": 0}, "dim_x .* not 0"),
        ({"dim_y": 1}, "dim_y .* not 1"),
        ({"valley": 0}, "valley .* not 0"),
        ({"valley": 5}, r"dim_y - valley \(= 5 - 5\) .* not 0"),
        ({"rho": -1.0}, "rho .* not -1"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        FlatValley(**arguments)


def test_single_precision_and_seeds() -> None:
    single, double = FlatValley(dtype=torch.float32), FlatValley()
    value = single.value(single.x0)
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(float(double.value(double.x0)), rel=1e-5)
    assert torch.equal(FlatValley(seed=3).C, FlatValley(seed=3).C)
    assert not torch.equal(FlatValley(seed=3).C, FlatValley(seed=4).C)
