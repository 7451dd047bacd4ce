"""The first-order relatives of F2SA: F2BA, VPBGD, MEHA, BOME, and training without a bilevel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

import bilevel
from bilevel.errors import (
    NonFiniteError,
    StateError,
)
from bilevel.methods.bome import BOME
from bilevel.methods.f2ba import F2BA, Nesterov
from bilevel.methods.meha import MEHA
from bilevel.methods.no_bilevel import NoBilevel
from bilevel.methods.vpbgd import VPBGD
from bilevel.problems import Quadratic, WeightedLogistic
from bilevel.stepping.schedules import Power
from tests.methods.common import counted_passes

Array = npt.NDArray[np.float64]
Draws = Callable[[], Array]
Points = Iterator[tuple[Array, Array, Array]]

GAMMA, BETA = Power(0.4, 20, -0.3), Power(0.3, 20, -0.4)
UPPER, LAM = Power(0.3, 20, -0.5), Power(2.0, 20, 0.3)
PLAIN: dict[str, Any] = {"lower_lr": GAMMA, "upper_lr": UPPER}
PENALTY: dict[str, Any] = {**PLAIN, "penalty_lr": BETA, "multiplier": LAM}
STEPS = 200


ACCELERATED = Nesterov(momentum=0.8, radius=1.5, least_radius=0.2, decay=0.75)
# F2BA


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"single_pass": True}, {"coupling": "independent"}], ids=str)
def test_f2ba_is_f2sa_with_a_constant_multiplier_bit_for_bit(more: dict[str, Any]) -> None:
    problem = Quadratic(sigma_f=0.2, sigma_g=0.2, seed=1)
    choices = {**PENALTY, "multiplier": 8.0, "inner_steps": 3, **more}
    data: dict[str, Any] = {"upper_data": problem.upper_noise, "lower_data": problem.lower_noise}
    solvers = [
        bilevel.Solver(problem, problem.x0, problem.y0, method=m, **data)
        for m in (F2BA(**choices), bilevel.F2SA(**choices))
    ]
    for _ in range(50):
        infos = [solver.step() for solver in solvers]
        assert infos[0] == infos[1]
    assert torch.equal(solvers[0].x, solvers[1].x)
    assert torch.equal(solvers[0].y, solvers[1].y)


@pytest.mark.slow
def test_acceleration_starts_afresh_after_long_travel_and_momentum_comes_back() -> None:
    problem = Quadratic(dim_x=3, dim_y=4, seed=3)
    method = F2BA(0.5, 0.3, multiplier=7.0, acceleration=ACCELERATED)
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method)
    counts, radii = [], []
    for _ in range(60):
        solver.step(measure=False)
        saved = solver.state.x_update.state_dict()
        counts.append(saved["count"])
        radii.append(saved["radius"])
    restarts = counts.count(0)
    assert restarts >= 2
    assert counts[-1] > 10
    assert radii[-1] == pytest.approx(1.5 * 0.75**restarts)


def test_a_state_saved_without_acceleration_is_refused_with_it() -> None:
    problem = Quadratic(seed=1)
    plain, accelerated = (
        bilevel.Solver(
            problem, problem.x0, problem.y0, method=F2BA(0.4, 0.1, acceleration=acceleration)
        )
        for acceleration in (None, Nesterov())
    )
    with pytest.raises(StateError, match=r"x.*acceleration"):
        accelerated.load_state_dict(plain.state_dict())
    with pytest.raises(StateError, match="state of x was saved with"):
        plain.load_state_dict(accelerated.state_dict())


@pytest.mark.slow
def test_momentum_0_is_no_acceleration() -> None:
    problem = Quadratic(seed=1)
    ends = [
        bilevel.minimize(
            problem,
            problem.x0,
            problem.y0,
            method=F2BA(0.5, 0.3, acceleration=acceleration),
            steps=50,
        ).x
        for acceleration in (None, Nesterov(momentum=0.0, radius=0.1))
    ]
    assert torch.equal(*ends)


@pytest.mark.slow
def test_acceleration_needs_fewer_steps_on_an_ill_conditioned_problem() -> None:
    scales = torch.logspace(0, -1, 6, dtype=torch.float64)  # F has condition number 90
    problem = Quadratic(
        A=torch.eye(6, dtype=torch.float64), B=torch.diag(scales), rho=0.001, seed=0
    )

    def steps_to(tolerance: float, acceleration: Nesterov | None) -> int:
        method = F2BA(1.0, 0.9, multiplier=1e3, inner_steps=2, acceleration=acceleration)
        solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method)
        while problem.penalised_gradient(solver.x, 1e3).norm() > tolerance:
            solver.step(measure=False)
            assert solver.k < 10_000
        return solver.k

    plain = steps_to(1e-3, None)
    assert steps_to(1e-3, Nesterov(momentum=0.9)) < plain / 4
    # a small radius restarts again and again, and loses little more than the gain
    assert steps_to(1e-3, Nesterov(momentum=0.9, radius=0.1, least_radius=0.01)) < 1.1 * plain


@pytest.mark.slow
def test_accelerated_iterates_stay_in_their_set() -> None:
    base = Quadratic(seed=0)
    problem = bilevel.Problem(base.upper, base.lower, x_set=bilevel.sets.Box(-0.3, 0.3))
    solver = bilevel.Solver(
        problem, base.x0, base.y0, method=F2BA(0.5, 0.5, multiplier=100.0, acceleration=Nesterov())
    )
    for _ in range(100):
        solver.step(measure=False)
        assert solver.x.abs().max() <= 0.3
    x = solver.x
    step = (x - base.penalised_gradient(x, 100.0)).clamp(-0.3, 0.3)
    torch.testing.assert_close(step, x, rtol=0, atol=1e-6)  # the constrained optimum


# NoBilevel


def test_no_bilevel_never_moves_x_and_reports_a_direction_of_0() -> None:
    problem = WeightedLogistic(train=30, trusted=25, dim=4)
    data: dict[str, Any] = {
        "upper_data": problem.upper_data,
        "lower_data": problem.lower_data,
        "batch_size": 5,
        "direction_batch_size": "all",
    }
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=NoBilevel(0.1), **data)
    for _ in range(5):
        info = solver.step()
    assert torch.equal(solver.x, problem.x0)
    assert float(info.direction_norm) == 0
    assert np.isnan(info.multiplier)
    assert torch.isnan(info.gap)
    torch.testing.assert_close(info.upper, problem.upper(problem.x0, solver.y, None))
    torch.testing.assert_close(info.lower, problem.lower(problem.x0, solver.y, None))


# Properties that all of them have

# settings a user could choose, the steps taken, and to what ||grad F||^2 falls from its start


def test_info_is_taken_at_the_point_of_the_joint_step() -> None:
    problem = Quadratic(seed=1)
    for method, scale in (
        (VPBGD(0.5, 0.1, multiplier=4.0), 1 / 4),
        (VPBGD(0.5, 0.1, multiplier=0.5), 1.0),
        (MEHA(0.5, 0.1, multiplier=4.0), 1 / 4),
        (BOME(0.1, 0.1, inner_lr=0.5), 1.0),
    ):
        solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method)
        solver.step()
        x, y = solver.x, solver.state.penalised.value.detach().clone()
        info = solver.step()
        assert info.lower is not None
        assert info.direction_norm is not None
        torch.testing.assert_close(info.upper, problem.upper(x, solver.y, None))
        torch.testing.assert_close(info.lower, problem.lower(x, solver.y, None))
        torch.testing.assert_close(info.gap, problem.lower(x, y, None) - info.lower)
        torch.testing.assert_close(info.direction_norm * 0.1 * scale, (solver.x - x).norm())


@pytest.mark.parametrize(
    ("method", "f", "g", "backwards"),
    [
        (NoBilevel(0.1, inner_steps=4), 0, 4, 4),
        (VPBGD(0.1, 0.1, inner_steps=4), 1, 6, 5),
        (MEHA(0.1, 0.1), 1, 3, 2),
        (BOME(0.1, 0.1, inner_steps=4), 1, 6, 6),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, bilevel.methods.Method) else "",
)
def test_a_step_costs_what_the_algorithm_says(
    method: Any, f: int, g: int, backwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"f": 0, "g": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            counts[name] += 1
            return function(*args, **more)

        return call

    base = Quadratic()
    problem = bilevel.Problem(counted("f", base.upper), counted("g", base.lower))
    solver = bilevel.Solver(problem, base.x0, base.y0, method=method)
    passes = counted_passes(monkeypatch)
    counts.update(f=0, g=0)
    solver.step(measure=False)
    assert counts == {"f": f, "g": g}
    assert len(passes) == backwards


@pytest.mark.parametrize("coupling", ["shared", "independent"])
@pytest.mark.parametrize("make", [VPBGD, MEHA, BOME])
def test_a_sweep_is_the_full_gradient_whatever_the_chunks(make: Any, coupling: Any) -> None:
    problem = WeightedLogistic(train=31, trusted=17, dim=3)
    ends = []
    for chunk in (4, 31):
        solver = bilevel.Solver(
            problem,
            problem.x0,
            problem.y0 + 0.3,
            method=make(0.1, 0.5, coupling=coupling),
            upper_data=problem.upper_data,
            lower_data=problem.lower_data,
            batch_size=4,
            chunk_size=chunk,
            direction_batch_size="all",
        )
        for _ in range(3):
            solver.step()
        ends.append((solver.x, solver.y))
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_running_statistics_move_with_their_own_copys_steps_only() -> None:
    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)) + 5

    def lower(x: Tensor, y: nn.Module, batch: Tensor) -> Tensor:
        return (y(batch) ** 2).mean() + (x**2).sum() * sum((p**2).sum() for p in y.parameters())

    def upper(x: Tensor, y: nn.Module, batch: Tensor) -> Tensor:
        return ((y(batch) - 1) ** 2).mean()

    for method, of_y, of_z in (
        (VPBGD(inner_steps=3), 2, 3),  # y sees f and g in the joint step, z its T steps
        (MEHA(), 2, 1),
        (BOME(inner_steps=3), 2, 3),
    ):
        solver = bilevel.Solver(
            bilevel.Problem(upper, lower),
            torch.ones(1),
            nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)),
            method=method,
            upper_data=inputs,
            lower_data=inputs,
        )
        solver.step()
        y, z = solver.state.penalised, solver.state.solution
        assert [int(v.value[0].num_batches_tracked) for v in (y, z)] == [of_y, of_z]


@pytest.mark.parametrize(
    "method",
    [
        VPBGD(0.4, 0.2, multiplier=5.0, inner_steps=2),
        MEHA(0.4, 0.2, multiplier=5.0, proximal=2.0),
        BOME(0.1, 0.1, inner_lr=0.4, inner_steps=2),
        NoBilevel(0.4, inner_steps=2),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_non_finite_number_stops_the_run_before_it_is_used(method: Any) -> None:
    problem = bilevel.Problem(
        lambda x, y, b: (y**2).sum(),
        lambda x, y, b: ((y - x) ** 2).sum() * (float("nan") if y[0] > 0.01 else 1.0),
    )
    solver = bilevel.Solver(problem, torch.ones(2), torch.zeros(2), method=method)

    def run() -> None:
        for _ in range(10):
            solver.step()

    with pytest.raises(NonFiniteError, match=r"lower\(x, (y|z|theta)\).*step"):
        run()
    for variable in (solver.state.x, solver.state.solution):
        assert torch.isfinite(variable.value).all()


# BOME


def test_bome_finds_its_multiplier_where_squares_overflow() -> None:
    slope = torch.tensor([3e25, 4e25])  # in single precision, which ends at 3e38
    lam = BOME(0.1, 0.1, eta=0.5)._multiplier([-slope], [slope], 0.0)
    assert lam == pytest.approx(1.5)


@pytest.mark.parametrize("barrier", ["gradient", "gap"])
def test_bome_reports_the_smallest_multiplier_that_keeps_the_gap_falling(barrier: Any) -> None:
    problem = Quadratic(seed=1)
    method = BOME(0.1, 0.1, inner_lr=0.5, inner_steps=5, eta=0.7, barrier=barrier)
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method)
    positive = 0
    for _ in range(30):
        x = solver.x.requires_grad_()
        y = solver.state.penalised.value.detach().clone().requires_grad_()
        info = solver.step()
        f = problem.upper(x, y, None)
        q = problem.lower(x, y, None) - problem.lower(x, solver.y, None)
        grad_f = torch.cat(torch.autograd.grad(f, [x, y]))
        grad_q = torch.cat(torch.autograd.grad(q, [x, y]))
        wanted = 0.7 * (grad_q @ grad_q if barrier == "gradient" else q.detach())
        rate = (grad_f + info.multiplier * grad_q) @ grad_q
        assert rate >= wanted - 1e-12
        if info.multiplier > 0:
            positive += 1
            torch.testing.assert_close(rate, wanted, rtol=1e-9, atol=1e-12)
    assert positive > 10


def test_bome_follows_f_alone_where_the_gap_has_no_slope() -> None:
    problem = bilevel.Problem(
        lambda x, y, b: ((y - 1) ** 2).sum() + (x**2).sum(),
        lambda x, y, b: 0 * (x * y).sum(),
    )
    solver = bilevel.Solver(problem, torch.ones(2), torch.zeros(2), method=BOME(0.1, 0.1))
    info = solver.step()
    assert info.multiplier == 0
    torch.testing.assert_close(solver.x, torch.full((2,), 0.8))
    torch.testing.assert_close(solver.state.penalised.value.detach(), torch.full((2,), 0.2))


def test_bome_inner_lr_is_lower_lr_unless_given() -> None:
    problem = Quadratic(seed=1)
    ends = [
        bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=5).x
        for method in (BOME(0.3, 0.2), BOME(0.3, 0.2, inner_lr=0.3), BOME(0.3, 0.2, inner_lr=0.2))
    ]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


# MEHA


def test_meha_multiplier_is_c0_times_k_plus_1_to_the_p() -> None:
    assert [MEHA().rates.multiplier(k) for k in (0, 15)] == [10.0, 20.0]
