"""The problem that all contestants step on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from bilevel import F2SA, Solver
from bilevel.problems import HyperCleaning

Runner: TypeAlias = Callable[[int], tuple[Any, Any]]
"""Takes the given number of outer steps; returns x and the lower solution when they are done."""


@dataclass(frozen=True)
class Task:
    """The problem and the settings of F2SA, the same for all contestants.

    Attributes:
        problem: softmax regression with bias and weights sigmoid(x_i).
        batch: the number of samples of each kind in a batch.
        inner_steps: T.
        seed: the seed of the batches.
        lower_lr, upper_lr, multiplier: gamma = beta, alpha and lam.
    """

    problem: HyperCleaning
    batch: int
    inner_steps: int
    seed: int
    lower_lr: float = 0.01
    upper_lr: float = 1.0
    multiplier: float = 10.0

    @classmethod
    def random(
        cls,
        samples: int,
        batch: int,
        inner_steps: int,
        device: str,
        seed: int,
        features: int = 784,
    ) -> Task:
        """Make a task with random images; the time of a step does not depend on their content."""
        generator = torch.Generator().manual_seed(seed)
        sizes = samples, max(2, samples // 20)
        images = [torch.rand(size, features, generator=generator) for size in sizes]
        labels = [torch.randint(10, (size,), generator=generator) for size in sizes]
        problem = HyperCleaning(
            images[0], labels[0], images[1], labels[1], classes=10, device=device
        )
        return cls(problem, batch, inner_steps, seed)

    def solver(self, *, compile: bool, method: F2SA | None = None) -> Solver:
        """Make the solver that takes the steps of F2SA, by default with the settings above."""
        problem = self.problem
        return Solver(
            problem,
            problem.x0,
            problem.y0,
            method=method
            or F2SA(
                inner_steps=self.inner_steps,
                lower_lr=self.lower_lr,
                upper_lr=self.upper_lr,
                multiplier=self.multiplier,
            ),
            upper_data=problem.upper_data,
            lower_data=problem.lower_data,
            batch_size=self.batch,
            compile=compile,
            seed=self.seed,
        )

    def synchronise(self) -> None:
        """Wait until the device has finished."""
        if self.problem.x0.device.type == "cuda":
            torch.cuda.synchronize()
