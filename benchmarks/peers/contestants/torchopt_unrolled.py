"""TorchOpt: unrolled differentiable SGD steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
import torchopt
from torch import Tensor

from benchmarks.peers.contestants.torch_task import TorchTask
from benchmarks.peers.contestants.unrolled import weights_found
from benchmarks.peers.task import Task


def solve(
    task: Task,
    *,
    seed: int,
    lower_lr: float,
    upper_lr: float,
    inner_steps: int = 20,
    batch_size: int = 500,
    chunk: int = 1,
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the weights."""
    data = TorchTask(task, seed)
    optimizer = torchopt.sgd(lower_lr)
    y = data.start.clone().requires_grad_()

    def unroll(losses: list[Callable[[Tensor], Tensor]], upper: Callable[[Tensor], Tensor]) -> None:
        nonlocal y
        parameters = (y.detach().requires_grad_(),)
        state = optimizer.init(parameters)
        for loss in losses:
            gradients = torch.autograd.grad(loss(*parameters), parameters, create_graph=True)
            updates, state = optimizer.update(gradients, state, inplace=False)
            parameters = torchopt.apply_updates(parameters, updates, inplace=False)
        upper(*parameters).backward()  # type: ignore[no-untyped-call]
        (y,) = parameters

    return weights_found(
        data,
        unroll,
        upper_lr=upper_lr,
        inner_steps=inner_steps,
        batch_size=batch_size,
        chunk=chunk,
    )
