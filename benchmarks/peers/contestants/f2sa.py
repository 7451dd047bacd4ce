"""This library's F2SA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import bilevel
from benchmarks.peers.contestants.torch_task import TorchTask
from benchmarks.peers.task import Task


def solve(
    task: Task,
    *,
    seed: int,
    sweep: bool,
    box: bool = True,
    per_visit: float,
    lower_lr: float,
    decay: float = 0.0,
    multiplier: float = 5.0,
    batch_size: int = 250,
    inner_steps: int = 20,
    compile: bool = False,
    chunk: int = 1,
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the weights.

    Args:
        task: the data.
        seed: the seed of the batches.
        sweep: the direction of x comes from all samples; otherwise from the last batch.
        box: the weights are x, in [0, 1]; otherwise they are sigmoid(x).
        per_visit: the step size of x_i each time that sample i contributes to the direction.
        lower_lr, decay: the step size of y and z at outer step k is lower_lr / (1 + k) ** decay.
        multiplier, batch_size, inner_steps, compile: the settings of F2SA and the solver.
        chunk: the number of outer steps after which the weights are yielded.
    """
    data = TorchTask(task, seed)
    weight: Callable[[Tensor], Tensor] = (lambda x: x) if box else torch.sigmoid
    visited = len(data.labels) if sweep else batch_size

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        features, labels, index = batch
        return data.weighted(weight(x[index]), y, features, labels)

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return data.trusted(y, *batch)

    solver = bilevel.Solver(
        bilevel.Problem(upper, lower, x_set=bilevel.sets.Box(0, 1) if box else None),
        torch.full((len(data.labels),), float(box)),
        data.start,
        method=bilevel.F2SA(
            lower_lr=bilevel.schedules.Power(lower_lr, 1.0, -decay) if decay else lower_lr,
            upper_lr=per_visit * visited,
            multiplier=multiplier,
            inner_steps=inner_steps,
            single_pass=not sweep,
        ),
        upper_data=(data.trusted_features, data.trusted_labels),
        lower_data=(data.features, data.labels, data.index),
        batch_size=batch_size,
        direction_batch_size="all" if sweep else None,
        chunk_size=visited if sweep else None,
        seed=seed,
        compile=compile,
    )
    with solver.assume_unchanged():
        while True:
            for _ in range(chunk):
                solver.step(measure=False)
            yield weight(solver.x).numpy()
