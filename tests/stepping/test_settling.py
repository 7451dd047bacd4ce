"""Steps of x that are tested on f at the lower solution, and what that asks of y."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.errors import WorsenedWarning
from bilevel.methods import AID, BOME, F3SA, MASOBA, SOBA, VPBGD
from bilevel.problems import Quadratic
from bilevel.stepping.settling import settle

METHODS: list[Any] = [F3SA(), AID(), SOBA(), MASOBA(), BOME(), VPBGD()]


class Prior:
    """Ridge regressions on eight small tasks towards a common x, as iMAML has them.

    The condition numbers of the tasks are far above what ten plain steps of y can follow.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        truth = draw(10) + 0.3 * draw(8, 10)
        self.train, self.test = draw(8, 5, 10), draw(8, 20, 10)
        self.targets = [(a @ truth[..., None])[..., 0] for a in (self.train, self.test)]
        self.problem = bilevel.Problem(self.upper, self.lower)
        self.x0, self.y0 = torch.zeros(10, dtype=torch.float64), torch.zeros(8, 10).double()

    def upper(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return (((self.test @ y[..., None])[..., 0] - self.targets[1]) ** 2).mean()

    def lower(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        loss = (((self.train @ y[..., None])[..., 0] - self.targets[0]) ** 2).mean()
        return loss + 0.5 * ((y - x) ** 2).mean()

    def value(self, x: Tensor) -> float:
        """F in closed form."""
        pull = 0.5 * 5 / 10  # the two means are over 5 and over 10 entries of a task
        matrix = self.train.mT @ self.train + pull * torch.eye(10, dtype=torch.float64)
        right = (self.train.mT @ self.targets[0][..., None])[..., 0] + pull * x
        return float(self.upper(x, torch.linalg.solve(matrix, right), None))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_y_that_cannot_follow_x_does_not_mislead_it(method: Any) -> None:
    task = Prior()
    start = task.value(task.x0)
    found = bilevel.minimize(task.problem, task.x0, task.y0, method=method, steps=100)
    assert task.value(found.x) < 0.9 * start


def test_the_lower_solution_is_moved_on_until_f_rests() -> None:
    problem = Quadratic(condition=20, seed=0)
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=F3SA())
    state: Any = solver.state
    with torch.no_grad():
        state.y.leaves[0].add_(1.0)
    apart = (state.y.leaves[0] - state.z.leaves[0]).detach().clone()
    rate = 1.0 / problem.constants.l_g1
    merits, settled = settle(solver.evaluator, state, rate, None) or (None, None)
    assert settled
    exact = problem.value(problem.x0).detach()
    assert merits is not None
    assert merits.values == [pytest.approx(float(exact), rel=0.05)]
    torch.testing.assert_close((state.y.leaves[0] - state.z.leaves[0]).detach(), apart)


@pytest.mark.slow
def test_a_lower_solution_that_has_far_to_go_is_not_called_settled() -> None:
    """Of many modes f sees the slow ones, in which y has hundreds of steps to go."""
    stiffness = torch.logspace(0, -4, 100, dtype=torch.float64)

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return 0.5 * (stiffness * (y - x) ** 2).sum()

    problem = bilevel.Problem(lambda x, y, b: 1 + ((y[50:] - 1.0) ** 2).mean(), lower)
    start = torch.tensor(1.0, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)
    state: Any
    for steps, expected in ((1, False), (60, True)):
        solver = bilevel.Solver(problem, *start, method=SOBA())
        state = solver.state
        for _ in range(steps):
            found = settle(solver.evaluator, state, 1.0, None)
        assert found is not None
        merits, settled = found
        assert settled is expected
    assert merits.values == [pytest.approx(1.0, abs=0.1)]  # f at y*


def with_outliers() -> tuple[bilevel.Problem, tuple[Tensor, Tensor]]:
    """Regression on rows of which one in twenty is five times as long, and so 25 times as steep."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(500, 20, generator=generator) * (
        1 + 4 * (torch.rand(500, 1, generator=generator) < 0.05)
    )
    truth = torch.randn(20, generator=generator)
    noise = torch.randn(500, generator=generator)

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return ((batch[0] @ y - batch[1]) ** 2).mean()

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return upper(x, y, batch) + x.exp() * (y**2).mean()

    return bilevel.Problem(upper, lower), (features, features @ truth + noise)


def solved(method: Any, seed: int) -> tuple[float, float]:
    """What of f is left at the y of a run on outliers, and what F gained: both as parts of it."""
    problem, (features, targets) = with_outliers()
    start, data = torch.tensor(2.0), (features, targets)
    found = bilevel.minimize(
        problem,
        start,
        torch.zeros(20),
        method=method,
        steps=400,
        lower_data=data,
        upper_data=data,
        batch_size=16,
        seed=seed,
    )

    def exact(x: Tensor) -> float:
        matrix = features.T @ features / len(features) + x.exp() / 20 * torch.eye(20)
        y = torch.linalg.solve(matrix, features.T @ targets / len(features))
        return float(problem.upper(x, y, data))

    left = float(problem.upper(found.x, found.y, data)) / float((targets**2).mean())
    return left, (exact(start) - exact(found.x)) / exact(start)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_estimates_with_momentum_do_not_grow_by_noise(seed: int) -> None:
    """With steps of 1/L the paper's momentum makes F3SA's estimates grow without bound here."""
    assert solved(F3SA(), seed)[0] < 0.2
    method = F3SA(momentum=lambda k: 0.25)
    assert [method.steady_share(k) for k in (0, 1, 2)] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("soba", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("soba", 2), ("ma-soba", 1), ("ma-soba", 2), ("meha", 2), ("aid", 1))
        ),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("itd", "sobo")),
    ],
)
def test_lower_steps_that_some_minibatches_cannot_take_are_shortened(name: str, seed: int) -> None:
    """Of methods without a Phi, too: with steps of 1/L y runs away to 1e20 here, or f stays at .6.

    A run may say once that y ran away before it goes on with half the step, but not that x did. It
    says that it ended worse where F, by the normal equations, is higher.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        left, gained = solved(name, seed)
    assert left < 0.1
    worse = [each for each in said if issubclass(each.category, WorsenedWarning)]
    others = [str(each.message) for each in said if each not in worse]
    assert len(others) <= 1
    assert all("it is y that runs away" in message for message in others)
    assert bool(worse) == (gained < -0.01)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("soba", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("soba", 4), ("f2sa", 2), ("f2sa", 3))
        ),
    ],
)
def test_y_that_runs_away_before_x_has_moved_goes_back(name: str, seed: int) -> None:
    """Factors of a matrix: g is flat where they start, and steep where they go.

    In batches of eight entries, steps that are safe at the start take them to 1e30. (F of factors
    that are solved exactly may be higher at the end, and is then said to be.)
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    left, right = (torch.randn(n, 3, generator=generator) for n in (30, 20))
    noise = 0.5 * torch.randn(30, 20, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(30), torch.arange(20), indexing="ij")
    entries = rows.flatten(), columns.flatten(), (left @ right.T + noise).flatten()
    order = torch.randperm(600, generator=generator)
    train, held_out = (
        tuple(part[chosen] for part in entries) for chosen in (order[:300], order[300:])
    )

    def upper(x: Tensor, y: dict[str, Tensor], batch: Any) -> Tensor:
        found = (y["u"][batch[0]] * y["v"][batch[1]]).sum(1)
        return ((found - batch[2]) ** 2).mean()

    def lower(x: Tensor, y: dict[str, Tensor], batch: Any) -> Tensor:
        strengths = x.exp()
        squares = strengths[0] * (y["u"] ** 2).mean() + strengths[1] * (y["v"] ** 2).mean()
        return upper(x, y, batch) + squares

    y0 = {key: 0.3 * torch.randn(n, 5, generator=generator) for key, n in (("u", 30), ("v", 20))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorsenedWarning)
        found = bilevel.minimize(
            bilevel.Problem(upper, lower),
            torch.tensor([-3.0, -3.0]),
            y0,
            method=name,
            steps=300,
            lower_data=train,
            upper_data=held_out,
            batch_size=8,
        )
    start = float((held_out[2] ** 2).mean())
    assert float(upper(found.x, found.y, held_out)) < 1.5 * start
