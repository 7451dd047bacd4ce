"""L-BFGS against solutions in closed form, and where it has to give up."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bilevel.errors import NotConvergedError
from bilevel.problems.lbfgs import lbfgs


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BASIS, _ = torch.linalg.qr(normal(30, 30, seed=1))
HESSIAN = (BASIS * torch.logspace(-3, 1, 30, dtype=torch.float64)) @ BASIS.T
TARGET = normal(30, seed=2)


def quadratic(y: Tensor) -> tuple[Tensor, Tensor]:
    slope = HESSIAN @ (y - TARGET)
    return 5 + (y - TARGET) @ slope / 2, slope


def softened(y: Tensor) -> tuple[Tensor, Tensor]:
    """sum_i log cosh(s_i (y_i - t_i)): flat far away, so that early steps have to be searched."""
    scales = torch.logspace(-1, 1, 30, dtype=torch.float64)
    inner = scales * (y - TARGET)
    value = inner.abs() + torch.log1p(torch.exp(-2 * inner.abs())) - math.log(2)
    return value.sum(), scales * torch.tanh(inner)


@pytest.mark.slow
@pytest.mark.parametrize("function", [quadratic, softened])
@pytest.mark.parametrize("memory", [3, 20])
def test_the_minimiser_is_found_to_the_tolerance(function, memory) -> None:
    for tolerance in (1e-6, 1e-12):
        found = lbfgs(function, 10 * normal(30, seed=3), tolerance=tolerance, memory=memory)
        assert torch.linalg.vector_norm(function(found)[1]) <= tolerance
    torch.testing.assert_close(found, TARGET, rtol=0, atol=1e-8)


@pytest.mark.slow
def test_the_exact_inverse_hessian_needs_no_more_than_its_line_search() -> None:
    inverse = torch.linalg.inv(HESSIAN)
    evaluations = []

    def counted(y: Tensor) -> tuple[Tensor, Tensor]:
        evaluations.append(y)
        return quadratic(y)

    lbfgs(counted, 0 * TARGET, tolerance=1e-9, precondition=lambda v: v @ inverse)
    assert len(evaluations) <= 6
    evaluations.clear()
    lbfgs(counted, 0 * TARGET, tolerance=1e-9)
    assert len(evaluations) > 30


def test_a_start_that_is_good_enough_is_returned_as_it_is() -> None:
    found = lbfgs(quadratic, TARGET, tolerance=1e-12)
    assert torch.equal(found, TARGET)
    assert found is not TARGET


def test_what_cannot_be_reached_raises() -> None:
    with pytest.raises(NotConvergedError, match=r"after 3 steps, above the tolerance of 1\.00e-12"):
        lbfgs(quadratic, 0 * TARGET, tolerance=1e-12, steps=3)
    with pytest.raises(NotConvergedError, match="no step along its direction"):
        lbfgs(lambda y: (-(y @ y), -2 * y), TARGET, tolerance=1e-6)
    with pytest.raises(NotConvergedError, match="no step along its direction"):
        lbfgs(lambda y: (y.sum() * math.nan, y * math.nan), TARGET, tolerance=1e-6)
