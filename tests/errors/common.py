"""A small problem and runs of it, good but for what is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import bilevel
from bilevel import Problem


def f(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return ((y - 1) ** 2).sum()


def g(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return ((y - x) ** 2).sum() if batch is None else ((y - x - batch) ** 2).mean()


def construct(
    problem: Any = None, x0: Any = None, y0: Any = None, **options: Any
) -> bilevel.Solver:
    """A solver, good but for what is given; none of its steps is taken."""
    return bilevel.Solver(
        Problem(f, g) if problem is None else problem,
        torch.ones(2) if x0 is None else x0,
        torch.zeros(2) if y0 is None else y0,
        **{"method": "f2sa", **options},
    )


def minimize(**options: Any) -> bilevel.Result:
    arguments = {"steps": 4, **options}
    return bilevel.minimize(Problem(f, g), torch.ones(2), torch.zeros(2), **arguments)


def run(method: Any = "f2sa", **options: Any) -> bilevel.Result:
    """What is only known at a step: run a few."""
    return minimize(method=method, **options)


def rows(count: int = 10) -> Tensor:
    return torch.zeros(count, 2)


def some(count: int) -> Iterator[Tensor]:
    return (torch.zeros(2) for _ in range(count))


def steps(solver: bilevel.Solver, count: int) -> None:
    for _ in range(count):
        solver.step(measure=False)


class Switch:
    """Problems that break once it is on."""

    def __init__(self) -> None:
        self.on = False

    def at(self, step: int) -> Callable[[bilevel.Solver, Any], None]:
        """A callback after which step ``step`` breaks."""

        def callback(solver: bilevel.Solver, info: Any) -> None:
            self.on = info.step == step - 1

        return callback

    def problem(self, breaks: str) -> Problem:
        def break_value(value: Tensor) -> Tensor:
            return value + math.inf if self.on else value

        def break_gradient(variable: Tensor) -> Tensor:
            """0 with a gradient that is not a number: inf - inf."""
            return torch.sqrt(variable - variable).sum() if self.on else 0 * variable.sum()

        at_y = False  # an evaluation is f at y, g at y, g at z

        def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
            nonlocal at_y
            at_y = True
            value = f(x, y, batch) + 0.1 * (x**2).sum()
            return break_value(value) if breaks == "upper" else value

        def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
            nonlocal at_y
            copy, at_y = "y" if at_y else "z", False
            value = g(x, y, batch)
            if breaks == "x":
                value = value + break_gradient(x)
            if breaks == copy:
                value = value + break_gradient(y)
            return break_value(value) if breaks == f"lower at {copy}" else value

        return Problem(upper, lower)


BREAKS = [
    ("upper", r"upper\(x, y\).*step 3"),
    ("lower at y", r"lower\(x, y\).*step 3"),
    ("lower at z", r"lower\(x, z\).*step 3"),
    ("y", r"gradient of y\b.*step 3"),
    ("z", r"gradient of z\b.*step 3"),
    ("x", r"gradient of x\b.*step 3"),
]


def tensors_in(state: Any) -> list[Tensor]:
    if isinstance(state, dict):
        return [t for part in state.values() for t in tensors_in(part)]
    if isinstance(state, list | tuple):
        return [t for part in state for t in tensors_in(part)]
    return [state] if isinstance(state, Tensor) else []
