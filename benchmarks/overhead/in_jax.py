"""The same steps in JAX: ten outer steps as one compiled call, with loops by ``lax.scan``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.overhead.task import Runner, Task

STEPS_PER_CALL = 10
"""The number of outer steps in one call, so that the cost of a call is negligible."""


def one_scalar(task: Task) -> Runner:
    """Differentiate one scalar Phi = f(y) + lam (g(y) - g(z)) in both copies at once."""

    def directions(data: Any, x: Any, y: Any, z: Any, trusted: Any, samples: Any) -> Any:
        def phi(y: Any, z: Any) -> Any:
            gap = _lower(data, x, y, samples) - _lower(data, x, z, samples)
            return _upper(data, y, trusted) + task.multiplier * gap

        d_y, d_z = jax.grad(phi, (0, 1))(y, z)
        return d_y / task.multiplier, -d_z / task.multiplier

    return _runner(task, directions)


def three_gradients(task: Task) -> Runner:
    """Take each gradient separately."""

    def directions(data: Any, x: Any, y: Any, z: Any, trusted: Any, samples: Any) -> Any:
        f_y = jax.grad(lambda y: _upper(data, y, trusted))(y)
        g_y = jax.grad(lambda y: _lower(data, x, y, samples))(y)
        g_z = jax.grad(lambda z: _lower(data, x, z, samples))(z)
        return f_y / task.multiplier + g_y, g_z

    return _runner(task, directions)


def _runner(task: Task, directions: Callable[..., Any]) -> Runner:
    problem = task.problem
    device = jax.devices("gpu" if problem.x0.device.type == "cuda" else "cpu")[0]
    features, labels, _ = problem.lower_data
    arrays = (features, labels, *problem.upper_data)
    data = tuple(jax.device_put(np.asarray(array.cpu()), device) for array in arrays)
    ridge_and_data = (problem.ridge, *data)
    batch = task.batch

    def draw(key: Any) -> tuple[Any, Any]:
        first, second = jax.random.split(key)
        return (
            jax.random.randint(first, (batch,), 0, len(data[3])),
            jax.random.randint(second, (batch,), 0, len(data[1])),
        )

    def inner(all_data: Any, x: Any, copies: Any, key: Any) -> Any:
        y, z = copies
        d_y, d_z = directions(all_data, x, y, z, *draw(key))
        return (y - task.lower_lr * d_y, z - task.lower_lr * d_z), None

    def outer(all_data: Any, state: Any, key: Any) -> Any:
        x, copies = state
        last, key = jax.random.split(key)
        keys = jax.random.split(key, task.inner_steps)
        (y, z), _ = jax.lax.scan(partial(inner, all_data, x), copies, keys)
        _, samples = draw(last)

        def gap(rows: Any) -> Any:
            at = partial(_weighted, all_data, rows, index=samples)
            return task.multiplier * (at(y) - at(z))

        slope = jax.grad(gap)(x[samples])
        return (x.at[samples].add(-task.upper_lr * slope), (y, z)), None

    def call(all_data: Any, state: Any, key: Any, count: int) -> Any:
        return jax.lax.scan(partial(outer, all_data), state, jax.random.split(key, count))[0]

    compiled = jax.jit(call, static_argnums=3, donate_argnums=1)
    key = jax.device_put(jax.random.key(task.seed), device)
    start = [jax.device_put(np.asarray(v.cpu()), device) for v in (problem.x0, problem.y0)]
    state = (start[0], (start[1], jnp.array(start[1])))

    def run(steps: int) -> tuple[Any, Any]:
        nonlocal key, state
        while steps:
            count = min(steps, STEPS_PER_CALL)
            key, now = jax.random.split(key)
            state = compiled(ridge_and_data, state, now, count)
            steps -= count
        x, (_, z) = jax.block_until_ready(state)
        return x, z

    return run


def _upper(data: Any, y: Any, index: Any) -> Any:
    _, _, _, features, labels = data
    return _cross_entropy(features[index] @ y.T, labels[index]).mean()


def _lower(data: Any, x: Any, y: Any, index: Any) -> Any:
    return _weighted(data, x[index], y, index)


def _weighted(data: Any, rows: Any, y: Any, index: Any) -> Any:
    ridge, features, labels, _, _ = data
    losses = _cross_entropy(features[index] @ y.T, labels[index])
    return (jax.nn.sigmoid(rows) * losses).mean() + ridge * (y * y).sum()


def _cross_entropy(logits: Any, labels: Any) -> Any:
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
