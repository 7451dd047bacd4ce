"""Steps that are tested: what happens after a bad number, and where g rises while x rests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.stepping.curvature import Curvature

TARGETS = 1 + 0.01 * torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


def lower(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    return 0.5 * ((y - x * batch) ** 2).mean(0).sum()


def sampled(inner_steps: int = 10) -> bilevel.Solver:
    problem = bilevel.Problem(lambda x, y, batch: 0.5 * ((y - 3) ** 2).sum(), lower)
    method = bilevel.F2SA(inner_steps=inner_steps)
    x0, y0 = torch.ones(3), torch.zeros(3)
    return bilevel.Solver(problem, x0, y0, method=method, lower_data=TARGETS, batch_size=8)


def test_after_a_bad_number_x_rests_in_the_next_step() -> None:
    solver = sampled(inner_steps=3)
    moved: Any = 0.0
    while not (moved and not solver.state.policy.due):  # in the middle of a window
        moved = solver.step(measure=False).upper_lr
    assert solver.state.policy.take_back(solver.state)
    where = solver.x.clone()
    assert solver.step(measure=False).upper_lr == 0
    assert torch.equal(solver.x, where)


def test_the_lower_step_is_halved_where_g_rises_while_x_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def underestimate(self: Curvature, *_: Any, **__: Any) -> None:
        self.value = 0.3  # it is 1, so that steps of 1 / 0.3 lead away from the minimum

    monkeypatch.setattr(Curvature, "refine", underestimate)
    solver = sampled()
    infos = [solver.step() for _ in range(30)]
    assert infos[0].lower_lr > 2
    assert infos[-1].lower_lr < 2
    torch.testing.assert_close(solver.y, solver.x * TARGETS.mean(0), rtol=0.1, atol=0.0)
