"""Numbers that floats cannot hold are refused by name, wherever a number is taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bilevel
from bilevel import theory
from bilevel.errors import ArgumentError
from tests.errors.common import construct, f, g, minimize

HUGE = 10**400

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a rate": (lambda: bilevel.F2SA(lower_lr=HUGE), "lower_lr"),
    "a multiplier": (lambda: bilevel.F2SA(multiplier=HUGE), "multiplier"),
    "a schedule": (lambda: minimize(method=bilevel.F2SA(0.1, lambda k: HUGE)), "upper_lr"),
    "a tolerance": (lambda: minimize(tolerance=HUGE), "tolerance"),
    "a radius": (lambda: bilevel.sets.Ball(HUGE), "radius"),
    "a constant": (lambda: theory.Constants(mu_g=1, l_g1=1, l_f1=HUGE, l_f0=1), "l_f1"),
    "constants whose square overflows": (
        lambda: theory.Constants(mu_g=1, l_g1=1e308, l_f1=1, l_f0=1),
        "l_g1=1e[+]308",
    ),
    "constants of a design": (
        lambda: theory.design(theory.Constants(mu_g=1, l_g1=1, l_f1=1, l_f0=1), xi=1e308),
        "xi=1e[+]308",
    ),
    "a number of steps in a design": (
        lambda: theory.design(theory.Constants(mu_g=1, l_g1=1, l_f1=1, l_f0=1), T=HUGE),
        "T=1000",
    ),
    "a seed of a problem": (lambda: bilevel.problems.Quadratic(seed=HUGE), "seed"),
    "a seed of scikit-learn's": (
        lambda: bilevel.LabelCleaner(random_state=2**32).fit(torch.ones(4, 2), [0, 1, 0, 1]),
        "random_state",
    ),
    "a point": (
        lambda: bilevel.hypergradient(
            bilevel.Problem(f, g), torch.full((2,), math.inf), torch.zeros(2)
        ),
        r"\bx\b",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_by_name(what: str) -> None:
    call, named = REFUSED[what]
    with pytest.raises(ArgumentError, match=named):
        call()


def test_a_point_of_another_type_is_refused_by_name() -> None:
    problem = bilevel.problems.Quadratic(seed=0)
    with pytest.raises(ArgumentError, match=r"x is torch\.float16 .* is torch\.float64"):
        problem.value(problem.x0.half())


def test_a_metric_without_end_is_infinite() -> None:
    problem = bilevel.Problem(lambda x, y, batch: (f(x, y, batch), {"count": HUGE}), g)
    result = bilevel.minimize(problem, torch.ones(2), torch.zeros(2), steps=2)
    assert list(result.history["upper/count"]) == [math.inf, math.inf]


def test_data_may_be_in_float8() -> None:
    """Numbers that torch cannot add up; that nothing is written into them is still seen."""
    rows = torch.ones(4, 2).to(torch.float8_e4m3fn)
    problem = bilevel.Problem(f, lambda x, y, batch: ((y - x - batch.float()) ** 2).mean())
    construct(problem, lower_data=rows, batch_size=2).step()
