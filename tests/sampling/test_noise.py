"""What sharing samples buys: the noise of lam * (grad_x g(x, y) - grad_x g(x, z))."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.engine import EagerEvaluator
from bilevel.problem import FORWARD, Phi
from bilevel.sampling import Draw
from bilevel.variables import Variable
from tests.sampling.kinds import stream

LOGISTIC = bilevel.problems.WeightedLogistic(train=200, trusted=50, dim=10)
MULTIPLIERS = (5.0, 20.0, 100.0, 500.0)


def per_sample_gradients(y: Tensor) -> Tensor:
    """The entry in which the x gradient of g on sample i alone is not zero, for each i, at x0."""
    features, labels, _ = LOGISTIC.lower_data
    x = LOGISTIC.x0
    return (
        torch.sigmoid(x)
        * torch.sigmoid(-x)
        * torch.nn.functional.softplus(-labels * (features @ y))
    )


def expected_noise(multiplier: float, shared: bool) -> float:
    """E ||direction - E direction||^2 with one sample, from all 200 samples."""
    n = len(LOGISTIC.x0)
    x = LOGISTIC.x0
    y, z = LOGISTIC.penalised_solution(x, multiplier), LOGISTIC.lower_solution(x)

    def variance(entries: Tensor) -> float:  # of e_i * entries_i with i uniform
        return float((entries**2).mean() - (entries**2).sum() / n**2)

    at_y, at_z = per_sample_gradients(y), per_sample_gradients(z)
    if shared:
        return multiplier**2 * variance(at_y - at_z)
    return multiplier**2 * (variance(at_y) + variance(at_z))


@cache
def measured_noise(multiplier: float, shared: bool, repeats: int = 400) -> float:
    x = Variable.copy_of(LOGISTIC.x0, "x")
    copies = [
        Variable.copy_of(LOGISTIC.penalised_solution(LOGISTIC.x0, multiplier), "y"),
        Variable.copy_of(LOGISTIC.lower_solution(LOGISTIC.x0), "z"),
    ]
    draw = Draw(stream(None), stream(LOGISTIC.lower_data, 1))
    evaluator = EagerEvaluator(LOGISTIC, draw)
    phi = Phi(FORWARD, x, copies, multiplier, shared)
    mean = LOGISTIC.penalised_gradient(LOGISTIC.x0, multiplier)
    total = 0.0
    for _ in range(repeats):
        ((at_y, at_z),) = draw.direction(FORWARD.nodes, shared)
        evaluator.backward(evaluator.evaluate(phi, [at_y, at_z]), 1.0, multiplier)
        total += float((x.take_grads()[0] - mean).square().sum())
    return total / repeats


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("multiplier", MULTIPLIERS)
def test_the_noise_of_the_direction_is_what_the_samples_say(
    multiplier: float, shared: bool
) -> None:
    assert measured_noise(multiplier, shared) == pytest.approx(
        expected_noise(multiplier, shared), rel=0.3
    )


@pytest.mark.slow
def test_shared_noise_stays_and_independent_noise_grows_with_the_square() -> None:
    shared = [measured_noise(lam, shared=True) for lam in MULTIPLIERS]
    independent = [measured_noise(lam, shared=False) for lam in MULTIPLIERS]
    assert max(shared) < 3 * min(shared)
    slope = np.polyfit(np.log(MULTIPLIERS), np.log(independent), 1)[0]
    assert slope == pytest.approx(2, abs=0.1)
    assert independent[-1] > 1e5 * shared[-1]


@pytest.mark.slow
def test_sharing_tames_the_noise_of_the_inner_steps_too() -> None:
    def spread(coupling: Any) -> float:
        """The variance over seeds of a full x direction after noisy inner steps."""
        method = bilevel.F2SA(
            lower_lr=0.2, upper_lr=1.0, multiplier=500.0, inner_steps=30, coupling=coupling
        )
        moved = []
        for seed in range(12):
            solver = bilevel.Solver(
                LOGISTIC, LOGISTIC.x0, LOGISTIC.lower_solution(LOGISTIC.x0), method=method,
                upper_data=LOGISTIC.upper_data, lower_data=LOGISTIC.lower_data,
                batch_size=10, chunk_size=200, direction_batch_size="all", seed=seed,
            )  # fmt: skip
            solver.step(measure=False)
            moved.append(solver.x)
        return float(torch.stack(moved).var(dim=0).sum())

    assert spread("independent") > 1e3 * spread("shared")
