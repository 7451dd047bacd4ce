"""Runs that stall because of rounding say so; runs that have converged do not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.errors import PrecisionWarning


def run(scale: float, method: Any, dtype: torch.dtype = torch.float32) -> bilevel.Result:
    def upper(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return 0.5 * ((y - 1) ** 2).sum()

    def lower(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return 0.5 * scale * ((y - x) ** 2).sum()

    start = torch.zeros(3, dtype=dtype)
    return bilevel.minimize(bilevel.Problem(upper, lower), start, start, method=method, steps=300)


def given(scale: float) -> bilevel.F2SA:
    return bilevel.F2SA(0.5 / scale, 0.5)


@pytest.mark.slow
def test_a_lower_level_in_large_units_stalls_with_a_word() -> None:
    with pytest.warns(PrecisionWarning, match=r"curvature, which is about 1e\+06") as caught:
        result = run(1e6, given(1e6))
    assert "float32" in str(caught[0].message)
    assert float((result.x - 1).abs().max()) > 0.01  # it did stall


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "dtype"), [(1.0, torch.float32), (1e3, torch.float32), (1e6, torch.float64)]
)
@pytest.mark.parametrize("auto", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_that_converges_is_quiet(scale: float, dtype: torch.dtype, auto: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run(scale, "f2sa" if auto else given(scale), dtype)
    assert float((result.x - 1).abs().max()) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["f2sa", "f3sa"])
def test_a_multiplier_that_is_found_does_not_stall_in_large_units(method: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run(1e6, method)
    assert float((result.x - 1).abs().max()) < 1e-3


@pytest.mark.parametrize(
    "held",
    [
        pytest.param({"y_set": bilevel.sets.Box(-1.0, 0.0)}, id="at a bound"),
        pytest.param({"y_prox": bilevel.prox.L1(3.0)}, id="at a kink"),
    ],
)
def test_a_lower_solution_that_is_held_is_not_a_matter_of_rounding(held: dict[str, Any]) -> None:
    def upper(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return 0.5 * ((y - 3) ** 2).sum()

    def lower(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return 0.5 * ((y - x) ** 2).sum()

    problem = bilevel.Problem(upper, lower, **held)
    start = torch.ones(3), torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = bilevel.minimize(problem, *start, method=given(1.0), steps=9)
    assert torch.equal(result.x, start[0])  # y*(x) is 0 here, so x does not matter
