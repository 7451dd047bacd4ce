"""The least-squares problems: every closed form against the objectives, solvers and differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import bilevel
from bilevel.errors import ArgumentError, ArgumentTypeError, BilevelError
from bilevel.problems import LeastSquares, Nonconvex, Quadratic

Array = npt.NDArray[np.float64]
NAN, INF = float("nan"), float("inf")
MULTIPLIERS = (0.5, 10.0, 1000.0)


class Squares(LeastSquares):
    """LeastSquares with a map of its own, phi(x) = B (x_1^2, x_2^2, ...)."""

    def phi(self, x: Tensor) -> Tensor:
        return (x * x) @ self.B.T

    def jacobian_product(self, x: Tensor, v: Tensor) -> Tensor:
        return 2 * x * (v @ self.B)


class Case(NamedTuple):
    """A kind of problem, and u(x) of its map phi(x) = B u(x) written with NumPy."""

    make: Callable[..., LeastSquares]
    inner: Callable[[Array], Array]


CASES = {
    "least squares": Case(LeastSquares, lambda x: x),
    "quadratic": Case(Quadratic, lambda x: x),
    "nonconvex": Case(Nonconvex, lambda x: x + 0.5 * np.sin(4.0 * x)),
    "own map": Case(Squares, lambda x: x * x),
}
DIMENSIONS = {"wide": (4, 3), "tall": (2, 5), "one": (1, 1)}


class Instance(NamedTuple):
    """A problem, a point that is not its start, and phi there."""

    problem: LeastSquares
    x: Tensor
    y: Tensor
    phi: Array


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest.fixture(params=DIMENSIONS.values(), ids=list(DIMENSIONS))
def instance(case: Case, request: pytest.FixtureRequest) -> Instance:
    dim_x, dim_y = request.param
    problem = case.make(dim_x, dim_y, rho=0.3, seed=4)
    x, y = normal(dim_x, seed=5), normal(dim_y, seed=6)
    return Instance(problem, x, y, problem.B.numpy() @ case.inner(x.numpy()))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hessian_of(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.func.jacrev(torch.func.grad(function))


def minimiser(problem: LeastSquares, x: Tensor, upper: float, lower: float) -> Tensor:
    """argmin_y upper * f + lower * g from the objectives alone, by one Newton step.

    It is exact, because the objectives are quadratic in y.
    """

    def objective(y: Tensor) -> Tensor:
        return upper * problem.upper(x, y, None) + lower * problem.lower(x, y, None)

    start = torch.ones_like(problem.y0)
    slope = torch.func.grad(objective)(start)
    return start - torch.linalg.solve(hessian_of(objective)(start), slope)


def central_differences(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    h = 1e-5
    units = torch.eye(len(x), dtype=x.dtype)
    return torch.stack([(function(x + h * e) - function(x - h * e)) / (2 * h) for e in units])


def close(found: Tensor, expected: Any, tolerance: float = 1e-12) -> bool:
    """Equal up to ``tolerance`` relative to the size of what is expected (at least 1)."""
    expected = np.asarray(expected)
    scale = max(1.0, float(np.abs(expected).max()))
    return found.shape == expected.shape and bool(
        np.abs(found.numpy() - expected).max() <= tolerance * scale
    )


def slope_in_log(multipliers: Array, sizes: list[float]) -> float:
    return float(np.polyfit(np.log(multipliers), np.log(sizes), 1)[0])


# Closed forms


def test_objectives_are_the_documented_ones(instance: Instance) -> None:
    problem, x, y, phi = instance
    A, t, residual = problem.A.numpy(), problem.t.numpy(), y.numpy() - phi
    f = 0.5 * np.sum((y.numpy() - t) ** 2) + 0.3 / 2 * np.sum(x.numpy() ** 2)
    assert close(problem.upper(x, y, None), f)
    assert close(problem.lower(x, y, None), 0.5 * residual @ A @ residual)


def test_lower_solution_is_stationary_and_solves_the_normal_equations(instance: Instance) -> None:
    problem, x, _, phi = instance
    y = problem.lower_solution(x)
    slope = torch.func.grad(problem.lower, argnums=1)(x, y, None)
    assert slope.norm() < 1e-14
    assert close(y, phi)
    assert close(y, minimiser(problem, x, upper=0.0, lower=1.0))


@pytest.mark.parametrize("lam", MULTIPLIERS)
def test_penalised_solution_is_stationary_and_solves_its_linear_system(
    instance: Instance, lam: float
) -> None:
    problem, x, _, phi = instance
    A, t = problem.A.numpy(), problem.t.numpy()
    y = problem.penalised_solution(x, lam)
    f_y = torch.func.grad(problem.upper, argnums=1)(x, y, None)
    g_y = torch.func.grad(problem.lower, argnums=1)(x, y, None)
    assert (f_y + lam * g_y).norm() < 1e-12 * lam
    assert f_y.norm() > 1e-6  # the two cancel; neither vanishes
    system = np.eye(len(t)) + lam * A
    assert close(y, scipy.linalg.solve(system, t + lam * A @ phi, assume_a="pos"))


def test_value_and_gradient_of_F(instance: Instance) -> None:
    problem, x, _, _ = instance

    def value(x: Tensor) -> Tensor:
        return problem.upper(x, minimiser(problem, x, upper=0.0, lower=1.0), None)

    assert close(problem.value(x), value(x))
    assert close(problem.gradient(x), central_differences(value, x), 1e-8)


@pytest.mark.parametrize("lam", MULTIPLIERS)
def test_penalised_gradient_is_that_of_the_penalised_minimum(
    instance: Instance, lam: float
) -> None:
    problem, x, _, _ = instance

    def penalised_minimum(x: Tensor) -> Tensor:
        y = minimiser(problem, x, upper=1.0, lower=lam)
        z = minimiser(problem, x, upper=0.0, lower=1.0)
        gap = problem.lower(x, y, None) - problem.lower(x, z, None)
        return problem.upper(x, y, None) + lam * gap

    expected = central_differences(penalised_minimum, x)
    assert close(problem.penalised_gradient(x, lam), expected, 1e-7)


def test_closed_forms_by_hand() -> None:
    problem = Quadratic(
        A=torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
        B=torch.tensor([[1.0], [2.0]]),
        t=torch.tensor([3.0, 5.0]),
        rho=0.5,
    )
    x = torch.tensor([2.0], dtype=torch.float64)
    assert close(problem.lower_solution(x), [2.0, 4.0])
    assert close(problem.penalised_solution(x, 1.0), [2 + 1 / 2, 4 + 1 / 3])
    assert close(problem.value(x), 2.0)
    assert close(problem.gradient(x), [-2.0])
    assert close(problem.penalised_gradient(x, 1.0), [-5 / 6])
    assert close(problem.solution, [13 / 5.5])


@pytest.mark.parametrize("shape", [(4, 3), (2, 5), (3, 3)], ids=str)
@pytest.mark.parametrize("rho", [0.0, 0.1, 3.0])
def test_solution_is_the_minimiser(shape: tuple[int, int], rho: float) -> None:
    problem = Quadratic(*shape, rho=rho, seed=2)
    stacked = np.vstack([problem.B.numpy(), rho**0.5 * np.eye(shape[0])])
    target = np.concatenate([problem.t.numpy(), np.zeros(shape[0])])
    expected = scipy.linalg.lstsq(stacked, target)[0]
    assert close(problem.solution, expected, 1e-9)
    assert problem.gradient(problem.solution).norm() < 1e-12
    nearby = problem.solution + 0.1 * normal(50, shape[0], seed=3)
    assert bool((problem.value(nearby) >= problem.value(problem.solution)).all())


@pytest.mark.parametrize(("amplitude", "several"), [(0.2, False), (0.3, True)])
def test_nonconvex_has_several_minima_from_the_stated_amplitude_on(
    amplitude: float, several: bool
) -> None:
    problem = Nonconvex(1, 1, amplitude=amplitude, frequency=4.0, rho=0.0)
    line = torch.linspace(-8, 8, 4001, dtype=torch.float64).unsqueeze(-1)
    values = problem.value(line)
    inside = (values[1:-1] < values[:-2]) & (values[1:-1] < values[2:])
    assert (int(inside.sum()) > 1) == several
    assert int(inside.sum()) > 0


# Constants


@pytest.mark.parametrize("shape", [(4, 3), (2, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("rho", [0.0, 0.3, 3.0])
def test_curvatures_are_those_of_the_hessians(shape: tuple[int, int], rho: float) -> None:
    dim_x, dim_y = shape
    problem = Quadratic(dim_x, dim_y, rho=rho, sigma_f=0.2, sigma_g=0.7, seed=7)

    def joint(objective: Any) -> Callable[[Tensor], Tensor]:
        return lambda point: objective(point[:dim_x], point[dim_x:], None)

    hessians = []
    for seed in (8, 9):
        point = normal(dim_x + dim_y, seed=seed)
        f = hessian_of(joint(problem.upper))(point).numpy()
        g = hessian_of(joint(problem.lower))(point).numpy()
        hessians.append((f, g))
    (f, g), (f_elsewhere, g_elsewhere) = hessians
    constants = problem.constants
    assert constants.mu_g == pytest.approx(np.linalg.eigvalsh(g[dim_x:, dim_x:])[0], rel=1e-10)
    assert constants.l_g1 == pytest.approx(np.abs(np.linalg.eigvalsh(g)).max(), rel=1e-10)
    assert constants.l_f1 == pytest.approx(np.abs(np.linalg.eigvalsh(f)).max(), rel=1e-10)
    assert np.abs(f - f_elsewhere).max() < 1e-13
    assert np.abs(g - g_elsewhere).max() < 1e-13
    assert (constants.l_f2, constants.l_g2) == (0, 0)
    assert (constants.sigma_f, constants.sigma_g) == (0.2, 0.7)


@pytest.mark.parametrize("rho", [0.1, 30.0])
@pytest.mark.parametrize("t_size", [0.1, 10.0])
def test_gradient_bounds_hold_in_the_stated_region(rho: float, t_size: float) -> None:
    t = t_size * normal(3, seed=1)
    problem = Quadratic(4, 3, rho=rho, t=t, seed=10)
    x_radius = 2 * max(float(problem.x0.norm()), float(problem.solution.norm()))
    y_radius = 2 * max(
        float(y.norm())
        for y in (problem.y0, *map(problem.lower_solution, (problem.x0, problem.solution)))
    )
    steepest = torch.linalg.svd(problem.A @ problem.B)
    x, y = normal(500, 4, seed=11), normal(500, 3, seed=12)
    # Where gradients are longest: y away from t, and A (y - Bx) along the largest gain of B'A.
    x[0], y[0] = -steepest.Vh[0], -t
    x[1], y[1] = -steepest.Vh[0], steepest.U[:, 0]
    x = x_radius * x / x.norm(dim=-1, keepdim=True)
    y = y_radius * y / y.norm(dim=-1, keepdim=True)

    both = (0, 1)
    f_x, f_y = torch.func.vmap(torch.func.grad(problem.upper, both), in_dims=(0, 0, None))(
        x, y, None
    )
    g_x, _ = torch.func.vmap(torch.func.grad(problem.lower, both), in_dims=(0, 0, None))(x, y, None)
    longest_f = max(float(f_x.norm(dim=-1).max()), float(f_y.norm(dim=-1).max()))
    longest_g = float(g_x.norm(dim=-1).max())
    constants = problem.constants
    assert longest_f <= constants.l_f0 * (1 + 1e-12)
    assert longest_g <= constants.l_g0 * (1 + 1e-12)
    # Bounds, but not arbitrarily loose ones.
    assert constants.l_f0 <= 4 * longest_f + 4 * float(t.norm())
    assert constants.l_g0 <= 10 * longest_g


def test_constants_do_not_depend_on_how_many_runs_there_are() -> None:
    assert Quadratic(3, 2, runs=(4, 2)).constants == Quadratic(3, 2).constants


# Runs side by side


@pytest.mark.parametrize("runs", [(3,), (2, 3)], ids=str)
def test_runs_are_separate_instances(case: Case, runs: tuple[int, ...]) -> None:
    many, one = case.make(3, 4, runs=runs, seed=13), case.make(3, 4, seed=13)
    assert torch.equal(many.x0, one.x0.expand(*runs, 3))
    assert torch.equal(many.y0, torch.zeros(*runs, 4, dtype=torch.float64))
    x, y = normal(*runs, 3, seed=14), normal(*runs, 4, seed=15)
    maps: dict[str, Callable[[LeastSquares, Tensor], Tensor]] = {
        "lower": lambda p, x: p.lower_solution(x),
        "penalised": lambda p, x: p.penalised_solution(x, 7.0),
        "value": lambda p, x: p.value(x),
        "gradient": lambda p, x: p.gradient(x),
        "penalised gradient": lambda p, x: p.penalised_gradient(x, 7.0),
    }
    for name, of in maps.items():
        rows = [of(one, row) for row in x.reshape(-1, 3)]
        assert close(of(many, x), torch.stack(rows).reshape(*runs, *rows[0].shape)), name
    pairs = list(zip(x.reshape(-1, 3), y.reshape(-1, 4), strict=True))
    for total, part in ((many.upper, one.upper), (many.lower, one.lower)):
        assert close(total(x, y, None), sum(float(part(a, b, None)) for a, b in pairs))


def test_a_run_does_not_feel_its_neighbours() -> None:
    method = bilevel.F2SA(lower_lr=0.5, upper_lr=0.3, inner_steps=3)
    many, one = Quadratic(3, 4, runs=(2,), seed=16), Quadratic(3, 4, seed=16)
    starts = normal(2, 3, seed=17)
    together = bilevel.minimize(many, starts, many.y0, method=method, steps=20)
    for start, x, y in zip(starts, together.x, together.y, strict=True):
        alone = bilevel.minimize(one, start, one.y0, method=method, steps=20)
        assert close(x, alone.x)
        assert close(y, alone.y)


# Noise


@pytest.mark.parametrize("level", ["upper", "lower"])
def test_noise_has_mean_zero_and_the_chosen_size(case: Case, level: str) -> None:
    runs, sigma = 20_000, {"upper": 0.3, "lower": 2.0}[level]
    problem = case.make(3, 4, sigma_f=0.3, sigma_g=2.0, runs=(runs,))
    draw = problem.upper_noise if level == "upper" else problem.lower_noise
    assert draw is not None
    noise = draw(torch.Generator().manual_seed(18))
    assert noise.shape == (runs, 7)
    # Five standard deviations of each estimate.
    assert noise.mean(0).abs().max() < 5 * sigma / (7 * runs) ** 0.5
    assert float((noise**2).sum(-1).mean()) == pytest.approx(
        sigma**2, rel=5 * (2 / (7 * runs)) ** 0.5
    )
    covariance = noise.T @ noise / runs - sigma**2 / 7 * torch.eye(7, dtype=torch.float64)
    assert covariance.abs().max() < 5 * sigma**2 / 7 * (2 / runs) ** 0.5


def test_noise_is_drawn_from_the_generator_alone() -> None:
    problem = Quadratic(3, 4, sigma_f=1.0)
    draw = problem.upper_noise
    assert draw is not None
    generator = torch.Generator().manual_seed(19)
    first, second = draw(generator), draw(generator)
    assert not torch.equal(first, second)
    assert torch.equal(first, draw(torch.Generator().manual_seed(19)))


@pytest.mark.parametrize(("sigma_f", "sigma_g"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_where_sigma_is_zero_there_is_no_noise(sigma_f: float, sigma_g: float) -> None:
    problem = Quadratic(sigma_f=sigma_f, sigma_g=sigma_g)
    assert (problem.upper_noise is None) == (sigma_f == 0)
    assert (problem.lower_noise is None) == (sigma_g == 0)


@pytest.mark.parametrize("runs", [(), (3,)], ids=str)
@pytest.mark.parametrize("level", ["upper", "lower"])
def test_gradient_on_a_noisy_batch_is_the_exact_one_plus_the_batch(
    case: Case, level: str, runs: tuple[int, ...]
) -> None:
    problem = case.make(2, 3, sigma_f=1.0, sigma_g=1.0, runs=runs)
    draw = problem.upper_noise if level == "upper" else problem.lower_noise
    assert draw is not None
    noise = draw(torch.Generator().manual_seed(20))
    objective = problem.upper if level == "upper" else problem.lower
    x, y = normal(*runs, 2, seed=21), normal(*runs, 3, seed=22)
    exact = torch.cat(torch.func.grad(objective, argnums=(0, 1))(x, y, None), dim=-1)
    noisy = torch.cat(torch.func.grad(objective, argnums=(0, 1))(x, y, noise), dim=-1)
    assert close(noisy, exact + noise)


# Construction


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e4])
@pytest.mark.parametrize("dim_y", [1, 4])
def test_random_instances_are_scaled_as_documented(dim_y: int, condition: float) -> None:
    problem = Quadratic(3, dim_y, condition=condition, seed=23)
    A = problem.A.numpy()
    assert np.abs(A - A.T).max() < 1e-15
    eigenvalues = np.linalg.eigvalsh(A)
    assert eigenvalues[-1] == pytest.approx(1)
    if dim_y > 1:
        assert np.linalg.cond(A) == pytest.approx(condition)
    assert np.linalg.norm(problem.B.numpy(), 2) == pytest.approx(1)


def test_the_seed_decides_the_instance() -> None:
    first, again, other = Quadratic(seed=1), Quadratic(seed=1), Quadratic(seed=2)
    for name in ("A", "B", "t", "x0"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
        assert not torch.equal(getattr(first, name), getattr(other, name)), name


GIVEN: dict[str, Any] = {
    "A": torch.tensor([[2.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64),
    "B": torch.arange(6.0, dtype=torch.float64).reshape(3, 2),
    "t": torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64),
}


@pytest.mark.parametrize(
    "names", [("A",), ("B",), ("t",), ("A", "B"), ("A", "t"), ("B", "t"), ("A", "B", "t")], ids=str
)
def test_given_matrices_are_used_and_decide_the_dimensions(names: tuple[str, ...]) -> None:
    problem = Quadratic(**{name: GIVEN[name] for name in names})
    for name in names:
        assert torch.equal(getattr(problem, name), GIVEN[name])
    dim_x = 2 if "B" in names else 5
    assert (problem.x0.shape, problem.y0.shape) == ((dim_x,), (3,))
    x = normal(dim_x, seed=24)
    solution = minimiser(problem, x, upper=1.0, lower=3.0)
    assert close(problem.penalised_solution(x, 3.0), solution)


@pytest.mark.parametrize("make", [LeastSquares, Quadratic, Nonconvex])
def test_single_precision(make: Callable[..., LeastSquares]) -> None:
    problem, reference = make(3, 4, dtype=torch.float32), make(3, 4)
    single, x = problem.x0, problem.x0.double()
    for found, expected in (
        (problem.lower_solution(single), reference.lower_solution(x)),
        (problem.penalised_solution(single, 9.0), reference.penalised_solution(x, 9.0)),
        (problem.value(single), reference.value(x)),
        (problem.gradient(single), reference.gradient(x)),
        (problem.penalised_gradient(single, 9.0), reference.penalised_gradient(x, 9.0)),
        (problem.upper(single, problem.y0, None), reference.upper(x, reference.y0, None)),
        (problem.lower(single, problem.y0, None), reference.lower(x, reference.y0, None)),
    ):
        assert found.dtype == torch.float32
        assert close(found, expected, 1e-5)


def test_nonconvex_takes_the_arguments_of_quadratic() -> None:
    given = Nonconvex(**GIVEN)
    for name, tensor in GIVEN.items():
        assert torch.equal(getattr(given, name), tensor)


BAD: dict[str, tuple[dict[str, Any], type[BilevelError], str]] = {
    "dim_x 0": ({"dim_x": 0}, ArgumentError, "dim_x .* not 0"),
    "dim_y negative": ({"dim_y": -1}, ArgumentError, "dim_y .* not -1"),
    "dim_x fraction": ({"dim_x": 2.5}, ArgumentError, "dim_x .* not 2.5"),
    "condition below 1": ({"condition": 0.5}, ArgumentError, "condition .* not 0.5"),
    "condition nan": ({"condition": NAN}, ArgumentError, "condition .* not nan"),
    "condition inf": ({"condition": INF}, ArgumentError, "condition .* not inf"),
    "condition text": ({"condition": "10"}, ArgumentTypeError, "condition .* not '10'"),
    "rho negative": ({"rho": -0.1}, ArgumentError, "rho .* not -0.1"),
    "rho inf": ({"rho": INF}, ArgumentError, "rho .* not inf"),
    "sigma_f negative": ({"sigma_f": -1.0}, ArgumentError, "sigma_f .* not -1"),
    "sigma_g nan": ({"sigma_g": NAN}, ArgumentError, "sigma_g .* not nan"),
    "dimensions of A and B": (
        {"A": torch.eye(3), "B": torch.ones(2, 3)},
        ArgumentError,
        r"A \(3, 3\), B \(2, 3\)",
    ),
    "dimensions of B and t": (
        {"B": torch.ones(2, 3), "t": torch.ones(3)},
        ArgumentError,
        r"B \(2, 3\) and t \(3,\)",
    ),
    "A not square": ({"A": torch.ones(3, 4)}, ArgumentError, r"\bA\b.*\(3, 4\)"),
    "A not symmetric": ({"A": torch.ones(3, 3).triu()}, ArgumentError, r"\bA\b.*symmetric"),
    "A not positive": ({"A": -torch.eye(3)}, ArgumentError, r"\bA\b.*positive definite"),
    "B not a matrix": ({"B": torch.ones(3)}, ArgumentError, r"\bB\b.*\(3,\)"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), BAD.values(), ids=list(BAD))
def test_bad_arguments_are_named(
    arguments: dict[str, Any], error: type[BilevelError], message: str
) -> None:
    with pytest.raises(error, match=message):
        Quadratic(**arguments)


# What the paper proves


@st.composite
def instances(draw: st.DrawFn) -> Quadratic:
    return Quadratic(
        draw(st.integers(1, 5)),
        draw(st.integers(1, 5)),
        condition=draw(st.floats(1, 100)),
        rho=draw(st.floats(0, 3)),
        seed=draw(st.integers(0, 10_000)),
    )


def points(problem: Quadratic, seed: int, size: float) -> tuple[Tensor, Tensor]:
    x1, x2 = size * normal(2, problem.x0.shape[-1], seed=seed)
    return x1, x2


def bounded_at(problem: Quadratic, *xs: Tensor) -> bilevel.theory.Constants:
    """The problem's constants with an l_f0 that holds wherever the lemmas use it for these x.

    That is between y*(x) and y*_lam(x), and there grad_y f = y - t is longest at y*(x).
    """
    return replace(
        problem.constants,
        l_f0=max(float((problem.lower_solution(x) - problem.t).norm()) for x in xs),
    )


lemma = settings(max_examples=200, deadline=None)
seeds = st.integers(0, 10_000)
sizes = st.floats(0.01, 100)
factors = st.floats(1, 1000)  # the multiplier relative to the smallest that the lemmas allow


def within(a: Tensor, b: Tensor, bound: float) -> bool:
    """||a - b|| <= bound, up to the rounding of a and b."""
    return float((a - b).norm()) <= bound + 1e-13 * float(a.norm() + b.norm())


@pytest.mark.slow
@lemma
@given(instances(), seeds, sizes, factors)
def test_bias_and_distance_are_within_their_bounds(
    problem: Quadratic, seed: int, size: float, factor: float
) -> None:
    x, _ = points(problem, seed, size)
    constants = bounded_at(problem, x)
    lam = factor * constants.convex_multiplier
    direction, exact = problem.penalised_gradient(x, lam), problem.gradient(x)
    assert within(direction, exact, constants.bias_bound(lam))
    y, z = problem.penalised_solution(x, lam), problem.lower_solution(x)
    assert within(y, z, constants.distance_bound(lam))


@pytest.mark.slow
@lemma
@given(instances(), seeds, sizes, factors, factors)
def test_drift_is_within_its_bound(
    problem: Quadratic, seed: int, size: float, factor1: float, factor2: float
) -> None:
    x1, x2 = points(problem, seed, size)
    constants = bounded_at(problem, x1, x2)
    lam1, lam2 = (factor * constants.convex_multiplier for factor in (factor1, factor2))
    for x_far in (x1, x2):  # the same x, and another
        y1, y2 = problem.penalised_solution(x1, lam1), problem.penalised_solution(x_far, lam2)
        assert within(y1, y2, constants.drift_bound(lam1, lam2, float((x1 - x_far).norm())))


def test_the_bounds_are_within_reach() -> None:
    """In one dimension the distance is within a factor 2 of its bound: no slack hides an error."""
    one = torch.ones(1, 1, dtype=torch.float64)
    problem = Quadratic(A=0.5 * one, B=one, t=3 * one[0], rho=0.0)
    x, lam = torch.zeros(1, dtype=torch.float64), 1e6
    distance = float((problem.penalised_solution(x, lam) - problem.lower_solution(x)).norm())
    assert distance == pytest.approx(3 / (0.5 * lam), rel=1e-5)
    assert bounded_at(problem, x).distance_bound(lam) == pytest.approx(2 * distance, rel=1e-5)


def test_bias_falls_as_one_over_the_multiplier(instance: Instance) -> None:
    problem, x, _, _ = instance
    multipliers = np.geomspace(1e3, 1e5, 5)
    bias = [
        float((problem.penalised_gradient(x, lam) - problem.gradient(x)).norm())
        for lam in multipliers
    ]
    assert slope_in_log(multipliers, bias) == pytest.approx(-1, abs=0.05)


@pytest.mark.slow
def test_bias_of_the_limit_point_falls_as_one_over_the_multiplier() -> None:
    problem = Quadratic(4, 5, condition=2.0, rho=0.5, seed=0)
    A, B, t = (tensor.numpy() for tensor in (problem.A, problem.B, problem.t))
    multipliers = np.geomspace(10, 1000, 5)
    bias = []
    for lam in multipliers:
        method = bilevel.F2SA(lower_lr=1.0, upper_lr=0.8, multiplier=float(lam), inner_steps=5)
        result = bilevel.minimize(
            problem, problem.x0, problem.y0, method=method, steps=120, record_every=120
        )
        damped = lam * B.T @ A @ np.linalg.inv(np.eye(5) + lam * A)
        limit = np.linalg.solve(0.5 * np.eye(4) + damped @ B, damped @ t)
        assert close(result.x, limit, 1e-11)  # the run has converged
        x = result.x.numpy()
        bias.append(float(np.linalg.norm(0.5 * x + B.T @ (B @ x - t))))
    assert slope_in_log(multipliers, bias) == pytest.approx(-1, abs=0.05)
    assert np.all(np.diff(bias) < 0)
