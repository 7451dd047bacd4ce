"""The problem that all contestants step on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from bilevel.methods import F2SA
from bilevel.problems.cleaning import HyperCleaning
from bilevel.run import Solver

Runner: TypeAlias = Callable[[int], tuple[Any, Any]]
"""It takes that many outer steps, and gives x and the solution of the lower level when done."""


@dataclass(frozen=True)
class Task:
    """Data, settings and where to compute.

    Attributes:
        problem: weights sigmoid(x_i), softmax regression with bias.
        batch: samples of each kind in a minibatch.
        inner_steps: T.
        seed: of the minibatches.
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
        """Of MNIST's sizes; how long a step takes does not depend on what the images show."""
        generator = torch.Generator().manual_seed(seed)
        sizes = samples, max(2, samples // 20)
        images = [torch.rand(size, features, generator=generator) for size in sizes]
        labels = [torch.randint(10, (size,), generator=generator) for size in sizes]
        problem = HyperCleaning(
            images[0], labels[0], images[1], labels[1], classes=10, device=device
        )
        return cls(problem, batch, inner_steps, seed)

    def solver(self, *, compile: bool) -> Solver:
        """What takes the steps of F2SA."""
        problem = self.problem
        return Solver(
            problem,
            problem.x0,
            problem.y0,
            method=F2SA(
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
        """Wait for the device."""
        if self.problem.x0.device.type == "cuda":
            torch.cuda.synchronize()
