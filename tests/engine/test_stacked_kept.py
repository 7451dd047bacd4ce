"""Layers of which y is no part are evaluated once on a batch, and give what they gave before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import bilevel
from bilevel.engine.stacked import tasks
from bilevel.engine.stacked.layers import SideBySide
from bilevel.sampling import TaskBatches
from tests.engine.test_stacked_convolutions import SAMPLES, TASKS, stack

INNER = 3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was evaluated of all tasks at once, as it comes."""
    seen: list[str] = []
    evaluated = SideBySide._evaluated

    def counted(self: SideBySide, func: Any, args: Any, options: Any) -> Any:
        seen.append(func.__name__)
        return evaluated(self, func, args, options)

    monkeypatch.setattr(SideBySide, "_evaluated", counted)
    return seen


def solver(*, inplace: bool = False) -> Any:
    """F2SA of a last layer, on what a body makes of images."""
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.ReLU(inplace),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 2, 3),
        nn.ReLU(inplace),
        nn.Flatten(),
    )
    x = nn.ModuleDict({"body": body, "head": nn.Linear(2, 3)}).double()

    def task(generator: torch.Generator) -> Any:
        images = torch.randn(2, SAMPLES + 1, 1, 6, 6, generator=generator, dtype=torch.float64)
        return [(part, torch.arange(SAMPLES + 1)) for part in images]

    def upper(x: Any, y: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(y(x["body"](batch[0])), batch[1])

    def lower(x: Any, y: nn.Module, batch: Any) -> Tensor:
        pairs = zip(x["head"].parameters(), y.parameters(), strict=True)
        return upper(x, y, batch) + sum(((a - b) ** 2).sum() for a, b in pairs)

    return bilevel.Solver(
        bilevel.Problem(upper, lower),
        x,
        x["head"],
        method=bilevel.F2SA(lower_lr=0.1, upper_lr=0.1, inner_steps=INNER),
        data=bilevel.Episodes(task, TASKS, start=lambda x: x["head"]),
    )


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("joined", [True, False])
def test_a_body_that_all_tasks_share(
    joined: bool, inplace: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not joined:
        monkeypatch.setattr(tasks, "MOST_JOINED", 0)
    with monkeypatch.context() as patch:
        patch.setattr(TaskBatches, "stacked", None)
        one_by_one = solver(inplace=inplace)
        for _ in range(2):
            one_by_one.step()
    assert not calls
    through, resumed = solver(inplace=inplace), solver(inplace=inplace)
    through.step()
    resumed.load_state_dict(through.state_dict())
    calls.clear()
    through.step()
    # two convolutions on each of two batches, for the inner steps and for the direction, and on one
    # for the report; what is changed in place is evaluated again, with all that comes after it
    assert (calls.count("conv2d") == 10) == (not inplace)
    resumed.step()
    known = one_by_one.x.parameters()
    for found, again, exact in zip(
        through.x.parameters(), resumed.x.parameters(), known, strict=True
    ):
        assert torch.equal(found, again)
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-11)


def test_layers_whose_inputs_change_are_evaluated_again(calls: list[str]) -> None:
    images, kernels = stack(SAMPLES, 2, 4, 4, gradient=False), stack(3, 2, 3, 3)[0].detach()
    layers, batch = SideBySide(), object()

    def evaluated(padding: int = 0, *, batch: Any = batch, frozen: bool = True) -> Tensor:
        with layers.kept.of(batch, frozen=frozen), layers:
            return torch.vmap(lambda part: torch.conv2d(part, kernels, padding=padding))(images)

    first = evaluated()
    assert torch.equal(evaluated(), first)
    assert len(calls) == 1
    for number, change in enumerate([lambda: kernels.mul_(2), lambda: images.add_(1)]):
        change()
        again = evaluated()
        torch.testing.assert_close(again, torch.stack([torch.conv2d(i, kernels) for i in images]))
        assert len(calls) == 2 + number
    evaluated(padding=1)
    assert len(layers.kept._batches[0][-1]) == 1  # the last evaluation had no use for others
    evaluated(batch=object())
    evaluated(frozen=False)
    assert len(calls) == 6
    evaluated()  # nothing is kept while x moves
    with torch.no_grad():
        evaluated()
    assert len(calls) == 8


def test_layers_are_not_looked_for_where_none_is_used_again(calls: list[str]) -> None:
    images, kernels = stack(SAMPLES, 2, 4, 4, gradient=False), stack(3, 2, 3, 3).detach()
    layers, batch = SideBySide(), object()
    for _ in range(3):
        moved = kernels.clone()  # as y is in every inner step
        with layers.kept.of(batch, frozen=True), layers:
            torch.vmap(torch.conv2d)(images, moved)
    assert len(calls) == 3
    assert not layers.kept._batches[0][-1]  # nor are they held
