"""Step sizes and multipliers that are found: against known curvatures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.errors import ArgumentError, ArgumentTypeError, StateError
from bilevel.problems import Quadratic

F2SA = bilevel.F2SA


def _solver(problem: Any, method: Any = None, **options: Any) -> bilevel.Solver:
    return bilevel.Solver(problem, problem.x0, problem.y0, method=method or F2SA(), **options)


# The lower level


def test_the_lower_step_is_the_inverse_of_the_curvature_that_the_copies_meet() -> None:
    problem = Quadratic(seed=0)  # f and g have the largest curvature 1 in y
    info = _solver(problem, F2SA(upper_lr=0.1, multiplier=5.0, coupling="independent")).step()
    assert info.multiplier == 5.0
    assert info.lower_lr == pytest.approx(1 / (1 + 1 / 5), rel=0.1)
    info = _solver(problem, bilevel.METHODS["aid"]()).step()  # one copy, which meets g alone
    assert info.lower_lr == pytest.approx(1.0, rel=0.1)


def test_a_curvature_that_grows_is_followed() -> None:
    stiffness = torch.tensor(1.0, dtype=torch.float64)
    problem = bilevel.Problem(
        lambda x, y, b: 0.5 * ((y - 1) ** 2).sum(),
        lambda x, y, b: 0.5 * stiffness * ((y - x) ** 2).sum(),
    )
    start = torch.zeros(3, dtype=torch.float64)
    solver = bilevel.Solver(problem, start, start, method=F2SA(upper_lr=1e-3, multiplier=10.0))
    before = [solver.step() for _ in range(8)][-1]
    stiffness.fill_(50.0)
    after = [solver.step() for _ in range(10)][-1]
    assert before.lower_lr == pytest.approx(1 / 1.1, rel=1e-3)
    assert after.lower_lr == pytest.approx(1 / 50.1, rel=1e-2)


@pytest.mark.slow
def test_noise_shortens_the_lower_step_and_its_absence_does_not() -> None:
    lowers = []
    for sigma in (0.0, 0.5):
        problem = Quadratic(seed=0, sigma_g=sigma)
        solver = _solver(problem, F2SA(upper_lr=1e-3), lower_data=problem.lower_noise)
        infos = [solver.step(measure=False) for _ in range(100)]
        lowers.append([info.lower_lr for info in infos])
    assert lowers[0][-1] == pytest.approx(lowers[0][0], rel=0.1)
    assert lowers[1][-1] < 0.5 * lowers[1][0]


# The multiplier


@pytest.mark.slow
def test_a_multiplier_that_is_too_small_is_raised_and_a_given_schedule_is_not() -> None:
    problem = Quadratic(condition=1e3, seed=0)
    result = bilevel.minimize(problem, problem.x0, problem.y0, steps=60)
    lam = result.history["multiplier"]
    assert lam[-1] > 100
    assert bool((lam[1:] >= lam[:-1]).all())
    for method in (
        F2SA(multiplier=lambda k: 10.0),
        F2SA(multiplier=10.0, coupling="independent"),
        F2SA(lower_lr=0.5, multiplier=10.0),
    ):
        given = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=60)
        assert set(given.history["multiplier"]) == {10.0}


def test_a_multiplier_starts_in_the_units_of_f_and_g() -> None:
    base = Quadratic(seed=0)

    def first(f: float, g: float, method: F2SA) -> float:
        problem = bilevel.Problem(
            lambda x, y, b: f * base.upper(x, y, b), lambda x, y, b: g * base.lower(x, y, b)
        )
        return float(bilevel.Solver(problem, base.x0, base.y0, method=method).step().multiplier)

    own = first(1.0, 1.0, F2SA())
    assert own == pytest.approx(10.0, rel=0.05)  # f and g are equally curved
    for f, g in ((1e-3, 1.0), (1e3, 1.0), (1.0, 1e-3), (1.0, 1e3)):
        assert first(f, g, F2SA()) == pytest.approx(own * f / g, rel=1e-3)
        assert first(f, g, F2SA(multiplier=50.0)) == pytest.approx(max(50.0, own * f / g), rel=1e-3)


def test_a_multiplier_starts_in_units_where_f_is_linear_in_y() -> None:
    """Such an f has no curvature; what counts is how far it would take y."""
    price = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    x0, y0 = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)

    def first(f: float, unit: float) -> float:
        problem = bilevel.Problem(
            lambda x, y, b: f * (price @ y) / unit, lambda x, y, b: ((y / unit - x) ** 2).sum()
        )
        return float(bilevel.Solver(problem, x0, y0).step().multiplier)

    own = first(1.0, 1.0)
    assert own == pytest.approx(10 * float(price.norm()) / 2 / 3**0.5, rel=1e-3)
    for f, unit in ((1e4, 1.0), (1e-4, 1.0), (1.0, 100.0), (1.0, 0.01)):
        assert first(f, unit) == pytest.approx(f * own, rel=1e-3)


def test_rounding_is_not_taken_for_a_curvature_of_f() -> None:
    """As where f holds an argmin: the gradients of a linear f then differ by its tolerance."""
    x0, y0 = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)

    def first(bend: float) -> float:
        problem = bilevel.Problem(
            lambda x, y, b: y.sum() + bend * (y**2).sum(), lambda x, y, b: ((y - x) ** 2).sum()
        )
        return float(bilevel.Solver(problem, x0, y0).step().multiplier)

    assert first(1e-12) == pytest.approx(first(0.0), rel=1e-6)
    assert first(1e-2) == pytest.approx(10 * 1e-2, rel=1e-3)


def test_a_curved_f_is_not_taken_for_linear_where_y_starts_beside_its_solution() -> None:
    """As in distillation, where y and the images that it is fitted to both start near zero."""
    x0, y0 = torch.full((3,), 1e-6), torch.zeros(3)
    problem = bilevel.Problem(
        lambda x, y, b: ((y - 1) ** 2).sum(), lambda x, y, b: ((y - x) ** 2).sum()
    )
    assert float(bilevel.Solver(problem, x0, y0).step().multiplier) == pytest.approx(10, rel=1e-2)


@pytest.mark.parametrize("scheme", ["forward", "midpoint", "central"])
def test_copies_that_are_contracted_keep_the_direction(scheme: Any) -> None:
    """y - z is proportional to 1/lam, so that lam (g(y) - g(z)) stays as it is to first order."""
    problem = Quadratic(seed=0)
    solver = _solver(problem, F2SA(0.5, 1e-9, multiplier=1000.0, scheme=scheme, inner_steps=200))
    before = float(solver.step().direction_norm)  # type: ignore[arg-type]
    spread = _spread(solver)
    solver.state.contract_copies(0.25)
    torch.testing.assert_close(_spread(solver), [0.25 * s for s in spread])
    finer = _solver(problem, F2SA(0.5, 1e-9, multiplier=4000.0, scheme=scheme, inner_steps=1))
    states: Any = finer.state, solver.state
    for mine, theirs in zip(*(state.points for state in states), strict=True):
        mine.assign(theirs)
    info = finer.step()
    assert float(info.direction_norm) == pytest.approx(before, rel=0.02)  # type: ignore[arg-type]


def _spread(solver: bilevel.Solver) -> list[Tensor]:
    state: Any = solver.state
    return [point.leaves[0].detach() - state.solution.leaves[0].detach() for point in state.points]


# What is said


def test_the_history_says_what_was_used() -> None:
    problem = Quadratic(seed=1)
    history = bilevel.minimize(
        problem, problem.x0, problem.y0, method=F2SA(0.25, lambda k: 0.1 / (k + 1)), steps=3
    ).history
    assert history["lower_lr"].tolist() == [0.25] * 3
    assert history["upper_lr"].tolist() == pytest.approx([0.1, 0.05, 0.1 / 3])
    optimizers = F2SA(
        lower_optimizer=lambda p: torch.optim.SGD(p, lr=0.125),
        upper_optimizer=lambda p: torch.optim.Adam(p, lr=0.0625),
    )
    history = bilevel.minimize(problem, problem.x0, problem.y0, method=optimizers, steps=3).history
    assert set(history["lower_lr"]) == {0.125}
    assert set(history["upper_lr"]) == {0.0625}


def test_a_direction_is_the_way_of_x_by_its_step() -> None:
    problem = Quadratic(seed=1)
    solver = _solver(problem)
    for _ in range(12):
        x = solver.x
        info = solver.step()
        moved = float((solver.x - x).norm())
        assert moved == pytest.approx(info.upper_lr * float(info.direction_norm), rel=1e-9)  # type: ignore[arg-type, operator]


def test_a_state_with_given_steps_is_refused() -> None:
    problem = Quadratic(seed=1)
    found, *given = (
        _solver(problem, method) for method in (F2SA(), F2SA(upper_lr=0.1), F2SA(0.1, 0.1))
    )
    for other in given:
        with pytest.raises(StateError, match="other steps than here"):
            found.load_state_dict(other.state_dict())
    with pytest.raises(StateError, match="saved with 'auto' steps, but here they are given"):
        given[1].load_state_dict(found.state_dict())


@pytest.mark.parametrize("rate", ["lower_lr", "upper_lr"])
def test_other_words_than_auto_are_refused(rate: str) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"{rate}.*'auto'.*'fast'"):
        F2SA(**{rate: "fast"})  # type: ignore[arg-type]


def test_acceleration_wants_a_number() -> None:
    from bilevel.methods.f2ba import F2BA, Nesterov

    with pytest.raises(ArgumentError, match=r"upper_lr='auto' cannot be used with acceleration"):
        F2BA(acceleration=Nesterov())
