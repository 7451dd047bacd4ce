"""The user's optimizers as they come: with schedulers, with hooks that clip, fused or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import bilevel
from bilevel.errors import ArgumentTypeError, CheckpointError, StateError
from bilevel.problem.sets import Box
from bilevel.problems import Quadratic
from bilevel.stepping.updates import Update
from bilevel.variables import Variable
from tests.methods.common import Oracle

SGD = partial(torch.optim.SGD, lr=0.1)
Made = torch.optim.Optimizer | schedulers.LRScheduler

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], schedulers.LRScheduler]] = {
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, T_max=30),
    "warmup, then cosine": lambda o: schedulers.SequentialLR(
        o,
        [
            schedulers.LinearLR(o, start_factor=0.1, total_iters=5),
            schedulers.CosineAnnealingLR(o, T_max=20),
        ],
        milestones=[5],
    ),
    "milestones": lambda o: schedulers.MultiStepLR(o, milestones=[3, 3, 11], gamma=0.5),
    "function": lambda o: schedulers.LambdaLR(o, lambda t: 1 / (1 + t)),
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.2, total_steps=200),
    "several": lambda o: schedulers.ChainedScheduler(
        [schedulers.ExponentialLR(o, 0.99), schedulers.ConstantLR(o, 0.5, total_iters=7)]
    ),
}


def solver_with(make: Callable[[Any], Made], method: Any = bilevel.F2SA, **options: Any) -> Any:
    problem = Quadratic(sigma_f=0.1, sigma_g=0.1, seed=1)
    made = method(lower_optimizer=make, upper_optimizer=make, **options)
    data = {"upper_data": problem.upper_noise, "lower_data": problem.lower_noise}
    return bilevel.Solver(problem, problem.x0, problem.y0, method=made, **data)


def updates_of(solver: Any) -> list[Update]:
    values = vars(solver.state).values()
    parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
    return [part for part in parts if isinstance(part, Update)]


@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=list(SCHEDULERS))
def test_a_scheduler_is_that_of_torch_and_the_same_on_both_copies(schedule: Any) -> None:
    alone = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    reference = schedule(alone)
    solver = solver_with(lambda p: schedule(SGD(p)), inner_steps=3)
    rates = []
    for _ in range(8):
        assert solver.step().lower_lr == pytest.approx(alone.param_groups[0]["lr"], abs=1e-15)
        for _ in range(3):
            rates.append(alone.param_groups[0]["lr"])
            alone.step()
            reference.step()
        for update in solver.state.y_updates:
            assert update.optimizer.param_groups[0]["lr"] == alone.param_groups[0]["lr"]
    assert len(set(rates)) > 1


def test_iterates_follow_the_schedule() -> None:
    problem = Quadratic(dim_x=4, dim_y=6, seed=3)
    method = bilevel.F2SA(
        inner_steps=2,
        multiplier=5.0,
        lower_optimizer=lambda p: schedulers.LambdaLR(SGD(p), lambda t: 1 / (1 + t)),
        upper_optimizer=lambda p: schedulers.LambdaLR(SGD(p), lambda k: 0.5**k),
    )
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method)
    o = Oracle.of(problem)
    x, y, t = problem.x0.numpy(), problem.y0.numpy(), 0
    z = y
    for k in range(10):
        solver.step()
        for _ in range(2):
            rate, t = 0.1 / (1 + t), t + 1
            y = y - rate * (o.g_y(x, y) + o.f_y(y) / 5.0)
            z = z - rate * o.g_y(x, z)
        x = x - 0.1 * 0.5**k * (o.f_x(x) + 5.0 * (o.g_x(x, y) - o.g_x(x, z)))
    np.testing.assert_allclose(solver.x.numpy(), x, rtol=0, atol=1e-13)
    np.testing.assert_allclose(solver.y.numpy(), z, rtol=0, atol=1e-13)


@pytest.mark.parametrize("method", [partial(bilevel.F2SA, inner_steps=2), bilevel.F3SA])
@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=list(SCHEDULERS))
def test_a_scheduled_run_resumes_bit_for_bit(schedule: Any, method: Any, tmp_path: Path) -> None:
    make = lambda p: schedule(torch.optim.AdamW(p, lr=0.1))  # noqa: E731
    whole, first, again = (solver_with(make, method) for _ in range(3))
    for _ in range(20):
        whole.step()
    for _ in range(7):
        first.step()
    first.save(tmp_path / "state")
    again.load(tmp_path / "state")
    for _ in range(13):
        again.step()
    assert torch.equal(again.x, whole.x)
    assert torch.equal(again.y, whole.y)
    for mine, theirs in zip(updates_of(again), updates_of(whole), strict=True):
        assert mine.scheduler.state_dict() == theirs.scheduler.state_dict()
        assert mine.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"]


def test_states_with_and_without_a_scheduler_do_not_fit_each_other(tmp_path: Path) -> None:
    with_one = solver_with(lambda p: SCHEDULERS["cosine"](SGD(p)))
    without = solver_with(SGD)
    with pytest.raises(StateError, match=r"x.*a learning-rate scheduler"):
        with_one.load_state_dict(without.state_dict())
    with pytest.raises(StateError, match=r"x.*a learning-rate scheduler"):
        without.load_state_dict(with_one.state_dict())
    with_one.save(tmp_path / "state")
    other = solver_with(lambda p: SCHEDULERS["function"](SGD(p)))
    with pytest.raises(CheckpointError, match="'CosineAnnealingLR' there and 'LambdaLR' here"):
        other.load(tmp_path / "state")


def test_a_scheduler_that_waits_for_a_number_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="the scheduler of x is ReduceLROnPlateau"):
        solver_with(lambda p: schedulers.ReduceLROnPlateau(SGD(p)))
    with pytest.raises(ArgumentTypeError, match=r"or a learning-rate scheduler of one, not 3"):
        solver_with(lambda p: 3)  # type: ignore[return-value]


def clipped(make: Callable[..., torch.optim.Optimizer], bound: float, seen: list[float]) -> Any:
    """A factory of optimizers that clip before each step, as a user writes it."""

    def factory(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        optimizer = make(params)
        optimizer.register_step_pre_hook(
            lambda *_: seen.append(float(nn.utils.clip_grad_norm_(params, bound)))
        )
        return optimizer

    return factory


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_hook_that_clips_sees_the_direction_of_each_copy(fused: bool, accumulate: bool) -> None:
    problem = Quadratic(dim_x=4, dim_y=6, seed=3)
    bound, lam = 0.05, 5.0
    seen: list[float] = []
    method = bilevel.F2SA(
        inner_steps=2,
        multiplier=lam,
        upper_lr=0.1,
        lower_optimizer=clipped(partial(torch.optim.SGD, lr=0.5, fused=fused), bound, seen),
    )
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method, accumulate=accumulate)
    o = Oracle.of(problem)
    x, y = problem.x0.numpy(), problem.y0.numpy()
    z, norms = y, []
    for _ in range(10):
        solver.step()
        for _ in range(2):
            steps = o.g_y(x, y) + o.f_y(y) / lam, o.g_y(x, z)
            lengths = [float(np.linalg.norm(step)) for step in steps]
            norms += lengths
            factors = [min(1.0, bound / (length + 1e-6)) for length in lengths]
            y, z = y - 0.5 * factors[0] * steps[0], z - 0.5 * factors[1] * steps[1]
        x = x - 0.1 * (o.f_x(x) + lam * (o.g_x(x, y) - o.g_x(x, z)))
    assert max(norms) > bound
    np.testing.assert_allclose(seen, norms, rtol=1e-6)
    np.testing.assert_allclose(solver.x.numpy(), x, rtol=0, atol=1e-12)


def test_entries_that_move_by_themselves_are_cut_off_and_others_keep_their_direction() -> None:
    gradient = torch.tensor([0.1, -3.0, 40.0])
    for projections, ends in (
        ([None], [-0.2, 4.0, -4.0]),
        ([Box(-1.0, 1.0)], [-0.2, 1.0, -1.0]),
        ([lambda x: x - x.mean()], torch.tensor([-0.01, 0.3, -4.0])),
    ):
        x = Variable.copy_of(torch.zeros(3), "x")
        update = Update(x, projections)
        x.set_grads([gradient.clone()])
        rate = update.choose(1.0, 2.0, 4.0)
        update.cut_off(2.0 * rate, 4.0)
        update.apply(rate, 2.0)
        expected = torch.as_tensor(ends)
        if not update.entrywise:
            expected = expected - expected.mean()
        torch.testing.assert_close(x.leaves[0].detach(), expected)
