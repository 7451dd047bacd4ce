"""Layers of several tasks: values and derivatives are those of each alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import bilevel
from bilevel.engine.stacked import convolutions, layers, tasks
from bilevel.engine.stacked.layers import SideBySide
from tests.engine.test_stacked_convolutions import SAMPLES, TASKS, check, slopes, stack

CLASSES = torch.tensor([[0, 2, 1, 2], [1, -100, 0, 2], [2, 2, -100, -100]])


class Operations(TorchDispatchMode):
    """Counts the operations that are run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(function: Callable[..., Tensor], *tensors: Tensor) -> int:
    """How many it takes for all tasks, forward and backward."""
    with Operations() as counted:
        found = torch.vmap(function)(*tensors)
        torch.autograd.grad(found.sum(), [tensor for tensor in tensors if tensor.requires_grad])
    return counted.count


def fewer(function: Callable[..., Tensor], *tensors: Tensor) -> bool:
    """Whether it takes fewer operations than by the rules of vmap."""
    alone = operations(function, *tensors)
    with SideBySide():
        return operations(function, *tensors) < alone


def normalised(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.batch_norm(images, None, None, weight, bias, training=True)


@pytest.mark.parametrize("shape", [(4,), (4, 5), (4, 3, 5)])
def test_normalisation_over_the_batch(shape: tuple[int, ...]) -> None:
    tensors = stack(SAMPLES + 2, *shape), stack(4), stack(4)
    check(normalised, *tensors)
    assert fewer(normalised, *tensors)


def test_normalisation_with_weights_that_all_tasks_share() -> None:
    weight, bias = stack(4)[0].detach(), stack(4)[1].detach()
    check(lambda images: normalised(images, weight, bias), stack(SAMPLES, 4, 3, 3))


def test_normalisation_by_running_statistics_is_left_to_torch() -> None:
    mean, variance = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    check(lambda images: functional.batch_norm(images, mean, variance), stack(SAMPLES, 4, 3, 3))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction: str) -> None:
    def one(scores: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(scores, classes, reduction=reduction)

    check(one, stack(4, 3), CLASSES)
    if reduction != "none":
        assert fewer(one, stack(4, 3), CLASSES)


def test_cross_entropy_with_classes_that_all_tasks_share() -> None:
    check(lambda scores: functional.cross_entropy(scores, CLASSES[1]), stack(4, 3))


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1}, {"weight": torch.ones(3, dtype=torch.float64)}]
)
def test_other_cross_entropies_are_left_to_torch(options: dict[str, Any]) -> None:
    classes = CLASSES.clamp(min=0)
    check(lambda scores, c: functional.cross_entropy(scores, c, **options), stack(4, 3), classes)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(4,), (2, 4), ()])
def test_linear(rows: tuple[int, ...], bias: bool) -> None:
    def one(inputs: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        return functional.linear(inputs, weight, shift if bias else None) + shift

    check(one, stack(*rows, 5), stack(3, 5), stack(3))


def test_g_is_evaluated_once_for_both_copies_of_all_tasks() -> None:
    """And draws at random, which vmap refuses, are the same at both copies."""
    seen: list[str] = []

    def task(generator: torch.Generator) -> Any:
        return torch.randn(2, 3, generator=generator, dtype=torch.float64).unbind()

    def upper(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        seen.append("f")
        return ((y - batch) ** 2).sum()

    def lower(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        seen.append("g")
        return ((y - x) ** 2).sum() + y @ batch

    def noisy(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return lower(x, y, batch) + y @ torch.randn(3, dtype=torch.float64)

    def stepped(lower: Any, count: int) -> Any:
        x0 = torch.zeros(3, dtype=torch.float64)
        solver = bilevel.Solver(
            bilevel.Problem(upper, lower),
            x0,
            x0,
            method=bilevel.F2SA(lower_lr=0.1, upper_lr=0.1, multiplier=1e6, inner_steps=2),
            data=bilevel.Episodes(task, count),
        )
        seen.clear()
        return solver.step()

    stepped(lower, TASKS)
    assert seen.count("f") == 4  # the direction and the report beside the two steps
    assert seen.count("g") == 3
    # different draws at y and z would be multiplied by 1e6
    assert abs(float(stepped(noisy, TASKS).gap)) < 1e-3


@pytest.mark.parametrize("widest", [0, 1 << 20])
def test_g_of_large_batches_is_evaluated_once_where_layers_are_narrow(
    widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step finds out; a run that is resumed finds the same, and has the same bits."""
    monkeypatch.setattr(tasks, "MOST_JOINED", 0)
    monkeypatch.setattr(tasks, "WIDEST_JOINED", widest)
    seen: list[str] = []

    def task(generator: torch.Generator) -> Any:
        return torch.randn(2, SAMPLES, 1, 6, 6, generator=generator).unbind()

    def upper(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return ((torch.conv2d(batch, y) - 1) ** 2).mean()

    def lower(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        seen.append("g")
        return upper(x, y, batch) + ((y - x) ** 2).sum()

    def solver() -> Any:
        x0 = torch.zeros(2, 1, 3, 3)
        return bilevel.Solver(
            bilevel.Problem(upper, lower),
            x0,
            x0,
            method=bilevel.F2SA(lower_lr=0.1, upper_lr=0.1, inner_steps=2),
            data=bilevel.Episodes(task, TASKS),
        )

    through = solver()
    through.step()
    found = through.state_dict()
    seen.clear()
    through.step()
    assert len(seen) == (3 if widest else 6)
    resumed = solver()
    resumed.load_state_dict(found)
    resumed.step()
    assert torch.equal(resumed.x, through.x)
    assert all(map(torch.equal, resumed.y, through.y))


@pytest.mark.parametrize("flatten", [nn.Flatten(), lambda images: torch.flatten(images, 1, 3)])
def test_images_as_rows_of_numbers(flatten: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    images, kernels = stack(SAMPLES, 2, 6, 6), stack(4, 2, 3, 3)
    monkeypatch.setattr(convolutions, "HAS_GROUPS", True)
    check(lambda a, b: flatten(torch.conv2d(a, b).tanh()), images, kernels)
    with SideBySide():
        hidden = torch.vmap(torch.conv2d)(images, kernels).detach().requires_grad_()
        torch.vmap(flatten)(hidden).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.stride() == hidden.stride()


def test_other_ways_to_flatten_are_left_to_torch() -> None:
    for flatten in (nn.Flatten(0), nn.Flatten(2), nn.Flatten(1, 2)):
        check(flatten, stack(SAMPLES, 2, 3, 4))
    check(nn.Flatten(), stack(SAMPLES, 2, 3, 4))
    check(nn.Flatten(), stack(SAMPLES, 6))


@pytest.mark.parametrize("shared", [True, False])
def test_second_derivatives_of_large_normalisations(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "LARGE", 0)
    weight, bias = stack(4), stack(4)
    if shared:
        check(
            lambda images: normalised(images, weight[0].detach(), bias[0].detach()),
            stack(3, 4, 3, 5),
        )
    else:
        check(normalised, stack(3, 4, 3, 5), weight, bias)


@pytest.mark.parametrize("learned", [True, False])
def test_third_derivatives_of_large_normalisations(
    learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "LARGE", 0)
    images, weight, bias = stack(3, 4, 3, 5), stack(4, gradient=learned), stack(4)
    inputs = [images, weight, bias] if learned else [images, bias]
    with SideBySide():
        found = torch.vmap(normalised)(images, weight, bias)
    # torch's own third derivatives of a normalisation are wrong
    centred = images - images.mean((1, 3, 4), keepdim=True)
    deviation = (centred.square().mean((1, 3, 4), keepdim=True) + 1e-5).sqrt()
    spread = [tensor[:, None, :, None, None] for tensor in (weight, bias)]
    known = centred / deviation * spread[0] + spread[1]
    for ours, theirs in zip(slopes(found, inputs, 3), slopes(known, inputs, 3), strict=True):
        # small entries are what remains of large ones
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=1e-11 * float(theirs.detach().abs().max())
        )
