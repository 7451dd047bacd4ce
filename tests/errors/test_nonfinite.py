"""Numbers that are not finite, steps that are interrupted, data that ends: what is handed back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import bilevel
from bilevel import F2SA, F3SA, Problem
from bilevel.errors import (
    ArgumentError,
    DataExhaustedError,
    DivergenceWarning,
    NonFiniteError,
)
from tests.errors.common import (
    BREAKS,
    Switch,
    construct,
    f,
    g,
    minimize,
    rows,
    run,
    steps,
    tensors_in,
)

BOTH = {
    "f2sa": F2SA(0.1, 0.1, inner_steps=3),
    "single pass": F2SA(0.1, 0.1, inner_steps=3, single_pass=True),
    "f3sa": F3SA(0.1, 0.1, momentum=0.5),
    "combined": F3SA(0.1, 0.1, momentum=0.5, recursion="combined"),
}


@pytest.mark.parametrize("method", BOTH.values(), ids=list(BOTH))
@pytest.mark.parametrize(("breaks", "message"), BREAKS, ids=[name for name, _ in BREAKS])
def test_a_number_that_is_not_finite_stops_the_run(method: Any, breaks: str, message: str) -> None:
    switch = Switch()
    problem = switch.problem(breaks)
    x0, y0 = torch.ones(2), torch.zeros(2)
    with pytest.raises(NonFiniteError, match=message) as caught:
        bilevel.minimize(problem, x0, y0, method=method, steps=9, callback=switch.at(3))
    error = caught.value
    assert error.step == 3

    good = bilevel.minimize(switch.problem("nothing"), x0, y0, method=method, steps=3)
    result = error.result
    assert result is not None
    assert result.outcome is bilevel.Outcome.BROKEN
    assert result.steps == result.selected_step == 3
    assert result.history["step"].tolist() == [0, 1, 2]
    assert torch.equal(result.x, good.x)
    assert bool(torch.isfinite(result.y).all())

    assert error.state is not None
    floats = [t for t in tensors_in(error.state) if t.is_floating_point()]
    assert floats
    assert all(bool(torch.isfinite(t).all()) for t in floats)
    switch.on = False
    resumed = bilevel.Solver(problem, x0, y0, method=method)
    resumed.load_state_dict(error.state)
    assert resumed.k == 3
    assert torch.equal(resumed.x, good.x)
    resumed.step()
    assert bool(torch.isfinite(resumed.x).all())


@pytest.mark.parametrize("method", BOTH.values(), ids=list(BOTH))
def test_a_run_goes_on_from_the_last_finite_state(method: Any) -> None:
    switch = Switch()
    problem = switch.problem("upper")  # breaks in the first evaluation of a step
    start = torch.ones(2), torch.zeros(2)
    whole = bilevel.minimize(problem, *start, method=method, steps=6)
    with pytest.raises(NonFiniteError) as caught:
        bilevel.minimize(problem, *start, method=method, steps=6, callback=switch.at(3))
    switch.on = False
    resumed = bilevel.Solver(problem, *start, method=method)
    assert caught.value.state is not None
    resumed.load_state_dict(caught.value.state)
    for _ in range(3):
        resumed.step()
    assert torch.equal(resumed.x, whole.x)


@pytest.mark.filterwarnings("ignore::bilevel.errors.DivergenceWarning")
@pytest.mark.parametrize("method", BOTH.values(), ids=list(BOTH))
def test_rates_too_large_for_the_curvature_stop_the_run_with_finite_numbers(method: Any) -> None:
    known = bilevel.problems.Quadratic()
    wild = type(method)(lower_lr=100.0)
    options: dict[str, Any] = {"method": wild, "steps": 1000, "on_divergence": "warn"}
    with pytest.raises(NonFiniteError, match=r"lower_lr is 100.*use lower_lr=") as caught:
        bilevel.minimize(known, known.x0, known.y0, **options)
    floats = [t for t in tensors_in(caught.value.state) if t.is_floating_point()]
    assert all(bool(torch.isfinite(t).all()) for t in floats)


@pytest.mark.slow
def test_a_random_iterate_of_a_broken_run_is_one_of_its_iterates() -> None:
    start = torch.ones(2), torch.zeros(2)
    for seed in range(20):
        switch = Switch()
        visited: list[tuple[Tensor, Tensor]] = []

        def visit(
            solver: bilevel.Solver, info: Any, switch: Switch = switch, visited: Any = visited
        ) -> None:
            switch.at(3)(solver, info)
            visited.append((solver.x, solver.y))

        with pytest.raises(NonFiniteError) as caught:
            bilevel.minimize(
                switch.problem("upper"), *start, method=bilevel.F2SA(0.1, 0.1), steps=9,
                callback=visit, select="random", seed=seed,
            )  # fmt: skip
        result = caught.value.result
        assert result is not None
        iterates = [start[0], *(x for x, _ in visited)]
        assert torch.equal(result.x, iterates[result.selected_step])
        assert torch.equal(result.y, visited[result.selected_step][1])


def test_a_set_that_stops_giving_numbers_leaves_the_variables_finite() -> None:
    switch = Switch()
    problem = Problem(f, g, x_set=lambda v: v * math.nan if switch.on else v)
    solver = construct(problem)
    solver.step()
    switch.on = True
    with pytest.raises(ArgumentError, match=r"set.*\bx\b"):
        solver.step()
    assert bool(torch.isfinite(solver.x).all())


class Interrupted(BaseException):
    """As KeyboardInterrupt, but pytest does not stop for it."""


@pytest.mark.parametrize("method", BOTH.values(), ids=list(BOTH))
@pytest.mark.parametrize("failing_call", [1, 2, 7, 11, 12, 14, 18])
def test_an_interrupted_step_leaves_no_gradient_behind(method: Any, failing_call: int) -> None:
    calls = -100  # construction does not count

    def interrupted(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise Interrupted
        return g(x, y, batch)

    def fresh(lower: Any) -> bilevel.Solver:
        sweep = {"direction_batch_size": "all", "chunk_size": 1}
        if method == BOTH["single pass"]:
            sweep = {}
        return bilevel.Solver(
            Problem(f, lower), torch.ones(2), torch.zeros(2), method=method,
            lower_data=torch.arange(6.0).reshape(3, 2), **sweep,  # type: ignore[arg-type]
        )  # fmt: skip

    solver = fresh(interrupted)
    calls = 0
    with pytest.raises(Interrupted):
        steps(solver, 9)
    again = fresh(g)
    again.load_state_dict(solver.state_dict())
    solver.step()
    again.step()
    assert torch.equal(solver.x, again.x)
    assert torch.equal(solver.y, again.y)


def test_data_that_ends_hands_back_what_was_reached() -> None:
    with pytest.raises(DataExhaustedError) as caught:
        minimize(lower_data=(row for row in rows(25)), method=F2SA(inner_steps=4), steps=99)
    # five batches per step, four of them inner: the sixth step finds none
    assert caught.value.result is not None
    assert caught.value.result.steps == 5
    assert caught.value.result.outcome is bilevel.Outcome.BROKEN
    assert caught.value.state is not None
    whole = minimize(lower_data=list(rows(25)), method=F2SA(inner_steps=4), steps=5)
    assert torch.equal(caught.value.result.x, whole.x)


@pytest.mark.slow
def test_an_upper_loss_that_is_only_reported_stops_the_run_too() -> None:
    def infinite_at_z(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        differentiated = x.requires_grad or y.requires_grad  # at z only the value is asked for
        return f(x, y, batch) / differentiated

    with (
        pytest.warns(DivergenceWarning, match=r"upper\(x, z\) is not finite.*goes back to step 0"),
        pytest.raises(NonFiniteError, match=r"upper\(x, z\).*step 0"),
    ):
        bilevel.minimize(Problem(infinite_at_z, g), torch.ones(2), torch.zeros(2), steps=1)


def test_batch_size_is_for_the_level_that_is_sampled_here() -> None:
    seen = []

    def upper(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        seen.append(len(batch))
        return f(x, y, batch)

    bilevel.minimize(
        Problem(upper, g), torch.ones(2), torch.zeros(2),
        upper_data=rows(9), lower_data=DataLoader(rows(8)), batch_size=3, steps=1,
    )  # fmt: skip
    assert set(seen) == {3}


@pytest.mark.parametrize("method", BOTH.values(), ids=BOTH)
def test_a_step_that_would_overflow_is_not_taken(method: Any) -> None:
    wild = dataclasses.replace(method, upper_lr=3e38)
    with pytest.raises(NonFiniteError, match=r"step of x\b.*step 0") as caught:
        run(wild, steps=1)
    assert caught.value.result is not None
    assert torch.equal(caught.value.result.x, torch.ones(2))


@pytest.mark.parametrize("recursion", ["separate", "combined"])
def test_f3sa_starts_its_estimators_afresh_after_a_step_that_broke(recursion: Any) -> None:
    known = bilevel.problems.Quadratic()
    broken = False

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        value = known.lower(x, y, batch)
        return value * float("nan") if broken and x.requires_grad else value  # the x phase only

    solver = bilevel.Solver(
        Problem(known.upper, lower),
        known.x0,
        known.y0,
        method=F3SA(momentum=0.1, recursion=recursion),
    )
    steps(solver, 5)
    broken = True
    with pytest.raises(NonFiniteError):
        solver.step()
    broken = False
    for _ in range(20):
        x, z = solver.x, solver.y
        solver.step()
    # without noise an estimator is the gradient itself, at the point where it was taken
    exact = (z - known.lower_solution(x)) @ known.A
    torch.testing.assert_close(solver.state.z_estimate[0], exact)
