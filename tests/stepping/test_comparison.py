"""Whether a run ended above its start: F by a closed form where y follows slowly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.errors import WorsenedWarning
from bilevel.stepping.comparison import compare
from bilevel.stepping.found import FoundSizes
from tests.marks import slow_except

Exact = Callable[[Tensor], Tensor]


def _prior(decades: float) -> tuple[bilevel.Problem, Tensor, Exact]:
    """Regression of condition 10^decades towards the prior x, and F by the normal equations."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scales = torch.logspace(0, -decades / 2, 10, dtype=torch.float64)
    truth, pull = normal(10), 10.0**-decades
    train, held_out = normal(40, 10) * scales, normal(40, 10) * scales.flip(0)
    targets, others = train @ truth + 0.1 * normal(40), held_out @ truth + 0.1 * normal(40)

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return ((held_out @ y - others) ** 2).mean()

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return ((train @ y - targets) ** 2).mean() + pull * ((y - x) ** 2).sum()

    def exact(x: Tensor) -> Tensor:
        matrix = train.T @ train / 40 + pull * torch.eye(10, dtype=torch.float64)
        y = torch.linalg.solve(matrix, train.T @ targets / 40 + pull * x)
        return upper(x, y, None)

    return bilevel.Problem(upper, lower), torch.zeros(10, dtype=torch.float64), exact


def test_f_at_two_points_is_that_of_the_closed_form() -> None:
    problem, start, exact = _prior(4)
    solver = bilevel.Solver(problem, start, start)
    solver.step()
    state, other = solver.state, torch.ones_like(start)
    x = solver.x
    found = compare(solver.evaluator, state, float(state.policy.current.lower), other, 1000)
    assert found is not None
    assert found == pytest.approx((float(exact(other)), float(exact(x))), rel=1e-5)
    assert torch.equal(solver.x, x)
    y = solver.y
    assert float(problem.upper(x, y, None)) == pytest.approx(found[1], rel=1e-12)


def test_the_start_is_solved_with_the_curvature_that_g_has_there() -> None:
    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return ((y - 2) ** 2).sum()

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return (x.exp() * (y - 1) ** 2).sum() + (y**2).sum()

    steep, flat = torch.full((3,), 9.0), torch.zeros(3)
    solver = bilevel.Solver(bilevel.Problem(upper, lower), steep, torch.ones(3))
    solver.step()
    state = solver.state
    found = compare(solver.evaluator, state, float(state.policy.current.lower), flat, 1000)
    # y*(x) = exp(x) / (exp(x) + 1); a step for the steep end hardly moves y at the flat one
    assert found == pytest.approx((3 * 1.5**2, 3.0), rel=1e-3)


@pytest.mark.parametrize("decades", slow_except(["2"], [2, 3, 4]))
def test_x_moves_on_a_lower_solution_that_follows_it(decades: float) -> None:
    problem, start, exact = _prior(decades)
    result = bilevel.minimize(problem, start, start, steps=100)
    assert exact(result.x) < 0.1 * exact(start)
    assert float(problem.upper(result.x, result.y, None)) == pytest.approx(
        float(exact(result.x)), rel=1e-3
    )


def test_a_run_whose_own_figures_fall_while_f_rises_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, start, _ = _prior(2)
    asked: list[Any] = []

    def concluded(self: Any, objectives: Any, state: Any) -> tuple[float, float]:
        asked.append(state.k)
        return 1.0, 1.5

    monkeypatch.setattr(FoundSizes, "conclude", concluded)
    with pytest.warns(WorsenedWarning, match="ended at 1.5, clearly above where it began, 1 "):
        result = bilevel.minimize(problem, start, start, steps=10)
    assert result.outcome is bilevel.Outcome.WORSENED
    assert asked == [10]


@pytest.mark.slow
def test_x_follows_f_and_not_the_penalty_where_these_differ() -> None:
    """A deconvolution that starts near the best strength: Phi at a small multiplier leads away."""
    generator = torch.Generator().manual_seed(0)
    places = torch.arange(60, dtype=torch.float64)
    blur = torch.exp(-(((places[:, None] - places) / 2) ** 2) / 2)
    blur = blur / blur.sum(dim=1, keepdim=True)
    truth = torch.sin(places / 6) + (places > 30)
    seen = blur @ truth + 0.02 * torch.randn(60, generator=generator, dtype=torch.float64)

    def exact(x: Tensor) -> Tensor:
        steps = torch.eye(60, dtype=torch.float64).diff(dim=0)
        y = torch.linalg.solve(blur.T @ blur + x.exp() * steps.T @ steps, blur.T @ seen)
        return ((y - truth) ** 2).mean()

    problem = bilevel.Problem(
        lambda x, y, b: ((y - truth) ** 2).mean(),
        lambda x, y, b: ((blur @ y - seen) ** 2).sum() + (x.exp() * y.diff() ** 2).sum(),
    )
    start = torch.full((1,), -3.0, dtype=torch.float64)
    result = bilevel.minimize(problem, start, torch.zeros_like(places), steps=60)
    best = min(float(exact(x)) for x in torch.linspace(-4, -2, 41, dtype=torch.float64))
    assert float(exact(result.x)) < best + 3e-6 < float(exact(start))


def test_what_is_not_solved_is_not_compared() -> None:
    """f at a y that has only begun to follow another x says nothing about F there."""
    problem, start, _ = _prior(4)
    solver = bilevel.Solver(problem, start, start)
    solver.step()
    rate = float(solver.state.policy.current.lower)
    x, y = solver.x, solver.y
    assert compare(solver.evaluator, solver.state, rate, torch.ones_like(start), 20) is None
    assert torch.equal(solver.x, x)
    assert problem.lower(x, solver.y, None) < problem.lower(x, y, None)


def _ridge(rows: int = 300) -> tuple[bilevel.Problem, dict[str, Any], Exact]:
    """Ridge regression in minibatches, and F by the normal equations."""
    generator = torch.Generator().manual_seed(1)
    inputs, others = torch.randn(2, rows, 5, generator=generator, dtype=torch.float64)
    truth = torch.randn(5, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, rows, generator=generator, dtype=torch.float64)
    train, held_out = (inputs, inputs @ truth + noise[0]), (others, others @ truth + noise[1])

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return ((batch[0] @ y - batch[1]) ** 2).mean()

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return ((batch[0] @ y - batch[1]) ** 2).mean() + (x.exp() * y**2).sum()

    def exact(x: Tensor) -> Tensor:
        matrix = inputs.T @ inputs / rows + torch.diag(x.exp())
        y = torch.linalg.solve(matrix, inputs.T @ train[1] / rows)
        return upper(x, y, held_out)

    data = {"upper_data": held_out, "lower_data": train, "batch_size": 10}
    return bilevel.Problem(upper, lower), data, exact


@pytest.mark.parametrize("method", ["f2sa", "soba"])
def test_few_samples_are_solved_as_a_whole_at_the_end_of_a_run_in_minibatches(method: str) -> None:
    problem, data, exact = _ridge()
    start = torch.ones(5, dtype=torch.float64)
    solver = bilevel.Solver(problem, start, 0 * start, method=method, **data)
    for _ in range(60):
        solver.step()
    point = solver.final_point()
    expected = float(exact(start)), float(exact(point.x))
    assert point.compared == pytest.approx(expected, rel=1e-6)
    at_y = float(problem.upper(point.x, point.y, data["upper_data"]))
    assert at_y == pytest.approx(expected[1], rel=1e-6)


def test_a_run_in_minibatches_that_ends_above_its_start_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, data, exact = _ridge()
    start = torch.full((5,), -2.0, dtype=torch.float64)

    def worse(self: Any, *of_the_test: Any) -> float:
        return -0.5  # uphill, whatever the test says

    monkeypatch.setattr(FoundSizes, "_tested", worse)
    began = f"clearly above where it began, {float(exact(start)):.4g} "
    with pytest.warns(WorsenedWarning, match=began):
        result = bilevel.minimize(problem, start, 0 * start, steps=100, **data)
    assert result.outcome is bilevel.Outcome.WORSENED
    assert exact(result.x) > exact(start)


@pytest.mark.parametrize("kind", ["sum", "dropout", "many", "chunks"])
def test_minibatches_that_no_whole_stands_for_are_not_compared(kind: str) -> None:
    problem, data, _ = _ridge(30_000 if kind == "many" else 300)

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        inputs, targets = batch
        if kind == "dropout":
            inputs = torch.nn.functional.dropout(inputs, 0.2)
        return problem.lower(x, y, (inputs, targets)) * (len(targets) if kind == "sum" else 1)

    start = torch.zeros(5, dtype=torch.float64)
    data |= {"chunk_size": 5} if kind == "chunks" else {}
    asked = bilevel.Problem(problem.upper, lower)
    solver = bilevel.Solver(asked, start, start, **data)
    for _ in range(20):
        solver.step()
    assert compare(solver.evaluator, solver.state, float("nan"), start, 1000) is None
