"""compile=True: the same run as without, the same states, and a way out where it cannot be."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bilevel
from bilevel.errors import CompileWarning, NonFiniteError
from bilevel.methods.reference import ReferenceF2SA
from bilevel.problems import WeightedLogistic
from bilevel.schedules import Power

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="torch is too old"
    ),
    # torch's own, from within its compiler
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
]


def _data(problem: WeightedLogistic, **more: Any) -> dict[str, Any]:
    return {
        "upper_data": problem.upper_data,
        "lower_data": problem.lower_data,
        "batch_size": 16,
        **more,
    }


def _run(problem: Any, method: Any, steps: int, compile: bool, **options: Any) -> bilevel.Result:
    return bilevel.minimize(
        problem, problem.x0, problem.y0, method=method, steps=steps, compile=compile, **options
    )


def test_iterates_are_the_references_in_double_precision_and_nothing_is_compiled_again() -> None:
    problem = WeightedLogistic(train=60, trusted=30, dim=4)
    settings: dict[str, Any] = {
        "lower_lr": Power(0.5, 10, -0.3),
        "upper_lr": Power(5.0, 10, -0.3),
        "multiplier": Power(10.0, 10, 0.3),
        "inner_steps": 3,
    }
    known = bilevel.Solver(
        problem, ReferenceF2SA(**settings), problem.x0, problem.y0, **_data(problem)
    )
    solver = bilevel.Solver(
        problem, bilevel.F2SA(**settings), problem.x0, problem.y0, compile=True, **_data(problem)
    )
    program: Any = solver._program
    for k in range(30):
        known.step(measure=False)
        solver.step(measure=False)
        if k == 1:
            compiled = program.compilations
    assert program.compilations == compiled == 2  # the inner step and the x direction
    torch.testing.assert_close(solver.x, known.x, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(solver.y, known.y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {"direction_batch_size": "all", "chunk_size": 25}),
        ({"scheme": "midpoint", "coupling": "independent"}, {}),
        ({"single_pass": True}, {}),
    ],
    ids=["all", "midpoint independent", "single pass"],
)
def test_iterates_are_those_of_the_eager_run(
    settings: dict[str, Any], options: dict[str, Any]
) -> None:
    problem = WeightedLogistic(train=60, trusted=30, dim=4, dtype=torch.float32)
    problem.x_set = bilevel.sets.Box(-1.0, 1.5)
    method = bilevel.F2SA(0.5, 20.0, multiplier=20.0, inner_steps=2, **settings)
    eager, compiled = (
        _run(problem, method, 100, compile, **_data(problem, **options))
        for compile in (False, True)
    )
    torch.testing.assert_close(compiled.x, eager.x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compiled.y, eager.y, rtol=1e-5, atol=1e-5)
    for name in ("upper", "lower", "gap", "direction_norm", "multiplier", "upper_lr"):
        torch.testing.assert_close(
            torch.as_tensor(compiled.history[name]),
            torch.as_tensor(eager.history[name]),
            rtol=1e-3,
            atol=1e-5,
        )


def test_steps_that_are_found_are_found_alike_and_a_run_may_change_over() -> None:
    problem = WeightedLogistic(train=60, trusted=30, dim=4)
    solvers = [
        bilevel.Solver(
            problem, bilevel.F2SA(), problem.x0, problem.y0, compile=compile, **_data(problem)
        )
        for compile in (False, True)
    ]
    for solver in solvers:
        for _ in range(6):
            solver.step()
    torch.testing.assert_close(solvers[1].x, solvers[0].x, rtol=1e-6, atol=1e-9)
    states = [solver.state_dict() for solver in solvers]
    for solver, state in zip(solvers, reversed(states), strict=True):
        solver.load_state_dict(state)
        for _ in range(6):
            solver.step()
    assert solvers[0].k == solvers[1].k == 12
    torch.testing.assert_close(solvers[1].x, solvers[0].x, rtol=1e-5, atol=1e-8)


def test_modules_and_trees() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 5, generator=generator)
    labels = torch.randint(3, (40,), generator=generator)

    def lower(x: Any, model: nn.Module, batch: Any) -> Tensor:
        features, classes, index = batch
        losses = cross_entropy(model(features), classes, reduction="none")
        ridge = sum((p**2).sum() for p in model.parameters())
        return (x["weights"][index].sigmoid() * losses).mean() + x["ridge"][0].exp() * ridge

    problem = bilevel.Problem(
        lambda x, model, batch: cross_entropy(model(batch[0]), batch[1]), lower
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    start = {"weights": torch.zeros(40), "ridge": (torch.tensor(-4.0),)}
    ends = [
        bilevel.minimize(
            problem, start, model, method=bilevel.F2SA(0.2, 1.0, inner_steps=2), steps=20,
            lower_data=(inputs, labels, torch.arange(40)), upper_data=(inputs, labels),
            batch_size=8, compile=compile,
        )
        for compile in (False, True)
    ]  # fmt: skip
    torch.testing.assert_close(ends[1].x, ends[0].x, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(ends[1].y.parameters(), ends[0].y.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (bilevel.METHODS["soba"](0.1, 0.1), "SOBA has no compiled form"),  # type: ignore[call-arg]
        (
            bilevel.F2SA(upper_lr=0.1, lower_optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
            "lower_optimizer",
        ),
        (bilevel.F2SA(0.1, 0.1, accumulate=True), "accumulate"),
    ],
    ids=["soba", "optimizer", "accumulate"],
)
def test_what_has_no_compiled_form_runs_as_it_is_after_one_warning(
    method: Any, reason: str
) -> None:
    problem = WeightedLogistic(train=20, trusted=10, dim=3)
    known = _run(problem, method, 3, False)
    with pytest.warns(CompileWarning, match=reason) as caught:
        result = _run(problem, method, 3, True)
    assert len(caught) == 1
    assert torch.equal(result.x, known.x)


def test_an_objective_that_cannot_be_compiled_runs_as_it_is_after_one_warning() -> None:
    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        scale = float(torch.rand(1)) + 1.0  # drawn at random, and read into Python
        return scale * ((y - x) ** 2).sum()

    problem = bilevel.Problem(lambda x, y, b: ((y - 1) ** 2).sum(), lower)
    start = torch.zeros(2)

    def end(compile: bool) -> Tensor:
        result = bilevel.minimize(
            problem, start, start, method=bilevel.F2SA(0.1, 0.1), steps=4, compile=compile
        )
        x: Tensor = result.x
        return x

    known = end(False)
    with pytest.warns(CompileWarning, match="compile=True has no effect") as caught:
        found = end(True)
    assert len([w for w in caught if issubclass(w.category, CompileWarning)]) == 1
    torch.testing.assert_close(found, known)


def test_a_number_that_is_not_finite_is_named_and_nothing_moved_by_it() -> None:
    start = torch.zeros(2, dtype=torch.float64)
    log = torch.ones((), dtype=torch.float64)
    problem = bilevel.Problem(
        lambda x, y, b: ((y - 1) ** 2).sum(), lambda x, y, b: ((y - x) ** 2).sum() + log.log()
    )
    solver = bilevel.Solver(problem, bilevel.F2SA(0.1, 0.1), start, start, compile=True)
    for _ in range(3):
        solver.step()
    x = solver.x
    log.fill_(-1.0)
    with pytest.raises(NonFiniteError, match=r"lower\(x, y\) is not finite at step 3"):
        solver.step()
    assert torch.equal(solver.x, x)
