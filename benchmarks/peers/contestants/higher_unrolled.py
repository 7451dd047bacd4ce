"""higher: unrolled SGD steps of a module and an optimizer patched to be differentiable."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import higher
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.peers.contestants.torch_task import TorchTask
from benchmarks.peers.contestants.unrolled import weights_found
from benchmarks.peers.task import Task


class Regression(torch.nn.Module):
    """Holds y."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.y = torch.nn.Parameter(start.clone())


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
    model = Regression(data.start)
    optimizer = torch.optim.SGD(model.parameters(), lr=lower_lr)

    def unroll(losses: list[Callable[[Tensor], Tensor]], upper: Callable[[Tensor], Tensor]) -> None:
        with higher.innerloop_ctx(model, optimizer) as (patched, differentiable):
            for loss in losses:
                differentiable.step(loss(patched.y))
            upper(patched.y).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                model.y.copy_(patched.y)

    return weights_found(
        data,
        unroll,
        upper_lr=upper_lr,
        inner_steps=inner_steps,
        batch_size=batch_size,
        chunk=chunk,
    )
