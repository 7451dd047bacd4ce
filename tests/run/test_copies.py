"""Copies of a solver, which go on as the solver itself does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import bilevel
from bilevel.errors import StateError

ROWS = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))


def solver(data: Any) -> bilevel.Solver:
    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return (y**2).sum()

    def lower(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return ((y - x - batch.mean(0)) ** 2).sum()

    method = bilevel.F2SA(lower_lr=0.1, upper_lr=0.05, inner_steps=2)
    start = torch.ones(2), torch.zeros(2)
    return bilevel.Solver(bilevel.Problem(upper, lower), *start, method=method, lower_data=data)


DATA: dict[str, Callable[[], Any]] = {
    "a function": lambda: lambda generator: torch.randn(4, 2, generator=generator),
    "a list": lambda: list(ROWS.split(3)),
    "a loader": lambda: DataLoader(ROWS, batch_size=3, shuffle=True),  # type: ignore[arg-type]
    "a loader with a generator": lambda: DataLoader(
        ROWS,  # type: ignore[arg-type]
        batch_size=3,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
    ),
}


@pytest.mark.parametrize("data", DATA.values(), ids=list(DATA))
@pytest.mark.parametrize("steps", [0, 3])
def test_a_copy_goes_on_as_the_solver_does(data: Callable[[], Any], steps: int) -> None:
    original = solver(data())
    for _ in range(steps):
        original.step()
    outside = torch.get_rng_state()
    copied = copy.deepcopy(original)
    assert torch.equal(torch.get_rng_state(), outside)
    for _ in range(9):
        original.step()
    for _ in range(9):
        copied.step()
    assert torch.equal(original.x, copied.x)
    assert torch.equal(original.y, copied.y)


def test_data_that_cannot_be_copied_is_named() -> None:
    once = solver(iter(ROWS.split(1)))
    with pytest.raises(StateError, match="lower_data is an iterator, which cannot be copied"):
        copy.deepcopy(once)

    class Unique(list[Tensor]):
        def __deepcopy__(self, memo: dict[int, Any]) -> Unique:
            raise NotImplementedError("there is only one")

    unique = solver(Unique(ROWS.split(3)))
    with pytest.raises(
        StateError, match=r"lower_data \(Unique\).*there is only one.*load_state_dict"
    ):
        copy.deepcopy(unique)
