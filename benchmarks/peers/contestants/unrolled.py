"""The descent in the weights that all libraries share which differentiate through training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.peers.contestants.torch_task import TorchTask

Unroll = Callable[[list[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]], None]
"""unroll(inner_losses, upper_loss) trains y by one step for each inner loss and calls ``backward``
on the upper loss of the result. The next call continues from that y."""


def weights_found(
    data: TorchTask,
    unroll: Unroll,
    *,
    upper_lr: float,
    inner_steps: int,
    batch_size: int,
    chunk: int,
) -> Iterator[npt.NDArray[np.float32]]:
    """Take projected gradient steps in the weights, which stay in [0, 1]; yield the weights."""
    x = torch.ones(len(data.labels), requires_grad=True)

    def inner_loss() -> Callable[[Tensor], Tensor]:
        features, labels, index = data.batch(batch_size)
        return lambda y: data.weighted(x[index], y, features, labels)

    while True:
        for _ in range(chunk):
            features, labels = data.trusted_batch(batch_size)
            x.grad = None
            unroll(
                [inner_loss() for _ in range(inner_steps)],
                lambda y: data.trusted(y, features, labels),  # noqa: B023
            )
            assert x.grad is not None
            with torch.no_grad():
                x.sub_(upper_lr * x.grad).clamp_(0, 1)
        yield x.detach().numpy()
