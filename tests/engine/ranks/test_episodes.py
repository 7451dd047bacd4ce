"""Episodes on two ranks: each has tasks of its own, and x moves along the mean of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from tests.engine.ranks.ranks import Ranks

STEPS = 4
METHODS: dict[str, Any] = {
    "f2sa": bilevel.F2SA(0.05, 0.2, 10.0, inner_steps=3),
    "f3sa": bilevel.F3SA(0.05, 0.2, 10.0, momentum=0.5),
}


def pairs() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(16, 2, 4, 3, generator=generator, dtype=torch.float64)
    b = 2 + torch.randn(16, 2, 4, generator=generator, dtype=torch.float64)
    return [((a[i, 0], b[i, 0]), (a[i, 1], b[i, 1])) for i in range(16)]


def loss(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return ((batch[0] @ y - batch[1]) ** 2).mean()


def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return loss(x, y, batch) + ((y - x) ** 2).sum()


def run(method: str, source: Any, tasks: int, start: Any, **options: Any) -> bilevel.Result:
    x0, y0 = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    return bilevel.minimize(
        bilevel.Problem(loss, lower),
        x0,
        y0,
        method=METHODS[method],
        data=bilevel.Episodes(source, tasks=tasks, start=start),
        **{"steps": STEPS} | options,
    )


def on_rank(rank: int, method: str, tasks: int, start: Any) -> Any:
    """Of the tasks of each step the share of this rank."""
    given = pairs()
    per_step = 2 * tasks
    mine = [p for i, p in enumerate(given) if i % per_step // tasks == rank]
    result = run(method, mine, tasks, start)
    return result.x, result.history["upper"], result.history["direction_norm"]


@pytest.mark.parametrize("start", ["fresh", "warm"])
@pytest.mark.parametrize(("method", "tasks"), [("f2sa", 1), ("f2sa", 2), ("f3sa", 2)])
def test_two_ranks_are_one_process_with_all_tasks(
    two: Ranks, method: str, tasks: int, start: str
) -> None:
    found = two.run(on_rank, method, tasks, start)
    alone = run(method, pairs(), 2 * tasks, start)
    for x, upper, norm in found:
        torch.testing.assert_close(x, alone.x, rtol=1e-12, atol=1e-13)
        assert upper == pytest.approx(alone.history["upper"], rel=1e-12)
        assert norm == pytest.approx(alone.history["direction_norm"], rel=1e-12)


def task(generator: torch.Generator) -> Any:
    a = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    return (a[0], a[0].sum(1)), (a[1], a[1].sum(1))


def resumed(rank: int, folder: Path, start: Any) -> Any:
    found = []
    for steps, where in ((6, None), (3, folder), (6, folder)):
        result = run("f2sa", task, 2, start, steps=steps, checkpoint=where)
        found.append((result.x, result.y, result.history["upper"].tolist()))
    return found[0], found[2]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fresh", "warm"])
def test_two_ranks_resumed_to_the_same_bits(two: Ranks, tmp_path: Path, start: str) -> None:
    answers = two.run(resumed, tmp_path / start, start)
    for whole, again in answers:
        assert torch.equal(whole[0], again[0])
        assert all(torch.equal(a, b) for a, b in zip(whole[1], again[1], strict=True))
        assert whole[2] == again[2]
    assert not torch.equal(answers[0][0][1][0], answers[1][0][1][0])  # each has its own tasks
