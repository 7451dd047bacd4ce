"""Convolutions and pools of several tasks: values and derivatives are those of each alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bilevel.engine.stacked import convolutions
from bilevel.engine.stacked.layers import SideBySide

TASKS, SAMPLES = 3, 2


def stack(*shape: int, gradient: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    made = torch.randn(TASKS, *shape, generator=generator, dtype=torch.float64)
    return made.requires_grad_(gradient)


def derivatives(values: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The value, its gradients, and the gradients of a scalar made of these."""
    return [values, *slopes(values, inputs, 2)]


def slopes(values: Tensor, inputs: list[Tensor], order: int) -> list[Tensor]:
    """All derivatives up to this order, each of a scalar made of those before."""
    found: list[Tensor] = []
    last = (values**3).sum()
    for number in range(1, order + 1):
        slopes = torch.autograd.grad(last, inputs, create_graph=number < order)
        found += slopes
        last = sum(((slope**2).sum() for slope in slopes), torch.zeros(()))
    return found


def check(function: Callable[..., Tensor], *tensors: Tensor) -> None:
    inputs = [tensor for tensor in tensors if tensor.requires_grad]
    with SideBySide():
        at_once = torch.vmap(function)(*tensors)
    one_by_one = torch.stack([function(*parts) for parts in zip(*tensors, strict=True)])
    for found, known in zip(
        derivatives(at_once, inputs), derivatives(one_by_one, inputs), strict=True
    ):
        torch.testing.assert_close(found, known, rtol=1e-10, atol=1e-12)


@pytest.fixture(params=["groups", "rows", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How convolutions are evaluated, whatever the processor is."""
    chosen: str = request.param
    monkeypatch.setattr(convolutions, "HAS_GROUPS", chosen == "groups")
    if chosen == "one by one":
        monkeypatch.setattr(convolutions, "MOST_GATHERED", 0)
    return chosen


def kinds(values: Tensor) -> list[str]:
    """The names of the operations behind values, forwards and backwards."""
    seen, left = [], [values.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            seen.append(node.name())
            left += [before for before, _ in node.next_functions]
    return seen


def test_each_way_is_made_of_what_it_says(way: str) -> None:
    with SideBySide():
        found = torch.vmap(torch.conv2d)(stack(SAMPLES, 4, 5, 5), stack(5, 4, 3, 3))
    names = kinds(found)
    assert sum("Convolution" in name for name in names) == (TASKS if way == "one by one" else 0)
    assert sum("Grouped" in name for name in names) == (way == "groups")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"stride": 3, "padding": 2, "dilation": 2},
        {"stride": [4], "padding": [1], "dilation": [1]},
        {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
    ],
)
@pytest.mark.parametrize("channels", [1, 4, 8])
def test_convolutions(channels: int, options: dict[str, Any], bias: bool, way: str) -> None:
    images = stack(SAMPLES, channels, 7, 6, gradient=channels != 1)
    kernels, shift = stack(5, channels, 3, 2), stack(5)

    def one(images: Tensor, kernels: Tensor, shift: Tensor) -> Tensor:
        found = torch.conv2d(images, kernels, shift if bias else None, **options)
        return found if bias else found * shift[:, None, None]

    check(one, images, kernels, shift)


def test_third_derivatives(way: str) -> None:
    inputs = [stack(SAMPLES, 4, 5, 5), stack(5, 4, 3, 3), stack(5)]
    with SideBySide():
        at_once = torch.vmap(torch.conv2d)(*inputs)
    one_by_one = torch.stack([torch.conv2d(*parts) for parts in zip(*inputs, strict=True)])
    for found, known in zip(slopes(at_once, inputs, 3), slopes(one_by_one, inputs, 3), strict=True):
        torch.testing.assert_close(found, known, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("channels", [1, 4])
def test_kernels_that_all_tasks_share(channels: int, way: str) -> None:
    images = stack(SAMPLES, channels, 6, 5, gradient=channels != 1)
    kernels = stack(5, channels, 3, 3).detach()[0].requires_grad_()
    shift = stack(5).detach()[0].requires_grad_()

    def network(images: Tensor) -> Tensor:
        return torch.conv2d(images, kernels, shift, stride=2, padding=1)

    def derived(found: Tensor) -> list[Tensor]:
        inputs = [t for t in (images, kernels, shift) if t.requires_grad]
        return derivatives(found, inputs)

    with SideBySide():
        at_once = torch.vmap(network)(images)
    assert any("Expand" in name for name in kinds(at_once)) == (way == "groups")
    one_by_one = torch.stack([network(part) for part in images])
    for found, known in zip(derived(at_once), derived(one_by_one), strict=True):
        torch.testing.assert_close(found, known, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{"groups": 2}, {"padding": "same", "groups": 1}])
def test_what_is_left_to_torch(options: dict[str, Any]) -> None:
    images, kernels = stack(SAMPLES, 4, 5, 5), stack(4, 4 // options["groups"], 3, 3)
    check(lambda a, b: torch.conv2d(a, b, **options), images, kernels)
    one = stack(SAMPLES, 4, 5, 5)[0].detach()
    check(lambda kernels: torch.conv2d(one, kernels, **options), kernels)
    check(lambda a, b: torch.conv2d(a, b, **options), stack(4, 5, 5), kernels)


def test_what_does_not_fit_is_said_by_torch(way: str) -> None:
    for kernels in (stack(4, 3, 3, 3), stack(4, 2, 9, 9)):
        with SideBySide(), pytest.raises(RuntimeError, match=r"channels|greater than actual input"):
            torch.vmap(torch.conv2d)(stack(SAMPLES, 2, 5, 5), kernels)


def test_types_of_numbers_are_chosen_by_torch(way: str) -> None:
    images, kernels = stack(SAMPLES, 4, 5, 5).detach(), stack(3, 4, 3, 3).detach()
    with torch.autocast("cpu", torch.bfloat16):
        known = torch.vmap(torch.conv2d)(images.float(), kernels.float())
        with SideBySide():
            found = torch.vmap(torch.conv2d)(images.float(), kernels.float())
    torch.testing.assert_close(found, known)
    with SideBySide(), pytest.raises(RuntimeError, match="type"):
        torch.vmap(torch.conv2d)(images.float(), kernels)


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.AvgPool2d(3, stride=2, padding=1),
        lambda images: functional.max_pool2d(images, 2, return_indices=True)[0],
        lambda images: torch.max_pool2d(images, 3, stride=1),
    ],
)
def test_pools(pool: Callable[[Tensor], Tensor]) -> None:
    check(pool, stack(SAMPLES, 4, 7, 6))


def test_a_network_of_all_kinds(way: str) -> None:
    images = stack(SAMPLES, 1, 12, 12, gradient=False)
    tensors = [stack(*shape) for shape in ((6, 1, 3, 3), (6,), (4, 6, 3, 3), (4,), (2, 16))]

    def network(images: Tensor, *weights: Tensor) -> Tensor:
        hidden = functional.conv2d(images, weights[0], weights[1], padding=1).tanh()
        hidden = functional.max_pool2d(hidden, 2)
        hidden = functional.conv2d(hidden, weights[2], weights[3], stride=2)
        return hidden.tanh().flatten(1) @ weights[4].T

    check(network, images, *tensors)


def test_patches_are_those_of_the_present_images() -> None:
    """Kept for the same images with the same window, and for nothing else."""
    kernels, images = stack(2, 1, 3, 3), stack(SAMPLES, 1, 5, 5, gradient=False)
    other, mode = 2 * images, SideBySide()

    def convolved(of: Tensor, **options: Any) -> None:
        function = lambda a, b: torch.conv2d(a, b, **options)  # noqa: E731
        with mode:
            found = torch.vmap(function)(of, kernels)
        known = torch.stack([function(a, b) for a, b in zip(of, kernels, strict=True)])
        torch.testing.assert_close(found, known, rtol=1e-10, atol=1e-12)

    for of in (images, images, other, images):
        convolved(of)
    convolved(images, padding=1)
    images.mul_(3)
    convolved(images)
    convolved(other)


def test_rows_of_hidden_layers_are_not_kept(way: str) -> None:
    """Where nothing is differentiated they have no gradient either."""
    images, hidden = stack(SAMPLES, 1, 5, 5, gradient=False), stack(SAMPLES, 4, 5, 5)
    kept, mode = convolutions.Convolutions(), SideBySide()
    mode._rules[torch.conv2d] = kept
    with torch.no_grad(), mode:
        torch.vmap(torch.conv2d)(images, stack(2, 1, 3, 3))
        torch.vmap(torch.conv2d)(hidden, stack(2, 4, 3, 3))
    assert [of.shape for of, _, _ in kept._kept] == [images.shape] * (way != "one by one")
