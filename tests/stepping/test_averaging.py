"""Where minibatches keep y from resting, its average is tested and returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.stepping import averaging
from bilevel.stepping.averaging import AVERAGED, Average

ROWS = torch.randn(400, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return 0.5 * ((y - 3) ** 2).sum()


def lower(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    return 0.5 * ((y - x - 5 * batch) ** 2).mean(0).sum()


def solver(method: Any = "f2sa", problem: Any = None, **given: Any) -> bilevel.Solver:
    x0 = torch.ones(6, dtype=torch.float64)
    problem = problem or bilevel.Problem(upper, lower)
    data = {"lower_data": ROWS, "batch_size": 4} | given
    return bilevel.Solver(problem, x0, 0 * x0, method=method, **data)


def error(run: bilevel.Solver, y: Tensor) -> float:
    return float((y - run.x - 5 * ROWS.mean(0)).norm())


def test_the_result_is_nearer_to_the_lower_solution_than_the_path_is() -> None:
    run, errors = solver(), []
    for _ in range(200):
        x = run.x
        run.step(measure=False)
        if run.k > 100 and not run.state.policy.due:
            errors.append(float((run.y - x - 5 * ROWS.mean(0)).norm()))
    final = run.final_point()
    found = float((final.y - final.x - 5 * ROWS.mean(0)).norm())
    assert found < 0.5 * sum(errors) / len(errors)


class Places:
    """What an average asks of a run."""

    def __init__(self, run: bilevel.Solver) -> None:
        self.run, self.average = run, Average()

    def take(self, *places: float) -> float:
        state = self.run.state
        for place in places:
            with torch.no_grad():
                for leaf in averaging.leaves_of_copies(state):
                    leaf.fill_(place)
            self.average.add(state)
        self.average.take(self.run.evaluator, state)
        return float(state.solution.leaves[0].detach()[0])


def test_copies_go_to_their_average_only_where_g_is_lower_there() -> None:
    minimum = 1 + 5 * float(ROWS.mean())
    assert Places(solver()).take(minimum - 4, minimum + 4) == pytest.approx(minimum)
    assert Places(solver()).take(minimum + 8, minimum) == minimum
    assert Places(solver()).take(minimum + 8) == minimum + 8  # one place is no path


def test_a_run_is_not_moved_by_what_it_returns() -> None:
    asked, unasked = solver(), solver()
    for _ in range(40):
        asked.step()
        asked.final_point()
        unasked.step()
    assert torch.equal(asked.y, unasked.y)


def test_old_steps_fade() -> None:
    path = Places(solver())
    first = path.take(*[100.0] * AVERAGED, *[0.0] * 10 * AVERAGED)
    assert abs(first) < 0.01


def test_an_average_stays_in_the_set() -> None:
    def shell(y: Tensor) -> Tensor:  # not convex: the average of its points is none
        return torch.where(y.abs() < 2, 2 * y.sign() + 2 * (y == 0), y)

    run = solver(problem=bilevel.Problem(upper, lower, y_set=shell))
    assert Places(run).take(-2.0, 2.0) == 2.0


def test_what_moves_the_copies_begins_the_average_anew() -> None:
    run = solver()
    for _ in range(10):
        run.step(measure=False)
    average = run.state.policy._average
    assert average.state_dict()["count"] > 1
    run.y = torch.zeros(6, dtype=torch.float64)
    assert average.state_dict()["count"] == 0


@pytest.mark.parametrize("method", [bilevel.F2SA(lower_lr=0.1), bilevel.F2SA(upper_lr=0.1), "f3sa"])
def test_steps_that_are_given_have_no_average(method: Any) -> None:
    run = solver(method)
    run.step()
    assert run.state_dict()["state"]["policy"]["average"] is None


def test_a_run_goes_on_with_the_average_it_was_saved_with() -> None:
    run, again = solver(), solver()
    for _ in range(15):
        run.step()
    again.load_state_dict(run.state_dict())
    for _ in range(15):
        run.step()
        again.step()
    assert torch.equal(run.y, again.y)
    forged = run.state_dict()
    forged["state"]["policy"]["average"]["means"] = [torch.zeros(2)]
    with pytest.raises(bilevel.errors.StateError, match="average"):
        again.load_state_dict(forged)
