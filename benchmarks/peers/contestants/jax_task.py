"""The two losses in JAX, for all contestants that use JAX."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.peers.task import Task


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["features", "labels", "trusted_features", "trusted_labels"],
    meta_fields=["ridge"],
)
@dataclass(frozen=True)
class JaxTask:
    """The task's arrays on JAX's device, and its losses.

    Compiled functions take it as an argument: as a constant, its arrays would be folded into the
    program, which takes seconds.
    """

    features: Any
    labels: Any
    trusted_features: Any
    trusted_labels: Any
    ridge: float

    @classmethod
    def of(cls, task: Task) -> JaxTask:
        """Copy the arrays of the task to the device."""
        return cls(
            jnp.asarray(task.features),
            jnp.asarray(task.labels),
            jnp.asarray(task.trusted_features),
            jnp.asarray(task.trusted_labels),
            task.ridge,
        )

    def weighted(self, weights: Any, y: Any, index: Any = slice(None)) -> Any:
        """Return g on the samples with these indices and weights."""
        losses = _cross_entropy(self.features[index] @ y.T, self.labels[index])
        return (weights * losses).mean() + self.ridge * (y * y).sum()

    def trusted(self, y: Any, index: Any = slice(None)) -> Any:
        """Return f on the trusted samples with these indices."""
        return _cross_entropy(self.trusted_features[index] @ y.T, self.trusted_labels[index]).mean()

    def draw(self, key: Any, batch_size: int) -> tuple[Any, Any]:
        """Draw indices of samples and of trusted samples."""
        first, second = jax.random.split(key)
        return (
            jax.random.randint(first, (batch_size,), 0, len(self.labels)),
            jax.random.randint(second, (batch_size,), 0, len(self.trusted_labels)),
        )


def start(task: Task) -> Any:
    """Return the initial y."""
    return jnp.zeros((task.classes, task.features.shape[1]))


def _cross_entropy(logits: Any, labels: Any) -> Any:
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
