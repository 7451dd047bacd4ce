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

    def compared(self: Any, objectives: Any, state: Any) -> tuple[float, float]:
        asked.append(state.k)
        return 1.0, 1.5

    monkeypatch.setattr(FoundSizes, "compared", compared)
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
