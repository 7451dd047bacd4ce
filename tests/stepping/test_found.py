"""Steps that are tested: what happens after a bad number, and where g rises while x rests."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bilevel
from bilevel.stepping.curvature import Curvature

TARGETS = 1 + 0.01 * torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


def lower(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    return 0.5 * ((y - x * batch) ** 2).mean(0).sum()


def sampled(inner_steps: int = 10) -> bilevel.Solver:
    problem = bilevel.Problem(lambda x, y, batch: 0.5 * ((y - 3) ** 2).sum(), lower)
    method = bilevel.F2SA(inner_steps=inner_steps)
    x0, y0 = torch.ones(3), torch.zeros(3)
    return bilevel.Solver(problem, x0, y0, method=method, lower_data=TARGETS, batch_size=8)


def test_after_a_bad_number_x_rests_in_the_next_step() -> None:
    solver = sampled(inner_steps=3)
    moved: Any = 0.0
    while not (moved and not solver.state.policy.due):  # in the middle of a window
        moved = solver.step(measure=False).upper_lr
    assert solver.state.policy.take_back(solver.state)
    where = solver.x.clone()
    assert solver.step(measure=False).upper_lr == 0
    assert torch.equal(solver.x, where)


def test_the_lower_step_is_halved_where_g_rises_while_x_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def underestimate(self: Curvature, *_: Any, **__: Any) -> None:
        self.value = 0.3  # it is 1, so that steps of 1 / 0.3 lead away from the minimum

    monkeypatch.setattr(Curvature, "refine", underestimate)
    monkeypatch.setattr(Curvature, "hold_for_a_step", lambda *_: None)
    solver = sampled()
    infos = [solver.step() for _ in range(30)]
    assert infos[0].lower_lr > 2
    assert infos[-1].lower_lr < 2
    torch.testing.assert_close(solver.y, solver.x * TARGETS.mean(0), rtol=0.1, atol=0.0)


class Ridge:
    """Least squares with one strength softplus(x) per feature; y*(x) is known in closed form."""

    def __init__(self, seed: int, rows: int = 30, features: int = 20) -> None:
        generator = torch.Generator().manual_seed(seed)
        truth = torch.randn(features, generator=generator).double()
        truth[features // 4 :] = 0

        def drawn() -> tuple[Tensor, Tensor]:
            inputs = torch.randn(rows, features, generator=generator).double()
            return inputs, inputs @ truth + 0.5 * torch.randn(rows, generator=generator).double()

        self.train, self.held_out = drawn(), drawn()
        self.x0 = torch.full((features,), -4.0, dtype=torch.float64)
        self.y0 = torch.zeros(features, dtype=torch.float64)

    def upper(self, x: Tensor, y: Tensor, batch: object = None) -> Tensor:
        inputs, targets = self.held_out
        return 0.5 * ((inputs @ y - targets) ** 2).mean()

    def lower(self, x: Tensor, y: Tensor, batch: object = None) -> Tensor:
        inputs, targets = self.train
        strengths = torch.nn.functional.softplus(x)
        return 0.5 * ((inputs @ y - targets) ** 2).mean() + 0.5 * (strengths * y * y).sum()

    def value(self, x: Tensor) -> float:
        inputs, targets = self.train
        strengths = torch.nn.functional.softplus(x)
        hessian = inputs.T @ inputs / len(inputs) + torch.diag(strengths)
        return float(self.upper(x, torch.linalg.solve(hessian, inputs.T @ targets / len(inputs))))

    def solver(self) -> bilevel.Solver:
        return bilevel.Solver(bilevel.Problem(self.upper, self.lower), self.x0, self.y0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_wherever_a_run_ends_its_result_is_below_its_start(seed: int) -> None:
    ridge = Ridge(seed)
    solver = ridge.solver()
    start = ridge.value(ridge.x0)
    for _ in range(80):
        solver.step(measure=False)
        found = ridge.value(solver.final_point()[0])
        assert found <= (1 + 1e-9) * start, solver.k
    assert found < 0.8 * start


@pytest.mark.slow
def test_the_momentum_of_a_rest_comes_back_with_the_state() -> None:
    ridge = Ridge(0)
    solver, resting = ridge.solver(), 0
    for _ in range(40):
        solver.step(measure=False)
        other = ridge.solver()
        other.load_state_dict(solver.state_dict())
        resting += solver.state_dict()["state"]["policy"]["path"] is not None
        onward = ridge.solver()
        onward.load_state_dict(solver.state_dict())
        for _ in range(3):
            other.step(measure=False)
        for _ in range(3):
            onward.step(measure=False)
            onward.load_state_dict(onward.state_dict())
        assert torch.equal(other.x, onward.x)
        assert torch.equal(other.y, onward.y)
    assert resting > 2


def test_y_that_was_set_loses_its_momentum() -> None:
    ridge = Ridge(0)
    solver = ridge.solver()
    while not solver.state.policy.state_dict()["found"]["resting"]:
        solver.step(measure=False)
    solver.y = ridge.y0 + 1
    assert not solver.state.policy.state_dict()["found"]["resting"]


def test_a_gradient_that_overflows_is_a_curvature_without_bound() -> None:
    ridge = Ridge(0)
    solver = ridge.solver()
    for _ in range(5):
        solver.step(measure=False)
    policy = solver.state.policy
    assert policy.accelerated is not None
    policy.accelerated.rate = 0.0  # as after a gradient that is infinite
    assert policy._met() == float("inf")  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scheme", ["forward", "midpoint"])
def test_y_may_start_where_g_is_flat_and_end_where_it_is_steep(
    scheme: Any, dtype: torch.dtype
) -> None:
    """F is least at x = 1; the curvature of g is 5 there, and at the start a millionth of that."""
    problem = bilevel.Problem(
        lambda x, y, batch: ((y - 1) ** 2).sum(),
        lambda x, y, batch: (torch.exp(5 * (y - x)) / 5 - y).sum(),
    )
    x0, y0 = torch.full((3,), 3.0, dtype=dtype), torch.zeros(3, dtype=dtype)
    method = bilevel.F2SA(scheme=scheme)
    result = bilevel.minimize(problem, x0, y0, method=method, steps=60)
    torch.testing.assert_close(result.x, torch.ones(3, dtype=dtype), atol=0.02, rtol=0)


def test_the_first_step_in_minibatches_does_not_lead_to_where_g_is_steep() -> None:
    """The curvature of g is 1 at the start, by which y would go to 9, where it is e^9."""
    problem = bilevel.Problem(
        lambda x, y, batch: ((y - x) ** 2).sum(),
        lambda x, y, batch: (torch.exp(y) - 10 * y * batch).mean(0).sum(),
    )
    solver = bilevel.Solver(
        problem, torch.ones(3), torch.zeros(3), lower_data=TARGETS, batch_size=8
    )
    solver.step()
    torch.testing.assert_close(solver.y, torch.full((3,), math.log(10)), atol=0.1, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_f", "of_g"), [(1e20, 1e20), (1e25, 1e25), (1.0, 1e25), (1e19, 1.0), (1.0, 1e-25)]
)
def test_units_whose_squares_single_precision_cannot_hold(of_f: float, of_g: float) -> None:
    """F is least at x = 1, in whatever units f and g are."""
    problem = bilevel.Problem(
        lambda x, y, batch: of_f * ((y - 1) ** 2).sum(),
        lambda x, y, batch: of_g * ((y - x) ** 2).sum(),
    )
    result = bilevel.minimize(problem, torch.zeros(3), torch.zeros(3), steps=200)
    assert torch.allclose(result.x, torch.ones(3), atol=1e-5)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_x_is_not_thrown_away_where_y_breaks_away_within_a_window(compile: bool) -> None:
    # g becomes steeper as x grows, until the steps of y are too long for it: the direction of x is
    # then as large as y, and x would go where y tells nothing about it for the rest of the run
    generator = torch.Generator().manual_seed(2)
    near, far = (at + 0.3 * torch.randn(512, 4, generator=generator) for at in (1, 2))

    def upper(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return 0.5 * ((y - batch) ** 2).sum(1).mean()

    def lower(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return x.exp() * upper(x, y, batch) + 0.05 * (y**2).sum()

    furthest: list[float] = []
    bilevel.minimize(
        bilevel.Problem(upper, lower),
        torch.tensor(0.0),
        torch.zeros(4),
        steps=190,
        seed=2,
        upper_data=far,
        lower_data=near,
        batch_size=512,
        compile=compile,
        callback=lambda solver, info: furthest.append(float(solver.x.abs())),
    )
    assert max(furthest) < 100  # it was 2e10
    assert furthest[-1] < 10


def test_what_objectives_draw_at_random_is_no_curvature() -> None:
    """Both gradients of a difference are taken with the same draws, at every look."""

    def drawn(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return 0.5 * (y**2).sum() + 10 * (torch.randn_like(y) * y).sum()

    solver = bilevel.Solver(
        bilevel.Problem(lambda x, y, batch: ((x - 1) ** 2).sum() + (y**2).sum(), drawn),
        torch.zeros(3),
        torch.ones(3),
        method="no-bilevel",
        lower_data=TARGETS,
        batch_size=8,
    )
    policy = solver.state.policy
    for _ in range(40):
        solver.step()
        assert policy._curvatures[0].value == pytest.approx(1.0, rel=0.05)


def test_a_step_that_promises_more_than_the_merit_is_shortened_where_it_fails() -> None:
    """Without a penalty y runs off; at the edge of its box x has a slope of many times f."""
    generator = torch.Generator().manual_seed(0)
    truth, X, noise = (torch.randn(s, generator=generator) for s in ((20,), (1000, 20), (1000,)))
    y = (X @ truth + 0.1 * noise > 0).float()

    def loss(x: Tensor, w: Tensor, batch: Any) -> Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(batch[0] @ w, batch[1])

    def ridge(x: Tensor, w: Tensor, batch: Any) -> Tensor:
        return loss(x, w, batch) + 0.5 * (x * w**2).sum()

    problem = bilevel.Problem(loss, ridge, x_set=bilevel.sets.Box(1e-8, 10.0))
    x0, y0 = torch.ones(20), torch.zeros(20)
    data = {"lower_data": (X[:500], y[:500]), "upper_data": (X[500:], y[500:])}
    result = bilevel.minimize(problem, x0, y0, steps=60, **data)
    taken = result.history["upper_lr"][result.history["upper_lr"] > 0]
    assert min(taken) < 1e-3 * taken[0]
    assert loss(result.x, result.y, data["upper_data"]) < 0.25 * loss(x0, y0, data["upper_data"])


@pytest.mark.slow
def test_the_gap_below_zero_is_no_noise_where_g_has_none() -> None:
    """Ten points are learned on which a network is trained that is to know a thousand samples.

    f is drawn in minibatches of these, while g is of the ten points alone, though it is handed
    minibatches too. With every gap below zero taken for noise, f ended at 1.5 in place of .03.
    """
    generator = torch.Generator().manual_seed(3)
    means = 2 * torch.randn(5, 10, generator=generator)
    labels = torch.randint(5, (1000,), generator=generator)
    rows = means[labels] + torch.randn(1000, 10, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        y0 = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 5))

    def upper(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(y(batch[0]), batch[1])

    def lower(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        decay = sum((part * part).sum() for part in y.parameters())
        return cross_entropy(y(x), torch.arange(5).repeat(2)) + 1e-3 * decay

    result = bilevel.minimize(
        bilevel.Problem(upper, lower),
        0.1 * torch.randn(10, 10, generator=generator),
        y0,
        steps=300,
        upper_data=(rows, labels),
        lower_data=(rows, labels),
        batch_size=32,
        seed=3,
    )
    assert result.outcome is bilevel.Outcome.COMPLETED
    assert upper(result.x, result.y, (rows, labels)) < 0.3


def test_y_steps_over_kinks_where_its_copies_hardly_ever_settle() -> None:
    """A soft threshold from y = 0, where all its kinks are, and where y used to stay."""
    generator = torch.Generator().manual_seed(3)
    centre = 2 * torch.randn(20, dtype=torch.float64, generator=generator)
    wanted = 0.5 * torch.rand(20, generator=generator)

    def solution(x: Tensor) -> Tensor:
        return centre.sign() * (centre.abs() - x.exp()).clamp(min=0)

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return 0.5 * ((y - solution(wanted.log())) ** 2).sum()

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return 0.5 * ((y - centre) ** 2).sum() + (x.exp() * y.abs()).sum()

    x0 = torch.zeros(20, dtype=torch.float64)
    result = bilevel.minimize(bilevel.Problem(upper, lower), x0, x0.clone(), steps=150)
    assert upper(result.x, solution(result.x), None) < 0.1 * upper(x0, solution(x0), None)
    assert torch.allclose(result.y, solution(result.x), atol=0.15)
