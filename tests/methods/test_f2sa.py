from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bilevel
from bilevel.problems import Quadratic, WeightedLogistic
from bilevel.stepping.schedules import Constant, Power
from bilevel.variables import sparse as rows
from tests.marks import slow_except
from tests.methods.common import Oracle, assert_equals_its_reference, counted_passes

GAMMA, BETA = Power(0.4, 20, -0.3), Power(0.3, 20, -0.4)
UPPER, LAM = Power(0.3, 20, -0.5), Power(5.0, 20, 0.2)
SCHEDULES: dict[str, Any] = {
    "lower_lr": GAMMA,
    "penalty_lr": BETA,
    "upper_lr": UPPER,
    "multiplier": LAM,
}


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["shared", "independent"])
@pytest.mark.parametrize("direction", [None, 25, "all"])
def test_one_backward_pass_gives_the_iterates_of_the_paper(coupling: Any, direction: Any) -> None:
    problem = WeightedLogistic(train=30, trusted=25, dim=4)
    method = bilevel.F2SA(**SCHEDULES, inner_steps=3, coupling=coupling)
    assert_equals_its_reference(
        method, problem, 50, batch_size=7, direction_batch_size=direction, seed=5
    )


def test_info_is_taken_at_one_point() -> None:
    problem = Quadratic(seed=1)
    solver = bilevel.Solver(
        problem, problem.x0, problem.y0, method=bilevel.F2SA(lower_lr=0.5, upper_lr=0.1)
    )
    solver.step()
    x = solver.x
    info = solver.step()
    y, z = solver.state.penalised.value.detach(), solver.y
    upper, lower = problem.upper, problem.lower
    assert info.step == 1
    assert info.multiplier == 10.0
    assert info.upper is not None
    assert info.direction_norm is not None
    torch.testing.assert_close(info.upper, upper(x, z, None))
    torch.testing.assert_close(info.lower, lower(x, z, None))
    torch.testing.assert_close(info.gap, lower(x, y, None) - lower(x, z, None))
    torch.testing.assert_close(info.direction_norm * 0.1, (solver.x - x).norm())
    # at the penalised copy f would look better than it is
    assert info.upper > upper(x, y, None)


class _Counter:
    """A quadratic problem that counts evaluations of f and g, and gradients through y's path."""

    def __init__(self) -> None:
        self.f = self.g = self.backward = 0
        counter = self

        class Watched(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, y: Tensor) -> Tensor:
                return y.clone()

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                counter.backward += 1
                return grads[0]

        def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
            self.f += 1
            return ((Watched.apply(y) - 1) ** 2).sum()

        def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
            self.g += 1
            return (x.sigmoid() * (Watched.apply(y) - 2) ** 2).sum() + (y**2).sum()

        self.problem = bilevel.Problem(upper, lower)

    def reset(self) -> None:
        self.f = self.g = self.backward = 0


def test_a_step_costs_what_the_algorithm_says() -> None:
    counter = _Counter()
    solver = bilevel.Solver(
        counter.problem,
        torch.zeros(3),
        torch.zeros(3),
        method=bilevel.F2SA(0.1, 0.1, inner_steps=4),
    )
    counter.reset()
    solver.step(measure=False)
    assert (counter.f, counter.g) == (4 + 1, 2 * 4 + 2)
    # the x direction needs no gradient through y: only the inner steps went back through it
    assert counter.backward == 3 * 4
    counter.reset()
    solver.step()
    assert (counter.f, counter.g) == (4 + 2, 2 * 4 + 2)  # f at z, for the report


def test_one_backward_per_inner_step(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = counted_passes(monkeypatch)
    problem = Quadratic()
    for method, expected in (
        (bilevel.F2SA(0.1, 0.1, inner_steps=5), 6),
        (bilevel.F2SA(0.1, 0.1, inner_steps=5, single_pass=True), 5),
        (bilevel.F2SA(0.1, 0.1, inner_steps=5, coupling="independent"), 6),
    ):
        solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method)
        passes.clear()
        solver.step()
        assert len(passes) == expected


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["forward", "midpoint", "central"])
@pytest.mark.parametrize("coupling", ["shared", "independent"])
def test_terms_one_after_another_are_the_same_run(scheme: Any, coupling: Any) -> None:
    problem = WeightedLogistic(train=40, trusted=20, dim=3)
    ends = [
        bilevel.minimize(
            problem, problem.x0, problem.y0, steps=20, batch_size=7, direction_batch_size=11,
            upper_data=problem.upper_data, lower_data=problem.lower_data,
            method=bilevel.F2SA(0.5, 5.0, multiplier=50.0, scheme=scheme, coupling=coupling),
            accumulate=one_by_one,
        )
        for one_by_one in (False, True)
    ]  # fmt: skip
    torch.testing.assert_close(ends[0].x, ends[1].x, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(ends[0].y, ends[1].y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("inner_steps", [1, 3])
def test_terms_one_after_another_in_a_single_pass(inner_steps: int) -> None:
    problem = WeightedLogistic(train=40, trusted=20, dim=3)
    ends = [
        bilevel.minimize(
            problem, problem.x0, problem.y0, steps=20, batch_size=7,
            upper_data=problem.upper_data, lower_data=problem.lower_data,
            method=bilevel.F2SA(
                0.5, 5.0, multiplier=50.0, inner_steps=inner_steps, single_pass=True
            ),
            accumulate=one_by_one,
        )
        for one_by_one in (False, True)
    ]  # fmt: skip
    torch.testing.assert_close(ends[0].x, ends[1].x, rtol=1e-11, atol=1e-12)
    for name in ("upper", "lower", "gap", "direction_norm"):
        found, known = (torch.from_numpy(end.history[name]) for end in ends)
        torch.testing.assert_close(found, known, rtol=1e-8, atol=1e-12)


class _Rounded(torch.autograd.Function):
    """The identity, whose gradient is rounded to bfloat16."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].bfloat16().to(grads[0].dtype)


def test_the_gradient_of_f_is_kept_in_the_given_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LARGE", 1)
    base = Quadratic(seed=0)
    rounded: Any = _Rounded.apply
    by_hand = bilevel.Problem(lambda x, y, b: base.upper(x, rounded(y), b), base.lower)
    ends = [
        bilevel.minimize(
            problem,
            base.x0,
            base.y0,
            steps=30,
            method=bilevel.F2SA(0.1, 0.1, inner_steps=2, single_pass=True),
            accumulate=how,
        ).x
        for problem, how in ((by_hand, True), (base, torch.bfloat16), (base, True))
    ]
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-12, atol=1e-13)
    assert not torch.allclose(ends[1], ends[2], rtol=1e-7)


def test_terms_one_after_another_hold_one_gradient_at_a_time() -> None:
    """A copy has moved, and its gradient is gone, when the next one is evaluated."""
    base = Quadratic(seed=0)
    seen: list[tuple[bool, bool]] = []

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        if solver is not None:
            (first,) = solver.state.points[0].leaves
            seen.append((first.grad is None, not torch.equal(first, base.y0)))
        return base.lower(x, y, batch)

    solver: Any = None
    for how in (False, True, torch.bfloat16):
        solver = bilevel.Solver(
            bilevel.Problem(base.upper, lower),
            base.x0,
            base.y0,
            method=bilevel.F2SA(0.1, 0.1, inner_steps=1, single_pass=True),
            accumulate=how,
        )
        seen.clear()
        solver.step(measure=False)
        assert seen == [(True, False), (True, bool(how))]
        solver = None


def test_terms_one_after_another_hold_one_graph_at_a_time() -> None:
    alive, most = 0, 0

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            return y.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            nonlocal alive
            alive -= 1
            return grads[0]

    base = Quadratic(seed=0)
    through: Any = Held.apply
    problem = bilevel.Problem(
        lambda x, y, b: base.upper(x, through(y), b), lambda x, y, b: base.lower(x, through(y), b)
    )
    for one_by_one, expected in ((False, 3), (True, 1)):
        most = 0
        method = bilevel.F2SA(0.1, 0.1, inner_steps=3, single_pass=True)
        solver = bilevel.Solver(problem, base.x0, base.y0, method=method, accumulate=one_by_one)
        alive, most = 0, 0
        solver.step(measure=False)
        assert most == expected


@pytest.mark.slow
def test_sgd_factories_equal_plain_steps() -> None:
    problem = Quadratic(seed=4)
    plain = bilevel.F2SA(lower_lr=0.3, upper_lr=0.2)
    factories = bilevel.F2SA(
        lower_optimizer=lambda p: torch.optim.SGD(p, lr=0.3),
        upper_optimizer=lambda p: torch.optim.SGD(p, lr=0.2),
    )
    ends = [
        bilevel.minimize(problem, problem.x0, problem.y0, method=m, steps=50).x
        for m in (plain, factories)
    ]
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


def test_the_lower_optimizer_sees_directions_in_the_scale_of_g() -> None:
    # Adam is blind to scale, so its first step from y is lr * sign(grad g + grad f / lam)
    problem = Quadratic(seed=4)
    lam = 7.0
    method = bilevel.F2SA(
        multiplier=lam, inner_steps=1, lower_optimizer=lambda p: torch.optim.SGD(p, lr=1.0)
    )
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method)
    solver.step()
    o = Oracle.of(problem)
    x, y = problem.x0.numpy(), problem.y0.numpy()
    moved = solver.state.penalised.value.detach().numpy() - y
    np.testing.assert_allclose(moved, -(o.g_y(x, y) + o.f_y(y) / lam), atol=1e-12)


@pytest.mark.slow
def test_users_optimizers_reach_the_solution() -> None:
    problem = Quadratic(seed=0)
    method = bilevel.F2SA(
        multiplier=200.0,
        lower_optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5),
        upper_optimizer=lambda p: torch.optim.Adam(p, lr=0.02),
    )
    result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=800)
    error = (result.x - problem.solution).norm() / problem.solution.norm()
    assert error < 0.05


def test_a_sweep_is_the_full_gradient_whatever_the_chunks() -> None:
    problem = WeightedLogistic(train=101, trusted=37, dim=3)
    directions = []
    for chunk in (None, 10, 101):
        solver = bilevel.Solver(
            problem,
            problem.x0,
            problem.y0 + 0.3,
            method=bilevel.F2SA(0.1, 1.0, multiplier=20.0, inner_steps=1),
            upper_data=problem.upper_data,
            lower_data=problem.lower_data,
            batch_size=4,
            chunk_size=chunk,
            direction_batch_size="all",
        )
        info = solver.step()
        y, z = solver.state.penalised.value.detach(), solver.y
        x = problem.x0.clone().requires_grad_()
        phi = problem.upper(x, y, None) + 20.0 * (
            problem.lower(x, y, None) - problem.lower(x, z, None)
        )
        (exact,) = torch.autograd.grad(phi, x)
        torch.testing.assert_close(problem.x0 - solver.x, exact, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(info.upper, problem.upper(problem.x0, z, None))
        directions.append(solver.x)
    torch.testing.assert_close(directions[0], directions[2], rtol=1e-12, atol=1e-14)


def test_running_statistics_move_with_their_own_copys_inner_steps_only() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)) + 5

    def lower(x: Tensor, y: nn.Module, batch: Tensor) -> Tensor:
        return (y(batch) ** 2).mean() + (x**2).sum() * sum((p**2).sum() for p in y.parameters())

    def upper(x: Tensor, y: nn.Module, batch: Tensor) -> Tensor:
        return ((y(batch) - 1) ** 2).mean()

    solver = bilevel.Solver(
        bilevel.Problem(upper, lower),
        torch.ones(1),
        model,
        method=bilevel.F2SA(lower_lr=0.01, upper_lr=0.01, inner_steps=2),
        upper_data=inputs,
        lower_data=inputs,
    )
    y, z = solver.state.points
    tracked = [c.value[0].num_batches_tracked for c in (y, z)]
    assert [int(t) for t in tracked] == [0, 0]  # construction evaluates, and puts them back
    solver.step()
    # y sees f and g in each of the two inner steps, z only g; the direction and the report neither
    assert [int(t) for t in tracked] == [4, 2]
    assert z.value[0].running_mean.mean() == pytest.approx(
        float(inputs.mean()) * (1 - 0.9**2), rel=1e-5
    )
    assert int(model[0].num_batches_tracked) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [bilevel.F2SA, bilevel.F3SA])
def test_from_theory_runs_the_design(cls: Any) -> None:
    constants = bilevel.theory.Constants(mu_g=1.0, l_g1=1.0, l_f1=1.0, l_f0=1.0)
    method = cls.from_theory(constants, regime="deterministic", lam0=3.0)
    design = bilevel.theory.design(
        constants, algorithm=cls.algorithm, regime="deterministic", lam0=3.0
    )
    for k in (0, 1, 10, 1000):
        assert method.rates.lower(k) == design.gamma(k)
        assert method.rates.penalty(k) == pytest.approx(design.alpha(k) * design.multiplier(k))
        assert method.rates.upper(k) == pytest.approx(design.xi * design.alpha(k))
        assert method.rates.multiplier(k) == design.multiplier(k)
    assert method.coupling == "independent"
    if cls is bilevel.F2SA:
        assert method.inner_steps == design.T
    else:
        assert method.momentum == design.momentum


@pytest.mark.parametrize("method", slow_except(["f2sa"], ["f2sa", "f3sa"]))
def test_fused_attention_which_has_no_second_derivative_is_no_obstacle(method: str) -> None:
    values = torch.randn(12, 1, 8, 4)

    def attended(y: Tensor) -> Tensor:
        q = values * y
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return nn.functional.scaled_dot_product_attention(q, values, values)

    problem = bilevel.Problem(
        lambda x, y, b: ((attended(y) - values) ** 2).mean(),
        lambda x, y, b: (attended(y) ** 2).mean() + ((y - x) ** 2).sum(),
    )
    result = bilevel.minimize(
        problem, torch.zeros(4), torch.zeros(4), method=method, steps=100, record_every=99
    )
    assert result.history["upper"][-1] < result.history["upper"][0]


def test_methods_are_values() -> None:
    assert bilevel.F2SA(0.1, 0.2) == bilevel.F2SA(lower_lr=0.1, upper_lr=0.2)
    assert bilevel.F2SA(multiplier=Constant(3.0)) != bilevel.F2SA()
    assert "multiplier=10.0" in repr(bilevel.F2SA())


@pytest.mark.slow
@pytest.mark.parametrize("lower_lr", ["auto", 0.05])
@pytest.mark.parametrize("batch_size", [None, 8])
def test_a_single_pass_finds_the_same_steps_one_by_one(
    lower_lr: Any, batch_size: int | None
) -> None:
    """ "auto" tests x with the copies where they end the step, whenever they moved there."""
    torch.manual_seed(0)
    rows = torch.randn(36, 6, dtype=torch.float64)
    targets = rows.sum(1) + torch.randn(36, dtype=torch.float64)

    def error(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return ((batch[0] @ y - batch[1]) ** 2).mean()

    def ridge(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return error(x, y, batch) + (x.exp() * y**2).sum()

    runs = [
        bilevel.minimize(
            bilevel.Problem(error, ridge), -3 * torch.ones(6).double(), torch.zeros(6).double(),
            method=bilevel.F2SA(lower_lr, single_pass=True), steps=40, accumulate=one_by_one,
            upper_data=(rows[:18], targets[:18]), lower_data=(rows[18:], targets[18:]),
            batch_size=batch_size,
        )
        for one_by_one in (False, True)
    ]  # fmt: skip
    torch.testing.assert_close(runs[0].x, runs[1].x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(runs[0].y, runs[1].y, rtol=1e-9, atol=1e-9)
