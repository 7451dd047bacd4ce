"""x and y in convex sets: iterates stay inside, and the constrained optimum is found.

What is compared with is min F over the set by SciPy's SLSQP, on F written out in NumPy; no
projection of the library is in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.optimize
import torch
from torch import Tensor

import bilevel
from bilevel import BOME, F2BA, F2SA, F3SA, MEHA, METHODS, VPBGD, Nesterov
from bilevel.methods import Method, State
from bilevel.problem.sets import Ball, Box, Simplex
from bilevel.problems import Quadratic
from bilevel.stepping.schedules import Power
from bilevel.variables import Variable
from tests.marks import slow_except

Array = npt.NDArray[np.float64]
ROUNDING = 1e-12


@dataclass(frozen=True)
class Case:
    """A method, and how near to the constrained optimum it comes.

    Attributes:
        method: with settings that a user could have chosen.
        steps: how many it takes.
        distance: the largest entry of |x - x*| that may be left then: the bias of the method's
            direction, and for those whose multiplier grows what it has not yet grown to.
    """

    method: Method[Any]
    steps: int
    distance: float


LONG: dict[str, Any] = {"lower_lr": 1.0, "upper_lr": 0.8, "inner_steps": 3}
F3: dict[str, Any] = {"lower_lr": 1.0, "upper_lr": 0.2, "multiplier": 1e3}
GROWING: dict[str, Any] = {"lower_lr": 0.9, "upper_lr": 2.0, "multiplier": Power(1.0, 5, 1.0)}
BARRIER: dict[str, Any] = {
    "lower_lr": Power(0.3, 10, -1),
    "upper_lr": Power(1.0, 10, -1),
    "inner_lr": 1.5,
    "inner_steps": 6,
    "eta": 5.0,
}
CASES = {
    # O(1/lam)
    "f2sa": Case(F2SA(**LONG, multiplier=1e3), 150, 1e-3),
    "f2sa single pass": Case(F2SA(**LONG, multiplier=1e3, single_pass=True), 150, 1e-3),
    "f3sa": Case(F3SA(**F3), 400, 1e-3),
    "f3sa combined": Case(F3SA(**F3, recursion="combined"), 400, 1e-3),
    "f2ba": Case(F2BA(**LONG, multiplier=1e3), 150, 1e-3),
    "f2ba accelerated": Case(F2BA(**LONG, multiplier=1e3, acceleration=Nesterov(0.5)), 60, 1e-3),
    # O(1/lam^order); the midpoint is exact where g is quadratic
    "f2sa central": Case(F2SA(**LONG, multiplier=100.0, scheme="central"), 150, 3e-4),
    "f2sa central 4": Case(F2SA(**LONG, multiplier=30.0, scheme="central", order=4), 150, 1e-4),
    "f2sa midpoint": Case(F2SA(**LONG, multiplier=10.0, scheme="midpoint"), 150, 2e-6),
    # O(1/gam), with gam = 1 + k/5
    "vpbgd": Case(VPBGD(**GROWING, inner_steps=1), 400, 0.03),
    "vpbgd from y": Case(VPBGD(**GROWING, inner_steps=10, start="y"), 400, 0.03),
    "meha": Case(MEHA(**GROWING, proximal=100.0), 400, 0.03),
    # O(1/eta) where a set binds, and a share of (1 - alpha mu)^T
    "bome": Case(BOME(**BARRIER), 400, 0.04),
    "bome gap": Case(BOME(**BARRIER, barrier="gap"), 400, 0.04),
}
QUICK = ("f2sa", "f2sa midpoint", "f3sa", "f2ba accelerated", "vpbgd", "meha", "bome")


def test_methods_of_first_order_are_here_and_each_is_quick_once() -> None:
    """That the iterates of any method stay in their sets is part of ``check_method``."""
    first_order = {name for name, m in METHODS.items() if m.properties.order == 1}
    known = {label.split()[0] for label in CASES}
    assert known <= first_order - {"no-bilevel"}
    assert known == {label.split()[0] for label in QUICK}


QUADRATIC = Quadratic(dim_x=6, dim_y=5, condition=3.0, seed=0)
MIX = slice(0, 3)


@dataclass(frozen=True)
class Setting:
    """A set for x and one for y, the latter binding at the start and not at the optimum.

    Attributes:
        problem: with both sets.
        x0, y0: outside of them.
        sums_to_one, bounds: the set of x again: which entries have the sum 1, and all their bounds.
    """

    problem: bilevel.Problem
    x0: Any
    y0: Any
    sums_to_one: slice
    bounds: list[tuple[float, float]]

    def flat(self, value: Any) -> Array:
        leaves = list(value.values()) if isinstance(value, dict) else [value]
        return np.concatenate([leaf.detach().numpy() for leaf in leaves])

    def x_outside(self, x: Array) -> float:
        low, high = np.array(self.bounds).T
        mix = x[self.sums_to_one]
        return max(
            float((low - x).max()),
            float((x - high).max()),
            abs(float(mix.sum()) - 1) if len(mix) else 0.0,
        )

    def y_outside(self, value: Any) -> float:
        if isinstance(value, dict):
            return max(
                float(value["box"].detach().abs().max()) - 2,
                float(value["ball"].detach().norm()) - 2,
            )
        return float(value.detach().abs().max()) - 2

    def optimum(self) -> Array:
        B, t, rho = QUADRATIC.B.numpy(), QUADRATIC.t.numpy(), QUADRATIC.rho
        constraints = []
        row = np.zeros(6)
        row[self.sums_to_one] = 1
        if row.any():
            constraints.append({"type": "eq", "fun": lambda x: row @ x - 1, "jac": lambda x: row})
        found = scipy.optimize.minimize(
            lambda x: 0.5 * float(np.sum((B @ x - t) ** 2)) + 0.5 * rho * float(x @ x),
            np.full(6, 1 / 3),
            jac=lambda x: B.T @ (B @ x - t) + rho * x,
            bounds=self.bounds,
            constraints=constraints,
            method="SLSQP",
            options={"ftol": 1e-15, "maxiter": 500},
        )
        assert found.success
        x: Array = found.x
        return x


def _joined(tree: Any) -> Tensor:
    return torch.cat(list(tree.values()))


FREE, BOX = (0.0, np.inf), (-0.3, 0.5)
SETTINGS = {
    "simplex": Setting(
        bilevel.Problem(QUADRATIC.upper, QUADRATIC.lower, x_set=Simplex(), y_set=Box(-2, 2)),
        QUADRATIC.x0,
        QUADRATIC.y0 + 5,
        slice(0, 6),
        [FREE] * 6,
    ),
    "box": Setting(
        bilevel.Problem(QUADRATIC.upper, QUADRATIC.lower, x_set=Box(*BOX), y_set=Box(-2, 2)),
        QUADRATIC.x0,
        QUADRATIC.y0 + 5,
        slice(0, 0),
        [BOX] * 6,
    ),
    "product": Setting(
        bilevel.Problem(
            lambda x, y, b: QUADRATIC.upper(_joined(x), _joined(y), b),
            lambda x, y, b: QUADRATIC.lower(_joined(x), _joined(y), b),
            x_set={"mix": Simplex(), "gain": Box(*BOX)},
            y_set={"box": Box(-2, 2), "ball": Ball(2)},
        ),
        {"mix": QUADRATIC.x0[MIX].clone(), "gain": QUADRATIC.x0[3:].clone()},
        {"box": QUADRATIC.y0[:2] + 5, "ball": QUADRATIC.y0[2:] + 5},
        MIX,
        [FREE] * 3 + [BOX] * 3,
    ),
}


def _variables(state: State) -> tuple[list[Variable], list[Variable]]:
    """Every variable that is carried: x, all copies of y, and the previous ones of either."""
    values = [v for value in vars(state).values() for v in _listed(value)]
    variables = [v for v in values if isinstance(v, Variable)]
    xs = [v for v in variables if v.name == "x"]
    return xs, [v for v in variables if v.name != "x"]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("name", slow_except(QUICK, CASES))
def test_iterates_stay_inside_and_end_at_the_constrained_optimum(
    name: str, setting: Setting
) -> None:
    case = CASES[name]
    solver = bilevel.Solver(setting.problem, setting.x0, setting.y0, method=case.method)
    xs, ys = _variables(solver.state)
    assert len(ys) >= 2
    for y in ys:
        assert setting.y_outside(y.value) > -ROUNDING  # the set of y does bind at the start
    for k in range(case.steps + 1):
        for x in xs:
            assert setting.x_outside(setting.flat(x.value)) <= ROUNDING
        for y in ys:
            assert setting.y_outside(y.value) <= ROUNDING
        if k < case.steps:
            solver.step(measure=False)
    known = setting.optimum()
    assert np.abs(setting.flat(solver.x) - known).max() <= case.distance
    # neither the unconstrained optimum nor its projection would pass for it
    free = QUADRATIC.solution
    for other in (free, Simplex()(free), Box(*BOX)(free)):
        assert np.abs(other.numpy() - known).max() > 0.05


@pytest.mark.slow
def test_where_a_set_binds_bomes_multiplier_settles_at_a_multiple_of_eta() -> None:
    def run(setting: Setting, problem: bilevel.Problem, eta: float) -> tuple[float, float, Array]:
        """The multiplier after 100 and after 200 steps, and the end."""
        method = BOME(**{**BARRIER, "inner_steps": 10, "eta": eta})
        solver = bilevel.Solver(problem, setting.x0, setting.y0, method=method)
        infos = [solver.step(measure=False) for _ in range(200)]
        return float(infos[99].multiplier), float(infos[199].multiplier), solver.x.numpy()

    setting = SETTINGS["simplex"]
    multipliers, errors = [], []
    for eta in (0.5, 2.0, 5.0):
        early, late, x = run(setting, setting.problem, eta)
        assert late == pytest.approx(early, rel=0.03)
        multipliers.append(late)
        errors.append(np.abs(x - setting.optimum()).max())
    assert multipliers[0] / 0.5 == pytest.approx(multipliers[2] / 5.0, rel=0.15)
    assert errors[0] > 3 * errors[1]
    early, late, _ = run(setting, bilevel.Problem(QUADRATIC.upper, QUADRATIC.lower), 2.0)
    assert late > 1.5 * early  # where no set binds it grows for ever


# A set of y that binds at the optimum: y*(x) is the projection of x, and F has kinks

TARGET, CURVATURE, RHO = [2.0, -1.0, 0.5], [1.0, 0.5, 0.8], 0.1
CALM: dict[str, Any] = {"lower_lr": 1.0, "upper_lr": Power(0.5, 20, -1), "multiplier": 100.0}
BINDING = {
    "f2sa": Case(F2SA(**CALM, inner_steps=5), 200, 0.03),
    "f2sa central": Case(F2SA(**CALM, inner_steps=5, scheme="central"), 200, 0.03),
    "f2sa midpoint": Case(F2SA(**CALM, inner_steps=5, scheme="midpoint"), 200, 0.03),
    "f3sa": Case(F3SA(1.0, Power(0.1, 50, -0.75), 100.0), 900, 0.03),
    "f2ba": Case(F2BA(**CALM, inner_steps=5), 200, 0.03),
    "f2ba accelerated": Case(F2BA(**CALM, inner_steps=5, acceleration=Nesterov(0.5)), 200, 0.03),
    "vpbgd": Case(VPBGD(1.0, 1.0, Power(1.0, 5, 1.0), inner_steps=1), 600, 0.03),
    "meha": Case(MEHA(0.9, 1.0, Power(1.0, 5, 1.0), proximal=100.0), 600, 0.03),
    "bome": Case(BOME(0.05, 0.025, inner_lr=1.0, inner_steps=5, eta=20.0), 600, 0.03),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BINDING.values(), ids=list(BINDING))
def test_a_lower_set_that_binds_at_the_optimum(case: Case) -> None:
    t, a = (torch.tensor(v, dtype=torch.float64) for v in (TARGET, CURVATURE))
    problem = bilevel.Problem(
        lambda x, y, b: 0.5 * ((y - t) ** 2).sum() + 0.5 * RHO * (x**2).sum(),
        lambda x, y, b: 0.5 * (a * (y - x) ** 2).sum(),
        y_set=Box(0, 1),
    )
    start = torch.full((3,), 0.7, dtype=torch.float64)
    solver = bilevel.Solver(problem, start, start, method=case.method)
    for _ in range(case.steps):
        solver.step(measure=False)
    # each entry on its own, on a grid: F(x) = (clip(x) - t)^2 / 2 + rho x^2 / 2
    grid = np.linspace(-1, 2, 30_001)
    values = 0.5 * (grid.clip(0, 1) - np.array(TARGET)[:, None]) ** 2 + 0.5 * RHO * grid**2
    known = grid[values.argmin(axis=1)]
    np.testing.assert_allclose(known, [1, 0, 0.5 / 1.1], atol=1e-4)
    np.testing.assert_allclose(solver.x.numpy(), known, rtol=0, atol=case.distance)
    np.testing.assert_allclose(solver.y.numpy(), known.clip(0, 1), rtol=0, atol=case.distance)
