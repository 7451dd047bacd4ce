"""The finite differences behind F2SA's direction: forward, central, midpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import bilevel
from bilevel.problem import FORWARD, MIDPOINT, central
from bilevel.problems import Quadratic, WeightedLogistic


@pytest.mark.parametrize(
    ("order", "weights"),
    [
        (2, [1 / 2]),
        (4, [2 / 3, -1 / 12]),
        (6, [3 / 4, -3 / 20, 1 / 60]),
        (8, [4 / 5, -1 / 5, 4 / 105, -1 / 280]),
    ],
)
def test_central_weights_are_the_known_ones(order: int, weights: list[float]) -> None:
    stencil = central(order)
    assert stencil.lower[0::2] == pytest.approx(weights)
    assert stencil.lower[1::2] == pytest.approx([-w for w in weights])


@pytest.mark.parametrize("order", [2, 4, 6, 8])
def test_central_differentiates_and_interpolates_polynomials_exactly(order: int) -> None:
    stencil = central(order)
    nodes = np.array(stencil.strengths)
    for degree in range(order + 1):
        slope = np.dot(stencil.lower, nodes**degree)
        assert slope == pytest.approx(1.0 if degree == 1 else 0.0, abs=1e-12)
    for degree in range(order):
        value = 1.0 if degree == 0 else 0.0
        assert np.dot(stencil.upper, nodes**degree) == pytest.approx(value, abs=1e-12)
        assert np.dot(stencil.centre, nodes**degree) == pytest.approx(value, abs=1e-12)


def test_strengths_and_costs() -> None:
    assert FORWARD.strengths == (1.0, 0.0)
    assert MIDPOINT.strengths == (1.0, -1.0)
    # one gradient of f and two of g, as F2SA
    assert [sum(kind) for kind in zip(*MIDPOINT.nodes, strict=True)] == [1, 2]
    assert [sum(kind) for kind in zip(*FORWARD.nodes, strict=True)] == [1, 2]


def _method(scheme: str) -> bilevel.F2SA:
    name, _, order = scheme.partition(" ")
    return bilevel.F2SA(scheme=name, order=int(order) if order else None)  # type: ignore[arg-type]


def test_directions_on_a_quadratic_are_the_closed_forms() -> None:
    problem = Quadratic(condition=3.0, seed=2)
    lam, x = 20.0, problem.x0
    A, B, t = problem.A, problem.B, problem.t
    identity = torch.eye(len(t), dtype=A.dtype)
    residual = B @ x - t
    expected = {
        "forward": problem.rho * x
        + lam * B.T @ A @ torch.linalg.solve(identity + lam * A, residual),
        "central": problem.rho * x
        + B.T @ A @ A @ torch.linalg.solve(A @ A - identity / lam**2, residual),
        "midpoint": problem.gradient(x),  # exact where g is quadratic in y
    }
    for scheme, direction in expected.items():
        check = bilevel.check_hypergradient(
            problem, x, problem.y0, method=_method(scheme), multiplier=lam
        )
        torch.testing.assert_close(check.direction, direction, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "order", "multipliers"),
    [
        ("forward", 1, [50.0, 100.0, 200.0, 400.0]),
        ("central", 2, [20.0, 40.0, 80.0, 160.0]),
        ("midpoint", 2, [20.0, 40.0, 80.0, 160.0]),
        ("central 4", 4, [20.0, 30.0, 40.0, 60.0]),
    ],
)
def test_the_bias_falls_with_its_order(scheme: str, order: int, multipliers: list[float]) -> None:
    problem = WeightedLogistic()
    exact = problem.gradient(problem.x0)
    errors = [
        float(
            (
                bilevel.check_hypergradient(
                    problem, problem.x0, problem.y0, method=_method(scheme), multiplier=lam
                ).direction
                - exact
            ).norm()
        )
        for lam in multipliers
    ]
    slope, _ = np.polyfit(np.log(multipliers), np.log(errors), 1)
    assert slope == pytest.approx(-order, abs=0.15)


def test_at_multiplier_10_the_midpoint_is_20_times_closer_for_the_same_work() -> None:
    problem = WeightedLogistic()
    errors = {
        scheme: bilevel.check_hypergradient(
            problem, problem.x0, problem.y0, method=_method(scheme), multiplier=10.0
        ).relative_error
        for scheme in ("forward", "midpoint")
    }
    assert errors["forward"] > 20 * errors["midpoint"]


def test_the_report_is_taken_at_the_midpoint() -> None:
    problem = Quadratic(seed=1)
    method = bilevel.F2SA(0.5, 0.1, 5.0, scheme="midpoint")
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method)
    x = solver.x
    info = solver.step()
    torch.testing.assert_close(info.upper, problem.upper(x, solver.y, None))
    torch.testing.assert_close(info.lower, problem.lower(x, solver.y, None))
    above = problem.lower(x, solver.state.penalised.value.detach(), None)
    torch.testing.assert_close(info.gap, above - problem.lower(x, solver.y, None))
