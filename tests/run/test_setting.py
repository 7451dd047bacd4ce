"""Solver.x and Solver.y can be set; metrics choose the iterate and end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bilevel
from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.problems import Quadratic

RATES: dict[str, Any] = {"lower_lr": 0.3, "upper_lr": 0.1}
METHODS: dict[str, Any] = {
    "f2sa": bilevel.F2SA(**RATES),
    "midpoint": bilevel.F2SA(**RATES, scheme="midpoint"),
    "accelerated": bilevel.F2BA(**RATES, acceleration=bilevel.Nesterov(radius=100.0)),
    "f3sa": bilevel.F3SA(**RATES, momentum=0.5),
    "aid": bilevel.AID(**RATES, cg_steps=50),
    "soba": bilevel.METHODS["soba"](**RATES),
    "ma-soba": bilevel.METHODS["ma-soba"](**RATES),
    "adam": bilevel.F2SA(
        lower_optimizer=lambda p: torch.optim.Adam(p, lr=0.1),
        upper_optimizer=lambda p: torch.optim.Adam(p, lr=0.1),
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_is_set_anywhere_is_a_new_run_from_there(name: str) -> None:
    problem = Quadratic(seed=0)
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=METHODS[name])
    for _ in range(5):
        solver.step()
    solver.x, solver.y = problem.x0 + 1, problem.y0 - 1
    assert torch.equal(solver.x, problem.x0 + 1)
    assert torch.equal(solver.y, problem.y0 - 1)
    fresh = bilevel.Solver(problem, problem.x0 + 1, problem.y0 - 1, method=METHODS[name])
    for _ in range(3):
        solver.step()
        fresh.step()
    torch.testing.assert_close(solver.x, fresh.x, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(solver.y, fresh.y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("kind", ["complex", "meta"])
def test_what_has_no_real_values_cannot_be_set(name: str, kind: str) -> None:
    problem = Quadratic(seed=0)
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=METHODS["f2sa"])
    there = getattr(solver, name)
    with pytest.raises(ArgumentTypeError, match=f"{name} is set to"):
        setattr(solver, name, there * 1j if kind == "complex" else there.to("meta"))
    assert torch.equal(getattr(solver, name), there)


@pytest.mark.slow
def test_what_was_found_for_auto_belongs_to_the_old_x() -> None:
    problem = Quadratic(seed=0)
    solver = bilevel.Solver(problem, problem.x0, problem.y0)
    for _ in range(20):
        solver.step()
    solver.x = problem.x0 + 100
    assert solver.state.policy.current is None
    for _ in range(40):
        solver.step()
    assert problem.value(solver.x) < problem.value(problem.x0 + 100)


def test_modules_sets_and_structure() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    data = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))

    def loss(x: Tensor, y: nn.Module, batch: Tensor) -> Tensor:
        return (y(batch) ** 2).mean() + (x**2).sum() * sum((p**2).sum() for p in y.parameters())

    problem = bilevel.Problem(loss, loss, x_set=bilevel.sets.Box(0, 1))
    solver = bilevel.Solver(
        problem,
        torch.ones(1),
        net,
        method=bilevel.F2SA(0.01, 0.01),
        upper_data=data,
        lower_data=data,
    )
    solver.step()
    solver.y, solver.x = net, torch.full((1,), 3.0)
    for mine, theirs in zip(solver.y.state_dict().values(), net.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert solver.x == 1  # in its set
    for value in (torch.ones(2), torch.full((1,), float("nan"))):
        with pytest.raises(ArgumentError, match="x"):
            solver.x = value


def accuracies(values: list[float]) -> bilevel.Problem:
    """A problem whose metric is, step by step, what the test says."""
    left = iter([values[0], *values, *[0.0] * 100])  # the first is for the check at the start

    def upper(x: Tensor, y: Tensor, batch: None) -> Any:
        return ((y - 1) ** 2).sum(), {"accuracy": next(left)}

    return bilevel.Problem(upper, lambda x, y, batch: ((y - x) ** 2).sum())


METHOD = bilevel.AID(0.5, 0.1, inner_steps=1)


def run(values: list[float], **options: Any) -> bilevel.Result:
    zero = torch.zeros(1)
    given = {"method": METHOD, "steps": len(values), "on_divergence": "warn"} | options
    return bilevel.minimize(accuracies(values), zero, zero, **given)


def test_the_iterate_with_the_best_metric_is_returned() -> None:
    values = [0.1, 0.2, 0.9, 0.3, 0.05]
    best = run(values, select="best", monitor="upper/accuracy", monitor_mode="max")
    recorded = best.history["upper/accuracy"]
    assert best.selected_step == int(recorded.argmax())
    worst = run(values, select="best", monitor="upper/accuracy")
    assert worst.selected_step == int(recorded.argmin())
    assert run(values, select="best").selected_step == int(best.history["upper"].argmin())


def test_patience_ends_a_run_and_goes_on_in_a_resumed_one(tmp_path: Path) -> None:
    values = [0.1, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1]
    options: dict[str, Any] = {"monitor": "upper/accuracy", "monitor_mode": "max"}
    result = run(values, patience=3, **options)
    assert result.outcome is bilevel.Outcome.OUT_OF_PATIENCE
    assert result.steps == int(result.history["upper/accuracy"].argmax()) + 4
    assert run(values, patience=50, **options).outcome is bilevel.Outcome.COMPLETED
    falling = bilevel.Problem(
        lambda x, y, batch: ((y - 1) ** 2).sum(), lambda x, y, batch: ((y - x) ** 2).sum()
    )
    ends = []
    for folder, counts in ((None, [60]), (tmp_path, [20, 60])):
        for steps in counts:
            end = bilevel.minimize(
                falling,
                torch.zeros(1),
                torch.zeros(1),
                method=bilevel.F2SA(0.5, 0.9, inner_steps=3),
                steps=steps,
                patience=5,
                checkpoint=folder,
            )
        ends.append((end.steps, end.outcome, end.x))
    assert ends[0] == ends[1]
    assert ends[0][1] is bilevel.Outcome.OUT_OF_PATIENCE


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"monitor": "accuracy"}, "monitor.*upper/accuracy"),
        ({"monitor_mode": "most"}, "monitor_mode"),
        ({"patience": 0}, "patience"),
    ],
)
def test_bad_choices_are_refused(options: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        run([0.1, 0.2], **options)
