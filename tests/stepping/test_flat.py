"""A direction of x that is exactly zero from the start is explained, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel


def warned(strength: Callable[[Tensor], Tensor], start: float, dtype: Any, data: Any) -> list[str]:
    """What a run says, of ridge regression with these strengths of the features."""

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return ((batch[0] @ y - batch[1]) ** 2).mean()

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return upper(x, y, batch) + (strength(x) * y**2).sum()

    x0, y0 = torch.full((8,), start, dtype=dtype), torch.zeros(8, dtype=dtype)
    given = dict(zip(("lower_data", "upper_data"), data, strict=True))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = bilevel.minimize(bilevel.Problem(upper, lower), x0, y0, steps=60, **given)
    assert torch.equal(result.x, x0)
    return [str(w.message) for w in seen if w.category is bilevel.errors.FlatWarning]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("strength", "start"),
    [(lambda x: x.clamp(0, 1), 1.5), (torch.square, 0.0), (torch.round, 1.0)],
    ids=["clamp", "square", "round"],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_x_that_nothing_feels_is_said_once(
    strength: Any, start: float, dtype: Any, seed: int
) -> None:
    torch.manual_seed(seed)
    samples = [torch.randn(30, 8, dtype=dtype) for _ in range(2)]
    noise = [0.5 * torch.randn(30, dtype=dtype) for _ in range(2)]
    data = [(A, A[:, :3].sum(1) + e) for A, e in zip(samples, noise, strict=True)]
    said = warned(strength, start, dtype, data)
    assert len(said) == 1
    assert "neither f nor g changes with x" in said[0]


def test_x_that_has_arrived_is_not_flat() -> None:
    problem = bilevel.Problem(
        lambda x, y, batch: ((y - 1) ** 2).sum(), lambda x, y, batch: ((y - x) ** 2).sum()
    )
    x0 = torch.ones(3, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = bilevel.minimize(problem, x0, torch.zeros_like(x0), steps=60)
    torch.testing.assert_close(result.x, x0, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["f2sa", "f2ba"])
@pytest.mark.parametrize("held_by", ["prox", "set"])
def test_a_y_that_is_held_where_it_is_is_said(method: str, held_by: str) -> None:
    """y is 0 wherever exp(x) >= 2, or at most 0, and neither copy of it can follow f."""
    held: Any = {"y_prox": bilevel.prox.L1(lambda x: x.exp())}
    if held_by == "set":
        held = {"y_set": bilevel.sets.Box(-1.0, 0.0)}
    problem = bilevel.Problem(
        lambda x, y, batch: ((y - 1) ** 2).sum(),
        lambda x, y, batch: 0.5 * ((y - 1 - x**2) ** 2).sum(),
        **held,
    )
    x0 = torch.tensor(0.75, dtype=torch.float64) + (held_by == "prox")
    y0 = torch.zeros(3, dtype=torch.float64)
    if held_by == "prox":
        problem = bilevel.Problem(
            problem.upper, lambda x, y, batch: 0.5 * ((y - 1) ** 2).sum(), **held
        )
    with pytest.warns(bilevel.errors.FlatWarning, match="y_set or y_prox hold"):
        bilevel.minimize(problem, x0, y0, method=method, steps=50)
