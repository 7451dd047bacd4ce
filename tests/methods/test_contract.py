"""Every property on every method in the table."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bilevel
from bilevel.benchmarks import methods
from bilevel.benchmarks.methods import Case
from bilevel.errors import ObjectiveError, StateError
from bilevel.methods import METHODS, Info
from bilevel.methods.f2ba import Nesterov
from bilevel.problems import Quadratic
from bilevel.stepping.schedules import Power
from tests.methods.common import OnceDifferentiable

CASES = [*methods.CASES, Case("no-bilevel", {"lower_lr": 0.5}, steps=10)]
BY_NAME = {case.name: case for case in CASES}
_F2SA, _F3SA = BY_NAME["f2sa"].settings, BY_NAME["f3sa"].settings
_OPTIMIZERS: dict[str, Any] = {
    "lower_optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
    "upper_optimizer": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}
VARIANTS = [
    *CASES,
    *(Case(name, {}, 10, "auto") for name in METHODS),
    Case("f2sa", {**_F2SA, "single_pass": True, "inner_steps": 3}, 10, "single pass"),
    Case("f2sa", {**_F2SA, "coupling": "independent", "inner_steps": 2}, 10, "independent"),
    Case("f2sa", {**_F2SA, "accumulate": True, "inner_steps": 2}, 10, "accumulated"),
    Case("f2sa", {**_F2SA, "scheme": "midpoint", "inner_steps": 2}, 10, "midpoint"),
    Case("f2sa", {**_F2SA, "scheme": "central", "order": 4}, 10, "central"),
    Case("f2sa", {"inner_steps": 2, **_OPTIMIZERS}, 10, "optimizers"),
    Case("f3sa", {**_F3SA, "recursion": "combined"}, 10, "combined"),
    Case("f2ba", {**_F2SA, "acceleration": Nesterov(0.5)}, 10, "accelerated"),
    Case("vpbgd", {"multiplier": 5.0, "inner_steps": 2, "start": "y"}, 10, "from y"),
    Case("vpbgd", {"multiplier": 5.0, "inner_steps": 2, **_OPTIMIZERS}, 10, "optimizers"),
    Case("meha", {"multiplier": 5.0, "coupling": "independent"}, 10, "independent"),
    Case("bome", {"inner_steps": 2, "barrier": "gap"}, 10, "gap"),
    Case("no-bilevel", {"lower_optimizer": _OPTIMIZERS["lower_optimizer"]}, 10, "optimizer"),
]


def only(*orders: int) -> pytest.MarkDecorator:
    chosen = [case for case in CASES if case.order in orders and case.name != "no-bilevel"]
    return pytest.mark.parametrize("case", chosen, ids=str)


cases = pytest.mark.parametrize("case", CASES, ids=str)
variants = pytest.mark.parametrize("case", VARIANTS, ids=str)


def test_the_table_is_covered() -> None:
    assert {case.name for case in CASES} == set(METHODS)
    assert {case.name for case in NOISY} == set(METHODS) - {"no-bilevel"}
    for method in METHODS.values():
        assert method.properties.order in (1, 2)
        assert method.properties.copies >= 1
        assert method.properties.gradients
        assert method.properties.assumes
        assert method.properties.reference


def quick(names: str, of: list[Any]) -> list[Any]:
    """The cases, of which those of other methods are slow: these take thousands of steps."""
    return [
        case if case.name in names.split() else pytest.param(case, marks=pytest.mark.slow)
        for case in of
        if case.name != "no-bilevel"
    ]


QUICK = "f2sa f3sa f2ba sobo soba ma-soba aid itd"  # unlike bome, vpbgd and meha


@pytest.mark.parametrize("case", quick(QUICK, CASES), ids=str)
def test_finds_the_optimum(case: Case) -> None:
    problem = Quadratic(seed=0)
    solver = bilevel.Solver(problem, case.method(), problem.x0, problem.y0)
    for _ in range(case.steps):
        solver.step(measure=False)
        if methods.left(problem, solver) <= methods.TARGET:
            return
    pytest.fail(f"not within {case.steps} steps")


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


@pytest.mark.parametrize("case", quick("f3sa soba aid", NOISY), ids=str)
def test_finds_the_optimum_through_noise_in_both_levels(case: Noisy) -> None:
    # four runs side by side, each with its own noise (in BOME they have one multiplier)
    problem = Quadratic(condition=3.0, sigma_f=0.2, sigma_g=0.2, runs=(4,), seed=0)
    solver = bilevel.Solver(
        problem,
        case.method(),
        problem.x0,
        problem.y0,
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
    "f2sa": ({"lower_lr": 1.0, "multiplier": 1e4}, 5e-4),
    "f3sa": ({"lower_lr": 1.0, "multiplier": 1e4}, 5e-4),
    "f2ba": ({"lower_lr": 1.0, "multiplier": 1e4}, 5e-4),
    "sobo": ({"lower_lr": 1.0, "neumann_steps": 200, "inner_steps": 200}, 1e-8),
    "soba": ({"lower_lr": 1.0}, 1e-8),
    "ma-soba": ({"lower_lr": 1.0, "averaging": 0.5}, 1e-8),
    "aid": ({"lower_lr": 1.0, "inner_steps": 200}, 1e-8),
    "itd": ({"lower_lr": 1.0, "inner_steps": 200}, 1e-8),
}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_with_the_lower_level_solved_the_direction_is_the_hypergradient(name: str) -> None:
    settings, tolerance = DIRECTIONS[name]
    recorders: list[_Recording] = []

    def recording(params: Any) -> _Recording:
        recorders.append(_Recording(params))
        return recorders[0]

    problem = Quadratic(seed=0)
    method = METHODS[name](upper_optimizer=recording, **settings)  # type: ignore[call-arg]
    solver = bilevel.Solver(problem, method, problem.x0, problem.y0)
    for _ in range(2 if "inner_steps" in settings else 400):
        solver.step(measure=False)
    exact = problem.gradient(problem.x0)
    (found,) = recorders[0].seen
    assert torch.equal(solver.x, problem.x0)
    assert (found - exact).norm() <= tolerance * exact.norm()


def _guises(problem: Quadratic) -> dict[str, tuple[bilevel.Problem, Any, Any]]:
    """The same quadratic with x and y as a tensor, as trees, as modules, as tables."""

    def joined(tree: Any) -> Tensor:
        return torch.cat([tree["a"], tree["rest"][0]])

    def split(tensor: Tensor) -> Any:
        return {"a": tensor[:2].clone(), "rest": (tensor[2:].clone(), None)}

    class Holder(nn.Module):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__()
            self.head = nn.Parameter(tensor[:2].clone())
            self.tail = nn.Parameter(tensor[2:].clone())
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self) -> Tensor:
            return torch.cat([self.head, self.tail])

    def seen_through(view: Any) -> bilevel.Problem:
        return bilevel.Problem(
            lambda x, y, b: problem.upper(view(x), view(y), b),
            lambda x, y, b: problem.lower(view(x), view(y), b),
        )

    return {
        "tensor": (problem, problem.x0, problem.y0),
        "tree": (seen_through(joined), split(problem.x0), split(problem.y0)),
        "module": (seen_through(lambda m: m()), Holder(problem.x0), Holder(problem.y0)),
        "table": (
            seen_through(lambda t: torch.cat([t[:2], t[[2, 3, 4]]])),
            bilevel.Table(problem.x0),
            bilevel.Table(problem.y0),
        ),
    }


def _flat(value: Any) -> Tensor:
    if isinstance(value, dict):
        return torch.cat([value["a"], value["rest"][0]])
    if isinstance(value, bilevel.Table):
        return value.values
    return value().detach() if isinstance(value, nn.Module) else value


@variants
def test_tensors_trees_modules_and_tables_give_the_same_iterates(case: Case) -> None:
    problem = Quadratic(dim_x=5, dim_y=5, sigma_f=0.1, sigma_g=0.1, seed=0)
    ends = {}
    guises = _guises(problem)
    if case.label.startswith("optimizer") or case.method().rates.upper is None:
        del guises["table"]  # what would move every row of it is refused
    for name, (guise, x0, y0) in guises.items():
        solver = bilevel.Solver(
            guise,
            case.method(),
            x0,
            y0,
            upper_data=problem.upper_noise,
            lower_data=problem.lower_noise,
        )
        for _ in range(10):
            solver.step()
        assert type(solver.x) is type(x0)
        ends[name] = _flat(solver.x), _flat(solver.y)
    for name in ends:
        for found, known in zip(ends[name], ends["tensor"], strict=True):
            torch.testing.assert_close(found, known, rtol=1e-9, atol=1e-12)


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keeps_the_dtype(case: Case, dtype: torch.dtype) -> None:
    problem = bilevel.Problem(
        lambda x, y, b: ((y - 1) ** 2).sum() + (x**2).sum(),
        lambda x, y, b: ((y - x) ** 2).sum(),
    )
    result = bilevel.minimize(
        problem,
        torch.zeros(2, dtype=dtype),
        torch.zeros(2, dtype=dtype),
        method=METHODS[case.name](),
        steps=5,
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


@variants
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
        case.method(),
        problem.x0,
        problem.y0,
        upper_data=problem.upper_noise,
        lower_data=problem.lower_noise,
        seed=seed,
    )
    for _ in range(steps):
        solver.step()
    return solver


@variants
def test_iterates_stay_in_their_sets(case: Case) -> None:
    base = Quadratic(seed=0)
    problem = bilevel.Problem(
        base.upper, base.lower, x_set=bilevel.sets.Box(-0.2, 0.2), y_set=bilevel.sets.Ball(0.1)
    )
    solver = bilevel.Solver(problem, case.method(), base.x0, base.y0)
    for _ in range(10):
        solver.step()
        assert solver.x.abs().max() <= 0.2
        for y in (solver.state.solution, solver.state.penalised or solver.state.solution):
            assert y.value.norm() <= 0.1 + 1e-12


@variants
def test_same_seed_same_bits_and_another_seed_not(case: Case) -> None:
    first, again, other = (_noisy_run(case, seed, 15) for seed in (0, 0, 1))
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.y, again.y)
    assert not torch.equal(first.y, other.y)


@variants
def test_a_state_dict_in_mid_run_changes_nothing(case: Case) -> None:
    whole = _noisy_run(case, 3, 20)
    half = _noisy_run(case, 3, 11)
    state = copy.deepcopy(half.state_dict())
    half.step()  # the saved state is a copy, not a view
    resumed = _noisy_run(case, 4, 0)
    resumed.load_state_dict(state)
    assert resumed.k == 11
    for _ in range(9):
        resumed.step()
    assert torch.equal(resumed.x, whole.x)
    assert torch.equal(resumed.y, whole.y)


def test_a_state_of_another_method_is_refused() -> None:
    f2sa, f3sa = (_noisy_run(BY_NAME[name], 0, 2) for name in ("f2sa", "f3sa"))
    with pytest.raises(StateError, match=r"saved by 'F2SA'.*runs 'F3SA'"):
        f3sa.load_state_dict(f2sa.state_dict())


def _twice_is_too_often() -> bilevel.Problem:
    half_square: Any = OnceDifferentiable.apply
    return bilevel.Problem(
        lambda x, y, b: half_square(y - 1).sum(),
        lambda x, y, b: half_square(y - x).sum(),
    )


@only(1)
def test_first_order_methods_never_differentiate_twice(case: Case) -> None:
    start = torch.zeros(3, dtype=torch.float64)
    problem = _twice_is_too_often()
    calmer = {"upper_lr": 0.5} if case.name in ("vpbgd", "meha") else {}
    solver = bilevel.Solver(problem, case.method(**calmer), start, start)
    for _ in range(case.steps):
        solver.step(measure=False)
        if (solver.x - 1).abs().max() < 1e-2:
            return
    pytest.fail(f"{solver.x} is not yet 1 after {case.steps} steps")


@only(2)
def test_second_order_methods_say_that_they_must(case: Case) -> None:
    start = torch.zeros(3, dtype=torch.float64)
    solver = bilevel.Solver(_twice_is_too_often(), case.method(), start, start)
    with pytest.raises(ObjectiveError, match="differentiated twice"):
        solver.step()


@variants
def test_measuring_does_not_change_the_run(case: Case) -> None:
    measured, not_measured = _noisy_run(case, 0, 6), _noisy_run(case, 0, 0)
    for _ in range(6):
        not_measured.step(measure=False)
    assert torch.equal(measured.x, not_measured.x)
    assert torch.equal(measured.y, not_measured.y)


@variants
def test_leaves_no_gradients_and_no_flags_behind(case: Case) -> None:
    solver = _noisy_run(case, 0, 3)
    for leaf in (*solver.state.x.leaves, *solver.state.solution.leaves):
        assert leaf.grad is None
        assert leaf.requires_grad
    assert not solver.x.requires_grad


FLAT = """
import gc, json, resource, sys, torch, bilevel
torch.set_num_threads(1)
problem = bilevel.problems.Quadratic(dim_x=2, dim_y=2, sigma_f=0.1, sigma_g=0.1)
method = bilevel.METHODS[sys.argv[1]](**json.loads(sys.argv[2]))
solver = bilevel.Solver(problem, method, problem.x0, problem.y0,
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
