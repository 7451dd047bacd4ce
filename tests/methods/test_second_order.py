"""SOBO, SOBA, MA-SOBA, AID and ITD against NumPy, closed forms and one another."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

import bilevel
from bilevel.errors import NonFiniteError, ObjectiveError
from bilevel.methods.aid import AID
from bilevel.methods.implicit import Slope
from bilevel.methods.itd import ITD
from bilevel.methods.soba import MASOBA, SOBA
from bilevel.methods.sobo import SOBO
from bilevel.problems import Quadratic, WeightedLogistic
from bilevel.stepping.schedules import Power
from bilevel.variables import Variable, conjugate_gradients, flatten, substituted, unflatten_like
from tests.methods.common import OnceDifferentiable

Array = npt.NDArray[np.float64]
GAMMA, UPPER = Power(0.8, 50, -0.3), Power(0.2, 50, -0.5)
ETA, THETA = Power(0.9, 50, -0.2), Power(0.9, 20, -0.5)
RATES: dict[str, Any] = {"lower_lr": GAMMA, "upper_lr": UPPER}
METHODS = {
    "sobo": SOBO(0.5, 0.2, inner_steps=2),
    "soba": SOBA(0.5, 0.02),
    "masoba": MASOBA(0.5, 0.02, averaging=0.3),
    "aid": AID(0.5, 0.2, inner_steps=2),
    "itd": ITD(0.5, 0.2, inner_steps=3),
}
every = pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))

# How far they come, and how exact they are


def _steps(solver: bilevel.Solver, count: int) -> None:
    for _ in range(count):
        solver.step()


def _direction(problem: Any, method: Any, **data: Any) -> Tensor:
    """The first direction of x from where the lower level is solved."""
    y0 = problem.lower_solution(problem.x0)
    solver = bilevel.Solver(problem, problem.x0, y0, method=method, **data)
    x = solver.x
    solver.step()
    return x - solver.x


def test_aid_is_exact_after_as_many_steps_as_dimensions() -> None:
    problem = Quadratic(seed=0)
    exact = problem.gradient(problem.x0)
    errors = [
        float((_direction(problem, AID(1.0, 1.0, cg_steps=n)) - exact).norm() / exact.norm())
        for n in range(1, 6)
    ]
    assert errors[4] < 1e-10
    assert errors[3] > 1e-6  # the fifth step is the one that two public libraries drop
    assert errors == sorted(errors, reverse=True)


def test_aid_starts_from_the_last_adjoint() -> None:
    problem = Quadratic(seed=0)
    y = problem.lower_solution(problem.x0)
    exact = torch.linalg.solve(problem.A, y - problem.t)
    ends = {}
    for warm in (True, False):
        # x hardly moves, so one step of conjugate gradients at a time adds up to steepest descent
        method = AID(1.0, 1e-9, cg_steps=1, inner_steps=1, warm_start=warm)
        solver = bilevel.Solver(problem, problem.x0, y, method=method)
        _steps(solver, 60)
        ends[warm] = float((solver.state.adjoint - exact).norm() / exact.norm())
    assert ends[True] < 1e-4
    assert ends[False] > 0.1


def test_aid_stops_at_a_direction_without_curvature() -> None:
    saddle = bilevel.Problem(
        lambda x, y, b: (y - 1).sum() + (x**2).sum(),
        lambda x, y, b: 0.5 * (torch.tensor([1.0, -2.0]) * (y - x) ** 2).sum(),
    )
    solver = bilevel.Solver(
        saddle, torch.ones(2), torch.ones(2), method=AID(0.1, 0.1, inner_steps=1)
    )
    solver.step()
    assert torch.equal(solver.state.adjoint, torch.zeros(2))
    torch.testing.assert_close(solver.x, 0.8 * torch.ones(2))


def test_truncated_conjugate_gradients_are_the_best_in_their_subspace() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    H, b = root @ root.T + torch.eye(8), torch.randn(8, generator=generator, dtype=torch.float64)
    for start in (None, torch.randn(8, generator=generator, dtype=torch.float64)):
        residual = b if start is None else b - H @ start
        for steps in range(1, 8):
            powers = [torch.linalg.matrix_power(H, n) @ residual for n in range(steps)]
            basis = torch.linalg.qr(torch.stack(powers, dim=1)).Q
            best = basis @ torch.linalg.solve(basis.T @ H @ basis, basis.T @ residual)
            found = conjugate_gradients(lambda v: H @ v, b, steps=steps, start=start)
            known = best if start is None else start + best
            torch.testing.assert_close(found, known, rtol=1e-8, atol=1e-10)
    products: list[Tensor] = []

    def identity(v: Tensor) -> Tensor:
        products.append(v)
        return v

    assert torch.equal(conjugate_gradients(identity, b, steps=100), b)
    assert len(products) == 1  # one step solves it, and then there is no second


@pytest.mark.parametrize("degree", [0, 1, 5, 20])
def test_sobos_series_is_the_matrix_series(degree: int) -> None:
    problem = Quadratic(dim_x=3, dim_y=6, seed=2)
    eta = 0.7
    found = _direction(problem, SOBO(1.0, 1.0, neumann_steps=degree, neumann_lr=eta))
    # eta * sum_{q<=Q} (I - eta A)^q = A^-1 (I - (I - eta A)^(Q+1)): that is the stated bias
    identity = torch.eye(6, dtype=torch.float64)
    left = torch.linalg.matrix_power(identity - eta * problem.A, degree + 1)
    y = problem.lower_solution(problem.x0)
    implicit = problem.B.T @ (identity - left) @ (y - problem.t)
    known = problem.rho * problem.x0 + implicit
    torch.testing.assert_close(found, known, rtol=1e-12, atol=1e-12)


def test_the_series_takes_its_step_from_lower_lr() -> None:
    problem = Quadratic(seed=2)
    same = [_direction(problem, SOBO(0.3, 1.0, neumann_lr=eta)) for eta in (None, 0.3)]
    assert torch.equal(*same)
    optimizers = SOBO(upper_lr=1.0, lower_optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    curvature = float(torch.linalg.eigvalsh(problem.A)[-1])
    torch.testing.assert_close(
        _direction(problem, optimizers),
        _direction(problem, SOBO(0.5, 1.0, neumann_lr=1 / curvature)),
        rtol=1e-3,
        atol=1e-3,
    )


def _log_problem() -> tuple[bilevel.Problem, Tensor, Tensor]:
    """Not quadratic, so that second derivatives change along the way."""
    problem = bilevel.Problem(
        lambda x, y, b: ((y - 1) ** 2).sum() + 0.1 * (x**2).sum() + (x * y).sum(),
        lambda x, y, b: (x.exp() * y**2).sum() + (y + x).cosh().log().sum() + 0.1 * (y**4).sum(),
    )
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    return problem, x, y


@pytest.mark.parametrize("y_set", [None, bilevel.sets.Box(-0.2, 0.5), bilevel.sets.Ball(0.5)])
def test_itd_is_the_gradient_of_the_unrolled_function(y_set: Any) -> None:
    problem, x0, y0 = _log_problem()
    problem.y_set = y_set
    solver = bilevel.Solver(problem, x0, y0, method=ITD(0.1, 0.5, inner_steps=5))
    x, y = x0, y0 if y_set is None else y_set(y0)
    for _ in range(10):
        x = x.detach().requires_grad_()
        moved = y.detach().requires_grad_()
        for _ in range(5):
            (slope,) = torch.autograd.grad(problem.lower(x, moved, None), moved, create_graph=True)
            moved = moved - 0.1 * slope
            moved = moved if y_set is None else y_set(moved)
        (direction,) = torch.autograd.grad(problem.upper(x, moved, None), x)
        x, y = x.detach() - 0.5 * direction, moved.detach()
        solver.step()
        torch.testing.assert_close(solver.x, x, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(solver.y, y, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("method", "bound"),
    [
        (ITD(0.1, 1.0, inner_steps=200), 1e-10),
        (AID(0.1, 1.0, inner_steps=200), 1e-10),
        (SOBO(0.1, 1.0, inner_steps=200, neumann_steps=200), 1e-10),
    ],
)
def test_tends_to_the_exact_hypergradient(method: Any, bound: float) -> None:
    problem, x0, y0 = _log_problem()
    exact = bilevel.hypergradient(problem, x0, y0)
    solver = bilevel.Solver(problem, x0, y0, method=method)
    solver.step()
    assert (x0 - solver.x - exact).norm() < bound * exact.norm()


def test_itd_falls_short_by_what_it_does_not_unroll() -> None:
    problem = Quadratic(seed=0)
    exact = problem.gradient(problem.x0) - problem.rho * problem.x0
    errors = []
    for T in (5, 20, 80):
        found = _direction(problem, ITD(1.0, 1.0, inner_steps=T)) - problem.rho * problem.x0
        left = torch.linalg.matrix_power(torch.eye(5, dtype=torch.float64) - problem.A, T)
        known = problem.B.T @ left @ (problem.phi(problem.x0) - problem.t)
        torch.testing.assert_close(exact - found, known, rtol=1e-9, atol=1e-11)
        errors.append(float((exact - found).norm()))
    assert errors[2] < 0.01 * errors[1] < errors[0]


# What they share with every other method


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeps_the_dtype(method: Any, dtype: torch.dtype) -> None:
    problem = bilevel.Problem(
        lambda x, y, b: ((y["a"] - 1) ** 2).sum() + ((y["b"] - 1) ** 2).sum() + (x**2).sum(),
        lambda x, y, b: ((y["a"] - x) ** 2).sum() + 0.5 * ((y["b"] + x) ** 2).sum(),
    )
    start = torch.zeros(2, dtype=dtype)
    y0 = {"a": start, "b": torch.zeros(2, dtype=torch.float32)}
    result = bilevel.minimize(problem, start, y0, method=method, steps=5)
    assert result.x.dtype == dtype
    assert [v.dtype for v in result.y.values()] == [dtype, torch.float32]
    assert torch.isfinite(result.x).all()
    assert result.y["a"].abs().max() > 0 or result.x.abs().max() == 0


@every
def test_a_sweep_is_the_full_gradient_whatever_the_chunks(method: Any) -> None:
    problem = WeightedLogistic(train=31, trusted=17, dim=3)
    method = copy.copy(method)
    ends = []
    # full batches within, so that only the direction's own parts could differ
    for data in (
        {"upper_data": problem.upper_data, "lower_data": problem.lower_data},
        {
            "upper_data": problem.upper_data,
            "lower_data": problem.lower_data,
            "direction_batch_size": "all",
            "chunk_size": 5,
        },
    ):
        solver = bilevel.Solver(problem, problem.x0, problem.y0 + 0.3, method=method, **data)
        infos = [solver.step() for _ in range(5)]
        ends.append((solver.x, solver.y, infos[-1].upper, infos[-1].lower))
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-13)


@every
def test_optimizers_and_sets(method: Any) -> None:
    problem = Quadratic(seed=4)
    boxed = bilevel.Problem(
        problem.upper, problem.lower, x_set=bilevel.sets.Box(-0.2, 0.2), y_set=bilevel.sets.Ball(3)
    )
    result = bilevel.minimize(boxed, problem.x0, problem.y0, method=method, steps=10)
    assert result.x.abs().max() <= 0.2

    given: dict[str, Any] = {"upper_optimizer": lambda p: torch.optim.SGD(p, lr=0.02)}
    plain: dict[str, Any] = {"upper_lr": 0.02, "lower_lr": 0.1}
    if isinstance(method, ITD):
        given["lower_lr"] = 0.1
    else:
        given["lower_optimizer"] = lambda p: torch.optim.SGD(p, lr=0.1)
    for secondary in ("neumann_lr", "adjoint_lr"):
        if hasattr(method, secondary):
            given[secondary] = 0.1
    ends = [
        bilevel.minimize(
            problem, problem.x0, problem.y0, method=type(method)(**settings), steps=10
        ).x
        for settings in (given, plain)
    ]
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


@every
def test_running_statistics_move_with_inner_steps_only(method: Any) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)) + 5

    def lower(x: Tensor, y: nn.Module, batch: Tensor) -> Tensor:
        return (y(batch) ** 2).mean() + (x**2).sum() * sum((p**2).sum() for p in y.parameters())

    solver = bilevel.Solver(
        bilevel.Problem(lambda x, y, batch: ((y(batch) - 1) ** 2).mean(), lower),
        torch.ones(1),
        model,
        method=replace(method, lower_lr=0.05, upper_lr=0.01),
        upper_data=inputs,
        lower_data=inputs,
    )
    for _ in range(3):
        solver.step()
    inner = getattr(method, "inner_steps", 1)
    assert int(solver.state.y.value[0].num_batches_tracked) == 3 * inner
    assert int(model[0].num_batches_tracked) == 0
    assert not torch.equal(solver.x, torch.ones(1))


def test_steps_cost_what_the_properties_say() -> None:
    problem = Quadratic(seed=0)
    calls = {"f": 0, "g": 0}

    def counted(name: str, objective: Any) -> Any:
        def call(x: Tensor, y: Tensor, batch: Any) -> Tensor:
            calls[name] += 1
            return objective(x, y, batch)

        return call

    watched = bilevel.Problem(counted("f", problem.upper), counted("g", problem.lower))
    for method, f, g in (
        (SOBO(0.1, 0.1, inner_steps=4, neumann_steps=3), 1, 4 + 3 + 1),
        (SOBA(0.1, 0.1), 1, 1),
        (MASOBA(0.1, 0.1), 1, 1),
        (AID(0.1, 0.1, inner_steps=4), 1, 4 + 2),
        (ITD(0.1, 0.1, inner_steps=4), 1, 4),
    ):
        assert method.properties.order == 2
        solver = bilevel.Solver(watched, problem.x0, problem.y0, method=method)
        calls.update(f=0, g=0)
        solver.step(measure=False)
        assert calls == {"f": f, "g": g}


# What they refuse


def _attention(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    q = y.reshape(1, 1, 1, 4).expand(1, 1, 8, 4)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        value: Tensor = nn.functional.scaled_dot_product_attention(q, q, q)
    return (value**2).mean() + (x * y).sum()


half_square: Any = OnceDifferentiable.apply
ONCE: dict[str, Any] = {
    "alone": lambda x, y, b: half_square(y - x).sum(),
    "weighted by x": lambda x, y, b: (x.exp() * half_square(y)).sum(),
    # here torch would silently leave the marked part out of the Hessian
    "beside another term": lambda x, y, b: half_square(y - x).sum() + (y**2).sum(),
    "not implemented": _attention,
    "linear": lambda x, y, b: (x * y).sum(),
}


@every
@pytest.mark.parametrize("lower", ONCE.values(), ids=list(ONCE))
def test_an_objective_without_second_derivatives_is_refused(method: Any, lower: Any) -> None:
    problem = bilevel.Problem(lambda x, y, b: ((y - 1) ** 2).sum(), lower)
    start = torch.ones(4)
    solver = bilevel.Solver(problem, start, 0.5 * start, method=method)
    name = type(method).__name__
    with pytest.raises(ObjectiveError, match=f"differentiated twice.*{name} needs second deriv"):
        solver.step()
    assert all(leaf.grad is None for leaf in solver.state.y.leaves)


@every
def test_f_need_not_be_differentiated_twice(method: Any) -> None:
    problem = bilevel.Problem(
        lambda x, y, b: half_square(y - 1).sum(), lambda x, y, b: ((y - x) ** 2).sum()
    )
    start = torch.zeros(4)
    result = bilevel.minimize(problem, start, start, method=method, steps=5)
    assert result.x.abs().max() > 0


@every
def test_other_errors_of_an_objective_are_left_alone(method: Any) -> None:
    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        if calls:
            raise NotImplementedError("this branch is not implemented")
        return ((y - x) ** 2).sum()

    calls: list[int] = []
    start = torch.zeros(2)
    solver = bilevel.Solver(
        bilevel.Problem(lambda x, y, b: (y**2).sum(), lower), start, start, method=method
    )
    calls.append(1)
    with pytest.raises(NotImplementedError, match="this branch"):
        solver.step()


@every
@pytest.mark.parametrize("level", ["upper", "lower"])
def test_non_finite_numbers_stop_the_run_by_name(method: Any, level: str) -> None:
    problem = Quadratic(seed=0)
    bad: list[float] = []

    def spoilt(name: str, objective: Any) -> Any:
        def call(x: Tensor, y: Tensor, batch: Any) -> Tensor:
            return objective(x, y, batch) * (bad[0] if bad and name == level else 1.0)

        return call

    solver = bilevel.Solver(
        bilevel.Problem(spoilt("upper", problem.upper), spoilt("lower", problem.lower)),
        problem.x0,
        problem.y0,
        method=method,
    )
    solver.step()
    bad.append(float("nan"))
    with pytest.raises(NonFiniteError, match=rf"{level}\(x, y\).*step 1") as caught:
        solver.step()
    assert caught.value.state is not None
    leaves = caught.value.state["state"]["y"]["leaves"]
    assert all(torch.isfinite(leaf).all() for leaf in leaves)


def test_a_second_derivative_that_is_not_finite_stops_the_run() -> None:
    # |y|^1.5 has a finite slope and an infinite curvature at 0
    problem = bilevel.Problem(
        lambda x, y, b: (y - 1).sum() + (x**2).sum(),
        lambda x, y, b: (y.abs() ** 1.5).sum() + 0 * (x * y).sum(),
    )
    for method in (AID(0.1, 0.1), SOBO(0.1, 0.1), SOBA(0.1, 0.1), ITD(0.1, 0.1)):
        solver = bilevel.Solver(problem, torch.zeros(2), torch.zeros(2), method=method)
        with pytest.raises(NonFiniteError):
            _steps(solver, 2)  # which of the two is not the point


# The tools


def test_substituted_puts_everything_back() -> None:
    shared = nn.Linear(2, 2, bias=False)
    holder = nn.Sequential(shared, nn.ReLU(), shared)
    y = Variable({"net": holder, "w": torch.ones(2)}, "y")
    value, before = y.value, list(y.leaves)
    doubled = [2 * leaf for leaf in y.leaves]
    with suppress(KeyError), substituted(y, doubled):
        assert y.value["w"] is doubled[1]
        assert y.value["net"][0].weight is y.value["net"][2].weight is doubled[0]
        assert list(y.value["net"].parameters()) == [doubled[0]]
        raise KeyError
    assert y.value is value
    assert shared.weight is before[0]
    assert isinstance(shared.weight, nn.Parameter)


def test_products_are_those_of_the_hessian() -> None:
    problem, x0, y0 = _log_problem()
    x, y = Variable.copy_of(x0, "x"), Variable.copy_of(y0, "y")
    whole = torch.autograd.functional.hessian(
        lambda z: problem.lower(z[:4], z[4:], None), torch.cat([x0, y0])
    )
    v = torch.arange(4.0, dtype=torch.float64) - 1
    slope = Slope.of(problem.g(x, y, None), y.leaves, "the test")
    torch.testing.assert_close(slope.hessian_product(v), whole[4:, 4:] @ v)
    torch.testing.assert_close(slope.mixed_product(v, x)[0], whole[:4, 4:] @ v)


def test_flat_and_back() -> None:
    tensors = [torch.ones(2, 3), torch.zeros(()), torch.full((1,), 2.0, dtype=torch.bfloat16)]
    back = unflatten_like(flatten(tensors), tensors)
    assert [t.dtype for t in back] == [t.dtype for t in tensors]
    assert all(map(torch.equal, back, tensors))
