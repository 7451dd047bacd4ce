"""Loss scaling: the iterates are those without it, and what overflows is tried again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bilevel
from bilevel.errors import ArgumentError, NonFiniteError, StateError
from bilevel.problems import Quadratic, WeightedLogistic

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "single pass": {"single_pass": True},
    "midpoint": {"scheme": "midpoint"},
    "one after another": {"accumulate": True},
    "one after another, single pass": {"accumulate": True, "single_pass": True},
    "independent": {"coupling": "independent"},
}


class Half(torch.autograd.Function):
    """The identity, whose gradient passes through float16 as an activation's does."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.half().to(grad.dtype)


def solver(problem: bilevel.Problem, scale: Any, **options: Any) -> bilevel.Solver:
    settings = {"lower_lr": 0.3, "upper_lr": 0.1, "inner_steps": 3, **options}
    data = {
        name: getattr(problem, name)
        for name in ("upper_data", "lower_data")
        if hasattr(problem, name)
    }
    size = {"batch_size": 7} if data else {}
    accumulate = settings.pop("accumulate", False)
    return bilevel.Solver(
        problem,
        problem.x0,
        problem.y0,
        method=bilevel.F2SA(**settings),
        loss_scale=scale,
        accumulate=accumulate,
        **data,
        **size,
    )


def scale_of(run: bilevel.Solver) -> float:
    return float(run.evaluator.state_dict()["loss_scale"]["scale"])


@pytest.mark.parametrize("options", VARIANTS.values(), ids=list(VARIANTS))
def test_a_scale_changes_nothing(options: dict[str, Any]) -> None:
    problem = WeightedLogistic(train=30, trusted=25, dim=4)
    plain, scaled = (solver(problem, s, **options) for s in (None, bilevel.LossScale()))
    for _ in range(12):
        first, second = plain.step(), scaled.step()
        torch.testing.assert_close(second.direction_norm, first.direction_norm)
    # one gradient after another is added up in another order
    tolerance = 1e-13 if "accumulate" in options else 0.0
    torch.testing.assert_close(scaled.x, plain.x, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(scaled.y, plain.y, rtol=tolerance, atol=tolerance)


class Overflowing(Quadratic):
    """A problem whose gradient in y passes through float16."""

    def _lower(self, x: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        return super()._lower(x, Half.apply(y), noise)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=list(VARIANTS))
def test_what_overflows_is_evaluated_again_with_a_smaller_scale(options: dict[str, Any]) -> None:
    huge = bilevel.LossScale(init_scale=2.0**40)
    problem = Overflowing(seed=0)
    fits, overflows = (solver(problem, s, **options) for s in (bilevel.LossScale(1024.0), huge))
    for _ in range(8):
        fits.step()
        overflows.step()
    assert 1 < scale_of(overflows) < 2.0**20
    assert torch.equal(overflows.x, fits.x)
    assert torch.equal(overflows.y, fits.y)


@pytest.mark.slow
def test_gradients_that_would_vanish_do_not() -> None:
    """Of 1e-9 nothing is left in float16; times 2^16 nearly all."""
    problem = bilevel.Problem(
        upper=lambda x, y, batch: 0.5e-9 * (Half.apply(y) - 1).square().sum(),
        lower=lambda x, y, batch: 0.5e-9 * (Half.apply(y) - x).square().sum(),
    )
    ends = []
    for scale in (None, bilevel.LossScale(2.0**26)):
        method = bilevel.F2SA(lower_lr=0.5e9, upper_lr=0.1e9)
        start = torch.zeros(2)
        result = bilevel.minimize(problem, start, start, method=method, loss_scale=scale, steps=100)
        ends.append(result.x)
    assert torch.equal(ends[0], torch.zeros(2))
    torch.testing.assert_close(ends[1], torch.ones(2), rtol=0, atol=0.01)


def test_a_repeated_evaluation_draws_the_same_and_counts_once() -> None:
    """Dropout masks and running statistics are those of an evaluation that had no overflow."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
            )

        def forward(self, rows: Tensor) -> Tensor:
            out: Tensor = self.layers(rows)
            return Half.apply(out)  # type: ignore[no-any-return]

    net = Net()
    rows = torch.randn(32, 3)
    problem = bilevel.Problem(
        upper=lambda x, y, batch: (y(batch) - 1).square().mean(),
        lower=lambda x, y, batch: (y(batch) - x).square().mean(),
    )
    ends = []
    for init in (256.0, 2.0**60):
        run = bilevel.Solver(
            problem,
            torch.zeros(1),
            net,
            method=bilevel.F2SA(0.1, 0.1, inner_steps=2),
            loss_scale=bilevel.LossScale(init),
            upper_data=rows,
            lower_data=rows,
            batch_size=8,
        )
        for _ in range(5):
            run.step()
        ends.append(run)
    assert torch.equal(ends[0].x, ends[1].x)
    for mine, theirs in zip(
        ends[0].y.state_dict().values(), ends[1].y.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert int(ends[1].y.layers[1].num_batches_tracked) == 10


@pytest.mark.slow
def test_autocast_to_half_precision_trains() -> None:
    """Float16 on a CPU, with gradients that float16 cannot hold unscaled."""
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    rows = torch.randn(64, 4)
    targets = rows.sum(1, keepdim=True)

    def loss(y: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            out = y(batch[0])
        return 1e-5 * (out.float() - batch[1]).square().mean()

    problem = bilevel.Problem(
        upper=lambda x, y, batch: loss(y, batch),
        lower=lambda x, y, batch: loss(y, batch) + 1e-5 * torch.exp(x) * sum_of_squares(y),
    )
    method = bilevel.F2SA(
        inner_steps=5,
        lower_optimizer=lambda p: bilevel.SharedAdamW(p, lr=0.01, weight_decay=0.0),
        upper_optimizer=lambda p: torch.optim.Adam(p, lr=0.05),
    )
    data = (rows, targets)
    result = bilevel.minimize(
        problem,
        torch.zeros(()),
        net,
        method=method,
        loss_scale=bilevel.LossScale(),
        steps=40,
        upper_data=data,
        lower_data=data,
    )
    assert result.history["upper"][-1] < 0.5 * result.history["upper"][0]
    assert result.x < -1  # less of the penalty


def sum_of_squares(module: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in module.parameters()]).sum()


def test_the_scale_grows_after_a_while_and_falls_at_once() -> None:
    settings = bilevel.LossScale(2.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    run = solver(Quadratic(seed=0), settings, inner_steps=1, single_pass=True)
    scales = []
    for _ in range(7):
        run.step()
        scales.append(scale_of(run))
    assert scales == [2.0, 2.0, 8.0, 8.0, 8.0, 32.0, 32.0]
    run = solver(Overflowing(seed=0), bilevel.LossScale(2.0**40, backoff_factor=2.0**-30))
    run.step()
    assert scale_of(run) == 2.0**10


@pytest.mark.parametrize("accumulate", [False, True])
def test_what_is_not_finite_without_a_scale_ends_the_run(accumulate: bool) -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * math.inf

    problem = bilevel.Problem(
        upper=lambda x, y, batch: y.square().sum(),
        lower=lambda x, y, batch: (Bad.apply(y) - x).square().sum(),
    )
    run = bilevel.Solver(
        problem,
        torch.ones(2),
        torch.zeros(2),
        method=bilevel.F2SA(0.1, 0.1),
        accumulate=accumulate,
        loss_scale=bilevel.LossScale(),
    )
    with pytest.raises(NonFiniteError, match=r"^the gradient of y is not finite at step 0"):
        run.step()
    assert scale_of(run) == 1.0


def test_a_scaled_run_resumes_bit_for_bit() -> None:
    problem = Overflowing(seed=0)
    settings = bilevel.LossScale(2.0**30, growth_interval=5)
    first, again = (solver(problem, settings) for _ in range(2))
    for _ in range(4):
        first.step()
    again.load_state_dict(first.state_dict())
    for _ in range(9):
        first.step()
        again.step()
    assert torch.equal(first.x, again.x)
    assert first.evaluator.state_dict() == again.evaluator.state_dict()
    with pytest.raises(StateError, match="saved with loss_scale"):
        solver(problem, None).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_scale": 0.5}, "init_scale must be finite and at least 1, not 0.5"),
        ({"growth_factor": 1.0}, "growth_factor must be finite and greater than 1, not 1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor must be below 1, not 1.0"),
        ({"backoff_factor": 0.0}, "backoff_factor must be finite and greater than 0, not 0.0"),
        ({"growth_interval": 0}, "growth_interval must be a whole number of at least 1, not 0"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        bilevel.LossScale(**options)
