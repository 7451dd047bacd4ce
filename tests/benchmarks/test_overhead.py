"""``python -m benchmarks overhead``: all contestants compute the same, and are timed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import overhead
from benchmarks.overhead import auto as of_auto
from benchmarks.overhead import by_hand
from benchmarks.overhead.task import Task
from bilevel import F2SA


def task() -> Task:
    return Task.random(200, 7, 3, "cpu", 0)


@pytest.mark.parametrize("make", [by_hand.closed_form, by_hand.one_backward])
def test_all_that_is_written_by_hand_takes_the_same_steps(make: Any) -> None:
    found, known = make(task())(20), by_hand.three_gradients(task())(20)
    assert (known[0] - task().problem.x0).abs().max() > 1e-3
    torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-6)


def test_in_jax_one_scalar_has_the_three_gradients() -> None:
    jax = pytest.importorskip("jax")
    from benchmarks.overhead import in_jax

    found, known = in_jax.one_scalar(task())(20), in_jax.three_gradients(task())(20)
    assert jax.numpy.abs(known[0] - task().problem.x0.numpy()).max() > 1e-3
    for ours, theirs in zip(found, known, strict=True):
        assert jax.numpy.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_in_jax_the_losses_are_those_of_the_problem() -> None:
    jax = pytest.importorskip("jax")
    from benchmarks.overhead import in_jax

    problem, rows = task().problem, torch.arange(7)
    x, y = torch.linspace(-1, 1, 200), torch.randn(10, 785, generator=torch.manual_seed(0))
    with jax.default_device(jax.devices("cpu")[0]):  # a GPU would round more
        arrays = [
            jax.numpy.asarray(array.numpy())
            for array in (*problem.lower_data[:2], *problem.upper_data)
        ]
        data = (problem.ridge, *arrays)
        index, at_x, at_y = (jax.numpy.asarray(value.numpy()) for value in (rows, x, y))
        for found, known in (
            (
                in_jax._upper(data, at_y, index),
                problem.upper(x, y, [column[rows] for column in problem.upper_data]),
            ),
            (
                in_jax._lower(data, at_x, at_y, index),
                problem.lower(x, y, [column[rows] for column in problem.lower_data]),
            ),
        ):
            assert float(found) == pytest.approx(float(known), rel=1e-5)


@pytest.mark.slow
def test_every_contestant_is_timed() -> None:
    rows = overhead.run(batches=[5], samples=100, inner_steps=2, steps=1, repeats=2)
    names = [row.name for row in rows]
    assert {overhead.CLOSED_FORM, "bilevel", "bilevel, compiled"} <= set(names)
    assert all(row.microseconds > 0 and row.first > 0 for row in rows)
    assert rows[names.index(overhead.CLOSED_FORM)].to_closed_form == 1
    if overhead.FLOOR in names:
        assert rows[names.index(overhead.FLOOR)].to_floor == 1
    else:
        assert all(row.to_floor is None for row in rows)
    assert overhead.table(rows).row_count == len(rows)


def test_beside_auto_a_direction_is_of_as_many_minibatches_with_the_rates_given() -> None:
    problem = task()
    auto = problem.solver(compile=False, method=F2SA(lower_lr="auto", upper_lr="auto"))
    given = problem.solver(compile=False, method=of_auto.Given(lower_lr=0.01, upper_lr=0.1))
    assert given.draw.batches == auto.draw.batches != (1, 1)


def test_auto_is_timed_beside_the_rates_that_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[of_auto.Given] = []

    class Recorded(of_auto.Given):
        def __post_init__(self) -> None:
            super().__post_init__()
            made.append(self)

    monkeypatch.setattr(of_auto, "Given", Recorded)
    monkeypatch.setattr(of_auto, "_advance", partial(advance, of_auto._advance))
    run = partial(of_auto.run, batches=[5], samples=100, inner_steps=2, steps=30, repeats=2)
    rows = run(compiled=[False])
    assert [(row.batch, row.compiled, row.steps) for row in rows] == [(5, False, 30)]
    assert made[0].lower_lr not in ("auto", 0.0)
    assert made[0].multiplier >= 10  # type: ignore[operator]
    assert rows[0].looks > 1
    assert min(rows[0].found, rows[0].given) > 0
    assert of_auto.table(rows).row_count == 1


def advance(original: Any, task: Task, solver: Any, steps: int) -> float:
    """The steps, and that the time is of a run that is where it should be."""
    before = solver.k
    seconds: float = original(task, solver, steps)
    assert solver.k == before + steps <= 30
    return seconds
