"""Objectives, data and backward passes that raise on one rank: all ranks raise, and may go on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bilevel
from tests.engine.ranks import tasks
from tests.engine.ranks.ranks import Ranks
from tests.engine.ranks.tasks import SAMPLES, START, outputs
from tests.marks import slow_except

DOUBLE = torch.float64
Found = tuple[str, str, int, list[float]]
"""The error that was caught, its text, the step it was raised at, and x at the end."""


def _start(kind: str) -> Any:
    """As in the list of starting points, and a module whose buffers DDP sends to all ranks."""
    if kind != "DDP with buffers":
        return START[kind](DOUBLE)
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    return DistributedDataParallel(layers.to(DOUBLE))


def _lower(kind: str) -> Any:
    """The training loss; with buffers in one forward pass.

    Batch norm in DDP cannot be called twice in one graph with every torch (2.11).
    """

    def once(x: Any, y: Any, batch: Any) -> Tensor:
        features, target, rows = batch
        outputs = tasks.outputs(y, features)
        return (x[rows].sigmoid() * ((outputs - target) ** 2 + 0.1 * outputs**2)).mean()

    return once if kind == "DDP with buffers" else tasks.lower


def _raised_and_gone_on(
    kind: str,
    method: str,
    *,
    steps: int = 12,
    upper: Any = tasks.upper,
    lower: Any = None,
    **options: Any,
) -> Found:
    """Take steps; what one of them raises is caught, and the run goes on."""
    data = tasks.samples(1, DOUBLE)
    if not options:
        options = {"lower_data": data, "batch_size": 4}
    solver = bilevel.Solver(
        bilevel.Problem(upper, lower or _lower(kind)),
        torch.zeros(SAMPLES, dtype=DOUBLE),
        _start(kind),
        upper_data=data,
        **options,
        **tasks.how(method),
    )
    found = ("", "", -1)
    for _ in range(steps):
        try:
            solver.step()
        except Exception as error:
            if "let this exception end the process" in "".join(getattr(error, "__notes__", [])):
                os._exit(1)
            found = type(error).__name__, str(error), solver.k
            if "cannot be reached" in found[1]:
                return *found, []
    return *found, solver.x.tolist()


def _raising(rank: int, kind: str, method: str, level: str) -> Found:
    """On rank 1 an objective raises once, is caught, and the run goes on."""
    calls = 0
    own = {"upper": tasks.upper, "lower": _lower(kind)}

    def raises(x: Any, y: Any, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 23:
            raise KeyError("mine")
        return own[level](x, y, batch)

    return _raised_and_gone_on(kind, method, **{level: raises})


def _check_that_both_raised(first: Found, second: Found, error: str, message: str) -> None:
    assert second[:2] == (error, message)
    assert first[0] == "DistributedError"
    assert "an objective or its data raised on rank 1" in first[1]
    assert f"{error}: {message}" in first[1]
    assert first[2:] == second[2:]  # and they go on together
    assert first[2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize("method", ["F2SA", "F2SA, one pass, one term at a time", "F3SA"])
@pytest.mark.parametrize("kind", [*START, "DDP with buffers"])
def test_an_objective_that_raises_on_one_rank_raises_on_all(
    two: Ranks, kind: str, method: str, level: str
) -> None:
    first, second = two.run(_raising, kind, method, level)
    _check_that_both_raised(first, second, "KeyError", "'mine'")


def _without_batch(rank: int, kind: str, method: str, at: int) -> Found:
    """On rank 1 a batch cannot be drawn, once; the run goes on."""
    calls = 0
    data = tasks.samples(1, DOUBLE)

    def draw(generator: torch.Generator) -> Any:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == at:
            raise OSError("the file is gone")
        rows = torch.randint(SAMPLES, (4,), generator=generator)
        return tuple(part[rows] for part in data)

    return _raised_and_gone_on(kind, method, steps=10, lower_data=draw)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["F2SA", "F2SA, one pass, one term at a time", "F3SA"])
@pytest.mark.parametrize("kind", [*START, "DDP with buffers"])
def test_data_that_raises_on_one_rank_raises_on_all(two: Ranks, kind: str, method: str) -> None:
    first, second = two.run(_without_batch, kind, method, 13 if method != "F3SA" else 5)
    _check_that_both_raised(first, second, "OSError", "the file is gone")


def _raising_around_passes(rank: int, where: str) -> Found:
    """On rank 1 the evaluation of a divided module raises once, is caught, and the run goes on."""
    calls = 0

    def upper(x: Any, y: Any, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        now = rank == 1 and calls == 20
        if now and where == "last layer":
            y[1].register_forward_pre_hook(_raise_once)
        first = outputs(y, batch[0][:, :2] if now and where == "first layer" else batch[0])
        if now and where == "between":
            raise ValueError("between the passes")
        second = outputs(y, 2 * batch[0])
        if now and where == "after":
            raise ValueError("after the passes")
        return ((first + second - batch[1]) ** 2).mean()

    return _raised_and_gone_on("FSDP2", "F2SA", upper=upper)


def _raise_once(module: nn.Module, inputs: Any) -> None:
    module._forward_pre_hooks.clear()
    raise ValueError("in the last layer")


@pytest.mark.parametrize(
    ("where", "raised_there"),
    [
        ("first layer", "RuntimeError"),
        pytest.param("last layer", "ValueError", marks=pytest.mark.slow),
        pytest.param("between", "ValueError", marks=pytest.mark.slow),
        pytest.param("after", "ValueError", marks=pytest.mark.slow),
    ],
)
def test_a_divided_module_that_raises_on_one_rank_raises_on_all(
    two: Ranks, where: str, raised_there: str
) -> None:
    first, second = two.run(_raising_around_passes, where)
    assert second[0] == raised_there
    assert first[0] == "DistributedError"
    assert f"rank 1 at step {first[2]}: {raised_there}: {second[1]}" in first[1]
    assert first[2:] == second[2:]  # and they go on together
    assert 0 < first[2] < 12


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no gradient")


def _without_gradient(rank: int, kind: str, method: str) -> Found:
    """On rank 1 a backward pass raises once, is caught, and the run goes on."""
    calls = 0

    def upper(x: Any, y: Any, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        value = tasks.upper(x, y, batch)
        return _NoGradient.apply(value) if rank == 1 and calls == 14 else value

    return _raised_and_gone_on(kind, method, upper=upper)


@pytest.mark.parametrize("method", ["F2SA", "F2SA, one pass, one term at a time", "F3SA"])
@pytest.mark.parametrize("kind", ["plain tensors", "plain module"])
def test_a_backward_pass_that_raises_on_one_rank_raises_on_all(
    two: Ranks, kind: str, method: str
) -> None:
    first, second = two.run(_without_gradient, kind, method)
    assert second[:2] == ("ValueError", "no gradient")
    assert first[0] == "DistributedError"
    assert "ValueError: no gradient" in first[1]
    assert first[2:] == second[2:]  # and they go on together
    assert first[2] > 0


@pytest.mark.parametrize("kind", slow_except([], ["DDP", "FSDP2"]))
def test_a_backward_pass_with_messages_that_raises_ends_all_ranks(
    tmp_path: Path, kind: str
) -> None:
    with Ranks(2, tmp_path) as doomed:
        first, second = doomed.run(_without_gradient, kind, "F2SA")
    assert second is None
    assert first[0] == "DistributedError"
    assert "another rank cannot be reached" in first[1]
