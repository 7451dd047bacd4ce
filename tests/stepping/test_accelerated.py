"""The lower steps of "auto" where nothing is sampled: long valleys, saddles and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bilevel.stepping.accelerated import AcceleratedSteps
from bilevel.stepping.updates import Update
from bilevel.variables import Past, Variable, anderson


@dataclass(frozen=True)
class _Move:
    update: Update
    gain: float = 1.0


def _after(g: Callable[[Tensor], Tensor], start: Tensor, rate: float, steps: int) -> Tensor:
    """Where accelerated steps lead from ``start``."""
    y, path = Variable.copy_of(start, "y"), AcceleratedSteps(steps)
    move = _Move(Update(y, [None]))
    path.begin(rate, 0.0)
    for _ in range(steps):
        leaf = y.leaves[0].detach().requires_grad_()
        y.set_grads(torch.autograd.grad(g(leaf), leaf))
        path.move([move])
    return y.leaves[0].detach()


def test_a_long_valley_is_followed() -> None:
    """Of condition 10^4: gradient steps need some 10^5, Nesterov's a thousand."""
    stiffness = torch.logspace(0, -4, 8, dtype=torch.float64)
    found = _after(
        lambda y: 0.5 * (stiffness * (y - 1) ** 2).sum(),
        torch.zeros(8, dtype=torch.float64),
        1.0,
        60,
    )
    torch.testing.assert_close(found, torch.ones(8, dtype=torch.float64), atol=1e-6, rtol=0)


def test_a_saddle_is_no_solution() -> None:
    """A gradient that becomes shorter is no sign of a descent: at the saddle it is 0."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    wanted = torch.tanh(inputs @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))

    def g(y: Tensor) -> Tensor:  # all gradients vanish at y = 0, where it is no minimum
        return ((torch.tanh(inputs @ y[:3]) * y[3:].sum() - wanted) ** 2).mean()

    start = 0.3 * torch.randn(6, generator=generator, dtype=torch.float64)
    found = _after(g, start, 0.1, 100)
    assert g(found) < 0.05 * g(torch.zeros(6, dtype=torch.float64))


def test_a_step_to_where_g_is_steep_is_taken_again() -> None:
    """At 0 the curvature is 1, by which the first step leads to 99, where it is e^99."""
    found = _after(
        lambda y: (torch.exp(y) - 100 * y).sum(), torch.zeros(2, dtype=torch.float64), 1.0, 30
    )
    torch.testing.assert_close(found, torch.full_like(found, math.log(100)), atol=1e-3, rtol=0)


def test_what_is_remembered_of_a_large_variable_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anderson, "KEPT", 100)
    small, large = Past(8), Past(8)
    for _ in range(20):
        small.add(torch.ones(3), torch.ones(3))
        large.add(torch.ones(20), torch.ones(20))
    assert len(small) == 9
    assert len(large) == 3  # the last, and two to combine it with: 100 / (2 * 20)


def test_steps_that_rounding_makes_one_are_not_combined() -> None:
    past, step = Past(8), torch.tensor([1.0, 0.0], dtype=torch.float64)
    for k in (3.0, 2.0, 1.0):
        past.add(k * step, -k * step)
    assert bool(torch.isfinite(past.combined()).all())
    past.add(0 * step, 0 * step)
    past.add(0 * step, 0 * step)  # no step at all
    assert torch.equal(past.combined(), 0 * step)
    past.add(torch.nan * step, step)
    assert torch.equal(past.combined(), step)
