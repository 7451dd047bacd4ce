"""Proximal maps against their definition, by a search over random points."""

from __future__ import annotations

import pytest
import torch

from bilevel import prox
from bilevel.errors import ObjectiveError

TERMS = {
    "l1": prox.L1(0.7),
    "weights": prox.L1(torch.linspace(0, 1, 4, dtype=torch.float64)),
    "rows": prox.Group(0.7),
    "columns": prox.Group(0.7, dim=0),
    "nuclear": prox.Nuclear(0.7),
    "own": prox.Prox(0.7, lambda y: (y**2).sum() / 2, lambda v, t: v / (1 + t)),
}


@pytest.mark.parametrize("name", TERMS)
def test_prox_minimises_what_it_is_defined_by(name: str) -> None:
    term, generator = TERMS[name], torch.Generator().manual_seed(0)
    v = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    weight = 0.5 * term.at(None).double()

    def merit(u: torch.Tensor) -> float:
        return float(term.value(u, weight) + ((u - v) ** 2).sum() / 2)

    found = term.prox(v, weight)
    least = merit(found)
    for scale in (1e-1, 1e-2, 1e-3):
        for _ in range(50):
            step = scale * torch.randn(3, 4, generator=generator, dtype=torch.float64)
            assert merit(found + step) > least


def test_terms_that_are_strong_enough_leave_zero() -> None:
    v = torch.ones(2, 3)
    for term in (prox.L1(), prox.Group(), prox.Nuclear()):
        assert term.prox(v, torch.tensor(10.0)).abs().max() == 0


def test_a_weight_that_is_a_function_must_return_numbers() -> None:
    assert prox.L1(lambda x: x + 1).at(2.0) == 3
    with pytest.raises(ObjectiveError, match="weight of L1"):
        prox.L1(lambda x: "much").at(2.0)
