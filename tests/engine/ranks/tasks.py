"""A small problem, on one process and on several: weights of samples for a network."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bilevel

SAMPLES = 16


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)


def divided(dtype: torch.dtype) -> nn.Module:
    module = network(dtype)
    fully_shard(module.get_submodule("0"))
    fully_shard(module)
    return module


def wrapped(dtype: torch.dtype) -> nn.Module:
    return DistributedDataParallel(network(dtype))


def vector(dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1, 1, 3, dtype=dtype)


START: dict[str, Any] = {
    "plain tensors": vector,
    "plain module": network,
    "DDP": wrapped,
    "FSDP2": lambda dtype: partial(divided, dtype),
}


def outputs(y: Any, features: Tensor) -> Tensor:
    return features @ y if isinstance(y, Tensor) else y(features)[:, 0]


def lower(x: Any, y: Any, batch: Any) -> Tensor:
    features, target, rows = batch
    losses = (outputs(y, features) - target) ** 2 + 0.1 * outputs(y, features) ** 2
    return (x[rows].sigmoid() * losses).mean()


def upper(x: Any, y: Any, batch: Any) -> Tensor:
    features, target, _ = batch
    return ((outputs(y, features) - target) ** 2).mean()


def samples(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    target = features.sum(1) + torch.randn(SAMPLES, generator=generator, dtype=torch.float64)
    return features.to(dtype), target.to(dtype), torch.arange(SAMPLES)


def batches(seed: int, dtype: torch.dtype, part: slice, of: int = 8) -> list[Any]:
    """Every epoch the same batches; of each a rank has the rows ``part``."""
    data = samples(seed, dtype)
    return [
        tuple(tensor[start : start + of][part] for tensor in data)
        for start in range(0, SAMPLES, of)
    ]


METHODS: dict[str, bilevel.methods.Method[Any]] = {
    "F2SA": bilevel.F2SA(lower_lr=0.1, upper_lr=0.5, inner_steps=3),
    "F2SA, one pass, one term at a time": bilevel.F2SA(
        lower_lr=0.1, upper_lr=0.5, inner_steps=3, single_pass=True
    ),
    "F2SA, midpoint": bilevel.F2SA(lower_lr=0.1, upper_lr=0.5, inner_steps=3, scheme="midpoint"),
    "F2SA, AdamW": bilevel.F2SA(
        lower_optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), upper_lr=0.5, inner_steps=3
    ),
    "F3SA": bilevel.F3SA(lower_lr=0.1, upper_lr=0.5, momentum=0.5),
    "F3SA, combined": bilevel.F3SA(lower_lr=0.1, upper_lr=0.5, momentum=0.5, recursion="combined"),
}


def how(method: str) -> dict[str, Any]:
    """The arguments of a run by a method of the list."""
    options = {"accumulate": True} if "one term at a time" in method else {}
    return {"method": METHODS.get(method, method), **options}


def solve(
    kind: str, method: str, dtype: torch.dtype, part: slice, steps: int = 6, **options: Any
) -> bilevel.Result:
    return bilevel.minimize(
        bilevel.Problem(upper, lower),
        torch.zeros(SAMPLES, dtype=dtype),
        START[kind](dtype),
        upper_data=batches(1, dtype, part),
        lower_data=batches(2, dtype, part),
        steps=steps,
        **{**how(method), **options},
    )


def numbers(y: Any) -> list[Tensor]:
    """The whole tensors of a lower variable."""
    leaves = [y] if isinstance(y, Tensor) else list(y.parameters())
    return [
        (leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf).detach().clone()
        for leaf in leaves
    ]
