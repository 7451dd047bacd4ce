"""Gradients by rows: joined, and added to others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bilevel import Table
from bilevel.variables import GradientSum, Variable, add_gradients
from bilevel.variables.sparse import sum_gradients


def sparse(rows: list[int], values: list[float]) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([rows]), torch.tensor(values), (5,), check_invariants=True
    )


FEW, MORE = sparse([3, 1, 3], [1.0, 2.0, 3.0]), sparse([0, 3], [5.0, -4.0])
EVERY = torch.arange(5.0)


@pytest.mark.parametrize(
    "parts",
    [[FEW], [FEW, MORE], [FEW, EVERY], [EVERY, FEW, MORE], [EVERY, EVERY], [MORE, MORE, FEW]],
)
def test_parts_join_to_their_sum(parts: list[Tensor]) -> None:
    expected = torch.stack([part.to_dense() for part in parts]).sum(0)
    total = GradientSum()
    for part in parts:
        total.add([part.clone(), torch.ones(2)])
    found, beside = total.gradients()
    assert torch.equal(sum_gradients(parts).to_dense(), expected)
    assert torch.equal(found.to_dense(), expected)
    assert beside.tolist() == [len(parts)] * 2
    assert found.is_sparse == all(part.is_sparse for part in parts)


@pytest.mark.parametrize("mine", [FEW, EVERY])
@pytest.mark.parametrize("others", [MORE, EVERY])
def test_gradients_are_added_with_a_weight(mine: Tensor, others: Tensor) -> None:
    (found,) = add_gradients([mine.clone()], [others], alpha=-2.0)
    assert torch.equal(found.to_dense(), mine.to_dense() - 2 * others.to_dense())


def test_gradients_of_many_backward_passes_are_joined_once() -> None:
    x = Variable.copy_of(Table(torch.zeros(5)), "x")
    for row in (4, 2, 4):
        (x.value[[row]] * row).sum().backward()
        assert x.leaves[0].grad is None  # set aside: a sum of two would copy all that came before
    (gradient,) = x.grads()
    assert gradient.is_coalesced()
    assert gradient.indices().tolist() == [[2, 4]]
    assert gradient.values().tolist() == [2.0, 8.0]
    x.value[[2]].sum().backward()  # and once more after they were asked for
    assert x.take_grads()[0].to_dense().tolist() == [0, 0, 3, 0, 8]
    assert x.grads()[0]._nnz() == 0
