"""A unit for each entry of x: what it does to a direction, and to problems that need it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.stepping.metric import LEAST, Metric
from bilevel.variables import Variable, flatten


def active() -> Metric:
    metric = Metric()
    metric.active = True
    return metric


def test_the_direction_keeps_its_length_and_its_entries_become_alike() -> None:
    x = Variable.copy_of(torch.zeros(4), "x")
    direction = torch.tensor([3.0, -0.3, 0.0, 3.0 * LEAST / 10])
    towards = active().turned(direction, x)
    torch.testing.assert_close(towards.norm(), direction.norm())
    # the first two by one unit, the third not at all, the last by as much as it is above the least
    torch.testing.assert_close(towards / towards[0], torch.tensor([1.0, -1.0, 0.0, 0.1]))


def test_a_size_is_forgotten_slowly_and_taken_over_at_once() -> None:
    x, metric = Variable.copy_of(torch.zeros(2), "x"), active()
    metric.turned(torch.tensor([1.0, 1.0]), x)
    slower = metric.turned(torch.tensor([1.0, 0.1]), x)
    assert slower[1] / slower[0] == pytest.approx(0.1 / 0.9)
    back = metric.turned(torch.tensor([1.0, 5.0]), x)
    assert back[1] == back[0]


def test_tensors_of_x_do_not_share_a_least_size() -> None:
    x = Variable.copy_of({"a": torch.zeros(1), "b": torch.zeros(1)}, "x")
    towards = active().turned(torch.tensor([1.0, 1e-6]), x)
    assert towards[0] == towards[1]


def test_an_entry_that_was_zero_so_far_has_no_size() -> None:
    x, metric = Variable.copy_of({"a": torch.zeros(1), "b": torch.zeros(1)}, "x"), active()
    metric.turned(torch.tensor([1e-3, 0.0]), x)
    towards = metric.turned(torch.tensor([1e-3, 1e-4]), x)
    assert towards[0] == towards[1]


@pytest.mark.parametrize("sizes", [(0,), (0, 2)])
def test_tensors_of_x_may_be_empty(sizes: tuple[int, ...]) -> None:
    x = Variable.copy_of([torch.zeros(size) for size in sizes], "x")
    direction = torch.ones(sum(sizes))
    assert torch.equal(active().turned(direction, x), direction)


def test_the_gradients_keep_their_norm_where_they_are_turned() -> None:
    x = Variable.copy_of(torch.zeros(2), "x")
    x.set_grads([torch.tensor([6.0, 8.0])])
    active().turn_grads(x, torch.tensor([0.0, 2.0]))
    torch.testing.assert_close(flatten(x.grads()), torch.tensor([0.0, 10.0]))


class Separate:
    """min_x sum_i c_i (x_i - 1)^2 / 2, where y*(x) = x: entries of very different curvatures."""

    weights = torch.logspace(0, -1.9, 9, dtype=torch.float64)

    def upper(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return 0.5 * (self.weights * (y - 1) ** 2).sum()

    def lower(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return 0.5 * ((y - x) ** 2).sum()

    def solver(self, x_set: Any = None) -> bilevel.Solver:
        zero = torch.zeros(9, dtype=torch.float64)
        return bilevel.Solver(bilevel.Problem(self.upper, self.lower, x_set=x_set), zero, zero)


def test_entries_in_different_units_are_found_together() -> None:
    solver = Separate().solver(bilevel.sets.Box(-5, 5))
    for _ in range(20):
        solver.step()
    torch.testing.assert_close(solver.x, torch.ones_like(solver.x), rtol=0.05, atol=0.0)


def test_in_a_set_that_ties_entries_together_the_direction_is_the_gradient() -> None:
    free, tied = Separate().solver(), Separate().solver(bilevel.sets.Ball(100.0))
    while not bool(free.x.any() and tied.x.any()):
        for solver in (free, tied):
            if not bool(solver.x.any()):
                solver.step()
    torch.testing.assert_close(free.x / free.x[0], torch.ones_like(free.x), rtol=0.1, atol=LEAST)
    torch.testing.assert_close(tied.x / tied.x[0], Separate.weights, rtol=0.1, atol=0.0)


def test_a_run_goes_on_with_the_same_bits() -> None:
    first, second = Separate().solver(), Separate().solver()
    for _ in range(20):
        first.step()
    second.load_state_dict(first.state_dict())
    for _ in range(10):
        first.step()
        second.step()
    assert torch.equal(first.x, second.x)


@pytest.mark.parametrize("seed", [1, 4])
def test_small_strengths_of_a_ridge_are_not_left_behind(seed: int) -> None:
    """The README's problem from x = -6, where the gradient of each strength is exp(-6) of one."""
    torch.manual_seed(seed)
    truth = (torch.arange(40) < 5).float()
    (A, a), (B, b) = ((M, M @ truth + 0.5 * torch.randn(60)) for M in torch.randn(2, 60, 40))

    def loss(y: Tensor, batch: Any) -> Tensor:
        inputs, targets = batch
        return ((inputs @ y - targets) ** 2).mean()

    def value(x: Tensor) -> float:
        C, c = A.double(), a.double()
        y = torch.linalg.solve(C.T @ C / 60 + x.double().exp().diag(), C.T @ c / 60)
        return float(loss(y, (B.double(), b.double())))

    problem = bilevel.Problem(
        lambda x, y, batch: loss(y, batch),
        lambda x, y, batch: loss(y, batch) + (x.exp() * y**2).sum(),
        x_set=bilevel.sets.Box(-6, 4),
    )
    x0, y0 = torch.full((40,), -6.0), torch.zeros(40)
    result = bilevel.minimize(
        problem, x0, y0, steps=60, upper_data=(B, b), lower_data=(A, a), record_every=10
    )
    # from x = 0, from where the way is short, it is below 0.24 for all seeds from 0 to 4
    assert value(result.x) < 0.24 < 0.5 * value(x0)
