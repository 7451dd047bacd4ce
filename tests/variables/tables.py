"""A problem with a weight per sample, which may be a table or a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import bilevel
from bilevel import Table

ROWS = 40
GENERATOR = torch.Generator().manual_seed(0)
FEATURES = torch.randn(ROWS, 3, generator=GENERATOR, dtype=torch.float64)
TARGETS = torch.randn(ROWS, generator=GENERATOR, dtype=torch.float64)
STARTS = torch.randn(ROWS, generator=GENERATOR, dtype=torch.float64)
LOWER_DATA = (FEATURES, TARGETS, torch.arange(ROWS))
UPPER_DATA = (FEATURES.flip(0), TARGETS + 1, torch.arange(ROWS).flip(0))


def lower(x: Any, y: Tensor, batch: Any) -> Tensor:
    features, targets, index = batch
    return (torch.sigmoid(x[index]) * (features @ y - targets) ** 2).mean() + 0.1 * (y**2).sum()


def upper(x: Any, y: Tensor, batch: Any) -> Tensor:
    """f looks rows up as well, twice, and others than g."""
    features, targets, index = batch
    return ((features @ y - targets) ** 2).mean() + 0.01 * (x[index] * x[index % 7]).mean()


PLAIN = bilevel.F2SA(0.1, 0.1)


def solver_of(x0: Any, method: Any = PLAIN, steps: int = 0, **options: Any) -> bilevel.Solver:
    problem = options.pop("problem", None) or bilevel.Problem(
        upper, lower, x_set=options.pop("x_set", None)
    )
    settings: dict[str, Any] = {
        "upper_data": UPPER_DATA,
        "lower_data": LOWER_DATA,
        "batch_size": 8,
        **options,
    }
    y0 = settings.pop("y0", torch.zeros(3, dtype=torch.float64))
    solver = bilevel.Solver(problem, x0, y0, method=method, **settings)
    for _ in range(steps):
        solver.step()
    return solver


def plain(value: Any) -> Any:
    """A table as its tensor."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return value.values if isinstance(value, Table) else value


def single_precision() -> bilevel.Problem:
    def converted(batch: Any) -> Any:
        return batch[0].float(), batch[1].float(), batch[2]

    return bilevel.Problem(
        lambda x, y, batch: upper(x, y, converted(batch)),
        lambda x, y, batch: lower(x, y, converted(batch)),
    )


SETTINGS: dict[str, Any] = {
    "f2sa": bilevel.F2SA(0.1, 0.1, inner_steps=3),
    "f2sa, single pass": bilevel.F2SA(0.1, 0.1, inner_steps=3, single_pass=True),
    "f2sa, independent": bilevel.F2SA(0.1, 0.1, inner_steps=3, coupling="independent"),
    "f2sa, midpoint": bilevel.F2SA(0.1, 0.1, inner_steps=3, scheme="midpoint"),
    "f2sa, central": bilevel.F2SA(0.1, 0.1, inner_steps=2, scheme="central", order=4),
    "f2sa, lower step found": bilevel.F2SA(upper_lr=0.1, inner_steps=3),
    "f2ba": bilevel.F2BA(0.1, 0.1, inner_steps=2),
    "bome": bilevel.BOME(0.1, 0.1, inner_steps=2),
    "bome, gap": bilevel.BOME(0.1, 0.1, inner_steps=2, barrier="gap", coupling="independent"),
    "vpbgd": bilevel.VPBGD(0.1, 0.1, inner_steps=2),
    "vpbgd, from y": bilevel.VPBGD(0.1, 0.1, inner_steps=2, start="y"),
    "meha": bilevel.MEHA(0.1, 0.1),
    "sobo": bilevel.SOBO(0.1, 0.1),
    "soba": bilevel.SOBA(0.1, 0.1),
    "aid": bilevel.AID(0.1, 0.1),
    "itd": bilevel.ITD(0.1, 0.1, inner_steps=3),
    "no-bilevel": bilevel.NoBilevel(0.1),
}
DENSE: dict[str, Any] = {
    "f3sa": bilevel.F3SA(0.1, 0.1, momentum=0.5),
    "f3sa, combined": bilevel.F3SA(0.1, 0.1, momentum=0.5, recursion="combined"),
    "f2ba, accelerated": bilevel.F2BA(0.1, 0.1, inner_steps=2, acceleration=bilevel.Nesterov(0.5)),
    "ma-soba": bilevel.MASOBA(0.1, 0.1, averaging=0.5),
}


def per_sample(x: Any, y: Any, batch: Any) -> Tensor:
    """One lower parameter per sample."""
    _, targets, index = batch
    rows = y[index]
    return ((rows - targets - x) ** 2).mean() + 0.1 * (rows**4).mean()


PER_SAMPLE = bilevel.Problem(
    lambda x, y, batch: ((y[batch[2]] - 1) ** 2).mean() + 0.1 * x**2, per_sample
)


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    # for the rows, and what it is for a whole tensor of which every row has a gradient
    "sparse adam": (
        lambda p: torch.optim.SparseAdam(p, lr=0.05, eps=1e-30),  # which has another place there
        lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-30),
    ),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1),) * 2,
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1),) * 2,
}
