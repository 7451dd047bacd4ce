"""Diagnostics against closed forms, on every structure of x and y, leaving their inputs alone."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bilevel
from bilevel import F2SA, F3SA, Problem, check_hypergradient, hypergradient
from bilevel.diagnostics import potential, tracking_errors
from bilevel.errors import ArgumentError, ArgumentTypeError, NotConvergedError, ObjectiveError
from bilevel.methods import Method
from bilevel.problems import Nonconvex, Quadratic, WeightedLogistic

NAN, INF = float("nan"), float("inf")
QUADRATIC = Quadratic(4, 5, rho=0.3, seed=1)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = normal(4, seed=2), normal(5, seed=3)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative to what is expected."""
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# One problem in several guises


class Split(nn.Module):
    """A vector held by a module in two parameters, beside what is not to be moved."""

    calls: Tensor

    def __init__(self, vector: Tensor) -> None:
        super().__init__()
        self.head = nn.Parameter(vector[:1].clone())
        self.fixed = nn.Parameter(torch.ones(2, dtype=vector.dtype), requires_grad=False)
        self.tail = nn.Parameter(vector[1:].clone().unsqueeze(0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self) -> Tensor:
        self.calls += 1
        return torch.cat([self.head * self.fixed[0], self.tail[0]])


class Guise(NamedTuple):
    """How a vector is dressed, undressed, and how its gradient is brought back to a vector."""

    dress: Callable[[Tensor], Any]
    undress: Callable[[Any], Tensor]
    gradient: Callable[[Any], Tensor]


def _tree(vector: Tensor) -> Any:
    return {
        "b": vector[:2].clone(),
        "a": [vector[2:3].clone(), (vector[3:].clone().reshape(1, -1),)],
    }


def _tree_to_vector(tree: Any) -> Tensor:
    assert list(tree) == ["b", "a"]
    middle, (last,) = tree["a"]
    return torch.cat([tree["b"], middle, last.reshape(-1)])


def _module_gradient(gradient: Any) -> Tensor:
    assert list(gradient) == ["head", "tail"]
    return torch.cat([gradient["head"], gradient["tail"][0]])


GUISES = {
    "tensor": Guise(torch.clone, lambda x: x, lambda x: x),
    "tree": Guise(_tree, _tree_to_vector, _tree_to_vector),
    "module": Guise(Split, lambda module: module(), _module_gradient),
}


def dressed(problem: Problem, x: Guise, y: Guise) -> Problem:
    return Problem(
        lambda a, b, batch: problem.upper(x.undress(a), y.undress(b), batch),
        lambda a, b, batch: problem.lower(x.undress(a), y.undress(b), batch),
    )


@pytest.fixture(params=GUISES.values(), ids=[f"x {name}" for name in GUISES])
def x_guise(request: pytest.FixtureRequest) -> Guise:
    guise: Guise = request.param
    return guise


@pytest.fixture(params=GUISES.values(), ids=[f"y {name}" for name in GUISES])
def y_guise(request: pytest.FixtureRequest) -> Guise:
    guise: Guise = request.param
    return guise


# The exact hypergradient


def test_hypergradient_of_every_structure(x_guise: Guise, y_guise: Guise) -> None:
    problem = dressed(QUADRATIC, x_guise, y_guise)
    found = hypergradient(problem, x_guise.dress(X), y_guise.dress(Y))
    assert error(x_guise.gradient(found), QUADRATIC.gradient(X)) < 1e-12


def test_without_solving_y_is_taken_as_it_is(x_guise: Guise, y_guise: Guise) -> None:
    problem = dressed(QUADRATIC, x_guise, y_guise)
    found = hypergradient(problem, x_guise.dress(X), y_guise.dress(Y), solve=False)
    # grad_x f - grad^2_xy g [grad^2_yy g]^-1 grad_y f with the Hessians A and -B'A
    expected = 0.3 * X + QUADRATIC.B.T @ (Y - QUADRATIC.t)
    assert error(x_guise.gradient(found), expected) < 1e-12
    assert error(expected, QUADRATIC.gradient(X)) > 0.1


@pytest.mark.parametrize("distance", [1.0, 1e3, 1e6, 1e9])
def test_hypergradient_from_a_bad_start(distance: float) -> None:
    found = hypergradient(QUADRATIC, X, Y + distance)
    assert error(found, QUADRATIC.gradient(X)) < 1e-9


@pytest.mark.parametrize("scale", [1e-14, 1e-6, 1e6])
def test_hypergradient_does_not_depend_on_the_scale_of_the_lower_level(scale: float) -> None:
    problem = Problem(QUADRATIC.upper, lambda x, y, batch: scale * QUADRATIC.lower(x, y, batch))
    assert error(hypergradient(problem, X, Y), QUADRATIC.gradient(X)) < 1e-9


@pytest.mark.parametrize("start", [0.0, 5.0, 30.0])
def test_hypergradient_where_the_lower_level_is_not_quadratic(start: float) -> None:
    """At 30 all samples are saturated, so that Newton's full step would run away."""
    problem = WeightedLogistic(train=30, trusted=20, dim=4, seed=4)
    x = normal(30, seed=5)
    found = hypergradient(problem, x, torch.full_like(problem.y0, start))
    assert error(found, problem.gradient(x)) < 1e-10


def test_hypergradient_where_the_upper_level_is_not_convex() -> None:
    problem = Nonconvex(4, 5, seed=6)
    assert error(hypergradient(problem, X, Y), problem.gradient(X)) < 1e-12


@pytest.mark.parametrize("solve", [True, False])
def test_hypergradient_where_f_couples_x_and_y(solve: bool) -> None:
    C = normal(4, 5, seed=7)
    A, B, t = QUADRATIC.A, QUADRATIC.B, QUADRATIC.t
    problem = Problem(
        lambda x, y, batch: 0.5 * ((y - t) ** 2).sum() + x @ C @ y,
        lambda x, y, batch: 0.5 * (y - B @ x) @ A @ (y - B @ x),
    )
    y = B @ X if solve else Y
    expected = C @ y + B.T @ (y - t + C.T @ X)
    assert error(hypergradient(problem, X, Y, solve=solve), expected) < 1e-12


def test_hypergradient_where_f_is_of_x_alone() -> None:
    problem = Problem(lambda x, y, batch: 0.5 * (x**2).sum(), QUADRATIC.lower)
    assert torch.equal(hypergradient(problem, X, Y), X)


def test_hypergradient_where_x_and_y_meet_in_neither_level() -> None:
    """The lower solution is constant, so what is left is grad_x f."""
    problem = Problem(lambda x, y, batch: (x**3).sum() + y.sum(), lambda x, y, batch: (y**2).sum())
    assert error(hypergradient(problem, X, Y), 3 * X**2) < 1e-15


def test_hypergradient_on_given_batches() -> None:
    """A batch (n_x, n_y) of Quadratic adds n_x'x + n_y'y to its objective."""
    upper, lower = normal(9, seed=8), normal(9, seed=9)
    found = hypergradient(QUADRATIC, X, Y, upper_batch=upper, lower_batch=lower)
    y = QUADRATIC.B @ X - torch.linalg.solve(QUADRATIC.A, lower[4:])
    expected = 0.3 * X + upper[:4] + QUADRATIC.B.T @ (y - QUADRATIC.t + upper[4:])
    assert error(found, expected) < 1e-12


def test_hypergradient_of_many_runs() -> None:
    problem = Quadratic(4, 5, rho=0.3, seed=1, runs=(3,))
    x = normal(3, 4, seed=10)
    assert error(hypergradient(problem, x, problem.y0), problem.gradient(x)) < 1e-12


@pytest.mark.parametrize("solve", [True, False])
def test_hypergradient_in_single_precision(solve: bool) -> None:
    single = Quadratic(4, 5, rho=0.3, seed=1, dtype=torch.float32)
    y = Y if solve else QUADRATIC.lower_solution(X)
    found = hypergradient(single, X.float(), y.float(), solve=solve)
    assert found.dtype == torch.float32
    assert error(found, QUADRATIC.gradient(X)) < 1e-4


@pytest.mark.parametrize("solve", [True, False])
def test_hypergradient_of_a_badly_conditioned_lower_level(solve: bool) -> None:
    """Conjugate gradients need more steps than dimensions here."""
    problem = Quadratic(30, 30, condition=1e6, seed=2)
    y = problem.y0 if solve else problem.lower_solution(problem.x0)
    found = hypergradient(problem, problem.x0, y, solve=solve)
    assert error(found, problem.gradient(problem.x0)) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("solve", [True, False])
@pytest.mark.parametrize(
    ("condition", "dtype"), [(1e12, torch.float64), (1e10, torch.float32)], ids=str
)
def test_a_hopeless_condition_is_an_error_not_a_wrong_answer(
    condition: float, dtype: torch.dtype, solve: bool
) -> None:
    problem = Quadratic(30, 30, condition=condition, seed=2, dtype=dtype)
    y = problem.y0 if solve else problem.lower_solution(problem.x0)
    with pytest.raises(NotConvergedError):
        hypergradient(problem, problem.x0, y, solve=solve)


def test_hypergradient_works_inside_no_grad() -> None:
    with torch.no_grad():
        found = hypergradient(QUADRATIC, X, Y)
        check = check_hypergradient(QUADRATIC, X, Y)
    assert error(found, QUADRATIC.gradient(X)) < 1e-12
    assert error(check.direction, QUADRATIC.penalised_gradient(X, 10.0)) < 1e-12


# What has no hypergradient


def distance_to_one(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return 0.5 * ((y - 1) ** 2).sum()


NOT_CONVEX: dict[str, tuple[Callable[[Tensor, Tensor, Any], Tensor], str]] = {
    "concave": (lambda x, y, batch: (x @ y) - (y**2).sum(), "not convex .* -2.00e[+]00"),
    "a saddle": (
        lambda x, y, batch: x @ y + (y * torch.tensor([1.0, 2.0, -3.0, 4.0]) * y).sum(),
        "not convex",
    ),
    "with a kink": (lambda x, y, batch: (x - y).abs().sum(), "convex"),
}


@pytest.mark.parametrize("solve", [True, False])
@pytest.mark.parametrize(("lower", "reason"), NOT_CONVEX.values(), ids=list(NOT_CONVEX))
def test_a_lower_level_that_is_not_convex_is_refused(
    lower: Callable[[Tensor, Tensor, Any], Tensor], reason: str, solve: bool
) -> None:
    with pytest.raises(NotConvergedError, match=reason):
        hypergradient(Problem(distance_to_one, lower), X, torch.zeros_like(X), solve=solve)


@pytest.mark.parametrize("solve", [True, False])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_lower_level_that_is_not_strongly_convex_is_refused(
    size: int, seed: int, solve: bool
) -> None:
    """One direction of y does not matter to g: y*(x) is not unique, and f tells them apart."""
    W = normal(size - 1, size, seed=seed)
    problem = Problem(distance_to_one, lambda x, y, batch: 0.5 * ((W @ y - x) ** 2).sum())
    x, y = normal(size - 1, seed=seed + 10), torch.zeros(size, dtype=torch.float64)
    with pytest.raises(NotConvergedError, match="convex"):
        hypergradient(problem, x, y, solve=solve)


def test_a_lower_level_without_a_minimum_is_refused() -> None:
    problem = Problem(distance_to_one, lambda x, y, batch: (x.abs() * y + y.exp()).sum())
    with pytest.raises(NotConvergedError, match="the lower level"):
        hypergradient(problem, X, torch.zeros_like(X))


class Opaque(torch.autograd.Function):
    """Half the squared distance, with a backward that autograd does not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y - x)
        return 0.5 * ((y - x) ** 2).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (difference,) = ctx.saved_tensors
        with torch.no_grad():
            return -grads[0] * difference, grads[0] * difference


def opaque(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    value: Tensor = Opaque.apply(x, y)
    return value


NO_SECOND_DERIVATIVE: dict[str, tuple[Callable[[Tensor, Tensor, Any], Tensor], str]] = {
    "no y": (lambda x, y, batch: (x**2).sum(), "lower.* depend on y"),
    "linear": (lambda x, y, batch: x @ y, "lower.* linear"),
    "opaque": (opaque, "lower.* differentiated twice"),
}


def test_a_gradient_of_zero_has_no_relative_error() -> None:
    """f leads y to where g has it: the exact gradient is 0, and so is the direction."""
    target = torch.ones(3, dtype=torch.float64)
    problem = Problem(lambda x, y, b: ((y - 1) ** 2).sum(), lambda x, y, b: ((y - x) ** 2).sum())
    check = check_hypergradient(problem, target, target, multiplier=10.0)
    assert (check.relative_error, check.cosine) == (0.0, 0.0)
    tilted = Problem(lambda x, y, b: (y - x).sum() + (y**2).sum() * 0.5, problem.lower)
    check = check_hypergradient(tilted, 0 * target, 0 * target, multiplier=10.0)
    assert not check.exact.any()
    assert check.relative_error == INF  # the bias is all that there is


@pytest.mark.parametrize("of", [hypergradient, check_hypergradient])
@pytest.mark.parametrize(
    ("lower", "reason"), NO_SECOND_DERIVATIVE.values(), ids=list(NO_SECOND_DERIVATIVE)
)
def test_a_lower_level_without_second_derivatives_is_named(
    lower: Callable[[Tensor, Tensor, Any], Tensor], reason: str, of: Callable[..., Any]
) -> None:
    with pytest.raises(ObjectiveError, match=reason):
        of(Problem(distance_to_one, lower), X, torch.zeros_like(X))


def test_a_lower_set_is_refused() -> None:
    problem = Problem(QUADRATIC.upper, QUADRATIC.lower, y_set=bilevel.sets.Box(0, 1))
    for of in (hypergradient, check_hypergradient):
        with pytest.raises(ArgumentError, match=r"y_set=Box"):
            of(problem, X, Y)


def test_an_upper_set_does_not_matter() -> None:
    problem = Problem(QUADRATIC.upper, QUADRATIC.lower, x_set=bilevel.sets.Box(0, 1))
    assert error(hypergradient(problem, X, Y), QUADRATIC.gradient(X)) < 1e-12


# How far a method is from it


METHODS: dict[str, Any] = {
    "default": None,
    "f2sa": "f2sa",
    "f3sa": "f3sa",
    "F2SA": F2SA(inner_steps=1, single_pass=True),
    "F3SA": F3SA(momentum=0.3, recursion="combined"),
}


@pytest.mark.parametrize("multiplier", [0.5, 20.0, 1000.0])
@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_check_measures_the_closed_form_bias(method: Any, multiplier: float) -> None:
    chosen = {} if method is None else {"method": method}
    check = check_hypergradient(QUADRATIC, X, Y, multiplier=multiplier, **chosen)
    exact = QUADRATIC.gradient(X).numpy()
    direction = QUADRATIC.penalised_gradient(X, multiplier).numpy()
    assert error(check.exact, torch.from_numpy(exact)) < 1e-12
    assert error(check.direction, torch.from_numpy(direction)) < 1e-11
    bias = np.linalg.norm(direction - exact) / np.linalg.norm(exact)
    cosine = exact @ direction / np.linalg.norm(exact) / np.linalg.norm(direction)
    assert check.relative_error == pytest.approx(bias, rel=1e-8)
    assert check.cosine == pytest.approx(cosine, abs=1e-12)
    assert check.multiplier == multiplier


def test_check_of_every_structure(x_guise: Guise, y_guise: Guise) -> None:
    problem = dressed(QUADRATIC, x_guise, y_guise)
    check = check_hypergradient(problem, x_guise.dress(X), y_guise.dress(Y), multiplier=30.0)
    assert error(x_guise.gradient(check.exact), QUADRATIC.gradient(X)) < 1e-12
    assert error(x_guise.gradient(check.direction), QUADRATIC.penalised_gradient(X, 30.0)) < 1e-11


def test_check_where_the_lower_level_is_not_quadratic() -> None:
    problem = WeightedLogistic(train=30, trusted=20, dim=4, seed=4)
    x = normal(30, seed=5)
    check = check_hypergradient(problem, x, problem.y0, multiplier=7.0)
    assert error(check.direction, problem.penalised_gradient(x, 7.0)) < 1e-9
    bias = error(problem.penalised_gradient(x, 7.0), problem.gradient(x))
    assert check.relative_error == pytest.approx(bias, rel=1e-8)


def test_check_on_given_batches() -> None:
    """Both solutions from the linear equations of the objectives with their batches' terms."""
    upper, lower = normal(9, seed=8), normal(9, seed=9)
    lam, A, B = 12.0, QUADRATIC.A, QUADRATIC.B
    check = check_hypergradient(
        QUADRATIC, X, Y, multiplier=lam, upper_batch=upper, lower_batch=lower
    )
    z = B @ X - torch.linalg.solve(A, lower[4:])
    right = QUADRATIC.t - upper[4:] + lam * (A @ B @ X - lower[4:])
    y = torch.linalg.solve(torch.eye(5, dtype=torch.float64) + lam * A, right)
    expected = 0.3 * X + upper[:4] - lam * B.T @ A @ (y - z)
    assert error(check.direction, expected) < 1e-11


def test_measured_bias_falls_as_one_over_the_multiplier() -> None:
    multipliers = np.geomspace(1e3, 1e5, 5)
    bias = [
        check_hypergradient(QUADRATIC, X, Y, multiplier=lam).relative_error for lam in multipliers
    ]
    assert np.polyfit(np.log(multipliers), np.log(bias), 1)[0] == pytest.approx(-1, abs=0.05)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("f2sa", 10.0),
        ("f3sa", 10.0),
        (F2SA(multiplier=37.0), 37.0),
        (F2SA(multiplier=lambda k: 20.0 + k), 20.0),
        (F3SA(multiplier=5), 5.0),
    ],
    ids=["f2sa", "f3sa", "number", "function", "f3sa object"],
)
def test_the_multiplier_is_the_methods_own_at_the_start(method: Any, expected: float) -> None:
    check = check_hypergradient(QUADRATIC, X, Y, method=method)
    assert check.multiplier == expected
    assert error(check.direction, QUADRATIC.penalised_gradient(X, expected)) < 1e-11


def test_check_says_what_it_found() -> None:
    check = check_hypergradient(QUADRATIC, X, Y, multiplier=50.0)
    bias = error(QUADRATIC.penalised_gradient(X, 50.0), QUADRATIC.gradient(X))
    assert str(check).startswith(f"relative error {bias:.2e}, cosine 0.9")
    assert str(check).endswith("at multiplier 50")


@pytest.mark.parametrize("multiplier", [0.0, -1.0, NAN, INF], ids=str)
def test_a_bad_multiplier_is_refused(multiplier: float) -> None:
    with pytest.raises(ArgumentError, match=f"multiplier .* not {multiplier}"):
        check_hypergradient(QUADRATIC, X, Y, multiplier=multiplier)


class NotAPenaltyMethod(Method[Any]):
    def init(self, problem: Problem, x: Any, y: Any) -> Any:
        raise NotImplementedError

    def step(self, evaluator: Any, state: Any, sizes: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("method", "kind", "message"),
    [
        ("sgd", ArgumentError, "method"),
        (F2SA, ArgumentTypeError, "an instance is needed"),
        (7, ArgumentTypeError, "method .* not 7"),
        (
            NotAPenaltyMethod(),
            ArgumentTypeError,
            "method",
        ),
    ],
    ids=["unknown", "class", "number", "other method"],
)
def test_a_bad_method_is_refused(method: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        check_hypergradient(QUADRATIC, X, Y, method=method)


# Tracking errors and the potential


KNOWN: dict[str, Any] = {
    "quadratic": Quadratic(4, 5, seed=1),
    "nonconvex": Nonconvex(4, 5, seed=1),
    "logistic": WeightedLogistic(train=4, trusted=6, dim=5, seed=1),
}


@pytest.mark.parametrize("problem", KNOWN.values(), ids=list(KNOWN))
def test_tracking_errors_are_the_displacements(problem: Any) -> None:
    y, z = problem.penalised_solution(X, 8.0), problem.lower_solution(X)
    exact = tracking_errors(problem, X, y, z, 8.0)
    assert (float(exact.y), float(exact.z)) == (0, 0)
    away = torch.tensor([3.0, 0.0, -4.0, 0.0, 0.0], dtype=torch.float64)
    moved = tracking_errors(problem, X, y + away, z - 2 * away, 8.0)
    assert float(moved.y) == pytest.approx(5, rel=1e-12)
    assert float(moved.z) == pytest.approx(10, rel=1e-12)


def test_tracking_errors_of_other_numbers_of_runs_are_refused() -> None:
    x, y = torch.stack([X, X, X]), torch.stack([Y, Y])
    with pytest.raises(ArgumentError, match=r"z has the shape \(2, 5\), .* \(3, 5\)"):
        tracking_errors(QUADRATIC, x, Y, y, 8.0)


def test_the_module_can_be_imported_by_its_public_name() -> None:
    assert importlib.import_module("bilevel.diagnostics") is bilevel.diagnostics


# The message names what is wrong, and not the Hessian of g


def _hypergradient_of(upper: Any, lower: Any) -> Any:
    return hypergradient(Problem(upper, lower), X, X + 1.0)


def _distance(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return ((y - x) ** 2).sum()


def test_an_upper_objective_without_a_graph_is_refused() -> None:
    with pytest.raises(ObjectiveError, match=r"upper.* depends on neither x nor y"):
        _hypergradient_of(lambda x, y, batch: (y**2).sum().detach(), _distance)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_an_objective_that_is_not_finite_is_named(bad: float) -> None:
    def broken(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return bad * (1 + (y**2).sum())

    with pytest.raises(NotConvergedError, match=rf"upper.* is {bad}"):
        _hypergradient_of(broken, _distance)
    with pytest.raises(NotConvergedError, match=rf"lower.* is {bad}"):
        _hypergradient_of(_distance, broken)


def test_inference_mode_is_named() -> None:
    with torch.inference_mode(), pytest.raises(ArgumentError, match="inference_mode"):
        _hypergradient_of(_distance, _distance)


@pytest.mark.parametrize("method", [F2SA(scheme="midpoint"), F2SA(), F3SA()], ids=str)
def test_an_upper_objective_of_x_alone_has_its_own_gradient(method: Method[Any]) -> None:
    problem = Problem(lambda x, y, batch: (x**2).sum(), _distance)
    check = check_hypergradient(problem, X, X + 1.0, method=method)
    assert check.relative_error < 1e-12
    assert torch.allclose(check.exact, 2 * X)


def test_tracking_errors_of_many_runs_are_one_number_each() -> None:
    problem = Quadratic(4, 5, seed=1, runs=(3,))
    x, away = normal(3, 4, seed=10), normal(3, 5, seed=11)
    y, z = problem.penalised_solution(x, 8.0) + away, problem.lower_solution(x) - 3 * away
    errors = tracking_errors(problem, x, y, z, 8.0)
    sizes = np.linalg.norm(away.numpy(), axis=-1)
    np.testing.assert_allclose(errors.y.numpy(), sizes, rtol=1e-12)
    np.testing.assert_allclose(errors.z.numpy(), 3 * sizes, rtol=1e-12)


def numpy_potential(problem: Quadratic, x: Any, y: Any, z: Any, lam: float) -> float:
    """V = F - F* + l_g1 lam ||y - y*_lam||^2 + l_g1 lam / 2 ||z - y*||^2 from A, B, t and rho."""
    A, B, t = (tensor.numpy() for tensor in (problem.A, problem.B, problem.t))
    rho = problem.rho

    def F(x: Any) -> float:
        return float(0.5 * np.sum((B @ x - t) ** 2) + 0.5 * rho * np.sum(x**2))

    best = np.linalg.solve(B.T @ B + rho * np.eye(len(x)), B.T @ t)
    joint = np.hstack([-B, np.eye(len(t))])
    l_g1 = np.linalg.eigvalsh(joint.T @ A @ joint)[-1]
    penalised = np.linalg.solve(np.eye(len(t)) + lam * A, t + lam * A @ B @ x)
    tracking = np.sum((y - penalised) ** 2) + 0.5 * np.sum((z - B @ x) ** 2)
    return float(F(x) - F(best) + l_g1 * lam * tracking)


@pytest.mark.parametrize("lam", [1.0, 30.0])
def test_potential_is_the_papers_formula(lam: float) -> None:
    z = normal(5, seed=12)
    expected = numpy_potential(QUADRATIC, X.numpy(), Y.numpy(), z.numpy(), lam)
    assert float(potential(QUADRATIC, X, Y, z, lam)) == pytest.approx(expected, rel=1e-12)


def test_potential_of_many_runs() -> None:
    problem = Quadratic(4, 5, rho=0.3, seed=1, runs=(3,))
    x, y, z = normal(3, 4, seed=13), normal(3, 5, seed=14), normal(3, 5, seed=15)
    expected = [
        numpy_potential(problem, x[i].numpy(), y[i].numpy(), z[i].numpy(), 6.0) for i in range(3)
    ]
    np.testing.assert_allclose(potential(problem, x, y, z, 6.0).numpy(), expected, rtol=1e-12)


def test_potential_vanishes_at_the_solution_alone() -> None:
    x = QUADRATIC.solution
    y, z = QUADRATIC.penalised_solution(x, 5.0), QUADRATIC.lower_solution(x)
    assert abs(float(potential(QUADRATIC, x, y, z, 5.0))) < 1e-14
    for moved in ((x + 0.1, y, z), (x, y + 0.1, z), (x, y, z + 0.1)):
        assert float(potential(QUADRATIC, *moved, 5.0)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["deterministic", "stochastic"])
def test_potential_falls_along_a_run_with_the_papers_steps(regime: str) -> None:
    problem = Quadratic(B=0.5 * torch.eye(2, dtype=torch.float64), condition=1.5, seed=0)
    method = F2SA.from_theory(problem.constants, regime, T=1)
    solver = bilevel.Solver(problem, 10 * problem.x0, problem.y0, method=method)
    values = []
    for k in range(150):
        y = solver.state.penalised.value.detach()  # type: ignore[attr-defined]
        values.append(float(potential(problem, solver.x, y, solver.y, method.rates.multiplier(k))))
        solver.step(measure=False)
    assert np.all(np.diff(values) < 0)
    assert values[-1] < 0.2 * values[0]


# The inputs stay as they are


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, nn.Module):
        yield from value.state_dict(keep_vars=True).values()
    elif isinstance(value, Tensor):
        yield value
    else:
        for child in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(child)


CALLS: dict[str, Callable[[Problem, Any, Any], Any]] = {
    "hypergradient": hypergradient,
    "not solved": lambda problem, x, y: hypergradient(problem, x, y, solve=False),
    "check f2sa": check_hypergradient,
    "check f3sa": lambda problem, x, y: check_hypergradient(problem, x, y, method="f3sa"),
}


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_nothing_is_changed_that_was_given(
    call: Callable[[Problem, Any, Any], Any], x_guise: Guise, y_guise: Guise, requires_grad: bool
) -> None:
    x, y = x_guise.dress(X), y_guise.dress(Y)
    tensors = [*tensors_in(x), *tensors_in(y)]
    for value in (x, y):
        if not isinstance(value, nn.Module):
            for tensor in tensors_in(value):
                tensor.requires_grad_(requires_grad)
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.grad = torch.full_like(tensor, 7.0)
    before = copy.deepcopy(tensors)
    call(dressed(QUADRATIC, x_guise, y_guise), x, y)
    for now, then in zip(tensors, before, strict=True):
        assert torch.equal(now, then)
        assert now.requires_grad == then.requires_grad
        if then.requires_grad:
            assert now.grad is not None
            assert now.grad.eq(7.0).all()
        else:
            assert now.grad is None


@pytest.mark.parametrize("requires_grad", [True, False])
def test_measures_of_a_run_change_nothing(requires_grad: bool) -> None:
    before = (X, Y, normal(5, seed=16))
    x, y, z = (v.clone().requires_grad_(requires_grad) for v in before)
    errors = tracking_errors(QUADRATIC, x, y, z, 5.0)
    found = (potential(QUADRATIC, x, y, z, 5.0), errors.y, errors.z)
    assert not any(v.requires_grad for v in found)
    for now, then in zip((x, y, z), before, strict=True):
        assert torch.equal(now, then)
        assert now.requires_grad == requires_grad
        assert now.grad is None
