"""Lower levels with kinks (lasso, hinge, |y|) and one that is flat at its minimum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu, softplus

from benchmarks.auto.case import Case, Maker
from benchmarks.auto.judges import double, finite, proximal, soft
from bilevel import Problem

FEATURES, GROUP = 30, 5


def _normal(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return partial(torch.randn, generator=generator)


def lasso(seed: int, data_dir: Path | None, *, penalty: str) -> Case:
    """Make a lasso: one strength in all, one per feature, or one per group of five features."""
    normal = _normal(seed)
    truth = torch.zeros(FEATURES)
    truth[:GROUP] = 1.0

    def samples() -> tuple[Tensor, Tensor]:
        features = normal(60, FEATURES)
        return features, features @ truth + 0.5 * normal(60)

    train, held_out = samples(), samples()
    grouped = penalty == "groups"
    count = {"one": 1, "features": FEATURES, "groups": FEATURES // GROUP}[penalty]

    def sizes(y: Tensor) -> Tensor:
        return y.view(-1, GROUP).norm(dim=1) if grouped else y.abs()

    def upper(x: Tensor, y: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        features, target = batch
        return 0.5 * ((features @ y - target) ** 2).mean()

    def lower(x: Tensor, y: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return upper(x, y, batch) + (x.exp() * sizes(y)).sum()

    (A, b), test = double(train), double(held_out)
    gram, right = A.T @ A / len(b), A.T @ b / len(b)
    curvature = float(torch.linalg.matrix_norm(gram, 2))

    def value(x: Tensor) -> Tensor:
        def prox(v: Tensor, step: float) -> Tensor:
            if not grouped:
                return soft(v, step * x.exp())
            rows = v.view(-1, GROUP)
            length: Tensor = rows.norm(dim=1, keepdim=True)
            shrunk = soft(length, step * x.exp()[:, None])
            return (rows * shrunk / length.clamp(min=1e-300)).view(-1)

        y = proximal(lambda y: gram @ y - right, prox, curvature, torch.zeros_like(right))
        return upper(x, y, test)

    return Case(
        Problem(upper, lower),
        torch.full((count,), -1.0),
        torch.full((FEATURES,), 0.1) if grouped else torch.zeros(FEATURES),
        finite(value),
        {"upper_data": held_out, "lower_data": train},
    )


def hinge(seed: int, data_dir: Path | None, *, count: int) -> Case:
    """Make a support vector machine with one strength, or one per feature; f is logistic."""
    normal = _normal(seed)
    truth = torch.zeros(10)
    truth[:3] = 1.0

    def samples() -> tuple[Tensor, Tensor]:
        features = normal(80, 10)
        return features, (features @ truth + 0.5 * normal(80)).sign()

    train, held_out = samples(), samples()

    def upper(x: Tensor, y: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        features, labels = batch
        return softplus(-labels * (features @ y)).mean()

    def lower(x: Tensor, y: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        features, labels = batch
        return relu(1 - labels * (features @ y)).mean() + 0.5 * (x.exp() * y**2).sum()

    (A, b), test = double(train), double(held_out)
    signed = A * b[:, None]

    def value(x: Tensor) -> Tensor:
        # The dual: min_a 1/2 a' kernel a - sum a over 0 <= a_i <= 1/n, with y = scaled' a.
        # A strength below 1e-6 moves y by no more, but the dual has no solution that can be found.
        scaled = signed / x.exp().clamp(min=1e-6).expand(10)
        kernel = signed @ scaled.T
        a = proximal(
            lambda a: kernel @ a - 1,
            lambda v, step: v.clamp(0, 1 / len(b)),
            float(torch.linalg.matrix_norm(kernel, 2)),
            torch.zeros_like(b),
        )
        return upper(x, scaled.T @ a, test)

    return Case(
        Problem(upper, lower),
        torch.zeros(count),
        torch.zeros(10),
        finite(value),
        {"upper_data": held_out, "lower_data": train},
    )


def threshold(seed: int, data_dir: Path | None) -> Case:
    """Make g = 1/2 ||y - c||^2 + sum exp(x_i) |y_i| from its kink, y = 0."""
    normal = _normal(seed)
    c = 2 * normal(20, dtype=torch.float64)
    t = soft(c, 0.5 * torch.rand(20, generator=torch.Generator().manual_seed(seed)))

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return 0.5 * ((y - t) ** 2).sum()

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return 0.5 * ((y - c) ** 2).sum() + (x.exp() * y.abs()).sum()

    x0 = torch.zeros(20, dtype=torch.float64)
    return Case(
        Problem(upper, lower), x0, x0.clone(), finite(lambda x: upper(x, soft(c, x.exp()), None))
    )


def quartic(seed: int, data_dir: Path | None) -> Case:
    """Make g = sum (y - Bx)^4 from its minimum, where it has no curvature."""
    normal = _normal(seed)
    B = normal(4, 4, dtype=torch.float64) / 2 + torch.eye(4, dtype=torch.float64)
    t = normal(4, dtype=torch.float64)

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return 0.5 * ((y - t) ** 2).sum() + 0.05 * (x * x).sum()

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return ((y - B @ x) ** 4).sum()

    x0 = torch.zeros(4, dtype=torch.float64)
    return Case(Problem(upper, lower), x0, B @ x0, finite(lambda x: upper(x, B @ x, None)))


PROBLEMS: dict[str, Maker] = {
    "lasso, one strength": partial(lasso, penalty="one"),
    "lasso, strengths of features": partial(lasso, penalty="features"),
    "lasso, strengths of groups": partial(lasso, penalty="groups"),
    "hinge, one strength": partial(hinge, count=1),
    "hinge, strengths of features": partial(hinge, count=10),
    "soft threshold": threshold,
    "quartic": quartic,
}
