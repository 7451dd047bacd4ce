"""F2SA in JAX with ``lax.scan``: one scalar, one gradient, shared batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks.peers.contestants.jax_task import JaxTask, start
from benchmarks.peers.task import Task


def solve(
    task: Task,
    *,
    seed: int,
    lower_lr: float,
    per_visit: float,
    multiplier: float = 5.0,
    box: bool = True,
    batch_size: int = 500,
    chunk: int = 10,
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the weights.

    Args:
        task: the data.
        seed: the seed of the batches.
        lower_lr: the step size of y and of z.
        per_visit: the step size of x_i each time that sample i is drawn.
        multiplier: lam.
        box: the weights are x, in [0, 1]; otherwise they are sigmoid(x).
        batch_size: the number of samples of each kind in a batch.
        chunk: the number of steps after which the weights are yielded.
    """
    weight = (lambda x: x) if box else jax.nn.sigmoid

    def phi(x: Any, y: Any, z: Any, data: JaxTask, index: Any, trusted: Any) -> Any:
        weights = weight(x)
        gap = data.weighted(weights, y, index) - data.weighted(weights, z, index)
        return data.trusted(y, trusted) + multiplier * gap

    def step(data: JaxTask, state: Any, key: Any) -> Any:
        x, y, z = state
        index, trusted = data.draw(key, batch_size)
        d_x, d_y, d_z = jax.grad(phi, (0, 1, 2))(x[index], y, z, data, index, trusted)
        x = x.at[index].add(-per_visit * batch_size * d_x)
        x = jnp.clip(x, 0, 1) if box else x
        return (x, y - lower_lr / multiplier * d_y, z + lower_lr / multiplier * d_z), None

    def steps(data: JaxTask, state: Any, key: Any) -> Any:
        return jax.lax.scan(partial(step, data), state, jax.random.split(key, chunk))[0]

    compiled = jax.jit(steps)
    data, key, y = JaxTask.of(task), jax.random.key(seed), start(task)
    state = (jnp.full(len(task.labels), float(box)), y, y)
    while True:
        key, now = jax.random.split(key)
        state = compiled(data, state, now)
        yield np.asarray(weight(state[0]))
