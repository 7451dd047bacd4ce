"""HyperCleaning: the reference against sums written out, differences and known results on MNIST."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.data import Mnist
from bilevel.errors import ArgumentError, ArgumentTypeError, BilevelError
from bilevel.problems import HyperCleaning, cleaning, softmax

N, M, D, K = 24, 9, 5, 3
RIDGE = 0.02
WEIGHTS = ["sigmoid", "box"]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def arguments(**options: Any) -> dict[str, Any]:
    """Three clouds of points; a third of the training labels is wrong."""
    centres = 2 * normal(K, D, seed=1)
    true = torch.arange(N) % K
    return {
        "images": centres[true] + normal(N, D, seed=2),
        "labels": torch.where(torch.arange(N) % 4 == 1, (true + 1) % K, true),
        "trusted_images": centres[torch.arange(M) % K] + normal(M, D, seed=3),
        "trusted_labels": torch.arange(M) % K,
        "true_labels": true,
        "ridge": RIDGE,
        "dtype": torch.float64,
        **options,
    }


def small(**options: Any) -> HyperCleaning:
    return HyperCleaning(**arguments(**options))


def point(weights: str) -> Tensor:
    x = normal(N, seed=4)
    return x if weights == "sigmoid" else torch.sigmoid(2 * x)


def losses(images: Tensor, labels: Tensor, y: Tensor) -> Any:
    """The cross entropies with NumPy, the bias as a term of its own."""
    logits = images.numpy() @ y.numpy()[:, :-1].T + y.numpy()[:, -1]
    return np.logaddexp.reduce(logits, axis=1) - logits[np.arange(len(labels)), labels]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_objectives_are_those_of_the_paper(weights: str) -> None:
    given, problem = arguments(), small(weights=weights)
    x, y = point(weights), normal(K, D + 1, seed=5)
    w = 1 / (1 + np.exp(-x.numpy())) if weights == "sigmoid" else x.numpy()
    lower = losses(given["images"], given["labels"], y)
    upper = losses(given["trusted_images"], given["trusted_labels"], y)
    ridge = RIDGE * float((y**2).sum())
    assert float(problem.lower(x, y, None)) == pytest.approx((w * lower).mean() + ridge)
    assert float(problem.upper(x, y, None)) == pytest.approx(upper.mean())
    rows = torch.tensor([3, 0, 17, 3])
    batch = tuple(part[rows] for part in problem.lower_data)
    assert float(problem.lower(x, y, batch)) == pytest.approx((w * lower)[rows].mean() + ridge)
    batch = tuple(part[:2] for part in problem.upper_data)
    assert float(problem.upper(x, y, batch)) == pytest.approx(upper[:2].mean())


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_solutions_are_stationary(
    weights: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wide:
        monkeypatch.setattr(softmax, "WIDEST", 2)
    problem, x = small(weights=weights), point(weights)
    slope_f = torch.func.grad(problem.upper, argnums=1)
    slope_g = torch.func.grad(problem.lower, argnums=1)
    y = problem.lower_solution(x)
    assert torch.linalg.vector_norm(slope_g(x, y, None)) < 2e-12
    for lam in (0.5, 50.0):
        y = problem.penalised_solution(x, lam)
        total = slope_g(x, y, None) + slope_f(x, y, None) / lam
        assert torch.linalg.vector_norm(total) < 2e-12


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_gradient_is_that_of_the_value(
    weights: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wide:
        monkeypatch.setattr(softmax, "WIDEST", 2)
    problem, x = small(weights=weights), point(weights)
    h = 1e-4
    differences = [
        (problem.value(x + h * e) - problem.value(x - h * e)) / (2 * h)
        for e in torch.eye(N, dtype=torch.float64)
    ]
    expected = torch.stack(differences)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(problem.gradient(x), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_gradient_agrees_with_the_one_by_automatic_differentiation(weights: str) -> None:
    problem, x = small(weights=weights), point(weights)
    exact = bilevel.hypergradient(problem, x, problem.lower_solution(x))
    torch.testing.assert_close(problem.gradient(x), exact, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_penalised_gradient_is_danskins_and_tends_to_the_gradient(weights: str) -> None:
    problem, x = small(weights=weights), point(weights)
    lam = 7.0
    y, z = problem.penalised_solution(x, lam), problem.lower_solution(x)

    def phi(x: Tensor) -> Tensor:
        difference = problem.lower(x, y, None) - problem.lower(x, z, None)
        return problem.upper(x, y, None) + lam * difference

    torch.testing.assert_close(problem.penalised_gradient(x, lam), torch.func.grad(phi)(x))
    gradient = problem.gradient(x)
    gaps = [
        float(torch.linalg.vector_norm(problem.penalised_gradient(x, lam) - gradient))
        for lam in (1e3, 1e4)
    ]
    assert gaps[1] == pytest.approx(gaps[0] / 10, rel=0.05)


def test_a_start_a_tolerance_and_single_precision_change_the_solution_only_by_the_tolerance() -> (
    None
):
    problem, x = small(), point("sigmoid")
    exact = problem.lower_solution(x)
    near = problem.lower_solution(x + 0.1)
    torch.testing.assert_close(problem.lower_solution(x, start=near), exact, rtol=0, atol=1e-10)
    assert torch.equal(problem.lower_solution(x, start=exact), exact)
    rough = problem.lower_solution(x, tolerance=1e-3)
    assert 0 < float(torch.linalg.vector_norm(rough - exact)) <= 1e-3 / (2 * RIDGE)
    single = small(dtype=torch.float32)
    found = single.lower_solution(x.float())
    assert found.dtype == torch.float32
    assert float(torch.linalg.vector_norm(found - exact)) <= 1e-5 / (2 * RIDGE)
    value = float(problem.value(x))
    assert float(single.value(x.float(), start=near.float())) == pytest.approx(value, rel=1e-4)
    torch.testing.assert_close(
        single.gradient(x.float()).double(), problem.gradient(x), rtol=1e-3, atol=1e-6
    )


def test_weights_of_one_are_training_as_usual() -> None:
    box, sigmoid = small(weights="box"), small()
    torch.testing.assert_close(box.x0, torch.ones(N, dtype=torch.float64))
    usual = sigmoid.trained(torch.ones(N, dtype=torch.float64))
    torch.testing.assert_close(usual, box.lower_solution(box.x0))
    torch.testing.assert_close(sigmoid.weight(sigmoid.x0), 0.5 * box.x0)


def test_arrays_of_any_shape_are_taken_as_they_are() -> None:
    given = arguments(images=torch.cat([arguments()["images"], torch.zeros(N, 1)], 1))
    given["trusted_images"] = torch.cat([given["trusted_images"], torch.zeros(M, 1)], 1)
    flat = HyperCleaning(**given)
    given["images"] = given["images"].reshape(N, 2, 3).numpy()
    given["labels"] = given["labels"].numpy().astype(np.uint8)
    shaped = HyperCleaning(**given)
    for a, b in zip(flat.lower_data, shaped.lower_data, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert shaped.y0.shape == (K, 7)


def test_corrupted_labels_and_accuracy_are_told_where_they_are_known() -> None:
    problem = small(test_images=torch.eye(D), test_labels=torch.tensor([0, 1, 2, 0, 0]))
    assert problem.corrupted.nonzero().squeeze(-1).tolist() == list(range(1, N, 4))
    y = torch.zeros(K, D + 1, dtype=torch.float64)
    y[1, 1] = y[2, 2] = y[2, 3] = 1.0
    assert problem.accuracy(y) == 4 / 5
    with pytest.raises(ArgumentError, match="true_labels"):
        _ = small(true_labels=None).corrupted
    with pytest.raises(ArgumentError, match="test_images"):
        small().accuracy(y)


@pytest.mark.slow
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_method_lowers_the_value_and_doubts_the_corrupted(weights: str) -> None:
    problem = small(weights=weights)
    result = bilevel.minimize(
        problem,
        problem.x0,
        problem.y0,
        steps=200,
        upper_data=problem.upper_data,
        lower_data=problem.lower_data,
    )
    assert problem.value(result.x) < problem.value(problem.x0)
    w = problem.weight(result.x)
    assert w[problem.corrupted].mean() < w[~problem.corrupted].mean()
    assert 0 <= float(w.min()) <= float(w.max()) <= 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": "softmax"}, ArgumentError, "weights"),
        ({"ridge": 0.0}, ArgumentError, "ridge .* greater than 0, not 0.0"),
        ({"dtype": torch.int64}, ArgumentTypeError, r"dtype .* not torch\.int64"),
        ({"images": [[1.0]]}, ArgumentTypeError, "images"),
        ({"images": torch.ones(N)}, ArgumentError, r"images .* not \(24,\)"),
        ({"images": torch.ones(0, D)}, ArgumentError, r"images .* not \(0, 5\)"),
        (
            {"trusted_images": torch.full((M, D), float("nan"))},
            ArgumentError,
            "trusted_images",
        ),
        ({"trusted_images": torch.ones(M, 2)}, ArgumentError, "images 5, trusted_images 2"),
        ({"labels": torch.zeros(N)}, ArgumentTypeError, r"labels .* not torch\.float32"),
        ({"labels": list(range(N))}, ArgumentTypeError, "labels"),
        ({"labels": torch.arange(N - 1)}, ArgumentError, r"labels .*\(24,\).* not \(23,\)"),
        ({"labels": -torch.arange(N)}, ArgumentError, "labels"),
        ({"classes": 2}, ArgumentError, "labels.*classes"),
        ({"classes": 1}, ArgumentError, "classes"),
        ({"true_labels": torch.arange(N), "classes": 3}, ArgumentError, "true_labels has .* 23"),
        ({"test_images": torch.ones(2, D)}, ArgumentError, "test_images.*test_labels"),
    ],
)
def test_bad_arguments_are_named(
    options: dict[str, Any], error: type[BilevelError], message: str
) -> None:
    with pytest.raises(error, match=message):
        small(**options)


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> Mnist:
    """In the place of MNIST, 60,000 images of three pixels that spell their number."""
    numbers = torch.arange(60_000)
    images = torch.stack([numbers // 256**2, numbers // 256 % 256, numbers % 256], -1)
    digits = Mnist(
        images.to(torch.uint8).unsqueeze(1), numbers % 10, images[:5].to(torch.uint8), numbers[:5]
    )
    monkeypatch.setattr(cleaning, "mnist", lambda data_dir: digits)
    return digits


def rows(features: Tensor) -> list[int]:
    pixels = (features[:, :3].double() * 255).round().long()
    return (pixels @ torch.tensor([256**2, 256, 1])).tolist()


def test_the_split_is_the_permutation_of_the_seed(numbered: Mnist) -> None:
    problem = HyperCleaning.mnist(0.3)
    order = np.random.default_rng(0).permutation(60_000)
    assert rows(problem.lower_data[0]) == order[:19_000].tolist()
    assert rows(problem.upper_data[0]) == order[19_000:20_000].tolist()
    assert problem.true_labels.tolist() == (order[:19_000] % 10).tolist()
    assert problem.upper_data[1].tolist() == (order[19_000:20_000] % 10).tolist()
    assert torch.equal(problem.lower_data[0][:, -1], torch.ones(19_000))
    again, other = HyperCleaning.mnist(0.3), HyperCleaning.mnist(0.3, seed=1)
    assert torch.equal(problem.lower_data[1], again.lower_data[1])
    assert rows(other.lower_data[0]) != rows(problem.lower_data[0])


def test_as_many_labels_are_corrupted_as_asked_each_to_another_class(numbered: Mnist) -> None:
    problem = HyperCleaning.mnist(0.3)
    assert int(problem.corrupted.sum()) == 5700
    assert problem.true_labels is not None
    shifts = ((problem.lower_data[1] - problem.true_labels) % 10).bincount(minlength=10)
    assert int(shifts[0]) == 13_300
    # 5700 / 9 = 633 each, with a deviation of 24
    assert 530 < int(shifts[1:].min()) <= int(shifts[1:].max()) < 740
    assert int(HyperCleaning.mnist(0.0, train=50, trusted=10).corrupted.sum()) == 0
    assert int(HyperCleaning.mnist(1.0, train=50, trusted=10).corrupted.sum()) == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corruption": 1.5}, "corruption must be at most 1, not 1.5"),
        ({"corruption": -0.1}, "corruption .* not -0.1"),
        ({"train": 0}, "train must be a whole number"),
        ({"trusted": 2.5}, "trusted must be a whole number"),
        ({"train": 59_500}, "train=59500 and trusted=1000 are more than the 60000"),
    ],
)
def test_bad_arguments_of_the_experiment_are_named(
    options: dict[str, Any], message: str, numbered: Mnist
) -> None:
    with pytest.raises(ArgumentError, match=message):
        HyperCleaning.mnist(**options)


@pytest.mark.skipif(not os.environ.get("BILEVEL_DATA"), reason="needs BILEVEL_DATA")
@pytest.mark.parametrize(
    ("corruption", "value", "spread", "accuracy"),
    [
        (0.0, 0.4798, 1e-4, 0.899),  # nothing is drawn but the split, so all digits agree
        (0.1, 0.6021, 0.02, 0.898),
        (0.3, 0.8727, 0.02, 0.888),
        (0.5, 1.1979, 0.02, 0.874),
    ],
)
def test_training_on_mnist_as_it_is_has_the_known_result(
    corruption: float, value: float, spread: float, accuracy: float
) -> None:
    problem = HyperCleaning.mnist(corruption, weights="box")
    y = problem.lower_solution(problem.x0)
    assert float(problem.upper(problem.x0, y, None)) == pytest.approx(value, rel=spread)
    assert problem.accuracy(y) == pytest.approx(accuracy, abs=0.005)
