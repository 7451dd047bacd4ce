"""Every property on every method in the table."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from benchmarks import methods
from benchmarks.methods import Case
from bilevel.errors import StateError
from bilevel.methods import METHODS, Info
from bilevel.methods.f2ba import Nesterov
from bilevel.problems import Quadratic
from bilevel.stepping.schedules import Power
from bilevel.testing import CHECKS
from tests.marks import slow_except

CASES = [*methods.CASES, Case("no-bilevel", {"lower_lr": 0.5}, steps=10)]
BY_NAME = {case.name: case for case in CASES}
_PLAIN = {"lower_lr": Power(0.4, 20, -0.3), "upper_lr": Power(0.3, 20, -0.5)}
_PENALTY = {**_PLAIN, "penalty_lr": Power(0.3, 20, -0.4), "multiplier": Power(3.0, 20, 0.3)}
_CENTRAL = {**_PLAIN, "multiplier": Power(30.0, 20, 0.3), "inner_steps": 2}
_CONSTANT = {**_PENALTY, "multiplier": 7.0, "inner_steps": 2}
_ETA = Power(0.9, 5, -0.5)
_OPTIMIZERS: dict[str, Any] = {
    "lower_optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
    "upper_optimizer": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}
_RESTARTED = Nesterov(0.9, radius=0.2, least_radius=0.05, decay=0.5)


def _variants(name: str, given: dict[str, Any], more: dict[str, dict[str, Any]]) -> list[Case]:
    return [Case(name, {**given, **choice}, 10, label) for label, choice in more.items()]


_INDEPENDENT = {"coupling": "independent"}
EXACT = [
    *CASES,
    *_variants(
        "f2sa",
        {**_PENALTY, "inner_steps": 2},
        {
            "scheduled": {},
            "one inner step": {"inner_steps": 1},
            "single pass": {"single_pass": True, "inner_steps": 3},
            "independent": _INDEPENDENT,
        },
    ),
    *_variants(
        "f2sa",
        _CENTRAL,
        {
            "midpoint": {"scheme": "midpoint"},
            "midpoint independent": {"scheme": "midpoint", **_INDEPENDENT},
            "midpoint single pass": {"scheme": "midpoint", "single_pass": True},
            "central": {"scheme": "central", "order": 4},
            "central independent": {"scheme": "central", **_INDEPENDENT},
            "central single pass": {"scheme": "central", "single_pass": True},
        },
    ),
    *_variants(
        "f3sa",
        {**_PENALTY, "momentum": _ETA},
        {
            "scheduled": {},
            "independent": _INDEPENDENT,
            "combined": {"recursion": "combined"},
            "combined independent": {"recursion": "combined", **_INDEPENDENT},
        },
    ),
    *_variants(
        "f2ba",
        _CONSTANT,
        {
            "accelerated": {"acceleration": Nesterov(0.5)},
            "restarted": {"acceleration": _RESTARTED, "upper_lr": 0.8},
        },
    ),
    *_variants(
        "vpbgd",
        {**_PENALTY, "inner_steps": 2},
        {"scheduled": {}, "from y": {"start": "y"}, "independent": _INDEPENDENT},
    ),
    *_variants(
        "meha", {**_PENALTY, "proximal": 3.0}, {"scheduled": {}, "independent": _INDEPENDENT}
    ),
    *_variants(
        "bome",
        {**_PLAIN, "inner_lr": 0.5, "inner_steps": 2, "eta": 0.7},
        {"scheduled": {}, "gap": {"barrier": "gap"}, "independent": _INDEPENDENT},
    ),
    *_variants("sobo", {**_PLAIN, "neumann_steps": 3, "neumann_lr": _ETA}, {"scheduled": {}}),
    *_variants("soba", {**_PLAIN, "adjoint_lr": _ETA}, {"scheduled": {}}),
    *_variants("ma-soba", {**_PLAIN, "adjoint_lr": _ETA, "averaging": _ETA}, {"scheduled": {}}),
    *_variants("aid", _PLAIN, {"scheduled": {}, "cold": {"warm_start": False}}),
    *_variants("itd", _PLAIN, {"scheduled": {}}),
    *_variants("no-bilevel", {"lower_lr": _PLAIN["lower_lr"]}, {"scheduled": {}}),
]
"""Whose rates are known before the run, so that a reference can have them."""

VARIANTS = [
    *EXACT,
    *(Case(name, {}, 10, "auto") for name in METHODS),
    Case("f2sa", {"inner_steps": 2, **_OPTIMIZERS}, 10, "optimizers"),
    Case("vpbgd", {"multiplier": 5.0, "inner_steps": 2, **_OPTIMIZERS}, 10, "optimizers"),
    Case("no-bilevel", {"lower_optimizer": _OPTIMIZERS["lower_optimizer"]}, 10, "optimizers"),
]

_ONE_OF_EACH = [*map(str, CASES), "f2sa central", "f2sa independent", "f2sa auto"]
"""Of every method its first settings, and the ways of F2SA that are code of their own."""

cases = pytest.mark.parametrize("case", CASES, ids=str)
variants = pytest.mark.parametrize("case", VARIANTS, ids=str)
REFERENCE = "equals its reference"


def _short(case: Case) -> Any:
    """The method of a case with few inner steps: what is checked with it holds for any number."""
    method = case.method()
    return replace(
        method,
        **{
            field.name: min(3, getattr(method, field.name))
            for field in fields(method)
            if field.name in ("inner_steps", "neumann_steps")
            and getattr(method, field.name) is not None
        },
    )


def test_the_table_is_covered() -> None:
    assert {case.name for case in CASES} == set(METHODS)
    assert {case.name for case in NOISY} <= set(METHODS)


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_equals_its_reference(case: Case) -> None:
    CHECKS[REFERENCE](_short(case))


@variants
@pytest.mark.parametrize("check", [name for name in CHECKS if name != REFERENCE])
def test_keeps_the_contract(case: Case, check: str) -> None:
    CHECKS[check](_short(case))


_QUICK = ("f2sa", "f3sa", "soba", "aid")  # one of each kind
FINDS = slow_except(_QUICK, [case for case in CASES if case.name != "no-bilevel"])


@pytest.mark.parametrize("case", FINDS, ids=str)
def test_finds_the_optimum(case: Case) -> None:
    problem = Quadratic(seed=0)
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=case.method())
    for _ in range(case.steps):
        solver.step(measure=False)
        if methods.remaining(problem, solver) <= methods.TARGET:
            return
    pytest.fail(f"not within {case.steps} steps")


@pytest.mark.slow
def test_no_bilevel_leaves_x_alone() -> None:
    problem = Quadratic(seed=0)
    result = bilevel.minimize(problem, problem.x0, problem.y0, method="no-bilevel", steps=200)
    assert torch.equal(result.x, problem.x0)
    torch.testing.assert_close(result.y, problem.lower_solution(problem.x0), rtol=1e-3, atol=1e-3)


@dataclass(frozen=True)
class Noisy(Case):
    """Settings for noisy gradients.

    With them x comes within ``distance`` of the optimum in ``steps``, on the average over a few
    runs and as a share of the distance at the start.
    """

    distance: float = 0.04


_FALLING, _SLOWLY = Power(0.5, 20, -0.75), Power(0.2, 50, -0.75)
_SHARED = {"lower_lr": 0.5, "upper_lr": _FALLING, "multiplier": 100.0, "inner_steps": 5}
_JOINT = {"lower_lr": 0.3, "upper_lr": Power(2.0, 50, -0.75), "multiplier": 10.0}
_IMPLICIT = {"lower_lr": 0.5, "upper_lr": _FALLING, "inner_steps": 5}
_SINGLE = {"lower_lr": 0.5, "upper_lr": _SLOWLY}
NOISY = [
    Noisy("f2sa", _SHARED, 200),
    Noisy("f2sa", {**_SHARED, "scheme": "midpoint", "multiplier": 30.0}, 200, "midpoint"),
    Noisy("f2sa", {**_SHARED, "scheme": "central", "multiplier": 30.0}, 200, "central"),
    Noisy("f2sa", {**_SHARED, "single_pass": True}, 200, "single pass"),
    # noise that the multiplier amplifies: a small one, and for it a larger bias
    Noisy(
        "f2sa",
        {**_SHARED, "lower_lr": 0.2, "multiplier": 5.0, "coupling": "independent"},
        400,
        "independent",
        distance=0.2,
    ),
    Noisy("f3sa", {**_SINGLE, "multiplier": 100.0, "momentum": 0.2}, 300),
    Noisy("f2ba", _SHARED, 200),
    Noisy("f2ba", {**_SHARED, "acceleration": Nesterov(0.5)}, 200, "accelerated"),
    # z has samples of its own, so the multiplier amplifies its noise as well
    Noisy("vpbgd", {**_JOINT, "inner_steps": 1}, 800, distance=0.1),
    Noisy("meha", {**_JOINT, "proximal": 100.0}, 800, distance=0.1),
    # noise in its two gradients makes BOME's multiplier too small; a large eta keeps it up
    Noisy(
        "bome",
        {
            "lower_lr": Power(0.06, 20, -0.75),
            "upper_lr": _FALLING,
            "inner_lr": 0.5,
            "inner_steps": 10,
            "eta": 5.0,
        },
        300,
        distance=0.1,
    ),
    Noisy("sobo", {**_IMPLICIT, "neumann_steps": 10}, 150),
    Noisy("soba", _SINGLE, 300),
    Noisy("ma-soba", {**_SINGLE, "averaging": 0.2}, 300),
    Noisy("aid", _IMPLICIT, 150),
    Noisy("itd", {**_IMPLICIT, "inner_steps": 15}, 150),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_except(_QUICK, NOISY), ids=str)
def test_finds_the_optimum_through_noise_in_both_levels(case: Noisy) -> None:
    # four runs side by side, each with its own noise (in BOME they have one multiplier)
    problem = Quadratic(condition=3.0, sigma_f=0.2, sigma_g=0.2, runs=(4,), seed=0)
    solver = bilevel.Solver(
        problem,
        problem.x0,
        problem.y0,
        method=case.method(),
        upper_data=problem.upper_noise,
        lower_data=problem.lower_noise,
    )
    for _ in range(case.steps):
        solver.step(measure=False)
    start, end = ((x - problem.solution).norm(dim=-1) for x in (problem.x0, solver.x))
    assert (end / start).mean() <= case.distance


class _Recording(torch.optim.Optimizer):
    """Keeps what it is given and moves nothing: x is held, and its direction can be read."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.seen: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = [p.grad.clone() for g in self.param_groups for p in g["params"]]


DIRECTIONS: dict[str, tuple[dict[str, Any], float]] = {
    # settings with x held, and how close the direction then is to the exact hypergradient
    "f2sa": ({"lower_lr": 1.0, "multiplier": 1e4, "inner_steps": 200}, 5e-4),
    "f3sa": ({"lower_lr": 1.0, "multiplier": 1e4}, 5e-4),
    "f2ba": ({"lower_lr": 1.0, "multiplier": 1e4, "inner_steps": 200}, 5e-4),
    "sobo": ({"lower_lr": 1.0, "neumann_steps": 200, "inner_steps": 200}, 1e-8),
    "soba": ({"lower_lr": 1.0}, 1e-8),
    "ma-soba": ({"lower_lr": 1.0, "averaging": 0.5}, 1e-8),
    "aid": ({"lower_lr": 1.0, "inner_steps": 200}, 1e-8),
    "itd": ({"lower_lr": 1.0, "inner_steps": 200}, 1e-8),
}


@pytest.mark.parametrize("name", slow_except(_QUICK, DIRECTIONS))
def test_with_the_lower_level_solved_the_direction_is_the_hypergradient(name: str) -> None:
    settings, tolerance = DIRECTIONS[name]
    recorders: list[_Recording] = []

    def recording(params: Any) -> _Recording:
        recorders.append(_Recording(params))
        return recorders[0]

    problem = Quadratic(seed=0)
    method = METHODS[name](upper_optimizer=recording, **settings)  # type: ignore[call-arg]
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method)
    for _ in range(2 if "inner_steps" in settings else 400):
        solver.step(measure=False)
    exact = problem.gradient(problem.x0)
    (found,) = recorders[0].seen
    assert torch.equal(solver.x, problem.x0)
    assert (found - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("case", slow_except(_ONE_OF_EACH, EXACT), ids=str)
def test_a_table_gives_the_iterates_of_a_tensor(case: Case) -> None:
    problem = Quadratic(dim_x=5, dim_y=5, sigma_f=0.1, sigma_g=0.1, seed=0)

    def seen(table: bilevel.Table) -> Tensor:
        return torch.cat([table[:2], table[[2, 3, 4]]])

    through_tables = bilevel.Problem(
        lambda x, y, b: problem.upper(seen(x), seen(y), b),
        lambda x, y, b: problem.lower(seen(x), seen(y), b),
    )
    plain, table = (
        bilevel.Solver(
            view,
            start(problem.x0),
            start(problem.y0),
            method=_short(case),
            upper_data=problem.upper_noise,
            lower_data=problem.lower_noise,
        )
        for view, start in ((problem, torch.clone), (through_tables, bilevel.Table))
    )
    for _ in range(10):
        plain.step()
        table.step()
    torch.testing.assert_close(table.x.values, plain.x, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(table.y.values, plain.y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", slow_except(_QUICK, CASES), ids=str)
def test_keeps_half_precision(case: Case) -> None:
    dtype = torch.bfloat16
    problem = bilevel.Problem(
        lambda x, y, b: ((y - 1) ** 2).sum() + (x**2).sum(),
        lambda x, y, b: ((y - x) ** 2).sum(),
    )
    result = bilevel.minimize(
        problem,
        torch.zeros(2, dtype=dtype),
        torch.zeros(2, dtype=dtype),
        method=METHODS[case.name](),
        steps=30,  # "auto" lets y settle before x moves
    )
    assert result.x.dtype == dtype
    assert result.y.dtype == dtype
    assert bool(result.x.any()) == (case.name != "no-bilevel")


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [tensor for part in parts for tensor in _tensors(part)]


@pytest.mark.parametrize("case", slow_except(_ONE_OF_EACH, VARIANTS), ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_keeps_the_device(case: Case, device: str) -> None:
    problem = Quadratic(sigma_f=0.1, sigma_g=0.1, device=device)
    seen: list[tuple[dict[str, Any], Info]] = []
    result = bilevel.minimize(
        problem,
        problem.x0,
        problem.y0,
        method=case.method(),
        steps=3,
        upper_data=problem.upper_noise,
        lower_data=problem.lower_noise,
        callback=lambda solver, info: seen.append((solver.state.state_dict(), info)),
    )
    (*_, (state, info)) = seen
    assert result.x.device.type == result.y.device.type == device
    # but for counters of torch's optimizers, which are scalars in main memory
    carried = [tensor for tensor in _tensors(state) if tensor.ndim]
    assert len(carried) >= 2
    assert {tensor.device.type for tensor in carried} == {device}
    assert {t.device.type for t in vars(info).values() if isinstance(t, Tensor)} == {device}


def _noisy_run(case: Case, seed: int, steps: int) -> bilevel.Solver:
    problem = Quadratic(sigma_f=0.2, sigma_g=0.2, seed=1)
    solver = bilevel.Solver(
        problem,
        problem.x0,
        problem.y0,
        method=case.method(),
        upper_data=problem.upper_noise,
        lower_data=problem.lower_noise,
        seed=seed,
    )
    for _ in range(steps):
        solver.step()
    return solver


def test_a_state_of_another_method_is_refused() -> None:
    f2sa, f3sa = (_noisy_run(BY_NAME[name], 0, 2) for name in ("f2sa", "f3sa"))
    with pytest.raises(StateError, match=r"saved by 'F2SA'.*runs 'F3SA'"):
        f3sa.load_state_dict(f2sa.state_dict())


FLAT = """
import gc, json, resource, sys, torch, bilevel
torch.set_num_threads(1)
problem = bilevel.problems.Quadratic(dim_x=2, dim_y=2, sigma_f=0.1, sigma_g=0.1)
method = bilevel.METHODS[sys.argv[1]](**json.loads(sys.argv[2]))
solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method,
    upper_data=problem.upper_noise, lower_data=problem.lower_noise)
def tensors():
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
def advance(to):
    while solver.k < to:
        solver.step()
    return tensors(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(*advance(100), *advance(10_000))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
@pytest.mark.parametrize(
    ("name", "found"),
    [*((case.name, False) for case in CASES), ("f2sa", True)],
    ids=lambda value: {True: "auto", False: ""}.get(value, value),
)
def test_memory_after_10000_steps_is_that_after_100(name: str, found: bool) -> None:
    mine = {field.name for field in fields(METHODS[name])}  # type: ignore[arg-type]
    # 10,000 of the shortest steps
    settings = dict.fromkeys(mine & {"inner_steps", "neumann_steps", "cg_steps"}, 1)
    rates = {} if found else dict.fromkeys(mine & {"lower_lr", "upper_lr"}, 0.1)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", FLAT, name, json.dumps({**settings, **rates})],
        capture_output=True,
        text=True,
        check=True,
    )
    tensors, peak, later_tensors, later_peak = map(int, run.stdout.split())
    assert later_tensors == tensors
    assert later_peak - peak < 1000  # kilobytes: a tenth of one small tensor per step would show
