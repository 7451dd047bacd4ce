"""How many minibatches are behind an x direction, where nothing is given and each reaches few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel import F2BA, F2SA, Problem, Solver

ROWS, BATCH = 200, 8
INPUTS = torch.linspace(-1, 1, 3 * ROWS, dtype=torch.float64).reshape(ROWS, 3).sin()
TARGETS = torch.sin(7 * INPUTS.sum(1))
SAMPLES = (INPUTS, TARGETS + torch.arange(ROWS) % 2, torch.arange(ROWS))
TRUSTED = (INPUTS[:50], TARGETS[:50])
DATA: dict[str, Any] = {"upper_data": TRUSTED, "lower_data": SAMPLES, "batch_size": BATCH}


def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    inputs, targets = batch
    return ((inputs @ y - targets) ** 2).mean()


def weighted(weight: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        inputs, targets, index = batch
        return (weight(x[index]) * (inputs @ y - targets) ** 2).mean() + 0.1 * (y**2).sum()

    return lower


WEIGHTS = Problem(upper, weighted(torch.sigmoid))


def solver(
    problem: Problem = WEIGHTS, method: Any = "f2sa", size: int = ROWS, **given: Any
) -> Solver:
    x0 = torch.zeros(size, dtype=torch.float64)
    return Solver(problem, x0, torch.zeros(3, dtype=torch.float64), method=method, **(DATA | given))


@pytest.mark.parametrize(
    ("method", "batches"),
    [
        (F2SA(), 25),  # then each entry is reached
        (F2SA(inner_steps=3), 12),
        (F2BA(scheme="midpoint", inner_steps=3), 12),
        (F2SA(lower_lr=0.1, inner_steps=3), 12),
        (F2SA(upper_lr=0.1), 1),
        (F2SA(upper_optimizer=torch.optim.SGD), 1),
        (F2SA(single_pass=True), 1),
        ("f3sa", 1),
        ("soba", 1),
        ("aid", 1),
    ],
)
def test_of_weights_of_samples_a_direction_is_of_four_minibatches_for_each_inner_step(
    method: Any, batches: int
) -> None:
    assert solver(method=method).draw.batches == (1, batches)  # f does not feel x


@pytest.mark.parametrize(
    "given", [{"direction_batch_size": 16}, {"direction_batch_size": "all"}, {"chunk_size": 4}]
)
def test_sizes_that_are_given_stay(given: dict[str, Any]) -> None:
    assert solver(**given).draw.batches == (1, 1)


def test_an_x_that_a_minibatch_reaches_needs_no_more() -> None:
    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return upper(x, y, batch[:2]) + (x.exp() * y**2).sum()

    assert solver(Problem(upper, lower), size=3).draw.batches == (1, 1)

    def third(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return lower(x[:3], y + 1, batch)  # every minibatch reaches the same

    assert solver(Problem(upper, third), size=9).draw.batches == (1, 1)

    def of_groups(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return weighted(lambda index: x[index].sigmoid())(index_of, y, batch)

    index_of = torch.arange(ROWS) // 20  # neighbours share a weight: a spread batch reaches most
    assert solver(Problem(upper, of_groups), size=10).draw.batches == (1, 1)


def test_of_each_level_by_itself() -> None:
    def shifted(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        inputs, targets, index = batch
        return ((inputs @ y - targets - x[index]) ** 2).mean()

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return upper(x, y, batch[:2]) + 0.1 * (y**2).sum()

    data = {"upper_data": SAMPLES, "lower_data": SAMPLES}
    assert solver(Problem(shifted, lower), **data).draw.batches == (25, 1)
    few = {"upper_data": tuple(part[:30] for part in SAMPLES)}  # three minibatches and a bit
    assert solver(Problem(shifted, lower), **data | few).draw.batches == (3, 1)


def test_a_sum_over_the_batch_is_another_function_of_more_samples() -> None:
    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return BATCH * weighted(torch.sigmoid)(x, y, batch)

    def summed(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return len(batch[0]) * weighted(torch.sigmoid)(x, y, batch)

    assert solver(Problem(upper, lower)).draw.batches == (1, 25)
    assert solver(Problem(upper, summed)).draw.batches == (1, 1)


def test_what_was_chosen_is_in_the_history() -> None:
    x0, y0 = torch.zeros(ROWS).double(), torch.zeros(3).double()
    history = bilevel.minimize(WEIGHTS, x0, y0, steps=4, **DATA).history
    assert history["lower_direction_samples"].tolist() == 4 * [25 * BATCH]
    assert "upper_direction_samples" not in history
    given = bilevel.minimize(WEIGHTS, x0, y0, method=F2SA(upper_lr=1.0), steps=4, **DATA).history
    assert "lower_direction_samples" not in given


def test_to_look_moves_no_samples_and_no_random_numbers() -> None:
    def noisy(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        inputs, targets, index = batch
        inputs = torch.nn.functional.dropout(inputs, 0.3)
        return WEIGHTS.lower(x, y, (inputs, targets, index))

    dropout = Problem(upper, noisy)
    looked, given = solver(dropout), solver(dropout, direction_batch_size=BATCH)
    assert looked.draw.batches == (1, 25)
    assert torch.equal(looked.draw.lower.next()[2], given.draw.lower.next()[2])
    theirs, ours = (run.state_dict()["randomness"] for run in (given, looked))
    assert torch.equal(theirs["cpu"], ours["cpu"])


def test_a_run_goes_on_with_the_choice_of_the_run_that_was_saved() -> None:
    rectified = Problem(upper, weighted(torch.relu))
    x0, y0 = torch.ones(ROWS).double(), torch.zeros(3).double()
    run = Solver(rectified, x0, y0, **DATA)
    dead = Solver(rectified, -x0, y0, **DATA)  # where no minibatch reaches anything
    assert (run.draw.batches, dead.draw.batches) == ((1, 25), (1, 1))
    for _ in range(5):
        run.step()
    dead.load_state_dict(run.state_dict())
    assert dead.draw.batches == (1, 25)
    for _ in range(20):
        run.step()
        dead.step()
    assert torch.equal(run.x, dead.x)
    forged = run.state_dict()
    forged["draw"]["batches"] = [1, 1000]
    with pytest.raises(bilevel.errors.StateError, match="minibatches"):
        dead.load_state_dict(forged)
    assert dead.draw.batches == (1, 25)
