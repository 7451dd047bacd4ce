"""A network that maps the loss of a sample to its weight, and what it is compared with."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bilevel

from ._digits import Batch, error, joined, perceptron, until

DECAY = 1e-4


def upper(x: Any, y: Any, batch: Batch) -> Tensor:
    """The loss on trusted digits."""
    return cross_entropy(y(batch[0]), batch[1])


def lower(x: Any, y: Any, batch: Batch) -> Tensor:
    """The loss on training digits, each with the weight that x gives to its loss."""
    losses = cross_entropy(y(batch[0]), batch[1], reduction="none")
    weights: Tensor = x(losses.detach()[:, None])[:, 0].sigmoid()
    decay = torch.stack([p.square().sum() for p in y.parameters()]).sum()
    return (weights * losses).sum() / weights.sum() + DECAY * decay


def compare_weights(
    seed: int, train: Batch, trusted: Batch, test: Batch, steps: int
) -> dict[str, float]:
    """The test error of a perceptron, by how its training digits are weighted."""
    x0, y0 = perceptron(seed, 1, 20, 1), perceptron(seed + 1, train[0][0].numel(), 64, 10)
    for last in x0[-1].parameters():  # all weights are the same at the start
        nn.init.zeros_(last)

    def result(**options: Any) -> float:
        given: dict[str, Any] = {"lower_data": train, "steps": steps} | options
        problem = bilevel.Problem(upper, lower)
        found = bilevel.minimize(problem, x0, y0, upper_data=trusted, batch_size=64, **given)
        return error(found.y, test)

    # The baselines end at their lowest loss on the trusted digits.
    plain: dict[str, Any] = {
        "method": "no-bilevel",
        "direction_batch_size": "all",
        "select": "best",
    }
    start = time.process_time()
    ours = result()
    same_time = until(time.process_time() - start)
    peer = result(method=bilevel.ITD(inner_steps=1), callback=same_time, steps=10**6)
    return {
        "weights by a network": ours,
        "uniform weights": result(**plain),
        "uniform weights, trusted digits too": result(lower_data=joined(train, trusted), **plain),
        "trusted digits alone": result(lower_data=trusted, **plain),
        "one step unrolled": peer,
    }
