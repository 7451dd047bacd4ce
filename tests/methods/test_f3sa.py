from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.problems import Quadratic, WeightedLogistic
from bilevel.stepping.schedules import Power
from tests.methods.common import assert_equals_its_reference

GAMMA, BETA = Power(0.4, 20, -0.3), Power(0.3, 20, -0.4)
UPPER, LAM = Power(0.1, 20, -0.5), Power(5.0, 20, 0.2)
ETA = Power(1.0, 1, -0.5)
SCHEDULES: dict[str, Any] = {
    "lower_lr": GAMMA,
    "penalty_lr": BETA,
    "upper_lr": UPPER,
    "multiplier": LAM,
}


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [1.0, 0.5, 0.01, ETA])
@pytest.mark.parametrize("recursion", ["separate", "combined"])
def test_without_noise_it_is_f2sa_with_one_inner_step(momentum: Any, recursion: Any) -> None:
    problem = Quadratic(dim_x=4, dim_y=6, seed=1)
    lam: Any = LAM if recursion == "separate" else 5.0
    rates = {**SCHEDULES, "multiplier": lam}
    f3 = bilevel.F3SA(**rates, momentum=momentum, recursion=recursion)
    f2 = bilevel.F2SA(**rates, inner_steps=1)
    solvers = [bilevel.Solver(problem, problem.x0, problem.y0, method=m) for m in (f3, f2)]
    for _ in range(1000):
        for solver in solvers:
            solver.step(measure=False)
    torch.testing.assert_close(solvers[0].x, solvers[1].x, rtol=0, atol=1e-10)
    torch.testing.assert_close(solvers[0].y, solvers[1].y, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_combined_differs_from_separate_only_when_the_multiplier_grows() -> None:
    problem = Quadratic(sigma_f=0.3, sigma_g=0.3, seed=1)
    ends: dict[tuple[str, bool], Tensor] = {}
    for recursion in ("separate", "combined"):
        for grows in (False, True):
            method = bilevel.F3SA(
                **{**SCHEDULES, "multiplier": LAM if grows else 5.0},
                momentum=0.2,
                recursion=recursion,  # type: ignore[arg-type]
            )
            ends[recursion, grows] = bilevel.minimize(
                problem,
                problem.x0,
                problem.y0,
                method=method,
                steps=100,
                upper_data=problem.upper_noise,
                lower_data=problem.lower_noise,
            ).x
    torch.testing.assert_close(ends["separate", False], ends["combined", False], atol=1e-12, rtol=0)
    assert (ends["separate", True] - ends["combined", True]).norm() > 1e-6


def test_full_momentum_weight_is_f2sa_on_the_same_samples() -> None:
    problem = WeightedLogistic(train=40, trusted=20, dim=3)
    ends = []
    for method in (
        bilevel.F3SA(**SCHEDULES, momentum=1.0),
        bilevel.F2SA(**SCHEDULES, inner_steps=1),
    ):
        result = bilevel.minimize(
            problem,
            problem.x0,
            problem.y0,
            method=method,
            steps=60,
            upper_data=problem.upper_data,
            lower_data=problem.lower_data,
            batch_size=8,
        )
        ends.append(result.x)
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("coupling", ["shared", "independent"])
def test_iterates_are_those_of_the_paper(coupling: Any) -> None:
    problem = WeightedLogistic(train=30, trusted=25, dim=4)
    method = bilevel.F3SA(**SCHEDULES, momentum=ETA, coupling=coupling)
    assert_equals_its_reference(method, problem, 80, batch_size=7, seed=5)


@pytest.mark.slow
def test_estimators_have_less_noise_than_gradients() -> None:
    problem = Quadratic(dim_x=2, dim_y=2, sigma_f=1.0, sigma_g=1.0, runs=(500,))
    spreads = []
    for momentum in (1.0, 0.1):
        # rates so small that nothing moves: what varies is the estimate of a fixed gradient
        solver = bilevel.Solver(
            problem,
            problem.x0,
            problem.y0,
            method=bilevel.F3SA(1e-9, 1e-9, momentum=momentum),
            upper_data=problem.upper_noise,
            lower_data=problem.lower_noise,
        )
        for _ in range(60):
            solver.step(measure=False)
        (estimate,) = solver.state.z_estimate
        spreads.append(float(estimate.var(dim=0).mean()))
    # stationary variance of h <- noise + (1 - eta) (h - noise): eta / (2 - eta) of the noise's
    assert spreads[0] == pytest.approx(0.25, rel=0.1)
    assert spreads[1] == pytest.approx(0.25 * 0.1 / 1.9, rel=0.1)


class _Steady(bilevel.F3SA):
    """Steps of "auto" that do not depend on the momentum."""

    def steady_share(self, k: int) -> float:
        return 1.0


def test_estimates_begin_afresh_where_auto_puts_x_back() -> None:
    # without noise an estimate is the gradient itself, whatever the momentum, unless its memory is
    # of a point that was left
    def upper(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return ((y - 1) ** 2).sum() + 0.1 * (x**4).sum()

    def lower(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return 0.5 * ((y - torch.sin(3 * x)) ** 2).sum() + 0.02 * (y**4).sum()

    problem = bilevel.Problem(upper, lower)
    start = torch.linspace(-2, 2, 3, dtype=torch.float64)
    solvers = [
        bilevel.Solver(problem, start, 0 * start, method=_Steady(momentum=m)) for m in (1.0, 0.1)
    ]
    returned = 0
    for _ in range(250):
        for solver in solvers:
            solver.step(measure=False)
        returned += solvers[0].state.policy.returned
        torch.testing.assert_close(solvers[0].x, solvers[1].x, rtol=0, atol=1e-9)
    assert returned
