"""Gradients of many tensors, in other types and added."""

from __future__ import annotations

import pytest
import torch

from bilevel.variables import sparse


def test_large_gradients_are_reduced_and_small_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sparse, "LARGE", 4)
    gradients = [torch.full((n,), 1 + 2.0**-12) for n in (3, 4, 5)]
    gradients.append(sparse.to_row_sparse(torch.ones(6, 1)))
    there = sparse.cast_large_gradients(gradients, torch.bfloat16)
    assert [g.dtype for g in there] == [
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    ]
    assert torch.equal(there[0], gradients[0])
    assert there[0] is not gradients[0]  # a captured graph would write over it
    assert there[3] is gradients[3]
    assert torch.equal(there[1].float(), torch.ones(4))  # rounded
    assert torch.equal(sparse.cast_large_gradients(gradients[:1], torch.bfloat16)[0], gradients[0])


@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_gradients_of_mixed_types_are_added(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_BLOCK", block)
    kinds = [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.bfloat16),
        (torch.float64, torch.float64),
        (torch.float32, torch.bfloat16),
    ]
    mine = [torch.arange(n + 1.0, dtype=own) for n, (own, _) in enumerate(kinds)]
    others = [torch.full((n + 1,), 1.5, dtype=other) for n, (_, other) in enumerate(kinds)]
    kept = [id(t) for t in mine]
    sums = sparse.add_gradients(mine, others, alpha=2.0)
    assert [id(t) for t in sums] == kept
    for n, (total, (own, _)) in enumerate(zip(sums, kinds, strict=True)):
        assert torch.equal(total, torch.arange(n + 1.0, dtype=own) + 3)
