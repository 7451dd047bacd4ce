"""AdamW with one preconditioner for all copies: against its recursion in NumPy, and torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.problems import Quadratic, WeightedLogistic
from bilevel.stepping.updates import Update
from bilevel.variables import Variable
from tests.methods.common import Array, Oracle

LR, BETA1, BETA2, EPS, DECAY = 0.02, 0.8, 0.95, 1e-6, 0.1
OPTIONS: dict[str, Any] = {
    "lr": LR,
    "betas": (BETA1, BETA2),
    "eps": EPS,
    "weight_decay": DECAY,
}
LAM, UPPER_LR = 7.0, 0.1


def recursion(problem: Quadratic, inner_steps: int) -> Iterator[tuple[Array, Array, Array]]:
    """F2SA in which y and z move by AdamW with the second moment of y, from the formulas alone."""
    o = Oracle.of(problem)
    x, y = problem.x0.numpy().copy(), problem.y0.numpy().copy()
    z = y.copy()
    m_y, m_z, v = np.zeros_like(y), np.zeros_like(y), np.zeros_like(y)
    t = 0
    while True:
        for _ in range(inner_steps):
            t += 1
            at_y, at_z = o.g_y(x, y) + o.f_y(y) / LAM, o.g_y(x, z)
            v = BETA2 * v + (1 - BETA2) * at_y**2
            metric = np.sqrt(v / (1 - BETA2**t)) + EPS
            m_y = BETA1 * m_y + (1 - BETA1) * at_y
            m_z = BETA1 * m_z + (1 - BETA1) * at_z
            y = (1 - LR * DECAY) * y - LR * m_y / (1 - BETA1**t) / metric
            z = (1 - LR * DECAY) * z - LR * m_z / (1 - BETA1**t) / metric
        x = x - UPPER_LR * (o.f_x(x) + LAM * (o.g_x(x, y) - o.g_x(x, z)))
        yield x, y, z


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("inner_steps", [1, 3])
def test_iterates_equal_the_recursion(inner_steps: int, accumulate: bool) -> None:
    problem = Quadratic(dim_x=4, dim_y=6, seed=3)
    method = bilevel.F2SA(
        upper_lr=UPPER_LR,
        multiplier=LAM,
        inner_steps=inner_steps,
        lower_optimizer=partial(bilevel.SharedAdamW, **OPTIONS),
    )
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method, accumulate=accumulate)
    expected = recursion(problem, inner_steps)
    for _ in range(60):
        solver.step(measure=False)
        x, y, z = next(expected)
        np.testing.assert_allclose(solver.x.numpy(), x, rtol=0, atol=1e-11)
        found = solver.state.penalised.value.detach().numpy()
        np.testing.assert_allclose(found, y, rtol=0, atol=1e-11)
        np.testing.assert_allclose(solver.y.numpy(), z, rtol=0, atol=1e-11)
    assert np.abs(x - problem.x0.numpy()).max() > 0.1


def test_f3sa_without_momentum_is_f2sa_with_it_too() -> None:
    problem = Quadratic(dim_x=4, dim_y=6, seed=3)
    method = bilevel.F3SA(
        upper_lr=UPPER_LR,
        multiplier=LAM,
        momentum=1.0,
        lower_optimizer=partial(bilevel.SharedAdamW, **OPTIONS),
    )
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method)
    expected = recursion(problem, 1)
    for _ in range(50):
        solver.step(measure=False)
        x, _, z = next(expected)
    np.testing.assert_allclose(solver.x.numpy(), x, rtol=0, atol=1e-11)
    np.testing.assert_allclose(solver.y.numpy(), z, rtol=0, atol=1e-11)


@pytest.mark.parametrize("scale", [None, -4.0])
def test_alone_it_is_torchs_adamw(scale: float | None) -> None:
    mine, theirs = (torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.0]).double()) for _ in range(2))
    shared = bilevel.SharedAdamW([mine], **OPTIONS)
    plain = torch.optim.AdamW([theirs], **OPTIONS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        theirs.grad = torch.randn(3, generator=generator, dtype=torch.float64)
        mine.grad = theirs.grad * (1.0 if scale is None else scale)
        if scale is not None:
            shared.grad_scale = torch.tensor(scale)
        shared.step()
        plain.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_is_bad_is_skipped_whole(first: bool) -> None:
    """Also the very first, where no moment is there to be divided by."""
    variable = Variable.copy_of(torch.tensor([1.0, -2.0]), "y")
    update = Update(variable, [None], partial(bilevel.SharedAdamW, **OPTIONS))
    assert update.can_skip_without_sync
    if not first:
        variable.set_grads([torch.tensor([1.0, 2.0])])
        update.apply(1.0, gain=0.25)
        before = update.state_dict()
    point = variable.leaves[0].detach().clone()
    variable.set_grads([torch.tensor([math.nan, math.inf])])
    update.apply(1.0, gain=0.25, bad=torch.tensor(True))
    assert torch.equal(variable.leaves[0], point)
    if not first:
        torch.testing.assert_close(update.state_dict(), before, rtol=0, atol=0)
    variable.set_grads([torch.tensor([4.0, -4.0])])
    update.apply(1.0, gain=0.25)
    assert bool(torch.isfinite(variable.leaves[0]).all())
    assert not torch.equal(variable.leaves[0], point)


def test_a_follower_holds_no_second_moment_and_resumes_bit_for_bit() -> None:
    problem = Quadratic(sigma_g=0.1, sigma_f=0.1, seed=1)

    def solver() -> bilevel.Solver:
        method = bilevel.F2SA(
            upper_lr=0.1, inner_steps=2, lower_optimizer=partial(bilevel.SharedAdamW, **OPTIONS)
        )
        data = {"upper_data": problem.upper_noise, "lower_data": problem.lower_noise}
        return bilevel.Solver(problem, problem.x0, problem.y0, method=method, **data)

    first = solver()
    for _ in range(5):
        first.step()
    held = [set(u.state_dict()["state"][0]) for u in first.state.y_updates]
    assert held == [{"step", "exp_avg", "exp_avg_sq"}, {"step", "exp_avg"}]
    again = solver()
    again.load_state_dict(first.state_dict())
    for _ in range(5):
        first.step()
        again.step()
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.y, again.y)


def test_on_the_way_the_direction_is_nearer_to_the_gradient_than_with_an_adamw_each() -> None:
    problem = WeightedLogistic(train=200, trusted=50, dim=10)
    wanted = problem.gradient(problem.x0)

    def cosine(make: Callable[[Any], torch.optim.Optimizer]) -> float:
        method = bilevel.F2SA(multiplier=10.0, inner_steps=1, upper_lr=1e-12, lower_optimizer=make)
        data = {"upper_data": problem.upper_data, "lower_data": problem.lower_data}
        solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method, **data)
        for _ in range(10):
            solver.step(measure=False)
        x = problem.x0.clone().requires_grad_()
        y, z = (point.value.detach() for point in solver.state.points)
        f = problem.upper(x, y, problem.upper_data)
        gap = problem.lower(x, y, problem.lower_data) - problem.lower(x, z, problem.lower_data)
        (direction,) = torch.autograd.grad(f + 10.0 * gap, x)
        return float(torch.cosine_similarity(direction, wanted, 0))

    plain = cosine(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0))
    shared = cosine(lambda p: bilevel.SharedAdamW(p, lr=1e-2, weight_decay=0.0))
    assert (round(plain, 2), round(shared, 2)) == (0.32, 0.73)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be finite and at least 0, not -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must be below 1, not 1.0"),
        ({"eps": 0.0}, "eps must be finite and greater than 0, not 0.0"),
        ({"weight_decay": math.nan}, "weight_decay must be finite and at least 0, not nan"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        bilevel.SharedAdamW([torch.zeros(1)], **options)


def test_what_is_no_copy_cannot_follow() -> None:
    optimizers = [bilevel.SharedAdamW([torch.zeros(size)]) for size in (2, 3)]
    with pytest.raises(ArgumentError, match="cannot follow"):
        optimizers[0].follow(optimizers[1])


def test_a_table_is_refused() -> None:
    problem = bilevel.Problem(
        upper=lambda x, y, batch: (y(torch.arange(2)) ** 2).sum(),
        lower=lambda x, y, batch: ((y(torch.arange(2)) - x) ** 2).sum(),
    )
    method = bilevel.F2SA(upper_lr=0.1, lower_optimizer=bilevel.SharedAdamW)
    start: Tensor = torch.zeros(())
    with pytest.raises(ArgumentTypeError, match=r"SharedAdamW.*would move every row"):
        bilevel.Solver(problem, start, bilevel.Table(torch.zeros(5)), method=method)
