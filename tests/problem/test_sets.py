"""Sets: projections held to the definition of the nearest point, and the methods inside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import bilevel
from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.problem.sets import Ball, Box, Projection, Simplex, projections
from bilevel.variables import Variable

Array = npt.NDArray[np.float64]

coordinates = st.floats(-1e3, 1e3, allow_nan=False, width=64)
points = st.lists(coordinates, min_size=1, max_size=6).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)
sizes = st.floats(1e-2, 1e2, allow_nan=False)
seeds = st.integers(0, 2**32 - 1)


def uniform(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_nearest(point: Tensor, found: Tensor, members: Tensor, scale: float) -> None:
    """P is the projection of v iff it is in the set and <v - P, w - P> <= 0 for all w in it."""
    slack = 1e-9 * (1 + scale + float(point.abs().max())) ** 2
    assert bool(((members - found) @ (point - found) <= slack).all())


def corners(*axes: tuple[float, float]) -> Tensor:
    return torch.cartesian_prod(*(torch.tensor(a, dtype=torch.float64) for a in axes)).reshape(
        -1, len(axes)
    )


@settings(deadline=None)
@given(points, coordinates, sizes)
def test_box(point: Tensor, low: float, width: float) -> None:
    box = Box(low, low + width)
    found = box(point)
    assert bool(((found >= box.low) & (found <= box.high)).all())
    assert torch.equal(box(found), found)
    # a linear function is largest over a box at a corner, so the corners stand for all of it
    check_nearest(point, found, corners(*[(box.low, box.high)] * len(point)), abs(low) + width)


@settings(deadline=None)
@example(torch.ones(1, dtype=torch.float64), 3.0625, 0)  # where r * (1 / r) is not 1
@given(points, sizes, seeds)
def test_ball(point: Tensor, radius: float, seed: int) -> None:
    ball = Ball(radius)
    found = ball(point)
    assert found.norm() <= radius * (1 + 1e-14)
    torch.testing.assert_close(ball(found), found, rtol=1e-14, atol=0)
    if point.norm() <= radius:
        assert torch.equal(found, point)
    directions = uniform(seed, 50, len(point)) - 0.5
    # over a ball a linear function is largest in its own direction
    directions = torch.cat([directions, (point - found).unsqueeze(0)])
    lengths = directions.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    check_nearest(point, found, radius * directions / lengths, radius)


@settings(deadline=None)
@given(points, sizes)
def test_simplex(point: Tensor, total: float) -> None:
    simplex = Simplex(total)
    found = simplex(point)
    assert bool((found >= 0).all())
    assert float(found.sum()) == pytest.approx(total, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(simplex(found), found, rtol=1e-9, atol=1e-9)
    check_nearest(point, found, total * torch.eye(len(point), dtype=torch.float64), total)


@settings(deadline=None)
@given(points, sizes)
def test_the_entries_of_the_simplex_projection_are_lowered_by_one_threshold(
    point: Tensor, total: float
) -> None:
    expected = simplex_by_bisection(point.numpy(), total)
    np.testing.assert_allclose(Simplex(total)(point).numpy(), expected, rtol=0, atol=1e-8)


def simplex_by_bisection(point: Array, total: float = 1.0) -> Array:
    """The threshold t with sum max(v - t, 0) = total, found without sorting."""
    low, high = float(point.min()) - total, float(point.max())
    for _ in range(200):
        middle = (low + high) / 2
        if np.maximum(point - middle, 0).sum() > total:
            low = middle
        else:
            high = middle
    return np.maximum(point - high, 0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1e9, 0.0], [1, 0]), ([5e7, 5e7], [0.5, 0.5]), ([-1e9, -2e9, -3e9], [1, 0, 0])],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_simplex_takes_numbers_beside_which_its_total_vanishes(
    values: list[float], expected: list[float], dtype: torch.dtype
) -> None:
    assert Simplex()(torch.tensor(values, dtype=dtype)).tolist() == expected


def test_the_simplex_projects_each_row() -> None:
    rows = uniform(0, 2, 3, 4) * 4 - 2
    together = Simplex(2.0)(rows)
    for index in np.ndindex(2, 3):
        expected = simplex_by_bisection(rows[index].numpy(), 2.0)
        np.testing.assert_allclose(together[index].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("project", [Box(0, 1), Ball(1.0), Simplex()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_projections_keep_type_and_shape_and_the_argument(
    project: Projection, dtype: torch.dtype
) -> None:
    point = (uniform(1, 3, 2) * 4 - 2).to(dtype)
    before = point.clone()
    found = project(point)
    assert (found.dtype, found.shape) == (dtype, point.shape)
    assert torch.equal(point, before)


def test_infinite_bounds_leave_a_side_open() -> None:
    point = torch.tensor([-7.0, 7.0])
    assert Box(-math.inf, 1)(point).tolist() == [-7, 1]
    assert Box(0, math.inf)(point).tolist() == [0, 7]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Box(2, 1), "low=2, high=1"),
        (lambda: Box(math.nan, 1), "low=nan, high=1"),
        (lambda: Box(0, math.nan), "low=0, high=nan"),
        (lambda: Ball(0.0), r"radius > 0, not 0\.0"),
        (lambda: Ball(-1.0), r"radius > 0, not -1\.0"),
        (lambda: Ball(math.inf), "radius > 0, not inf"),
        (lambda: Simplex(0.0), r"total > 0, not 0\.0"),
        (lambda: Simplex(math.nan), "total > 0, not nan"),
        (lambda: Simplex()(torch.tensor(1.0)), "at least one dimension"),
    ],
)
def test_sets_that_are_none_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


# Sets for the parts of a variable


def halved(tensor: Tensor) -> Tensor:
    return tensor / 2


def chosen(value: Any, wanted: Any) -> dict[str, Projection | None]:
    variable = Variable(value, "x")
    return dict(zip(variable.names, projections(variable, "x_set", wanted), strict=True))


def pair() -> dict[str, Any]:
    return {"a": torch.ones(2), "b": [torch.ones(1), None]}


def test_no_set_leaves_all_free() -> None:
    assert chosen(pair(), None) == {"x['a']": None, "x['b'][0]": None}


def test_one_set_goes_to_every_tensor() -> None:
    assert chosen(pair(), halved) == {"x['a']": halved, "x['b'][0]": halved}


def test_a_tree_of_sets_goes_part_by_part() -> None:
    box, ball = Box(0, 1), Ball(1.0)
    assert chosen(pair(), {"a": box}) == {"x['a']": box, "x['b'][0]": None}
    assert chosen(pair(), {"a": None, "b": ball}) == {"x['a']": None, "x['b'][0]": ball}
    assert chosen(pair(), {"a": box, "b": [ball, None]}) == {"x['a']": box, "x['b'][0]": ball}
    assert chosen((torch.ones(1), torch.ones(1)), (None, box)) == {"x[0]": None, "x[1]": box}


def test_a_module_takes_one_set_or_sets_by_parameter() -> None:
    box = Box(0, 1)
    assert chosen(nn.Linear(1, 1), box) == {"x.weight": box, "x.bias": box}
    assert chosen(nn.Linear(1, 1), {"bias": box}) == {"x.weight": None, "x.bias": box}


@pytest.mark.parametrize(
    ("value", "wanted", "error", "message"),
    [
        (torch.ones(1), 3, ArgumentTypeError, "x_set must be a callable .* not 3"),
        (torch.ones(1), {"a": halved}, ArgumentTypeError, "x_set must be a callable"),
        (pair(), {"c": halved}, ArgumentError, r"x_set names \['c'\], .* only \['a', 'b'\]"),
        (pair(), {"b": [halved]}, ArgumentError, r"x_set\['b'\] has 1 parts, .* has 2"),
        (pair(), {"b": [3, None]}, ArgumentTypeError, r"x_set\['b'\]\[0\] must be .* not 3"),
        (pair(), [halved, halved], ArgumentTypeError, "x_set must be a callable"),
        (nn.Linear(1, 1), {"scale": halved}, ArgumentError, r"\['scale'\].*\['weight', 'bias'\]"),
    ],
)
def test_sets_that_do_not_fit_are_refused(
    value: Any, wanted: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        chosen(value, wanted)


@pytest.mark.parametrize("returned", [None, torch.ones(3)], ids=["none", "another shape"])
def test_a_callable_that_does_not_project_is_refused_at_once(returned: Any) -> None:
    problem = bilevel.problems.Quadratic()
    confined = bilevel.Problem(problem.upper, problem.lower, y_set=lambda tensor: returned)
    with pytest.raises(ArgumentTypeError, match=r"the set of y must project .* \(5,\)"):
        bilevel.Solver(confined, problem.x0, problem.y0, method="f2sa")


@pytest.mark.parametrize("variable", ["x", "y"])
def test_a_map_that_moves_its_own_points_is_refused_at_once(variable: str) -> None:
    problem = bilevel.problems.Quadratic()
    sets: dict[str, Any] = {f"{variable}_set": lambda tensor: 0.5 * tensor}
    confined = bilevel.Problem(problem.upper, problem.lower, **sets)
    with pytest.raises(ArgumentError, match=f"the set of {variable} is no projection: .* 50%"):
        bilevel.Solver(confined, problem.x0, problem.y0, method="f2sa")


def test_projections_of_every_kind_are_taken() -> None:
    problem = bilevel.problems.Quadratic()
    projections: list[Projection] = [
        lambda tensor: tensor.clamp_(0, 1),  # in place
        lambda tensor: tensor / tensor.norm().clamp(min=1),
        lambda tensor: tensor - tensor.mean(),
        lambda tensor: tensor.round(decimals=3),
        torch.zeros_like,
    ]
    for project in projections:
        confined = bilevel.Problem(problem.upper, problem.lower, x_set=project)
        bilevel.Solver(confined, problem.x0, problem.y0, method="f2sa").step()


# Methods inside sets

MULTIPLIER = 20.0
STEPS = 250
METHODS: dict[str, Any] = {
    "f2sa": bilevel.F2SA(lower_lr=0.9, upper_lr=0.5, multiplier=MULTIPLIER, inner_steps=4),
    "f2sa single pass": bilevel.F2SA(
        lower_lr=0.9, upper_lr=0.2, multiplier=MULTIPLIER, inner_steps=3, single_pass=True
    ),
    "f3sa": bilevel.F3SA(lower_lr=0.9, upper_lr=0.2, multiplier=MULTIPLIER, momentum=0.5),
}
SETS: dict[str, tuple[Projection, Callable[[Array], Array]]] = {
    "box": (Box(-0.2, 0.1), lambda v: np.minimum(np.maximum(v, -0.2), 0.1)),
    "simplex": (Simplex(), simplex_by_bisection),
}


def projected_descent(
    gradient: Callable[[Array], Array], project: Callable[[Array], Array], start: Array
) -> Array:
    """The fixed point of x <- P(x - 0.5 * gradient(x))."""
    x = project(start)
    for _ in range(5000):
        moved = project(x - 0.5 * gradient(x))
        if np.abs(moved - x).max() < 1e-14:
            return moved
        x = moved
    raise AssertionError("the reference did not converge")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
@pytest.mark.parametrize(("x_set", "reference"), SETS.values(), ids=list(SETS))
def test_x_stays_inside_and_finds_the_constrained_optimum(
    method: Any, x_set: Projection, reference: Callable[[Array], Array]
) -> None:
    known = bilevel.problems.Quadratic(condition=2.0, rho=0.5, seed=3)
    A, B, t = (tensor.numpy() for tensor in (known.A, known.B, known.t))

    def gradient(x: Array) -> Array:  # of L*_lam
        solved = np.linalg.solve(np.eye(5) + MULTIPLIER * A, B @ x - t)
        return np.asarray(known.rho * x + MULTIPLIER * B.T @ A @ solved)

    expected = projected_descent(gradient, reference, known.x0.numpy())
    free = projected_descent(gradient, lambda v: v, known.x0.numpy())
    assert np.abs(expected - free).max() > 0.1, "the set must matter"

    def check_inside(solver: bilevel.Solver, info: Any) -> None:
        x = solver.x.numpy()
        np.testing.assert_allclose(x, reference(x), rtol=0, atol=1e-14)

    problem = bilevel.Problem(known.upper, known.lower, x_set=x_set)
    result = bilevel.minimize(
        problem, known.x0, known.y0, method=method, steps=STEPS, callback=check_inside
    )
    np.testing.assert_allclose(result.x.numpy(), expected, rtol=0, atol=1e-8)


@pytest.mark.slow  # in tests/methods/test_constrained.py sets of y are quick
@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_y_stays_inside_and_the_optimum_is_that_of_the_confined_lower_level(method: Any) -> None:
    known = bilevel.problems.Quadratic(A=torch.eye(5, dtype=torch.float64), rho=0.5, seed=3)
    B, t, low, high = known.B.numpy(), known.t.numpy(), -0.2, 0.01

    def solutions(x: Array) -> tuple[Array, Array]:
        """y*_lam and y* over the box; with A = I every coordinate is on its own."""
        penalised = (t + MULTIPLIER * B @ x) / (1 + MULTIPLIER)
        return np.clip(penalised, low, high), np.clip(B @ x, low, high)

    def gradient(x: Array) -> Array:
        y, z = solutions(x)
        return np.asarray(known.rho * x - MULTIPLIER * B.T @ (y - z))

    expected = projected_descent(gradient, lambda v: v, known.x0.numpy())
    free = known.penalised_solution(known.solution, MULTIPLIER).numpy()
    assert free.min() < low - 0.01 or free.max() > high + 0.01, "the set must matter"

    def check_inside(solver: bilevel.Solver, info: Any) -> None:
        assert bool(((solver.y >= low) & (solver.y <= high)).all())

    problem = bilevel.Problem(known.upper, known.lower, y_set=Box(low, high))
    result = bilevel.minimize(
        problem, known.x0, known.y0 + 5, method=method, steps=STEPS, callback=check_inside
    )
    np.testing.assert_allclose(result.x.numpy(), expected, rtol=0, atol=1e-8)
    np.testing.assert_allclose(result.y.numpy(), solutions(expected)[1], rtol=0, atol=1e-8)


def test_a_start_outside_is_brought_inside() -> None:
    known = bilevel.problems.Quadratic()
    problem = bilevel.Problem(known.upper, known.lower, x_set=Box(0, 1), y_set=Ball(1.0))
    start = torch.full((5,), 9.0, dtype=torch.float64)
    solver = bilevel.Solver(problem, start, start, method="f2sa")
    assert solver.x.tolist() == [1] * 5
    assert float(solver.y.norm()) == pytest.approx(1)
    assert start.tolist() == [9] * 5


@pytest.mark.parametrize("seed", range(3))
def test_an_optimizer_of_the_users_is_confined_too(seed: int) -> None:
    known = bilevel.problems.Quadratic(seed=seed)
    problem = bilevel.Problem(known.upper, known.lower, x_set=Simplex())
    method = bilevel.F2SA(upper_optimizer=lambda params: torch.optim.Adam(params, lr=0.3))
    solver = bilevel.Solver(problem, known.x0, known.y0, method=method)
    for _ in range(5):
        solver.step(measure=False)
        assert bool((solver.x >= 0).all())
        assert float(solver.x.sum()) == pytest.approx(1, abs=1e-12)
