"""An x direction of several minibatches, chosen because each of them reaches few entries of x."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bilevel import F2SA, Problem, Solver
from bilevel.sampling import indexed
from tests.engine.compiled.common import (
    LOWER_DATA,
    ROWS,
    TARGETS,
    UPPER_DATA,
    evaluator,
    gathered,
    graphs,
    solver,
    upper,
)


def assert_same_place(eager: Solver, compiled: Solver) -> None:
    draws = (run.state_dict()["draw"] for run in (eager, compiled))
    torch.testing.assert_close(*draws, rtol=0, atol=0)
    torch.testing.assert_close(eager.x, compiled.x, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(eager.y, compiled.y, rtol=1e-9, atol=1e-11)


@graphs
@gathered
@pytest.mark.parametrize("coupling", ["shared", "independent"])
@pytest.mark.parametrize("together", [True, False])
def test_the_same_steps(coupling: Any, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not together:
        monkeypatch.setattr(indexed, "PART_BYTES", 0)
    method = F2SA(inner_steps=3, coupling=coupling)
    eager, compiled = (solver(method, compile=c) for c in (False, True))
    assert compiled.draw.batches == (1, 5)  # which reach every entry
    assert compiled.draw.in_one_part is together
    for _ in range(60):
        assert eager.step().upper_lr == pytest.approx(compiled.step().upper_lr, rel=1e-9)
    assert_same_place(eager, compiled)
    assert not torch.equal(eager.x, torch.zeros_like(eager.x))
    evaluator(compiled)


@graphs
def test_eager_code_that_takes_over_sees_the_samples_of_the_direction() -> None:
    eager, compiled = (solver(F2SA(inner_steps=3), compile=c) for c in (False, True))
    broken = evaluator(compiled)
    run = broken._go
    for k in range(60):
        broken._go = (lambda _: broken._pieces.fine.fill_(False)) if k % 3 == 1 else run  # type: ignore[assignment,method-assign]
        eager.step()
        compiled.step()
    assert_same_place(eager, compiled)


@graphs
def test_a_state_brings_its_choice_along() -> None:
    def rectified(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        rows, targets, index = batch
        return (x[index].relu() * (rows @ y - targets) ** 2).mean() + 0.1 * (y**2).sum()

    x0 = torch.ones(20, dtype=torch.float64)
    data: dict[str, Any] = {"upper_data": UPPER_DATA, "lower_data": LOWER_DATA, "batch_size": 4}
    run, other = (
        Solver(Problem(upper, rectified), x, 0 * ROWS[0], compile=True, **data) for x in (x0, -x0)
    )
    assert (run.draw.batches, other.draw.batches) == ((1, 5), (1, 1))
    for _ in range(3):
        run.step()
        other.step()
    other.load_state_dict(run.state_dict())
    for _ in range(6):
        run.step()
        other.step()
    evaluator(other)
    assert len(TARGETS) == 20
    assert torch.equal(run.x, other.x)


@graphs
@torch.no_grad()
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_an_entry_that_is_not_finite_is_not_cut_off_but_told(bad: float) -> None:
    compiled = solver(F2SA(inner_steps=3), compile=True)
    with torch.enable_grad():
        compiled.step()
    pieces: Any = evaluator(compiled)._pieces
    pieces.sizes[1:3] = torch.tensor([1.0, 4.0])  # the step of x, and how far an entry may move
    fine = torch.ones((), dtype=torch.bool)
    slope = torch.full_like(compiled.x, 100.0)
    before = compiled.x
    assert bool(pieces._finish([slope], fine))
    torch.testing.assert_close(compiled.x, before - 4)
    slope[3] = bad
    assert not bool(pieces._finish([slope], fine))
    torch.testing.assert_close(compiled.x, before - 4)
