"""What is made without a word about its device is made on the default one; nothing here may be.

With the meta device as the default, whose tensors have no values, whatever is shows itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bilevel
from bilevel import problems


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Another default device than that of the variables and the data, for one test."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: problems.Quadratic(sigma_f=0.1, sigma_g=0.1),
        problems.FlatValley,
        lambda: problems.WeightedLogistic(train=8, trusted=4, dim=2),
    ],
    ids=["Quadratic", "FlatValley", "WeightedLogistic"],
)
def test_problems_with_known_answers_are_where_they_say(make: Any, elsewhere: None) -> None:
    problem = make()
    assert problem.x0.device.type == problem.y0.device.type == "cpu"
    assert bool(torch.isfinite(problem.gradient(problem.x0)).all())


@pytest.mark.parametrize("method", sorted(bilevel.METHODS))
def test_a_run_is_that_of_another_default_device(
    method: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    problem = problems.Quadratic(sigma_f=0.1, sigma_g=0.1)
    rates = {} if method == "no-bilevel" else {"upper_lr": 0.05}
    data = torch.randn(20, 10, dtype=torch.float64)

    def run(folder: Path) -> torch.Tensor:
        return bilevel.minimize(
            problem, problem.x0, problem.y0, steps=4, upper_data=data, lower_data=data,
            batch_size=1, method=bilevel.METHODS[method](lower_lr=0.1, **rates), checkpoint=folder,
        ).y  # fmt: skip

    expected = run(tmp_path / "usual")
    request.getfixturevalue("elsewhere")
    assert torch.equal(run(tmp_path / "elsewhere"), expected)


def test_many_runs_are_those_of_another_default_device(request: pytest.FixtureRequest) -> None:
    problem = problems.Quadratic(sigma_f=0.1, sigma_g=0.1)

    def run() -> torch.Tensor:
        return bilevel.minimize_many(
            problem, problem.x0, problem.y0, methods=bilevel.F2SA(0.1, 0.05), seeds=2, steps=3
        ).x

    expected = run()
    request.getfixturevalue("elsewhere")
    assert torch.equal(run(), expected)
