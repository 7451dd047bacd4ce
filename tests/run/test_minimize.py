"""minimize: what it records, which point it returns, and what it leaves alone."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bilevel
from bilevel.errors import MissingExtraError
from bilevel.methods import Info
from tests.engine.compiled.common import graphs, graphs_only  # noqa: F401

METHODS: dict[str, Any] = {
    "f2sa": bilevel.F2SA(lower_lr=0.5, upper_lr=0.1, inner_steps=2),
    "single pass": bilevel.F2SA(lower_lr=0.5, upper_lr=0.1, inner_steps=2, single_pass=True),
    "f3sa": bilevel.F3SA(lower_lr=0.5, upper_lr=0.1, momentum=0.5),
}
KEYS = ["step", "seconds", "upper", "lower", "gap", "direction_norm", "multiplier"]
KEYS += ["lower_lr", "upper_lr"]


class Iterate(NamedTuple):
    """What a callback saw after step k: x_{k+1}, z_{k+1} and the report of step k."""

    x: Tensor
    y: Tensor
    info: Info


def quadratic(**options: Any) -> bilevel.problems.Quadratic:
    return bilevel.problems.Quadratic(seed=1, **options)


def minimize(problem: Any = None, **options: Any) -> bilevel.Result:
    problem = quadratic() if problem is None else problem
    return bilevel.minimize(problem, problem.x0, problem.y0, **options)


def recording(into: list[Iterate]) -> Callable[[bilevel.Solver, Any], None]:
    return lambda solver, info: into.append(Iterate(solver.x, solver.y, info))


# History


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_the_history_is_equally_long_arrays(method: Any) -> None:
    result = minimize(method=method, steps=7)
    assert sorted(result.history) == sorted(KEYS)
    for name, column in result.history.items():
        assert column.shape == (7,)
        assert column.dtype == (np.int64 if name == "step" else np.float64)
        assert column.flags.owndata
    assert result.history["step"].tolist() == list(range(7))
    seconds = [0, *result.history["seconds"], result.seconds]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_the_history_is_what_the_objectives_say(method: Any) -> None:
    problem = quadratic()
    seen: list[Iterate] = []
    history = minimize(problem, method=method, steps=6, callback=recording(seen)).history
    xs = [problem.x0, *(iterate.x for iterate in seen)]
    for k, iterate in enumerate(seen):
        x, z = xs[k], iterate.y
        if method == METHODS["single pass"]:
            z = seen[k - 1].y if k else problem.y0  # all terms are from before the last inner step
            z = z - 0.5 * (z - problem.phi(x)) @ problem.A
        assert history["upper"][k] == pytest.approx(float(problem.upper(x, z, None)), rel=1e-12)
        assert history["lower"][k] == pytest.approx(float(problem.lower(x, z, None)), rel=1e-12)
        moved = float((x - xs[k + 1]).norm()) / 0.1  # upper_lr
        assert history["direction_norm"][k] == pytest.approx(moved, rel=1e-9)


def test_the_gap_is_that_of_the_exact_solutions_in_the_limit() -> None:
    problem = quadratic(condition=2.0)
    method = bilevel.F2SA(lower_lr=1.0, multiplier=20.0, inner_steps=60)
    history = minimize(problem, method=method, steps=1).history
    y, z = problem.penalised_solution(problem.x0, 20.0), problem.lower_solution(problem.x0)
    gap = problem.lower(problem.x0, y, None) - problem.lower(problem.x0, z, None)
    assert history["gap"][0] == pytest.approx(float(gap), rel=1e-9)
    assert history["upper"][0] == pytest.approx(float(problem.value(problem.x0)), rel=1e-9)
    direction = problem.penalised_gradient(problem.x0, 20.0)
    assert history["direction_norm"][0] == pytest.approx(float(direction.norm()), rel=1e-9)


def test_the_multiplier_is_recorded_as_it_grows() -> None:
    method = bilevel.F2SA(multiplier=lambda k: 5.0 + k**2)
    assert minimize(method=method, steps=4).history["multiplier"].tolist() == [5, 6, 9, 14]


@pytest.mark.parametrize(
    ("steps", "every", "recorded"),
    [
        (7, 1, [0, 1, 2, 3, 4, 5, 6]),
        (7, 3, [0, 3, 6]),
        (8, 3, [0, 3, 6, 7]),
        (5, 100, [0, 4]),
        (1, 1, [0]),
        (0, 1, []),
    ],
)
def test_every_so_many_steps_and_the_last_are_recorded(
    steps: int, every: int, recorded: list[int]
) -> None:
    seen: list[Iterate] = []
    result = minimize(steps=steps, record_every=every, callback=recording(seen))
    assert result.history["step"].tolist() == recorded
    assert [iterate.info.step for iterate in seen] == recorded
    whole = minimize(steps=steps)
    assert result.steps == whole.steps == steps
    assert torch.equal(result.x, whole.x)
    for name in set(KEYS) - {"seconds"}:
        assert result.history[name].tolist() == whole.history[name][recorded].tolist()


def test_objectives_of_different_precision_are_recorded() -> None:
    problem = bilevel.Problem(
        upper=lambda x, y, batch: ((y - 3) ** 2).sum().float(),
        lower=lambda x, y, batch: ((y - x) ** 2).sum(),
    )
    start = torch.zeros(2, dtype=torch.float64)
    history = bilevel.minimize(problem, start, start, steps=1).history
    assert history["upper"].tolist() == [18]


def test_a_frame_has_the_history_as_columns() -> None:
    result = minimize(steps=4)
    frame = result.to_frame()
    assert list(frame.columns) == list(result.history)
    for name, column in result.history.items():
        assert frame[name].tolist() == column.tolist()


@pytest.mark.parametrize(
    ("missing", "call", "message"),
    [
        ("pandas", lambda: minimize(steps=1).to_frame(), r"'pandas'.*bilevel\[pandas\]"),
        ("rich.progress", lambda: minimize(steps=1, progress=True), r"'rich'.*bilevel\[cli\]"),
    ],
)
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, missing: str, call: Callable[[], Any], message: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "bilevel.run.progress", raising=False)
    with pytest.raises(MissingExtraError, match=message):
        call()


# How a run ends


def test_a_run_that_takes_all_steps_is_completed() -> None:
    result = minimize(steps=3)
    assert (result.outcome, result.steps, result.selected_step) == (
        bilevel.Outcome.COMPLETED,
        3,
        3,
    )


def test_no_steps_is_the_starting_point() -> None:
    problem = quadratic()
    for select in ("last", "best", "random"):
        result = minimize(problem, steps=0, select=select)
        assert torch.equal(result.x, problem.x0)
        assert torch.equal(result.y, problem.y0)
        assert (result.steps, result.selected_step) == (0, 0)
        assert result.outcome is bilevel.Outcome.COMPLETED


def test_the_callback_may_stop_the_run() -> None:
    result = minimize(steps=100, callback=lambda solver, info: info.step == 4)
    assert (result.outcome, result.steps) == (bilevel.Outcome.STOPPED, 5)
    assert result.history["step"].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(result.x, minimize(steps=5).x)


def test_the_callback_is_called_at_recorded_steps_only() -> None:
    result = minimize(steps=100, record_every=3, callback=lambda solver, info: solver.k > 5)
    assert result.steps == 7
    assert result.history["step"].tolist() == [0, 3, 6]


@pytest.mark.parametrize("returned", [None, False])
def test_other_answers_of_the_callback_do_not_stop(returned: bool | None) -> None:
    assert minimize(steps=3, callback=lambda solver, info: returned).steps == 3


def test_the_numbers_of_an_outcome_are_its_messages() -> None:
    assert {outcome.value for outcome in bilevel.Outcome} == {
        "all steps were taken",
        "x came to rest within the tolerance",
        "max_seconds were over",
        "nothing better was recorded for as long as patience says",
        "f ended clearly above its start or its best",
        "the callback asked to stop",
        "Ctrl-C or SIGTERM asked to stop",
        "an error ended the run",
        "the run diverged",
    }


# Which point is returned


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_the_last_iterate(method: Any) -> None:
    seen: list[Iterate] = []
    result = minimize(method=method, steps=5, callback=recording(seen))
    assert torch.equal(result.x, seen[-1].x)
    assert not torch.equal(result.y, seen[-1].y)  # which was fitted at the x before


LAGGING = bilevel.F2SA(lower_lr=0.9, upper_lr=0.5, inner_steps=60)


def lower_errors(result: bilevel.Result, old: Tensor, problem: Any) -> tuple[float, float]:
    """How far result.y is from the lower solution of result.x, and how far the old copy is."""
    exact = problem.lower_solution(result.x)
    return float((result.y - exact).norm()), float((old - exact).norm())


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_y_is_the_lower_solution_of_the_last_x(noise: float) -> None:
    problem = quadratic(sigma_f=noise, sigma_g=noise)
    data = {"upper_data": problem.upper_noise, "lower_data": problem.lower_noise}
    options: dict[str, Any] = {"method": LAGGING, **(data if noise else {})}
    result = minimize(problem, steps=4, **options)
    solver = bilevel.Solver(problem, problem.x0, problem.y0, **options)
    for _ in range(4):
        solver.step()
    new, old = lower_errors(result, solver.y, problem)
    assert new < 0.05 * old
    assert torch.equal(result.x, solver.x)


@pytest.mark.slow
def test_y_of_many_runs_is_the_lower_solution_of_their_last_x() -> None:
    problem = quadratic(sigma_f=1e-3, sigma_g=1e-3)
    data = {"upper_data": problem.upper_noise, "lower_data": problem.lower_noise}
    results = bilevel.minimize_many(
        problem, problem.x0, problem.y0, methods=LAGGING, seeds=3, steps=4, **data
    )
    for seed, result in enumerate(results):
        alone = minimize(problem, method=LAGGING, steps=4, seed=seed, **data)
        torch.testing.assert_close(result.y, alone.y)
        solver = bilevel.Solver(problem, problem.x0, problem.y0, method=LAGGING, seed=seed, **data)
        for _ in range(4):
            solver.step()
        new, old = lower_errors(result, solver.y, problem)
        assert new < 0.05 * old


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return bool(a == b) or (a != a and b != b)  # NaN: not known yet


@graphs
@pytest.mark.parametrize(
    ("method", "compile"),
    [
        *((method, False) for method in METHODS.values()),
        (bilevel.F2SA(), False),
        pytest.param(METHODS["f2sa"], True, marks=pytest.mark.slow),
    ],
    ids=[*METHODS, "auto", "compiled"],
)
def test_fitting_y_leaves_the_run_as_it_was(method: Any, compile: bool, tmp_path: Any) -> None:
    problem = quadratic(sigma_f=0.1, sigma_g=0.1)
    options = {
        "method": method, "compile": compile,
        "upper_data": problem.upper_noise, "lower_data": problem.lower_noise,
    }  # fmt: skip
    solvers = [bilevel.Solver(problem, problem.x0, problem.y0, **options) for _ in range(2)]
    for _ in range(3):
        for solver in solvers:
            solver.step()
        solvers[0].lower_solution()
        assert solvers[0].k == solvers[1].k
        assert same(solvers[0].state_dict(), solvers[1].state_dict())
    kept: list[bilevel.Solver] = []
    result = minimize(
        problem, steps=3, callback=lambda solver, info: kept.append(solver),
        checkpoint=tmp_path, **options,
    )  # fmt: skip
    assert kept[-1].k == result.steps == result.selected_step == len(result.history["step"]) == 3
    assert same(kept[-1].state_dict(), solvers[1].state_dict())
    again = minimize(problem, steps=3, checkpoint=tmp_path, **options)
    assert torch.equal(again.y, result.y)
    eager = minimize(problem, steps=3, **{**options, "compile": False})
    torch.testing.assert_close(result.y, eager.y)


def test_a_schedule_need_not_go_beyond_the_last_step() -> None:
    rates = [0.5, 0.4, 0.3]
    result = minimize(method=bilevel.F2SA(lambda k: rates[k], 0.1, inner_steps=2), steps=3)
    assert result.history["lower_lr"].tolist() == rates


def test_y_stays_as_it_was_where_it_cannot_be_fitted() -> None:
    problem = quadratic()
    calls: list[int] = []

    def lower(x: Tensor, y: Tensor, batch: None) -> Tensor:
        calls.append(0)
        return problem.lower(x, y, batch) * (1.0 if len(calls) < most else float("nan"))

    broken = bilevel.Problem(problem.upper, lower)
    options: dict[str, Any] = {"method": METHODS["f2sa"], "steps": 3}
    most = 10**6
    seen: list[Iterate] = []
    before: list[int] = []  # how many calls each step ended with; y is fitted after the last
    count_calls = lambda solver, info: before.append(len(calls))  # noqa: E731
    bilevel.minimize(broken, problem.x0, problem.y0, callback=count_calls, **options)
    most, count = before[-1] + 2, len(calls)
    assert most < count
    calls.clear()
    result = bilevel.minimize(broken, problem.x0, problem.y0, callback=recording(seen), **options)
    assert len(calls) <= count
    assert result.outcome is bilevel.Outcome.COMPLETED
    assert torch.equal(result.y, seen[-1].y)


def test_an_iterator_gives_no_batch_beyond_the_last_step() -> None:
    problem = quadratic(sigma_f=0.1, sigma_g=0.1)
    drawn: list[int] = []

    def noise() -> Any:
        while True:
            drawn.append(0)
            yield torch.zeros_like(problem.y0)

    upper = lambda x, y, batch: problem.upper(x, y, None)  # noqa: E731
    lower = lambda x, y, batch: problem.lower(x, y, None) + (batch * y).sum()  # noqa: E731
    bare = bilevel.Problem(upper, lower)
    method = METHODS["f2sa"]
    bilevel.minimize(bare, problem.x0, problem.y0, method=method, steps=3, lower_data=noise())
    assert len(drawn) == 3 * 3


def noisy(seed: int, **options: Any) -> tuple[bilevel.Result, list[Iterate], Tensor]:
    """A run whose objective goes up and down."""
    problem = quadratic(sigma_f=3.0, sigma_g=0.3)
    seen: list[Iterate] = []
    result = minimize(
        problem, upper_data=problem.upper_noise, lower_data=problem.lower_noise, seed=seed,
        callback=recording(seen), method=METHODS["f2sa"], **options,
    )  # fmt: skip
    return result, seen, problem.x0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("every", [1, 3])
def test_the_best_iterate_is_the_lowest_of_the_history(seed: int, every: int) -> None:
    result, seen, x0 = noisy(seed, steps=20, select="best", record_every=every)
    iterates = [x0, *(iterate.x for iterate in noisy(seed, steps=20)[1])]
    row = int(np.argmin(result.history["upper"]))
    assert result.selected_step == result.history["step"][row]
    assert torch.equal(result.x, iterates[result.selected_step])
    assert torch.equal(result.y, seen[row].y)


def test_the_best_iterate_is_not_always_the_last() -> None:
    assert any(noisy(seed, steps=20, select="best")[0].selected_step < 19 for seed in range(5))


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10])
def test_the_random_iterate_is_uniform_over_the_steps(every: int) -> None:
    problem = quadratic(dim_x=1, dim_y=1)
    method = bilevel.F2SA(inner_steps=1)
    steps, runs = 4, 300
    chosen = Counter(
        minimize(
            problem, method=method, steps=steps, select="random", seed=seed, record_every=every
        ).selected_step
        for seed in range(runs)
    )
    assert set(chosen) == set(range(steps))
    expected = runs / steps
    chi_square = sum((count - expected) ** 2 / expected for count in chosen.values())
    assert chi_square < 16.3  # the 99.9% quantile with 3 degrees of freedom


@pytest.mark.slow
def test_the_random_iterate_is_uniform_over_the_steps_taken_when_stopped() -> None:
    chosen = {
        minimize(
            quadratic(dim_x=1, dim_y=1), method=bilevel.F2SA(inner_steps=1), steps=100, seed=seed,
            select="random", callback=lambda solver, info: solver.k == 3,
        ).selected_step
        for seed in range(20)
    }  # fmt: skip
    assert chosen == {0, 1, 2}


@pytest.mark.parametrize("seed", range(5))
def test_the_random_iterate_is_an_iterate_with_its_lower_solution(seed: int) -> None:
    result, seen, x0 = noisy(seed, steps=12, select="random")
    iterates = [x0, *(iterate.x for iterate in seen)]
    assert torch.equal(result.x, iterates[result.selected_step])
    assert torch.equal(result.y, seen[result.selected_step].y)


@pytest.mark.parametrize("select", ["last", "best", "random"])
def test_what_is_returned_is_the_users_to_keep(select: Any) -> None:
    kept: list[bilevel.Solver] = []
    result = minimize(steps=3, select=select, callback=lambda solver, info: kept.append(solver))
    before = result.x.clone(), result.y.clone()
    kept[-1].step()
    assert torch.equal(result.x, before[0])
    assert torch.equal(result.y, before[1])
    assert not result.x.requires_grad
    assert not result.y.requires_grad


# The same seed, the same bits


def on_minibatches(method: Any, seed: int) -> bilevel.Result:
    problem = bilevel.problems.WeightedLogistic(train=40, trusted=20, dim=3)
    return minimize(
        problem, method=method, steps=6, seed=seed, upper_data=problem.upper_data,
        lower_data=problem.lower_data, batch_size=5,
    )  # fmt: skip


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_the_same_seed_gives_the_same_bits(method: Any) -> None:
    mine, again, other = (on_minibatches(method, seed) for seed in (1, 1, 2))
    assert torch.equal(mine.x, again.x)
    assert torch.equal(mine.y, again.y)
    assert not torch.equal(mine.x, other.x)
    for name in set(KEYS) - {"seconds"}:
        assert mine.history[name].tolist() == again.history[name].tolist()
    assert mine.history["upper"].tolist() != other.history["upper"].tolist()


# The user's structures


@pytest.mark.slow
def test_modules_are_optimized_and_the_users_are_left_alone() -> None:
    torch.manual_seed(0)
    features = torch.randn(30, 3, dtype=torch.float64)
    target = features @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    x0 = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    y0 = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    x0.weight.grad = torch.ones_like(x0.weight)
    before = x0.weight.detach().clone(), y0.weight.detach().clone()
    problem = bilevel.Problem(
        upper=lambda x, y, batch: ((y(features) - target) ** 2).mean(),
        lower=lambda x, y, batch: ((y(features) - x(features)) ** 2).mean(),
    )
    method = bilevel.F2SA(lower_lr=0.3, upper_lr=0.3, inner_steps=5)
    result = bilevel.minimize(problem, x0, y0, method=method, steps=150)
    for learned in (result.x, result.y):
        assert isinstance(learned, nn.Linear)
        np.testing.assert_allclose(learned.weight.tolist(), [[1.0, -2.0, 0.5]], atol=1e-6)
        assert learned.weight.requires_grad
        assert learned.weight.grad is None
    assert torch.equal(x0.weight, before[0])
    assert torch.equal(y0.weight, before[1])
    assert torch.equal(x0.weight.grad, torch.ones_like(x0.weight))
    assert y0.weight.grad is None


@pytest.mark.slow
def test_trees_are_optimized_in_their_structure() -> None:
    x0: Any = {"shift": torch.zeros(2), "more": [torch.zeros(1), None]}
    y0: Any = (torch.zeros(2), {"b": torch.zeros(1)})
    problem = bilevel.Problem(
        upper=lambda x, y, batch: ((y[0] - 2) ** 2).sum() + ((y[1]["b"] + 1) ** 2).sum(),
        lower=lambda x, y, batch: (
            ((y[0] - x["shift"]) ** 2).sum() + ((y[1]["b"] - x["more"][0]) ** 2).sum()
        ),
    )
    method = bilevel.F2SA(lower_lr=0.4, upper_lr=0.3)
    result = bilevel.minimize(problem, x0, y0, method=method, steps=60)
    torch.testing.assert_close(result.x["shift"], torch.full((2,), 2.0), rtol=0, atol=1e-4)
    torch.testing.assert_close(result.x["more"][0], torch.full((1,), -1.0), rtol=0, atol=1e-4)
    assert result.x["more"][1] is None
    assert isinstance(result.y, tuple)
    torch.testing.assert_close(result.y[1]["b"], torch.full((1,), -1.0), rtol=0, atol=1e-4)
    assert x0["shift"].tolist() == [0, 0]
    assert y0[1]["b"].tolist() == [0]


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
@pytest.mark.parametrize("required", [True, False])
def test_starting_tensors_are_left_alone(method: Any, required: bool) -> None:
    problem = quadratic()
    x0, y0 = (t.clone().requires_grad_(required) for t in (problem.x0, problem.y0))
    bilevel.minimize(problem, x0, y0, method=method, steps=3)
    for mine, start in ((x0, problem.x0), (y0, problem.y0)):
        assert torch.equal(mine, start)
        assert mine.requires_grad is required
        assert mine.grad is None


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_what_an_objective_uses_beside_x_and_y_gets_no_gradient(method: Any) -> None:
    encoder = nn.Linear(2, 2)
    problem = bilevel.Problem(
        upper=lambda x, y, batch: ((encoder(y) - 1) ** 2).sum(),
        lower=lambda x, y, batch: ((y - encoder(x)) ** 2).sum(),
    )
    bilevel.minimize(problem, torch.ones(2), torch.zeros(2), method=method, steps=3)
    assert all(parameter.grad is None for parameter in encoder.parameters())


# The user's surroundings


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_the_users_grad_mode_does_not_matter_and_is_kept(method: Any) -> None:
    expected = minimize(method=method, steps=4)
    with torch.no_grad():
        result = minimize(method=method, steps=4)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert torch.equal(result.x, expected.x)


def test_the_users_default_dtype_does_not_matter_and_is_kept() -> None:
    problem = quadratic(dtype=torch.float32)
    expected = minimize(problem, steps=4)
    try:
        torch.set_default_dtype(torch.float64)
        result = minimize(problem, steps=4)
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert result.x.dtype is torch.float32
    assert torch.equal(result.x, expected.x)


def test_a_solver_by_hand_is_the_same_run() -> None:
    problem = quadratic()
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=METHODS["f2sa"])
    for _ in range(5):
        solver.step(measure=False)
    result = minimize(problem, method=METHODS["f2sa"], steps=5)
    assert solver.k == 5
    assert torch.equal(solver.x, result.x)
    assert torch.equal(solver.lower_solution(), result.y)


def test_a_history_takes_no_more_room_than_the_steps_taken() -> None:
    problem = bilevel.problems.Quadratic(seed=0)
    result = bilevel.minimize(
        problem, problem.x0, problem.y0, steps=10**15, callback=lambda solver, info: info.step == 4
    )
    assert result.steps == 5
    assert len(result.history["upper"]) == 5


@pytest.mark.slow
def test_a_history_grows_with_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = bilevel.problems.Quadratic(seed=0)
    whole = bilevel.minimize(problem, problem.x0, problem.y0, steps=12)
    monkeypatch.setattr("bilevel.run.history._FIRST_ROWS", 2)
    grown = bilevel.minimize(problem, problem.x0, problem.y0, steps=12)
    many = bilevel.minimize_many(
        problem, problem.x0, problem.y0, methods=bilevel.F2SA(0.1, 0.1), steps=12, seeds=2
    )
    for name in set(whole.history) - {"seconds"}:
        np.testing.assert_array_equal(grown.history[name], whole.history[name])
        assert len(many[1].history[name]) == 12
