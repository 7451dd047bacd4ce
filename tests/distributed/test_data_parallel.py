"""Two ranks with half the batch each take the steps of one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.ranks import Ranks
from tests.distributed.tasks import METHODS, START, numbers, solve

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def _all_kinds(rank: int, method: str, dtype: torch.dtype) -> dict[str, Any]:
    part = slice(4 * rank, 4 * (rank + 1))
    found = {}
    for kind in START:
        result = solve(kind, method, dtype, part)
        found[kind] = result.x, numbers(result.y), result.history
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_iterates_are_those_of_one_process(two: Ranks, method: str, dtype: torch.dtype) -> None:
    answers = two.run(_all_kinds, method, dtype)
    close = {"rtol": 0, "atol": TOLERANCE[dtype]}
    for kind in START:
        alone = solve(
            "plain tensors" if kind == "plain tensors" else "plain module",
            method,
            dtype,
            slice(None),
        )
        for answer in answers:
            x, y, history = answer[kind]
            assert x.abs().max() > 0.01, "x did not move"
            torch.testing.assert_close(x, alone.x, **close)
            torch.testing.assert_close(y, numbers(alone.y), **close)
            for name in ("upper", "lower", "gap", "direction_norm"):
                mine, theirs = (torch.from_numpy(h[name]) for h in (history, alone.history))
                torch.testing.assert_close(mine, theirs, rtol=0, atol=100 * TOLERANCE[dtype])
