"""WeightedLogistic: the reference against SciPy, differences and sums written out with NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.optimize
import torch
from torch import Tensor

import bilevel
from bilevel.errors import ArgumentError
from bilevel.problems import WeightedLogistic

Array = npt.NDArray[np.float64]
NAN = float("nan")
RIDGE = 0.02


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small(**options: Any) -> WeightedLogistic:
    return WeightedLogistic(**{"train": 30, "trusted": 12, "dim": 4, "ridge": RIDGE, **options})


X = normal(30, seed=1)
Y = normal(4, seed=2)


def losses(features: Tensor, labels: Tensor, y: Array) -> Array:
    """log(1 + exp(-s)) of every sample, with NumPy."""
    margins = labels.numpy() * (features.numpy() @ y)
    found: Array = np.logaddexp(0, -margins)
    return found


def f(problem: WeightedLogistic, y: Array) -> float:
    return float(losses(*problem.upper_data, y).mean())


def g(problem: WeightedLogistic, x: Array, y: Array) -> float:
    features, labels, _ = problem.lower_data
    weighted = losses(features, labels, y) / (1 + np.exp(-x))
    return float(weighted.mean() + problem.ridge * y @ y)


def slope(features: Tensor, labels: Tensor, y: Array, weights: Any) -> Array:
    """The gradient in y of the mean of the weighted losses."""
    a, b = features.numpy(), labels.numpy()
    found: Array = (weights * -b / (1 + np.exp(b * (a @ y)))) @ a / len(b)
    return found


def argmin(problem: WeightedLogistic, x: Array, strength: float) -> Array:
    """argmin_y g + strength * f, by SciPy's BFGS on the sums written out here."""
    features, labels, _ = problem.lower_data
    weights = 1 / (1 + np.exp(-x))

    def value(y: Array) -> float:
        return g(problem, x, y) + strength * f(problem, y)

    def gradient(y: Array) -> Array:
        lower = slope(features, labels, y, weights) + 2 * problem.ridge * y
        return lower + strength * slope(*problem.upper_data, y, 1.0)

    start = np.zeros(features.shape[1])
    found = scipy.optimize.minimize(value, start, jac=gradient, method="BFGS", tol=1e-9)
    solution: Array = found.x
    return solution


def central_differences(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    h = 1e-4
    units = torch.eye(len(x), dtype=x.dtype)
    return torch.stack([(function(x + h * e) - function(x - h * e)) / (2 * h) for e in units])


def close(found: Tensor, expected: Any, tolerance: float) -> bool:
    """Equal up to ``tolerance`` relative to the largest entry of what is expected."""
    expected = np.asarray(expected)
    error = np.abs(found.numpy() - expected).max()
    return found.shape == expected.shape and bool(error <= tolerance * np.abs(expected).max())


# Objectives and data


def test_objectives_are_the_documented_ones() -> None:
    problem = small()
    assert float(problem.upper(X, Y, None)) == pytest.approx(f(problem, Y.numpy()), rel=1e-13)
    assert float(problem.lower(X, Y, None)) == pytest.approx(
        g(problem, X.numpy(), Y.numpy()), rel=1e-13
    )


def test_layout_of_the_data() -> None:
    problem = small()
    features, labels, index = problem.lower_data
    trusted, trusted_labels = problem.upper_data
    assert (features.shape, labels.shape, trusted.shape) == ((30, 4), (30,), (12, 4))
    assert trusted_labels.shape == (12,)
    assert torch.equal(index, torch.arange(30))
    assert set(labels.tolist()) | set(trusted_labels.tolist()) == {-1.0, 1.0}
    assert (problem.x0.tolist(), problem.y0.tolist()) == ([0] * 30, [0] * 4)
    assert problem.flipped.shape == (30,)
    assert problem.flipped.dtype == torch.bool


def test_true_labels_follow_one_linear_rule() -> None:
    """A linear program finds a rule that all labels obey once the flips are undone."""
    problem = small(train=200, noise=0.4)
    features, labels, _ = problem.lower_data
    true = torch.where(problem.flipped, -labels, labels)
    rows = torch.cat(
        [true.unsqueeze(-1) * features, problem.upper_data[1][:, None] * problem.upper_data[0]]
    )
    ones = np.ones(len(rows))
    rule = scipy.optimize.linprog(np.zeros(4), -rows.numpy(), -ones, bounds=(None, None))
    assert rule.status == 0
    as_given = torch.cat([labels.unsqueeze(-1) * features, rows[200:]])
    assert (
        scipy.optimize.linprog(np.zeros(4), -as_given.numpy(), -ones, bounds=(None, None)).status
        == 2
    )


def test_flipped_says_which_labels_differ_from_the_clean_ones() -> None:
    noisy, clean = small(noise=0.4, seed=3), small(noise=0.0, seed=3)
    assert not clean.flipped.any()
    assert noisy.flipped.any()
    assert torch.equal(noisy.lower_data[1] != clean.lower_data[1], noisy.flipped)
    for here, there in zip(noisy.upper_data, clean.upper_data, strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("noise", [0.1, 0.5, 0.9])
def test_flipped_fraction(noise: float) -> None:
    problem = WeightedLogistic(train=20_000, trusted=1, dim=1, noise=noise)
    deviation = (noise * (1 - noise) / 20_000) ** 0.5
    assert float(problem.flipped.double().mean()) == pytest.approx(noise, abs=4 * deviation)


def test_the_seed_decides_the_data() -> None:
    first, again, other = small(seed=1), small(seed=1), small(seed=2)
    assert torch.equal(first.lower_data[0], again.lower_data[0])
    assert torch.equal(first.lower_data[1], again.lower_data[1])
    assert not torch.equal(first.lower_data[0], other.lower_data[0])


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("level", ["upper", "lower"])
def test_minibatches_are_unbiased(level: str, size: int) -> None:
    """The mean over all minibatches of a partition is the full objective, gradients included."""
    problem = small(trusted=10)
    data: tuple[Tensor, ...] = problem.lower_data if level == "lower" else problem.upper_data
    objective: Any = problem.lower if level == "lower" else problem.upper
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(4))

    def everything(batch: Any) -> Tensor:
        grads, value = torch.func.grad_and_value(objective, argnums=(0, 1))(X, Y, batch)
        return torch.cat([*grads, value.reshape(1)])

    parts = [everything(tuple(tensor[rows] for tensor in data)) for rows in order.split(size)]
    assert close(torch.stack(parts).mean(0), everything(None), 1e-13)


def test_a_weight_moves_only_with_its_own_sample() -> None:
    problem = small()
    rows = torch.tensor([3, 17])
    batch = tuple(tensor[rows] for tensor in problem.lower_data)
    gradient = torch.func.grad(problem.lower)(X, Y, batch)
    assert gradient.nonzero().flatten().tolist() == [3, 17]


def test_all_data_as_one_batch_is_the_same_run_as_no_data() -> None:
    problem = small()
    method = bilevel.F2SA(lower_lr=0.5, upper_lr=2.0, inner_steps=3)
    data: dict[str, Any] = {"upper_data": problem.upper_data, "lower_data": problem.lower_data}
    with_data, without = (
        bilevel.minimize(problem, X, problem.y0, method=method, steps=5, **given)
        for given in (data, {})
    )
    assert close(with_data.x, without.x, 1e-13)
    assert not close(with_data.x, X, 1e-6)


# The reference


@pytest.mark.parametrize(
    "x",
    [X, 5 * X, torch.zeros_like(X), X - 40],
    ids=["normal", "spread", "zero", "all weights vanish"],
)
def test_lower_solution(x: Tensor) -> None:
    problem = small()
    y = problem.lower_solution(x)
    assert torch.func.grad(problem.lower, argnums=1)(x, y, None).abs().max() < 1e-13
    assert float((y - torch.from_numpy(argmin(problem, x.numpy(), 0.0))).abs().max()) < 1e-7


@pytest.mark.parametrize("lam", [0.1, 10.0, 1000.0])
def test_penalised_solution(lam: float) -> None:
    problem = small()
    y = problem.penalised_solution(X, lam)
    f_y = torch.func.grad(problem.upper, argnums=1)(X, y, None)
    g_y = torch.func.grad(problem.lower, argnums=1)(X, y, None)
    assert (f_y / lam + g_y).abs().max() < 1e-13
    assert close(y, argmin(problem, X.numpy(), 1 / lam), 1e-6)


@pytest.mark.parametrize("seed", [34, 156, 189])
def test_nearly_unregularised_separable_data_are_solved(seed: int) -> None:
    """Here Newton's method with full steps alone runs away; found by searching over seeds."""
    problem = small(train=20, trusted=5, dim=15, noise=0.0, ridge=1e-6, seed=seed)
    features, labels, _ = problem.lower_data
    x = 3 * normal(20, seed=seed)
    y = problem.lower_solution(x)
    assert torch.func.grad(problem.lower, argnums=1)(x, y, None).abs().max() < 1e-13
    assert bool((labels * (features @ y) > 0).all())


def test_value() -> None:
    problem = small()
    expected = f(problem, argmin(problem, X.numpy(), 0.0))
    assert float(problem.value(X)) == pytest.approx(expected, rel=1e-7)


def test_gradient() -> None:
    problem = small()
    assert close(problem.gradient(X), central_differences(problem.value, X), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("lam", [1.0, 30.0])
def test_penalised_gradient(lam: float) -> None:
    problem = small()

    def penalised_minimum(x: Tensor) -> Tensor:
        y, z = argmin(problem, x.numpy(), 1 / lam), argmin(problem, x.numpy(), 0.0)
        gap = g(problem, x.numpy(), y) - g(problem, x.numpy(), z)
        return torch.tensor(f(problem, y) + lam * gap, dtype=torch.float64)

    expected = central_differences(penalised_minimum, X)
    assert close(problem.penalised_gradient(X, lam), expected, 1e-5)


def test_bias_falls_as_one_over_the_multiplier() -> None:
    problem = small()
    multipliers = np.geomspace(1e3, 1e5, 5)
    exact = problem.gradient(X)
    bias = [float((problem.penalised_gradient(X, lam) - exact).norm()) for lam in multipliers]
    assert float(np.polyfit(np.log(multipliers), np.log(bias), 1)[0]) == pytest.approx(-1, abs=0.05)
    assert bias[-1] < 1e-2 * float(exact.norm())


@pytest.mark.parametrize("lam", [10.0, 1e3, 1e5])
def test_distance_is_within_the_bound_of_the_paper(lam: float) -> None:
    problem = small()
    l_f0 = float(problem.upper_data[0].norm(dim=-1).mean())  # |l'| <= 1
    mu_g = 2 * RIDGE
    distance = float((problem.penalised_solution(X, lam) - problem.lower_solution(X)).norm())
    assert 0 < distance <= 2 * l_f0 / (lam * mu_g)


@pytest.mark.parametrize("shift", [-40.0, 0.0])
def test_the_lower_level_is_as_convex_as_the_ridge_says(shift: float) -> None:
    problem = small()
    hessian = torch.func.jacrev(torch.func.grad(problem.lower, argnums=1), argnums=1)
    smallest = float(torch.linalg.eigvalsh(hessian(X + shift, Y, None))[0])
    assert smallest >= 2 * RIDGE - 1e-12
    if shift:  # all weights vanish, and the ridge is all that is left
        assert smallest == pytest.approx(2 * RIDGE)


def test_single_precision() -> None:
    single, double = small(dtype=torch.float32), small()
    x = X.float()
    for found, expected, tolerance in (
        (single.lower_solution(x), double.lower_solution(X), 1e-3),
        (single.penalised_solution(x, 9.0), double.penalised_solution(X, 9.0), 1e-3),
        (single.value(x), double.value(X), 1e-4),
        (single.gradient(x), double.gradient(X), 1e-3),
        (single.penalised_gradient(x, 9.0), double.penalised_gradient(X, 9.0), 1e-2),
    ):
        assert found.dtype == torch.float32
        assert close(found, expected, tolerance)


@pytest.mark.slow
def test_learned_weights_tell_flipped_labels_from_true_ones() -> None:
    problem = WeightedLogistic(train=200, trusted=100, dim=5, noise=0.3, seed=5)
    method = bilevel.F2SA(lower_lr=1.0, upper_lr=500.0, multiplier=10.0, inner_steps=10)
    result = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=100)
    assert problem.value(result.x) < 0.7 * problem.value(problem.x0)
    flipped, true = result.x[problem.flipped], result.x[~problem.flipped]
    ranked = (flipped[:, None] < true[None, :]).double().mean()
    assert float(ranked) > 0.9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": 0}, "train .* not 0"),
        ({"trusted": -1}, "trusted .* not -1"),
        ({"dim": 1.5}, "dim .* not 1.5"),
        ({"noise": -0.1}, "noise .* not -0.1"),
        ({"noise": 1.0}, "noise .* not 1.0"),
        ({"noise": NAN}, "noise .* not nan"),
        ({"ridge": 0.0}, "ridge .* not 0.0"),
        ({"ridge": -1.0}, "ridge .* not -1.0"),
        ({"ridge": NAN}, "ridge .* not nan"),
        ({"ridge": float("inf")}, "ridge .* not inf"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        small(**arguments)
