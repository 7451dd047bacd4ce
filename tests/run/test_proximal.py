"""Lower levels with a non-smooth term: the lasso against its closed form, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.errors import ArgumentError, ArgumentTypeError, CompileWarning, UnbatchedWarning

GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(40, 8, generator=GENERATOR, dtype=torch.float64)
V = torch.randn(40, 8, generator=GENERATOR, dtype=torch.float64)
TRUTH = torch.tensor([2.0, -1.5, 1.0, 0, 0, 0, 0, 0], dtype=torch.float64)
T = X @ TRUTH + 0.5 * torch.randn(40, generator=GENERATOR, dtype=torch.float64)
TV = V @ TRUTH + 0.5 * torch.randn(40, generator=GENERATOR, dtype=torch.float64)
X0 = torch.tensor(-1.0, dtype=torch.float64)
Y0 = torch.zeros(8, dtype=torch.float64)


def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return 0.5 * ((V @ y - TV) ** 2).mean()


def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return 0.5 * ((X @ y - T) ** 2).mean()


LASSO = bilevel.Problem(upper, lower, y_prox=bilevel.prox.L1(lambda x: x.exp()))


def solution(x: Tensor) -> Tensor:
    return bilevel.argmin(
        lambda x, y: lower(x, y, None), x, Y0, y_prox=bilevel.prox.L1(lambda x: x.exp())
    )


def gradient(x: Tensor) -> Tensor:
    """The derivative of F, by the closed form of the lasso on its support."""
    y = solution(x)
    alive = y != 0
    slope = V.T @ (V @ y - TV) / 40
    G = X[:, alive].T @ X[:, alive] / 40
    return -x.exp() * (slope[alive] @ torch.linalg.solve(G, y[alive].sign()))


METHODS: dict[str, tuple[Any, float]] = {
    "f2sa": (bilevel.F2SA(0.3, 1.0, multiplier=1e4, inner_steps=500), 1e-3),
    "midpoint": (
        bilevel.F2SA(0.3, 1.0, multiplier=1e3, inner_steps=500, scheme="midpoint"),
        1e-5,
    ),
    "itd": (bilevel.ITD(0.3, 1.0, inner_steps=300), 1e-8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_direction_is_the_derivative_of_the_lasso(name: str) -> None:
    method, tolerance = METHODS[name]
    solver = bilevel.Solver(LASSO, X0, Y0, method=method)
    info = solver.step()
    torch.testing.assert_close(X0 - solver.x, gradient(X0), rtol=tolerance, atol=0)
    y = solution(X0)
    torch.testing.assert_close(solver.y, y, rtol=1e-4 if name == "midpoint" else 1e-7, atol=1e-6)
    assert 0 < int((y != 0).sum()) < 8
    if name != "midpoint":  # there it is the mean of two copies
        assert torch.equal(solver.y != 0, y != 0)
    value = lower(X0, solver.y, None) + X0.exp() * solver.y.abs().sum()
    torch.testing.assert_close(info.lower, value)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["given", "auto"])
def test_the_strength_of_a_lasso_is_found(method: str) -> None:
    """Ten noisy rows for eight features: neither no term nor a strong one is best."""
    noise = torch.randn(10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def train(x: Tensor, y: Tensor, batch: Any = None) -> Tensor:
        return 0.5 * ((X[:10] @ y - T[:10] - 2 * noise) ** 2).mean()

    term = bilevel.prox.L1(lambda x: x.exp())
    given: Any = bilevel.F2SA(0.3, 0.1, multiplier=100.0, inner_steps=30)
    if method == "auto":
        given = bilevel.F2SA(upper_lr=0.5)
    problem = bilevel.Problem(upper, train, y_prox=term)
    result = bilevel.minimize(problem, X0, Y0, method=given, steps=60)

    def value(x: Tensor) -> float:
        return float(upper(x, bilevel.argmin(train, x, Y0, y_prox=term), None))

    values = [value(x) for x in torch.linspace(-5, 2, 36, dtype=torch.float64)]
    assert min(values) < 0.9 * min(values[0], values[-1])
    assert value(result.x) < 1.05 * min(values)  # the bias of a finite multiplier


def test_several_tasks_have_a_term_each() -> None:
    def task(generator: torch.Generator) -> Any:
        a = torch.randn(2, 20, 3, generator=generator, dtype=torch.float64)
        return (a[0], a[0, :, 0]), (a[1], a[1, :, 0])

    def loss(x: Any, y: Tensor, batch: Any) -> Tensor:
        return 0.5 * ((batch[0] @ y - batch[1]) ** 2).mean()

    def solver(tasks: int) -> bilevel.Solver:
        return bilevel.Solver(
            bilevel.Problem(loss, loss, y_prox=bilevel.prox.L1(lambda x: x.exp())),
            X0,
            torch.zeros(3, dtype=torch.float64),
            method=bilevel.F2SA(0.3, 0.1, multiplier=50.0),
            data=bilevel.Episodes([task(torch.Generator().manual_seed(s)) for s in (1, 1)], tasks),
        )

    one, two = solver(1), solver(2)
    one.step()
    two.step()
    torch.testing.assert_close(one.x, two.x)
    torch.testing.assert_close(one.y, two.y[1])


def test_the_other_terms_are_followed_too() -> None:
    matrix = torch.tensor([[3.0, 0.0], [0.0, 0.5]], dtype=torch.float64)
    for term, expected in (
        (bilevel.prox.Nuclear(1.0), [[2.0, 0.0], [0.0, 0.0]]),
        (bilevel.prox.Group(1.0), [[2.0, 0.0], [0.0, 0.0]]),
        (bilevel.prox.L1(torch.tensor([0.0, 1.0]).double()), [[3.0, 0.0], [0.0, 0.0]]),
    ):
        problem = bilevel.Problem(
            lambda x, y, batch: (y**2).sum() * x,
            lambda x, y, batch: ((y - matrix) ** 2).sum() / 2,
            y_prox=term,
        )
        method = bilevel.NoBilevel(0.5, inner_steps=100)
        solver = bilevel.Solver(problem, X0, torch.ones_like(matrix), method=method)
        solver.step()
        torch.testing.assert_close(solver.y, torch.tensor(expected).double())


@pytest.mark.parametrize(
    ("problem", "options", "error", "match"),
    [
        (LASSO, {"method": "aid"}, ArgumentError, "y_prox"),
        (
            LASSO,
            {"method": bilevel.F2SA(lower_optimizer=lambda p: torch.optim.SGD(p, lr=0.1))},
            ArgumentError,
            "lower_optimizer",
        ),
        (
            bilevel.Problem(upper, lower, y_set=bilevel.sets.Box(0, 1), y_prox=bilevel.prox.L1()),
            {},
            ArgumentError,
            "y_set.*y_prox",
        ),
    ],
)
def test_what_is_refused(problem: Any, options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        bilevel.Solver(problem, X0, Y0, **options)


def test_what_is_no_term_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="y_prox"):
        bilevel.Problem(upper, lower, y_prox=0.1)
    with pytest.raises(ArgumentError, match="y_prox"):
        bilevel.hypergradient(LASSO, X0, Y0)


def test_compiled_and_stacked_runs_say_that_they_are_not() -> None:
    method = bilevel.F2SA(0.3, 0.1)
    plain = bilevel.minimize(LASSO, X0, Y0, method=method, steps=3)
    with pytest.warns(CompileWarning, match="y_prox"):
        compiled = bilevel.minimize(LASSO, X0, Y0, method=method, steps=3, compile=True)
    with pytest.warns(UnbatchedWarning, match="y_prox"):
        many = bilevel.minimize_many(LASSO, X0, Y0, methods=method, seeds=2, steps=3)
    assert torch.equal(plain.x, compiled.x)
    assert torch.equal(plain.x, many.runs[0].x if hasattr(many, "runs") else many[0].x)


def test_a_weight_given_as_a_number_keeps_all_its_digits() -> None:
    y = torch.tensor([1.0], dtype=torch.float64)
    term = bilevel.prox.L1(0.1)
    assert float(term.prox(y, term.at(None).to(y))) == 1 - 0.1
