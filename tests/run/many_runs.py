"""Problems for many runs, and the comparison with each run alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bilevel
from bilevel.problem import Box

F2SA = bilevel.F2SA
N, D, C = 40, 6, 3


class Task(NamedTuple):
    """A problem, where it starts, and how it is sampled."""

    problem: bilevel.Problem
    x0: Any
    y0: Any
    options: dict[str, Any]


def cleaning(wrap: Callable[[Tensor], Tensor] = lambda scores: scores, **choices: Any) -> Task:
    """Softmax regression with a weight per sample, in float64; ``wrap`` is put around scores."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(N, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(C, (N,), generator=generator)

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        features, labels, rows = batch
        losses = cross_entropy(wrap(features @ y), labels, reduction="none")
        return (torch.sigmoid(x[rows]) * losses).mean() + 0.01 * (y * y).sum()

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        features, labels = batch
        return cross_entropy(features @ y, labels)

    data = {
        "lower_data": (features, labels, torch.arange(N)),
        "upper_data": (features.flip(0), labels.flip(0)),
        "batch_size": 7,
    }
    return Task(
        bilevel.Problem(upper, lower, choices.pop("x_set", None), choices.pop("y_set", None)),
        torch.linspace(-1, 1, N, dtype=torch.float64),
        torch.zeros(D, C, dtype=torch.float64),
        {**data, **choices},
    )


def noisy_quadratic() -> Task:
    problem = bilevel.problems.Quadratic(seed=1, sigma_f=0.3, sigma_g=0.3)
    data = {"upper_data": problem.upper_noise, "lower_data": problem.lower_noise}
    return Task(problem, problem.x0, problem.y0, data)


def deterministic() -> Task:
    problem = bilevel.problems.Quadratic(seed=1)
    return Task(problem, problem.x0, problem.y0, {})


def networks(norm: nn.Module | None = None, seed: int = 0) -> Task:
    """A tree for x and a module for y, on dictionaries of tensors."""
    task = cleaning()
    torch.manual_seed(seed)
    layers = [nn.Linear(D, 4), nn.Tanh(), *([] if norm is None else [norm]), nn.Linear(4, C)]
    model = nn.Sequential(*layers).double()
    model[0].bias.requires_grad_(False)

    def lower(x: Any, y: nn.Module, batch: Any) -> Tensor:
        losses = cross_entropy(y(batch["features"]), batch["labels"], reduction="none")
        decay = sum(((p * p).sum() for p in y.parameters()), torch.zeros(()))
        return (torch.sigmoid(x["bias"] + x["weights"][0][batch["rows"]]) * losses).mean() + (
            x["decay"].exp() * decay
        )

    def upper(x: Any, y: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(y(batch["features"]), batch["labels"])

    features, labels, rows = task.options["lower_data"]
    x0 = {
        "weights": [torch.zeros(N, dtype=torch.float64)],
        "bias": torch.tensor(0.5, dtype=torch.float64),
        "decay": torch.tensor(-4.0, dtype=torch.float64),
    }
    data = {"features": features, "labels": labels, "rows": rows}
    return Task(
        bilevel.Problem(upper, lower, x_set={"decay": Box(-5, -3)}),
        x0,
        model,
        {"upper_data": data, "lower_data": data, "batch_size": 5},
    )


def many(task: Task, **options: Any) -> bilevel.Results:
    return bilevel.minimize_many(task.problem, task.x0, task.y0, **{**task.options, **options})


def one(task: Task, **options: Any) -> bilevel.Result:
    return bilevel.minimize(task.problem, task.x0, task.y0, **{**task.options, **options})


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module):
        return [*(p.detach() for p in value.parameters()), *value.buffers()]
    children = value.values() if isinstance(value, dict) else value
    return [leaf for child in children for leaf in leaves(child)]


def assert_same(mine: bilevel.Result, theirs: bilevel.Result, tolerance: float = 1e-10) -> None:
    assert mine.outcome == theirs.outcome
    assert (mine.steps, mine.selected_step) == (theirs.steps, theirs.selected_step)
    for name in ("x", "y"):
        for a, b in zip(leaves(getattr(mine, name)), leaves(getattr(theirs, name)), strict=True):
            assert a.dtype == b.dtype
            assert float((a - b).double().norm()) <= tolerance * float(b.double().norm()), name
    assert list(mine.history) == ["step", "seconds", *list(mine.history)[2:]]
    assert sorted(mine.history) == sorted(theirs.history)
    for name, column in theirs.history.items():
        if name != "seconds":
            # the gap is a difference of two losses, so that it is compared on their scale
            np.testing.assert_allclose(
                mine.history[name], column, rtol=tolerance, atol=tolerance, err_msg=name
            )


def assert_as_one_by_one(task: Task, methods: Any, seeds: Any, **options: Any) -> None:
    """All at once, without a warning, and each as by itself."""
    results = many(task, methods=methods, seeds=seeds, **options)
    assert all(r.seconds == results[0].seconds for r in results), "not one computation"
    for number, result in enumerate(results):
        setting, place = divmod(number, len(results.seeds))
        alone = one(task, method=results.methods[setting], seed=results.seeds[place], **options)
        assert_same(result, alone)


def f2sa(*arguments: Any, **choices: Any) -> bilevel.F2SA:
    return F2SA(*arguments, inner_steps=2, **choices)


GIVEN = f2sa(0.3, 0.1)
