"""Objectives that differentiate by themselves, as those of differential equations do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bilevel
from bilevel import methods

PLACES = torch.linspace(0, 1, 20)[:, None]


def residual(u: Any, places: Tensor) -> Tensor:
    """By how much u' = -2 u is missed."""
    places = places.clone().requires_grad_()
    value = u(places)
    [slope] = torch.autograd.grad(value.sum(), places, create_graph=True)
    return ((slope + 2 * value) ** 2).mean()


def lower(x: Tensor, u: Any, batch: Any) -> Tensor:
    at_zero = (u(torch.zeros(1, 1)) - 1) ** 2
    return x[0].exp() * residual(u, PLACES) + x[1].exp() * at_zero.mean()


def upper(x: Tensor, u: Any, places: Tensor) -> Tensor:
    return ((u(places) - (-2 * places).exp()) ** 2).mean()


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))


PROBLEM = bilevel.Problem(upper, lower)
X0 = torch.tensor([0.0, -3.0])


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 8])
def test_an_equation_is_solved_with_nothing_set(batch_size: int | None, tmp_path: Path) -> None:
    data: dict[str, Any] = {} if batch_size is None else {"batch_size": batch_size}
    found = bilevel.minimize(
        PROBLEM, X0, network(), steps=60, upper_data=PLACES, checkpoint=tmp_path, **data
    )
    with torch.no_grad():
        start, end = upper(X0, network(), PLACES), upper(found.x, found.y, PLACES)
    assert end < 0.1 * start


@pytest.mark.parametrize("kind", [methods.F3SA, methods.SOBA, methods.AID, methods.ITD])
def test_every_kind_of_method_reports_such_objectives(kind: type[Any]) -> None:
    found = bilevel.minimize(PROBLEM, X0, network(), steps=3, upper_data=PLACES, method=kind())
    assert found.steps == len(found.history["lower"]) == 3
