"""Quadratics with known F, in all units, and close relatives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.auto.case import Case, Maker
from bilevel import Problem
from bilevel.problems import LeastSquares, Nonconvex, Quadratic

SMALL, LARGE = 1e-3, 1e3
ALONE = [
    tuple(factor if place == i else 1.0 for i in range(4))
    for place in range(4)
    for factor in (SMALL, LARGE)
]
TOGETHER = [
    (LARGE, LARGE, LARGE, LARGE),
    (SMALL, SMALL, SMALL, SMALL),
    (LARGE, SMALL, SMALL, LARGE),
    (SMALL, LARGE, LARGE, SMALL),
]
"""Scales of f, g, x and y: each alone, and some together."""


def case_of(known: LeastSquares, scales: Sequence[float] = (1.0, 1.0, 1.0, 1.0)) -> Case:
    """Make the case of a problem in other units: f and g times a factor, x and y in other units."""
    f, g, x_unit, y_unit = scales

    def value(x: Tensor, y: Tensor) -> float:
        return f * float(known.value(x / x_unit))

    return Case(
        problem=Problem(
            lambda x, y, batch: f * known.upper(x / x_unit, y / y_unit, batch),
            lambda x, y, batch: g * known.lower(x / x_unit, y / y_unit, batch),
        ),
        x0=known.x0 * x_unit,
        y0=known.y0 * y_unit,
        value=value,
        data={"upper_data": known.upper_noise, "lower_data": known.lower_noise},
    )


def _quadratic(
    seed: int, data_dir: Path | None, *, condition: float, scales: Sequence[float]
) -> Case:
    return case_of(Quadratic(condition=condition, seed=seed), scales)


def _wide(seed: int, data_dir: Path | None) -> Case:
    return case_of(Quadratic(50, 50, condition=100.0, seed=seed))


def _noisy(seed: int, data_dir: Path | None) -> Case:
    return case_of(Quadratic(sigma_f=0.3, sigma_g=0.3, seed=seed))


def _nonconvex(seed: int, data_dir: Path | None) -> Case:
    return case_of(Nonconvex(seed=seed))


def _vanishing(seed: int, data_dir: Path | None, *, batch_size: int) -> Case:
    """Least squares with a weight exp(x) beside a pull to zero, for targets that are further on.

    F falls as the weight grows. But the smaller it is, the cheaper it is for y to follow f, so that
    with a multiplier that is too small for it Phi falls with the weight.
    """
    generator = torch.Generator().manual_seed(seed)
    near, far = (at + 0.3 * torch.randn(512, 4, generator=generator) for at in (1, 2))

    def upper(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return 0.5 * ((y - batch) ** 2).sum(1).mean()

    def lower(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return x.exp() * upper(x, y, batch) + 0.05 * (y**2).sum()

    def value(x: Tensor, y: Tensor) -> float:
        weight = x.double().exp()
        return float(upper(x, weight * near.mean(0) / (weight + 0.1), far))

    return Case(
        problem=Problem(upper, lower),
        x0=torch.tensor(0.0),
        y0=torch.zeros(4),
        value=value,
        data={"upper_data": far, "lower_data": near, "batch_size": batch_size},
    )


def _named(scales: Sequence[float]) -> str:
    return " ".join(
        f"{name}*{scale:g}" for name, scale in zip("fgxy", scales, strict=True) if scale != 1
    )


PROBLEMS: dict[str, Maker] = {
    **{
        f"quadratic, kappa {condition:g}": partial(
            _quadratic, condition=condition, scales=(1.0, 1.0, 1.0, 1.0)
        )
        for condition in (1.0, 10.0, 100.0, 1e3, 1e4)
    },
    **{
        f"quadratic, {_named(scales)}": partial(_quadratic, condition=10.0, scales=scales)
        for scales in (*ALONE, *TOGETHER)
    },
    "quadratic, 50 variables": _wide,
    "quadratic, noisy": _noisy,
    "nonconvex": _nonconvex,
    "a weight that can vanish": partial(_vanishing, batch_size=512),
    "a weight that can vanish, batches of 16": partial(_vanishing, batch_size=16),
}
