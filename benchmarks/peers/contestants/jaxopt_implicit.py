"""jaxopt: L-BFGS with implicit differentiation below, projected gradient descent above."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jaxopt
import numpy as np
import numpy.typing as npt

from benchmarks.peers.contestants.jax_task import JaxTask, start
from benchmarks.peers.task import Task


def solve(
    task: Task,
    *,
    seed: int,
    lower_steps: int,
    adjoint_steps: int = 10,
    per_visit: float,
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the weights, which are x itself, in [0, 1].

    Args:
        task: the data.
        seed: unused, because every step uses all samples.
        lower_steps: the number of L-BFGS steps, from the previous solution.
        adjoint_steps: the number of conjugate gradient steps.
        per_visit: the step size of x_i for each hypergradient.
    """
    count = len(task.labels)

    def value(x: Any, start: Any, data: JaxTask) -> Any:
        solver = jaxopt.LBFGS(
            lambda y, x: data.weighted(x, y),
            maxiter=lower_steps,
            implicit_diff=True,
            implicit_diff_solve=partial(jaxopt.linear_solve.solve_cg, maxiter=adjoint_steps),
        )
        y = solver.run(start, x).params
        return data.trusted(y), y

    def step(x: Any, y: Any, data: JaxTask) -> Any:
        direction, y = jax.grad(value, has_aux=True)(x, y, data)
        return jnp.clip(x - per_visit * count * direction, 0, 1), y

    compiled = jax.jit(step)
    x, y, data = jnp.ones(count), start(task), JaxTask.of(task)
    while True:
        x, y = compiled(x, y, data)
        yield np.asarray(x)
