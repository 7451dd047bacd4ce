"""Where minibatches keep y from resting, it is fitted to the last x."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.stepping.fitting import fit

ROWS = torch.randn(20_000, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
"""So many that they are not evaluated as a whole at the end of a run."""


def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return 0.5 * ((y - 3) ** 2).sum()


def lower(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    return 0.5 * ((y - x - 5 * batch) ** 2).mean(0).sum()


def solver(method: Any = "f2sa", problem: Any = None, **given: Any) -> bilevel.Solver:
    x0 = torch.ones(6, dtype=torch.float64)
    problem = problem or bilevel.Problem(upper, lower)
    data = {"lower_data": ROWS, "batch_size": 4} | given
    return bilevel.Solver(problem, x0, 0 * x0, method=method, **data)


def error(x: Tensor, y: Tensor) -> float:
    """The distance of y to the lower solution, which is known."""
    return float((y - x - 5 * ROWS.mean(0)).norm())


@pytest.mark.parametrize("method", ["f2sa", "f2ba", "soba", "aid"])
def test_the_result_is_nearer_to_the_lower_solution_than_the_path_is(method: str) -> None:
    run, errors = solver(method), []
    for _ in range(150):
        run.step(measure=False)
        errors.append(error(run.x, run.y))
    final = run.final_point()
    path = sorted(errors[100:])
    assert error(final.x, final.y) < 0.5 * path[len(path) // 2]


def test_a_run_is_not_moved_by_what_it_returns() -> None:
    asked, unasked = solver(), solver()
    for _ in range(40):
        asked.step()
        asked.final_point()
        unasked.step()
    assert torch.equal(asked.x, unasked.x)
    assert torch.equal(asked.y, unasked.y)


def placed(run: bilevel.Solver, place: Tensor) -> Tensor:
    """The lower solution of a run, put there; it is a view of what a fit moves."""
    [leaf] = run.state.solution.leaves
    with torch.no_grad():
        leaf.copy_(place)
    return leaf.detach()


def test_y_stays_where_further_steps_do_not_lower_g_for_sure() -> None:
    run = solver()
    exact = run.x + 5 * ROWS.mean(0)
    y = placed(run, exact)
    fit(run.evaluator, run.state, 0.5, 400)
    assert torch.equal(y, exact)
    y = placed(run, exact + 10)
    fit(run.evaluator, run.state, 0.5, 400)
    assert 0 < error(run.x, y) < 5
    fit(run.evaluator, run.state, 100.0, 400)  # steps that diverge
    assert error(run.x, y) < 5


def test_later_steps_count_for_more() -> None:
    """Without noise the n-th place is q^n, whose mean with weights n has a closed form."""
    run = solver(problem=bilevel.Problem(upper, lambda x, y, batch: 0.5 * ((y - x) ** 2).sum()))
    y, q, steps = placed(run, run.x + 1), 0.9, 25
    fit(run.evaluator, run.state, 1 - q, 4 * steps)
    weighted = sum(n * q**n for n in range(1, steps + 1)) / sum(range(1, steps + 1))
    assert float(y[0]) - 1 == pytest.approx(weighted, rel=1e-12)


def test_an_average_stays_in_the_set() -> None:
    def shell(y: Tensor) -> Tensor:  # not convex: the average of its points is none
        return torch.where(y.abs() < 2, 2 * y.sign() + 2 * (y == 0), y)

    run = solver(problem=bilevel.Problem(upper, lower, y_set=shell))
    y = placed(run, torch.full((6,), 9.0))
    fit(run.evaluator, run.state, 0.5, 40)
    assert float(y.abs().min()) >= 2
    assert float(y.abs().max()) < 9


@pytest.mark.parametrize("method", [bilevel.F2SA(lower_lr=0.1), bilevel.F2SA(upper_lr=0.1)])
def test_where_a_step_is_given_y_is_left_as_the_method_leaves_it(method: Any) -> None:
    run = solver(method)
    for _ in range(20):
        run.step()
    before = run.draw.state_dict()["lower"]["used"]
    assert run.state.policy.conclude(run.evaluator, run.state) is None
    assert run.draw.state_dict()["lower"]["used"] == before


def test_data_that_cannot_be_seen_again_is_not_used_up() -> None:
    drawn = [0]

    def endless() -> Any:
        while True:
            drawn[0] += 1
            yield ROWS[:4]

    run = solver(lower_data=endless(), batch_size=None)
    run.step()
    before = drawn[0]
    fit(run.evaluator, run.state, 0.1, 400)
    assert drawn[0] == before
