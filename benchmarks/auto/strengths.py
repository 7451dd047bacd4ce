"""One strength of regularisation per feature, learned from held-out samples: ridge, logistic.

The strengths are exp(x), softplus(x) or x^2. The first twelve ridge problems are the README's, from
other starts and with other bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import softplus

from benchmarks.auto.case import Case, Maker
from benchmarks.auto.judges import Logistic, double, finite
from bilevel import Problem, sets
from bilevel.problems import WeightedLogistic

Samples: TypeAlias = tuple[Tensor, Tensor]

LOWEST = -6.0
MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "softplus": softplus,
    "squared": torch.square,
}


def _linear(seed: int, count: int, features: int = 40) -> list[Samples]:
    """Draw two sets of samples of a linear rule in which five features matter."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.zeros(features)
    truth[:5] = 1.0
    drawn = []
    for _ in range(2):
        inputs = torch.randn(count, features, generator=generator)
        drawn.append((inputs, inputs @ truth + 0.5 * torch.randn(count, generator=generator)))
    return drawn


def _box(top: float | None) -> sets.Box | None:
    return None if top is None else sets.Box(LOWEST, top)


def ridge(
    seed: int,
    data_dir: Path | None,
    *,
    strength: str = "exp",
    start: float = 0.0,
    top: float | None = None,
) -> Case:
    """Make the README's problem: 40 features, 60 training and 60 held-out samples."""
    train, held_out = _linear(seed, 60)
    strengths = MAPS[strength]

    def upper(x: Tensor, y: Tensor, batch: Samples) -> Tensor:
        features, target = batch
        return ((features @ y - target) ** 2).mean()

    def lower(x: Tensor, y: Tensor, batch: Samples) -> Tensor:
        return upper(x, y, batch) + (strengths(x) * y**2).sum()

    (A, b), test = double(train), double(held_out)
    gram, right = A.T @ A / len(b), A.T @ b / len(b)

    def value(x: Tensor) -> Tensor:
        return upper(x, torch.linalg.solve(gram + torch.diag(strengths(x)), right), test)

    return Case(
        Problem(upper, lower, x_set=_box(top)),
        torch.full((40,), start),
        torch.zeros(40),
        finite(value),
        {"upper_data": held_out, "lower_data": train},
    )


def logistic(
    seed: int,
    data_dir: Path | None,
    *,
    strength: str = "exp",
    start: float = 0.0,
    top: float | None = None,
    batch_size: int | None = None,
) -> Case:
    """Make the same with logistic regression: 20 features, 200 samples each."""
    (inputs, score), (more, other) = _linear(seed, 200, 20)
    train, held_out = (inputs, score.sign()), (more, other.sign())
    strengths = MAPS[strength]

    def upper(x: Tensor, y: Tensor, batch: Samples) -> Tensor:
        features, labels = batch
        return softplus(-labels * (features @ y)).mean()

    def lower(x: Tensor, y: Tensor, batch: Samples) -> Tensor:
        return upper(x, y, batch) + 0.5 * (strengths(x) * y**2).sum()

    solver, test = Logistic(*train), double(held_out)
    return Case(
        Problem(upper, lower, x_set=_box(top)),
        torch.full((20,), start),
        torch.zeros(20),
        finite(lambda x: upper(x, solver.solve(strengths(x)), test)),
        {"upper_data": held_out, "lower_data": train, "batch_size": batch_size},
    )


def weighted(seed: int, data_dir: Path | None, *, batch_size: int | None = None) -> Case:
    """Make the problem of one weight per training sample, of which 30% are labelled wrongly."""
    problem = WeightedLogistic(seed=seed)
    data = {"upper_data": problem.upper_data, "lower_data": problem.lower_data}
    return Case(
        problem,
        problem.x0,
        problem.y0,
        finite(problem.value),
        {**data, "batch_size": batch_size},
    )


def _named(kind: str, strength: str, start: float, top: float | None) -> str:
    bound = "no bound" if top is None else f"x <= {top:g}"
    return f"{kind}, {strength}, from {start:g}, {bound}"


def _family(kind: str, make: Callable[..., Case], variants: list[Any]) -> dict[str, Maker]:
    return {
        _named(kind, *variant): partial(
            make, **dict(zip(("strength", "start", "top"), variant, strict=True))
        )
        for variant in variants
    }


RIDGE: dict[str, Maker] = _family(
    "ridge",
    ridge,
    [("exp", start, top) for start in (-6.0, -4.0, 0.0) for top in (2.0, 4.0, 6.0, None)]
    + [
        ("softplus", -4.0, None),
        ("softplus", 2.0, None),
        ("softplus", 0.0, 4.0),
        ("squared", 0.1, None),
        ("squared", 1.0, None),
        ("squared", 3.0, 4.0),
    ],
)

LOGISTIC: dict[str, Maker] = {
    **_family(
        "logistic",
        logistic,
        [
            ("exp", -6.0, None),
            ("exp", -6.0, 4.0),
            ("exp", 0.0, None),
            ("exp", 3.0, None),
            ("softplus", -4.0, None),
            ("softplus", 2.0, 4.0),
            ("squared", 0.1, None),
            ("squared", 2.0, None),
        ],
    ),
    "logistic, exp, from 0, batches of 20": partial(logistic, batch_size=20),
    "weighted logistic": weighted,
    "weighted logistic, batches of 20": partial(weighted, batch_size=20),
}
