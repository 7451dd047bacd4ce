"""Lower steps that "auto" finds in episodes, against tasks whose solutions are known."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.engine.ranks.batches import on_ranks
from bilevel.run.advice import choices_of

PULL, TASKS, N = 0.3, 8, 4
EYE = torch.eye(N, dtype=torch.float64)


def quadratics(count: int) -> list[Any]:
    """Tasks whose curvatures are up to a hundred times as large as those of others."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    found = []
    for place in range(count):
        q = torch.linalg.qr(draw(N, N))[0]
        steepest = 10.0 ** (place % 5 / 2 - 1)
        hessian = steepest * q @ torch.diag(torch.linspace(0.3, 1, N).to(q)) @ q.T
        found.append(((hessian, draw(N)), 1 + 0.1 * draw(N)))
    return found


def f(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
    return 0.5 * ((y - batch) ** 2).sum()


def g(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    hessian, centre = batch
    value = 0.5 * (y - centre) @ hessian @ (y - centre) + 0.5 * PULL * ((y - x) ** 2).sum()
    assert isinstance(value, Tensor)
    return value


def gradient(x: Tensor, tasks: list[Any]) -> Tensor:
    """That of F, from the closed form of each lower solution."""
    total = torch.zeros_like(x)
    for (hessian, centre), wanted in tasks:
        inverse = torch.linalg.inv(hessian + PULL * EYE)
        solution = inverse @ (hessian @ centre + PULL * x)
        total += PULL * inverse @ (solution - wanted)
    return total / len(tasks)


PROBLEM = bilevel.Problem(f, g)
X0 = torch.zeros(N, dtype=torch.float64)
STARTS: dict[str, Any] = {"fresh": "fresh", "warm": "warm", "function": lambda x: x}
UPPER_LR = 0.2


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("method", [bilevel.F2SA, bilevel.AID, bilevel.ITD])
def test_the_steps_of_y_are_those_of_the_tasks_of_the_step(method: Any, start: str) -> None:
    """Each step has tasks of other curvatures, at which y neither runs away nor lags far behind."""
    tasks = quadratics(5 * TASKS)
    given = method(upper_lr=UPPER_LR, inner_steps=20)
    episodes = bilevel.Episodes(tasks, tasks=TASKS, start=STARTS[start])
    solver = bilevel.Solver(PROBLEM, X0, X0, method=given, data=episodes)
    x = X0
    for k in range(5):
        exact = gradient(x, tasks[k * TASKS : (k + 1) * TASKS])
        solver.step()
        moved = (x - solver.x) / UPPER_LR
        x = solver.x
        # slow tasks are not solved to the end by plain steps that are safe for the steepest
        assert float(moved @ exact / moved.norm() / exact.norm()) > 0.9
        assert 0.5 < float(moved.norm() / exact.norm()) < 2


def test_lower_steps_are_plain_and_count_on_the_tasks_of_the_step() -> None:
    """Within an outer step nothing is sampled; from one to the next everything is."""
    data = bilevel.Episodes(quadratics(TASKS), tasks=2)
    for method, renewed in ((bilevel.F2SA(), True), (bilevel.F3SA(), False)):
        solver = bilevel.Solver(PROBLEM, X0, X0, method=method, data=data)
        draw: Any = solver.draw
        assert draw.renewed is renewed
        assert not draw.upper.deterministic
        assert not draw.sweeps
        solver.step()
        assert solver.state.policy.accelerated is None
        elsewhere: Any = on_ranks(draw, [])
        assert not elsewhere.renewed  # other ranks hold other tasks


def test_a_run_is_not_judged_by_the_tasks_of_one_step() -> None:
    """The tasks of the last step are harder than those of the first, by a hundred times in f."""
    tasks = [((EYE, X0), X0 + size) for size in (1.0,) * 30 + (10.0,)]
    result = bilevel.minimize(PROBLEM, X0, X0, steps=30, data=bilevel.Episodes(tasks))
    assert result.outcome is bilevel.Outcome.COMPLETED
    solver = bilevel.Solver(PROBLEM, X0, X0, data=bilevel.Episodes(tasks))
    solver.step()
    assert solver.final_point().compared is None
    assert "batch_size" not in choices_of(solver).against_rising  # which episodes refuse
    assert "more tasks" in choices_of(solver).against_rising


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("method", ["f2sa", "f3sa", "itd"])
def test_a_run_on_found_steps_is_resumed_to_the_same_bits(method: str, start: str) -> None:
    def task(generator: torch.Generator) -> Any:
        scale = 10 ** torch.rand((), generator=generator, dtype=torch.float64)
        return (scale * EYE, X0 + scale), X0 + 1

    data = bilevel.Episodes(task, tasks=2, start=STARTS[start])
    whole = bilevel.Solver(PROBLEM, X0, X0, method=method, data=data)
    for _ in range(5):
        whole.step()
    state = whole.state_dict()
    again = bilevel.Solver(PROBLEM, X0, X0, method=method, data=data)
    again.load_state_dict(state)
    for solver in (whole, again):
        for _ in range(5):
            solver.step()
    assert torch.equal(whole.x, again.x)
    assert all(torch.equal(a, b) for a, b in zip(whole.y, again.y, strict=True))


@pytest.mark.slow
def test_tasks_of_sines_by_a_last_layer() -> None:
    """The few-shot learning of learn2learn's ANIL, where nothing is set: f falls to about 0.8.

    With steps of y for the noise of other tasks it falls to 1.4, with accelerated ones to 1.8.
    """
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x0 = {"a": normal(1, 32), "b": normal(32), "c": normal(32, 32) / 6, "d": normal(32)}
    x0["head"] = normal(32, 1) / 6

    def task(generator: torch.Generator) -> Any:
        size = 0.1 + 4.9 * torch.rand(1, generator=generator)
        phase = math.pi * torch.rand(1, generator=generator)
        inputs = 10 * torch.rand(20, 1, generator=generator) - 5
        targets = size * (inputs + phase).sin()
        return (inputs[:10], targets[:10]), (inputs[10:], targets[10:])

    def upper(x: Any, y: Tensor, batch: Any) -> Tensor:
        features = (((batch[0] @ x["a"] + x["b"]).tanh()) @ x["c"] + x["d"]).tanh()
        return ((features @ y - batch[1]) ** 2).mean()

    def lower(x: Any, y: Tensor, batch: Any) -> Tensor:
        return upper(x, y, batch) + 0.01 * ((y - x["head"]) ** 2).sum()

    episodes = bilevel.Episodes(task, tasks=8, start=lambda x: x["head"])
    problem = bilevel.Problem(upper, lower)
    result = bilevel.minimize(problem, x0, x0["head"], steps=400, seed=1, data=episodes)
    assert result.history["upper"][-100:].mean() < 1.0 < result.history["upper"][:50].mean()


def test_steps_that_x_holds_are_not_called_too_long() -> None:
    """Meta-SGD: x holds the rate, and g ends as high in each episode as in the one before."""

    def steep(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return 50 * ((y - batch) ** 2).sum()

    tasks = [(X0 + 1 + i % 3, X0 + 1 + i % 3) for i in range(40)]
    for rate in (-7.0, -6.0):
        method = bilevel.ITD(inner_steps=2, learned_lr=lambda x: x.exp())
        x0 = torch.tensor(rate, dtype=torch.float64)
        result = bilevel.minimize(
            bilevel.Problem(steep, steep), x0, X0, method=method, steps=300,
            data=bilevel.Episodes(tasks, tasks=2),
        )  # fmt: skip
        assert result.outcome is bilevel.Outcome.COMPLETED
        solver = bilevel.Solver(
            bilevel.Problem(steep, steep), x0, X0, method=method, data=bilevel.Episodes(tasks)
        )
        assert "lower_lr" not in choices_of(solver).against_overflow
