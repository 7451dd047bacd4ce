"""The runs that are killed and resumed, and whose checkpoints are damaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import methods
from bilevel import F2SA, Problem, Table
from bilevel.problems import Quadratic


def _quadratic(method: Any, **more: Any) -> dict[str, Any]:
    problem = Quadratic(sigma_f=0.1, sigma_g=0.1, seed=0)  # The settings suit this seed.
    return {
        "problem": problem,
        "x0": problem.x0,
        "y0": problem.y0,
        "method": method,
        "upper_data": problem.upper_noise,
        "lower_data": problem.lower_noise,
        **more,
    }


def _case_task(case: methods.Case) -> Callable[[], dict[str, Any]]:
    return lambda: _quadratic(case.method())


def _samples() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(60, 4, generator=generator)
    return rows, (rows.sum(1) > 0).long(), torch.arange(60)


def _trusted(x: Any, y: Any, batch: Any) -> Tensor:
    return cross_entropy(y(batch[0]), batch[1])


def _weighted(x: Any, y: Any, batch: Any) -> Tensor:
    losses = cross_entropy(y(batch[0]), batch[1], reduction="none")
    loss: Tensor = (x[batch[2]].sigmoid() * losses).mean()
    return loss


def _module() -> dict[str, Any]:
    """Use dropout, BatchNorm, shuffled loaders and optimizers with momentum."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 2)
        )
    loaders = (
        DataLoader(TensorDataset(*_samples()), batch_size=size, shuffle=True, drop_last=True)
        for size in (8, 7)
    )
    method = F2SA(
        inner_steps=2,
        lower_optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
        upper_optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    )
    data = dict(zip(("upper_data", "lower_data"), loaders, strict=True))
    start = {"x0": torch.zeros(60), "y0": model}
    return {"problem": Problem(_trusted, _weighted), "method": method, **start, **data}


def _linear(x: Any, y: Tensor, batch: Any) -> Tensor:
    return cross_entropy(batch[0] @ y, batch[1])


def _weighted_linear(x: Any, y: Tensor, batch: Any) -> Tensor:
    losses = cross_entropy(batch[0] @ y, batch[1], reduction="none")
    loss: Tensor = (x[batch[2]].sigmoid() * losses).mean() + 0.01 * (y**2).sum()
    return loss


def _rows(x0: Any, **more: Any) -> dict[str, Any]:
    return {
        "problem": Problem(_linear, _weighted_linear),
        "x0": x0,
        "y0": torch.zeros(4, 2),
        "upper_data": _samples()[:2],
        "lower_data": _samples(),
        "batch_size": 10,
        **more,
    }


def _table() -> dict[str, Any]:
    """Use a table whose entries and optimizer state make a checkpoint of a megabyte."""
    method = F2SA(
        lower_lr=0.3,
        inner_steps=2,
        upper_optimizer=lambda params: torch.optim.SparseAdam(params, lr=0.01),
    )
    return _rows(Table(torch.zeros(100_000)), method=method)


def _compiled() -> dict[str, Any]:
    method = F2SA(lower_lr=0.3, upper_lr=1.0, inner_steps=3)
    return _rows(torch.zeros(60), method=method, compile=True)


TASKS: dict[str, Callable[[], dict[str, Any]]] = {
    **{case.name: _case_task(case) for case in methods.CASES},
    "no-bilevel": lambda: _quadratic("no-bilevel"),
    "f2sa, auto, best": lambda: _quadratic("f2sa", select="best"),
    "f3sa, auto, random": lambda: _quadratic("f3sa", select="random"),
    "a module, loaders, optimizers": _module,
    "a table": _table,
    "compiled": _compiled,
}
"""Functions that return the arguments of a run, by the name of the run."""

COMPILED = frozenset({"compiled"})
"""The runs that compile their steps."""
