"""What is made without a word about its device is made on the default one; nothing here may be.

With the meta device as the default, whose tensors have no values, whatever is shows itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
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


def test_sets_terms_and_metrics_do_not_care_for_the_default_device(elsewhere: None) -> None:
    target = torch.tensor([1.0, -2.0], device="cpu")

    def upper(x: torch.Tensor, y: torch.Tensor, batch: Any) -> Any:
        return ((y - target) ** 2).sum(), {"seven": 7.0}

    def lower(x: torch.Tensor, y: torch.Tensor, batch: Any) -> Any:
        return ((y - x) ** 2).sum()

    zero = torch.zeros(2, device="cpu")
    problem = bilevel.Problem(
        upper, lower, x_set=bilevel.sets.Box(-1, 1), y_prox=bilevel.prox.L1(0.5)
    )
    found = bilevel.minimize(problem, zero, zero, steps=3, method=bilevel.F2SA(0.1, 0.05))
    assert found.x.device.type == "cpu"
    assert found.history["upper/seven"][-1] == 7


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("trusted", [False, True])
def test_labels_are_cleaned_on_the_cpu(
    sparse: bool, trusted: bool, request: pytest.FixtureRequest
) -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 2, 90)
    X: Any = rng.normal(size=(90, 3)) + 3 * np.eye(2, 3)[truth]
    X = scipy.sparse.csr_matrix(X) if sparse else X
    given = np.where(rng.random(90) < 0.2, 1 - truth, truth)
    known: dict[str, Any] = {"X_clean": X[:30], "y_clean": truth[:30]} if trusted else {}

    def fitted() -> bilevel.LabelCleaner:
        return bilevel.LabelCleaner(max_steps=20).fit(X[30:], given[30:], **known)

    expected = fitted()
    probabilities = expected.predict_proba(X)
    request.getfixturevalue("elsewhere")
    cleaner = fitted()
    assert np.array_equal(cleaner.label_quality_, expected.label_quality_)
    assert np.array_equal(cleaner.predict_proba(X), probabilities)
