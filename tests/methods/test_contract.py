"""Every property on every method in the table."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bilevel
from bilevel.errors import ObjectiveError, StateError
from bilevel.methods import METHODS
from bilevel.problems import Quadratic


@dataclass(frozen=True)
class Case:
    """A method with settings that suit the problems here, and how close it then comes."""

    name: str
    settings: dict[str, Any]
    steps: int

    def method(self, **more: Any) -> Any:
        return METHODS[self.name](**{**self.settings, **more})


CASES = [
    Case("f2sa", {"lower_lr": 0.5, "upper_lr": 0.3, "multiplier": 300.0}, steps=800),
    Case("f3sa", {"lower_lr": 0.5, "upper_lr": 0.03, "multiplier": 30.0}, steps=4000),
]
VARIANTS = [
    *CASES,
    Case("f2sa", {**CASES[0].settings, "single_pass": True, "inner_steps": 3}, steps=10),
    Case("f2sa", {**CASES[0].settings, "coupling": "independent", "inner_steps": 2}, steps=10),
    Case(
        "f2sa",
        {
            "inner_steps": 2,
            "lower_optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
            "upper_optimizer": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        },
        steps=10,
    ),
    Case("f2sa", {**CASES[0].settings, "scheme": "midpoint", "inner_steps": 2}, steps=10),
    Case("f2sa", {**CASES[0].settings, "scheme": "central", "order": 4}, steps=10),
    Case("f3sa", {**CASES[1].settings, "recursion": "combined"}, steps=10),
]


def _id(case: Case) -> str:
    return f"{case.name}-{'-'.join(k for k in case.settings if k not in CASES[0].settings)}"


cases = pytest.mark.parametrize("case", CASES, ids=_id)
variants = pytest.mark.parametrize("case", VARIANTS, ids=_id)


def test_the_table_is_covered() -> None:
    assert {case.name for case in CASES} == set(METHODS)
    for method in METHODS.values():
        assert method.properties.order in (1, 2)
        assert method.properties.reference


@cases
def test_finds_the_optimum(case: Case) -> None:
    problem = Quadratic(seed=0)
    result = bilevel.minimize(
        problem, problem.x0, problem.y0, method=case.method(), steps=case.steps, record_every=100
    )
    lam = case.settings["multiplier"]
    start = problem.gradient(problem.x0).norm()
    # solved as a penalised problem to the last digit, and as a bilevel one up to O(1 / lam)
    assert problem.penalised_gradient(result.x, lam).norm() < 1e-6 * start
    assert problem.gradient(result.x).norm() < 10 / lam * start


def _guises(problem: Quadratic) -> dict[str, tuple[bilevel.Problem, Any, Any]]:
    """The same quadratic with x and y as a tensor, as trees, as modules."""

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
    }


def _flat(value: Any) -> Tensor:
    if isinstance(value, dict):
        return torch.cat([value["a"], value["rest"][0]])
    return value().detach() if isinstance(value, nn.Module) else value


@variants
def test_tensors_trees_and_modules_give_the_same_iterates(case: Case) -> None:
    problem = Quadratic(dim_x=5, dim_y=5, sigma_f=0.1, sigma_g=0.1, seed=0)
    ends = {}
    for name, (guise, x0, y0) in _guises(problem).items():
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
    for name in ("tree", "module"):
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
        method=case.method(lower_lr=0.1, upper_lr=0.01, multiplier=5.0),
        steps=5,
    )
    assert result.x.dtype == dtype
    assert result.y.dtype == dtype
    assert result.x.abs().max() > 0


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
def test_same_seed_same_bits_and_another_seed_not(case: Case) -> None:
    first, again, other = (_noisy_run(case, seed, 15) for seed in (0, 0, 1))
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.y, again.y)
    assert not torch.equal(first.x, other.x)


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
    f2sa, f3sa = (_noisy_run(case, 0, 2) for case in CASES)
    with pytest.raises(StateError, match=r"saved by 'F2SA'.*runs 'F3SA'"):
        f3sa.load_state_dict(f2sa.state_dict())


class _OnceDifferentiable(torch.autograd.Function):
    """y^2 / 2 whose backward has no backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return 0.5 * (y * y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y


@cases
def test_first_order_methods_never_differentiate_twice(case: Case) -> None:
    half_square: Any = _OnceDifferentiable.apply
    problem = bilevel.Problem(
        lambda x, y, b: half_square(y - 1).sum(),
        lambda x, y, b: half_square(y - x).sum(),
    )
    start = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ObjectiveError, match="differentiated twice"):  # it really cannot be done
        bilevel.hypergradient(problem, start, start)
    result = bilevel.minimize(
        problem, start, start, method=case.method(upper_lr=0.03), steps=4000, record_every=1000
    )
    torch.testing.assert_close(result.x, torch.ones_like(start), atol=1e-3, rtol=0)


@cases
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


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
@cases
def test_memory_after_10000_steps_is_that_after_100(case: Case) -> None:
    settings = {"inner_steps": 1} if case.name == "f2sa" else {}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", FLAT, case.name, json.dumps(settings)],
        capture_output=True,
        text=True,
        check=True,
    )
    tensors, peak, later_tensors, later_peak = map(int, run.stdout.split())
    assert later_tensors == tensors
    assert later_peak - peak < 1000  # kilobytes: a tenth of one small tensor per step would show
