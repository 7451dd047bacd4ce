"""The checks of the objectives before the first step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bilevel
from bilevel.errors import ObjectiveError, UnrepeatableWarning

ROWS = torch.linspace(-1, 2, 24).reshape(12, 2)


def mean_upper(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    return ((y - 1 - batch) ** 2).mean()


def mean_lower(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    return ((y - x - batch) ** 2).mean()


def sum_upper(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    return ((y - 1 - batch) ** 2).sum()


def sum_lower(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    return ((y - x - batch) ** 2).sum() + 10 * (y**2).sum()


def linear_sum(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    """Its value is 0 at the start, whatever the batch; its gradient is not."""
    return (y * batch).sum() + 0.5 * (y**2).sum()


def noisy_sum(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    return sum_upper(x, y, batch) + 0.1 * torch.randn(()) * y.sum()


def noisy_mean(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    return torch.dropout((y - 1 - batch) ** 2, 0.3, True).mean()


def solver(upper: Any, lower: Any, **options: Any) -> bilevel.Solver:
    options = {"upper_data": ROWS, "lower_data": ROWS, "batch_size": 6} | options
    problem = bilevel.Problem(upper, lower)
    y0 = options.pop("y0", torch.zeros(2))
    return bilevel.Solver(problem, torch.zeros(2), y0, method=bilevel.F2SA(0.1, 0.1), **options)


PARTS: dict[str, dict[str, Any]] = {
    "chunks": {"chunk_size": 2},
    "chunks of one": {"chunk_size": 1},
    "a direction in chunks": {"chunk_size": 4, "direction_batch_size": 8},
    "an uneven direction": {"direction_batch_size": 8},
    "an uneven sweep": {"direction_batch_size": "all", "batch_size": 5},
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=list(PARTS))
@pytest.mark.parametrize(
    ("upper", "lower", "culprit"),
    [
        (sum_upper, mean_lower, "upper"),
        (mean_upper, sum_lower, "lower"),
        (linear_sum, mean_lower, "upper"),
        (noisy_sum, mean_lower, "upper"),
    ],
)
def test_a_sum_in_parts_is_refused(
    parts: dict[str, Any], upper: Any, lower: Any, culprit: str
) -> None:
    with pytest.raises(ObjectiveError, match=rf"{culprit}\(x, y, batch\) is not a mean"):
        solver(upper, lower, **parts)


def test_a_sum_in_parts_is_refused_in_stacked_runs() -> None:
    with pytest.raises(ObjectiveError, match="not a mean"):
        bilevel.minimize_many(
            bilevel.Problem(sum_upper, mean_lower), torch.zeros(2), torch.zeros(2), seeds=2,
            methods=bilevel.F2SA(0.1, 0.1), upper_data=ROWS, lower_data=ROWS, batch_size=6,
            chunk_size=4, direction_batch_size=8,
        )  # fmt: skip


@pytest.mark.parametrize("parts", PARTS.values(), ids=list(PARTS))
@pytest.mark.parametrize("upper", [mean_upper, noisy_mean])
def test_means_in_parts_pass_without_a_trace_in_the_run(
    parts: dict[str, Any], upper: Callable[..., Tensor]
) -> None:
    before = torch.get_rng_state()
    assert solver(upper, mean_lower, **parts).step().upper is not None
    assert torch.equal(torch.get_rng_state(), before)


def test_batch_norm_and_weighted_means_are_means() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def loss(x: Tensor, y: Any, batch: Tensor) -> Tensor:
        weights = torch.softmax(batch[:, 0], 0)  # it depends on the other samples of the batch
        return weights @ (y(batch)[:, 0] - x[0]) ** 2

    solver(loss, loss, y0=module, chunk_size=2)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"direction_batch_size": 12},
        {"direction_batch_size": "all"},
        {"direction_batch_size": "all", "chunk_size": 24},
    ],
)
def test_a_sum_on_whole_minibatches_is_welcome(parts: dict[str, Any]) -> None:
    solver(sum_upper, sum_lower, **parts).step()


def writes(part: str, *, data: bool = False) -> Callable[..., Tensor]:
    def lower(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        target = {"x": x, "y": y, "batch": batch}[part]
        with torch.no_grad():
            (target.data if data else target).add_(0.5)
        return mean_lower(x, y, batch)

    return lower


@pytest.mark.parametrize("part", ["x", "y", "batch"])
@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("level", ["upper", "lower"])
def test_an_objective_that_writes_in_place_is_refused(part: str, data: bool, level: str) -> None:
    objectives = {"upper": mean_upper, "lower": mean_lower} | {level: writes(part, data=data)}
    with pytest.raises(ObjectiveError, match=rf"{level}\(x, y, batch\) wrote into {part}"):
        solver(**objectives, upper_data=ROWS.clone(), lower_data=ROWS.clone())


def test_the_part_that_is_written_to_is_named() -> None:
    def lower(x: Tensor, y: Any, batch: Any) -> Tensor:
        batch["images"][0].clamp_(0, 1)
        return mean_lower(x, y, batch["images"])

    with pytest.raises(ObjectiveError, match=r"into batch\['images'\] in place"):
        solver(mean_upper, lower, lower_data={"images": ROWS.clone()})


def test_buffers_are_the_modules_own_to_write_to() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def loss(x: Tensor, y: Any, batch: Tensor) -> Tensor:
        return ((y(batch) - x[0]) ** 2).mean()

    solver(loss, loss, y0=module).step()


class Noise:
    """Standard normal numbers from somewhere else than torch's global generators."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._generator = torch.Generator().manual_seed(0)
        self._calls = 0

    def __call__(self) -> Tensor:
        self._calls += 1
        draws: dict[str, Callable[[], Any]] = {
            "NumPy": lambda: np.random.randn(),
            "random": lambda: random.gauss(0, 1),
            "a generator of its own": lambda: torch.randn((), generator=self._generator),
            "a counter": lambda: self._calls,
            "torch": lambda: torch.randn(()),
        }
        return torch.as_tensor(draws[self._kind](), dtype=torch.float32)


@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize("kind", ["NumPy", "random", "a generator of its own", "a counter"])
def test_numbers_that_no_run_can_draw_again_are_told(kind: str, level: str) -> None:
    noise = Noise(kind)
    means = {"upper": mean_upper, "lower": mean_lower}
    mean = means[level]
    noisy = {level: lambda x, y, batch: mean(x, y, batch + 0.1 * noise())}
    with pytest.warns(UnrepeatableWarning, match=rf"^{level}\(x, y, batch\) returned"):
        solver(**(means | noisy))


def test_numbers_that_torch_draws_are_drawn_again() -> None:
    noise = Noise("torch")
    module = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 1))
    module = nn.Sequential(module, nn.utils.parametrizations.spectral_norm(nn.Linear(1, 1)))

    def loss(x: Tensor, y: Any, batch: Tensor) -> Tensor:
        return ((y(batch + 0.1 * noise()) - x.sum()) ** 2).mean()

    solver(loss, loss, y0=module).step()  # warnings are errors here


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.after = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows.clone().requires_grad_()  # without this, torch warns that nothing is trained
        value: Tensor = self.after(checkpoint(self.inside, rows, use_reentrant=True))
        return value


@pytest.mark.parametrize("level", ["upper", "lower"])
def test_reentrant_checkpoints_are_refused(level: str) -> None:
    """Parameters inside would get no gradient, and nobody would be told."""

    def plain(x: Tensor, y: Any, batch: Tensor) -> Tensor:
        return ((y.after(y.inside(batch)) - x.sum()) ** 2).mean()

    def reentrant(x: Tensor, y: Any, batch: Tensor) -> Tensor:
        return ((y(batch) - x.sum()) ** 2).mean()

    objectives = {"upper": plain, "lower": plain} | {level: reentrant}
    with pytest.raises(ObjectiveError, match=rf"^{level}\(x, y, batch\).*use_reentrant=False"):
        solver(**objectives, y0=Reentrant())


def test_an_objective_that_differentiates_by_a_variable_learns_how() -> None:
    def penalised(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        loss = mean_lower(x, y, batch)
        (slope,) = torch.autograd.grad(loss, y, create_graph=True)
        return loss + slope.square().sum()

    def as_advised(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return penalised(x, y if y.requires_grad else y.detach().requires_grad_(), batch)

    with pytest.raises(RuntimeError) as raised:
        solver(mean_upper, penalised)
    assert "y if y.requires_grad else y.detach().requires_grad_()" in raised.value.__notes__[0]
    assert solver(mean_upper, as_advised).step().lower is not None


def test_a_value_on_the_meta_device_is_refused() -> None:
    problem = bilevel.Problem(lambda x, y, b: (x * y).to("meta"), lambda x, y, b: (y - x) ** 2)
    with pytest.raises(ObjectiveError, match=r"upper.*on the meta device"):
        bilevel.Solver(problem, torch.ones(()), torch.ones(()))
