"""What "auto" tests the steps of x by, and what it does where that is not f at the solution."""

from __future__ import annotations

import math
import statistics
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.errors import WorsenedWarning
from bilevel.problem import FORWARD, Phi
from bilevel.stepping.memory import Reference
from bilevel.stepping.merit import SURE, Merits, merits_at, standard_error, surely_rose

NORMAL = torch.Generator().manual_seed(0)
NEAR = 1 + 0.3 * torch.randn(512, 4, generator=NORMAL)
FAR = 2 + 0.3 * torch.randn(512, 4, generator=NORMAL)


class Weighted:
    """g counts with the weight exp(x) beside a pull to zero, and f wants y further on.

    The true F falls as the weight grows. But a small weight makes it cheap for the penalised copy
    to be anywhere, so that Phi falls with the weight too, if the multiplier is too small for it.
    """

    def __init__(self, pull: float) -> None:
        self.pull = pull
        self.problem = bilevel.Problem(self.upper, self.lower)

    def upper(self, x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return 0.5 * ((y - batch) ** 2).sum(1).mean()

    def lower(self, x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return x.exp() * self.upper(x, y, batch) + 0.5 * self.pull * (y**2).sum()

    def value(self, x: Tensor) -> float:
        """F, in closed form."""
        weight = x.exp()
        return float(self.upper(x, weight * NEAR.mean(0) / (weight + self.pull), FAR))


@pytest.mark.parametrize(
    ("batch_size", "start", "pull"),
    [
        pytest.param(64, 0.0, 0.1, marks=pytest.mark.slow),
        pytest.param(16, -1.0, 0.001, marks=pytest.mark.slow),
        pytest.param(None, 1.0, 0.01, marks=pytest.mark.slow),
    ],
)
def test_a_merit_that_falls_where_f_rises_is_not_followed(
    batch_size: int | None, start: float, pull: float
) -> None:
    task, x0 = Weighted(pull), torch.tensor(start)
    data: dict[str, Any] = {"lower_data": NEAR, "upper_data": FAR}
    if batch_size is not None:
        data["batch_size"] = batch_size
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = bilevel.minimize(task.problem, x0, torch.zeros(4), steps=200, **data)
    best, end = task.value(torch.tensor(20.0)), task.value(found.x)
    # the rest is what the noise of minibatches hides, until all samples are evaluated at the end
    assert end < max(1.1 * best, best + 0.1 * (task.value(x0) - best))
    assert [each.category for each in said] == [WorsenedWarning] * (end > 1.01 * task.value(x0))


def test_a_gap_in_noise_is_left_out_of_the_merit() -> None:
    task = Weighted(0.1)
    data: dict[str, Any] = {"lower_data": NEAR, "upper_data": FAR, "batch_size": 16}
    solver = bilevel.Solver(task.problem, torch.tensor(0.0), torch.zeros(4), **data)
    state, evaluator = solver.state, solver.evaluator
    minimiser = NEAR.mean(0) / 1.1  # of g

    def merits(y: Tensor, z: Tensor) -> Merits:
        for variable, value in zip(state.points, (y, z), strict=True):
            variable.leaves[0].data.copy_(value)
        phi = Phi(FORWARD, state.x, state.points, 10.0, shared=True)
        return merits_at(evaluator, state, phi)

    def level(found: Merits) -> float:
        return statistics.fmean(found.values)

    seen, hidden = merits(minimiser + 1, minimiser), merits(minimiser, minimiser + 0.01)
    assert seen.gap > 5
    assert level(seen) == pytest.approx(seen.upper + seen.gap)
    assert hidden.gap < 0
    assert level(hidden) == pytest.approx(hidden.upper)
    x, y, z = torch.tensor(0.0), minimiser, minimiser + 0.01
    gaps = [
        10 * float(task.lower(x, y, batch) - task.lower(x, z, batch))
        for batch in evaluator.draw.lower.wide_probe()
    ]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5
    assert hidden.noise == pytest.approx(error, rel=1e-3)
    # f at both ends, on each minibatch
    assert statistics.fmean(seen.spread) == pytest.approx(
        statistics.fmean(seen.solution) - seen.upper
    )


@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_merit_of_which_a_part_is_not_finite_is_infinite(level: str, bad: float) -> None:
    """So that x goes back; the statistics of such numbers raise errors of their own."""
    broken = False

    def objective(x: Tensor, y: Tensor, batch: Tensor, name: str) -> Tensor:
        value = ((y - batch) ** 2).mean() + x**2
        # at one of the minibatches only
        return value + bad if broken and name == level and float(batch[0, 0]) < 1 else value

    solver = bilevel.Solver(
        bilevel.Problem(*(partial(objective, name=name) for name in ("upper", "lower"))),
        torch.tensor(1.0),
        torch.zeros(4),
        upper_data=torch.cat([NEAR, FAR]),
        lower_data=torch.cat([NEAR, FAR]),
        batch_size=16,
    )
    state, evaluator = solver.state, solver.evaluator
    phi = Phi(FORWARD, state.x, state.points, 10.0, True)
    assert all(map(math.isfinite, merits_at(evaluator, state, phi).values))
    broken = True
    for of in (phi, None):
        assert merits_at(evaluator, state, of).values == [math.inf]


def test_small_minibatches_do_not_hide_a_rise_by_a_few_per_cent() -> None:
    rows = 1 + torch.randn(10_000, 4, generator=torch.Generator().manual_seed(1))
    task = Weighted(0.1)
    solver = bilevel.Solver(
        task.problem,
        torch.tensor(0.0),
        torch.ones(4),
        lower_data=rows,
        upper_data=rows,
        batch_size=16,
    )
    state, evaluator = solver.state, solver.evaluator
    before = merits_at(evaluator, state, None).values
    state.solution.leaves[0].data[0] += 0.5  # f rises by 0.125, from 2
    pairs = zip(merits_at(evaluator, state, None).values, before, strict=True)
    rises = [here - there for here, there in pairs]
    assert statistics.fmean(rises) == pytest.approx(0.125, rel=0.2)
    assert statistics.fmean(rises) > SURE * standard_error(rises) > 0


def reference(solution: list[float], spread: list[float]) -> Reference:
    zero, merits = torch.zeros(1), [1.0] * len(solution)
    return Reference(0, zero, [], zero, merits, merits, [], solution, spread, 0.0, 1.0, [], True)


def found(solution: list[float], spread: list[float], merit: float = 1.0) -> Merits:
    return Merits([merit] * len(solution), solution=solution, spread=spread)


@pytest.mark.parametrize("probe", [1, 2])
def test_f_that_rises_with_both_copies_is_noise_and_away_from_one_it_is_not(probe: int) -> None:
    before = reference([1.0] * probe, [0.2] * probe)

    def misled(solution: float, spread: float, merit: float = 1.0) -> bool:
        return before.misled(found([solution] * probe, [spread] * probe, merit), noisy=True)

    assert misled(1.5, 0.7)
    assert not misled(1.5, 0.2)
    assert not misled(0.9, 0.7)
    assert not misled(1.001, 0.6, merit=0.8)


def test_without_noise_f_has_to_fall_where_the_merit_falls_by_a_tenth() -> None:
    before = reference([1.0], [0.2])
    assert before.misled(found([1.001], [0.6], merit=0.8), noisy=False)
    assert not before.misled(found([0.999], [0.6], merit=0.8), noisy=False)
    assert not before.misled(found([1.001], [0.2], merit=0.95), noisy=False)
    assert before.misled(found([1.2], [0.4], merit=0.95), noisy=False)
    assert not reference([], []).misled(Merits([0.0]), noisy=False)


def test_many_small_rises_count_together() -> None:
    first, second = reference([1.0], [0.1]), reference([1.05], [0.15])
    second.remember_lowest(first)
    assert second.misled(found([1.12], [0.22]), noisy=False)
    assert not reference([1.05], [0.15]).misled(found([1.12], [0.22]), noisy=False)


def test_a_rise_must_exceed_a_tenth_and_the_noise() -> None:
    assert surely_rose([1.2, 1.2], [1.0, 1.0])
    assert not surely_rose([1.05, 1.05], [1.0, 1.0])
    assert not surely_rose([2.0, 0.6], [1.0, 1.0])
    assert not surely_rose([0.3], [0.0], least=5.0)
    assert not surely_rose([], [])


def test_a_rise_of_all_by_more_than_themselves_is_sure() -> None:
    """Where y runs away, the minibatches differ as much as they rise."""
    there = [1.0] * 8
    here = [3.0, 4.0, 2.5, 9.0, 1e3, 1e5, 1e9, 5.0]
    assert standard_error(here) > statistics.fmean(here) / SURE
    assert surely_rose(here, there)
    assert not surely_rose([*here[:-1], 1.5], there)


def test_f_is_not_evaluated_again_on_a_batch_that_stays() -> None:
    """Of few trusted samples there is one batch, beside eight of those that g is tested on."""
    seen: list[str] = []

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        seen.append("f")
        return (y - 1).square().mean() + 0 * batch.sum()

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        seen.append("g")
        return (y - x - batch.mean()).square().mean()

    data = torch.randn(64, generator=torch.Generator().manual_seed(0))
    solver = bilevel.Solver(
        bilevel.Problem(upper, lower),
        torch.zeros(()),
        torch.zeros(2),
        method=bilevel.F2SA(lower_lr="auto", upper_lr="auto"),
        upper_data=data[:6],
        lower_data=data,
        batch_size=4,
    )
    state = solver.state
    phi = Phi(FORWARD, state.x, state.points, 10.0, True)
    seen.clear()
    found = merits_at(solver.evaluator, state, phi)
    assert (seen.count("f"), seen.count("g")) == (2, 16)
    assert len(found.values) == len(found.solution) == 8
    assert len(set(found.solution)) == 1 < len(set(found.lower))


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_standard_errors_are_those_of_statistics(scale: float) -> None:
    rises = [scale * rise for rise in (0.1, -0.7, 2.0, 0.30000000001, 5.0)]
    assert standard_error(rises) == pytest.approx(statistics.stdev(rises) / math.sqrt(5), rel=1e-12)
    assert standard_error(rises[:1]) == standard_error([]) == 0.0
