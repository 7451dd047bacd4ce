"""When "auto" looks again: soon where x rests or its step grows, seldom where neither is so."""

from __future__ import annotations

import pytest
import torch

from bilevel.stepping.memory import GROWING_WINDOW, LONGEST_WINDOW, Numbers


def _steps_to_a_look(numbers: Numbers, unit: int) -> int:
    while not numbers.look_is_due(unit):
        numbers.since += 1
    return numbers.since + 1


@pytest.mark.parametrize("unit", [1, 5])
def test_where_x_rests_a_look_comes_soon(unit: int) -> None:
    longest = LONGEST_WINDOW * unit
    assert _steps_to_a_look(Numbers(window=longest, measuring=False), unit) == longest
    measuring = Numbers(window=longest, measuring=True)
    assert _steps_to_a_look(measuring, unit) == GROWING_WINDOW * unit
    resting = Numbers(window=longest, measuring=False, rests=1)
    assert _steps_to_a_look(resting, unit) == GROWING_WINDOW * unit
    assert _steps_to_a_look(Numbers(window=2, measuring=True), unit) == 2


def test_windows_lengthen_where_the_step_cannot_grow() -> None:
    numbers = Numbers(upper=1.0, first=1.0, window=GROWING_WINDOW)
    falls = [-1.0, -1.1]
    numbers.learn_from_merits(falls, 1, longest=10.0)
    assert (numbers.upper, numbers.window) == (2.0, GROWING_WINDOW)
    for window in (2 * GROWING_WINDOW, 4 * GROWING_WINDOW, LONGEST_WINDOW, LONGEST_WINDOW):
        numbers.learn_from_merits(falls, 1, longest=3.0)
        assert (numbers.upper, numbers.window) == (3.0, window)


def test_an_outlier_in_one_direction_does_not_shorten_the_steps_after_it() -> None:
    numbers = Numbers(upper=1.0, first=1.0, longest_move=4.0)
    outlier = torch.tensor([1.0, -2.0, 400.0])
    numbers.learn_from_merits([-1.0, -1.1], 1, numbers.longest_step(outlier))
    numbers.limit_moves(torch.zeros(3), outlier, first=False)
    assert (numbers.upper, numbers.longest_move) == (1.0, 4.0)  # which limits that one step


def test_what_failed_is_the_step_that_was_taken() -> None:
    numbers = Numbers(upper=1.0, first=1.0, longest_move=4.0)
    longest = numbers.longest_step(torch.tensor([400.0, -400.0, 0.0]))
    assert longest == 0.01
    numbers.shorten(1.0, longest, noisy=True)
    assert numbers.upper == 0.005


def test_the_step_stays_between_its_limits() -> None:
    numbers = Numbers(upper=1e-9, first=1.0)
    x, direction = torch.tensor([-10.0, 10.0, 99.0]), torch.tensor([4.0, 0.0, -4.0])
    numbers.limit_moves(x, direction, first=False)
    assert (numbers.upper, numbers.longest_move) == (1e-3, 40.0)
    numbers.upper = 50.0
    numbers.limit_moves(x, direction, first=True)
    assert numbers.upper == 10.0
    assert numbers.longest_step(torch.zeros(3)) == torch.inf
