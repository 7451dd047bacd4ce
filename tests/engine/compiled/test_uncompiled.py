"""What cannot be compiled runs as it is, after one warning that says why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.data import DataLoader

import bilevel
from bilevel import F2SA, Problem, Solver
from bilevel.errors import CompileWarning
from tests.engine.compiled import common
from tests.engine.compiled.common import (
    DATA,
    LOWER_DATA,
    SCHEMES,
    SETTINGS,
    UPPER_DATA,
    assert_same,
    graphs,
    lower,
    solver,
    upper,
)
from tests.marks import slow_except


@graphs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", ["x", "y"])
@pytest.mark.parametrize("unchanged", [False, True])
def test_what_looks_at_values_is_not_compiled(
    level: str, unchanged: bool, dtype: torch.dtype
) -> None:
    """In double precision torch knows the values when it traces; they move while nobody asks."""

    def g(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        number = x if level == "x" else y
        return (2 if number.item() < -1 else 1) * (y - x) ** 2

    x0, y0 = torch.tensor(-2.0, dtype=dtype), torch.tensor(-3.0, dtype=dtype)
    method = F2SA(inner_steps=3, lower_lr=0.05, upper_lr=0.1, multiplier=10.0)
    runs = [
        Solver(Problem(lambda x, y, batch: (y - 1) ** 2, g), x0, y0, method=method, compile=c)
        for c in (False, True)
    ]

    def take_steps(run: Solver) -> None:
        with run.assume_unchanged() if unchanged else nullcontext():
            for _ in range(8):
                run.step()

    take_steps(runs[0])
    with pytest.warns(CompileWarning, match="look at the value of a tensor"):
        take_steps(runs[1])
    assert float(runs[0].x) > -1
    assert float(runs[0].y) > -1
    assert torch.equal(runs[0].x, runs[1].x)
    assert torch.equal(runs[0].y, runs[1].y)


@pytest.mark.slow
@graphs
def test_an_error_of_the_objectives_is_theirs_also_when_others_were_compiled() -> None:
    """The last minibatch is too small for what the objectives do; torch notices when it traces."""

    def g(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return (batch.view(2, -1).mean(0).mean() * (y - x) ** 2).sum() + (y**2).sum()

    run = Solver(
        Problem(lambda x, y, batch: ((y - 1) ** 2).sum(), g),
        torch.zeros(2), torch.zeros(2), method=F2SA(inner_steps=2, lower_lr=0.1, upper_lr=0.1),
        lower_data=DataLoader(torch.ones(5, 1), batch_size=4), compile=True,
    )  # fmt: skip
    with (
        pytest.warns(CompileWarning),
        pytest.raises(RuntimeError, match=r"^shape '\[2, -1\]' is invalid for input of size 1$"),
    ):
        run.step()


def test_a_table_runs_as_it_is_after_one_warning() -> None:
    def weighted(x: bilevel.Table, y: Tensor, batch: Any) -> Tensor:
        rows, targets, index = batch
        return (x[index].sigmoid() * (rows @ y - targets) ** 2).mean() + 0.1 * (y**2).sum()

    y0 = torch.zeros(3, dtype=torch.float64)
    with pytest.warns(CompileWarning, match="the rows of a table"):
        run = Solver(
            Problem(upper, weighted),
            bilevel.Table(torch.zeros(20, dtype=torch.float64)),
            y0,
            method=F2SA(**SETTINGS),
            upper_data=UPPER_DATA,
            lower_data=LOWER_DATA,
            batch_size=4,
            compile=True,
        )
    run.step()
    assert run.k == 1


def branches(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    value = lower(x, y, batch)
    return value if value.item() > 0 else 2 * value


def draws(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return lower(x, dropout(y, 0.3), batch)


class Remembers:
    """Keeps a tensor of its own from one call to the next."""

    def __init__(self) -> None:
        self.mean = torch.zeros((), dtype=torch.float64)

    def __call__(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        value = lower(x, y, batch)
        self.mean = 0.9 * self.mean + 0.1 * value.detach()
        return value + 0.01 * self.mean * (y**2).sum()


UNCOMPILABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "branches": (lambda: branches, "look at the value of a tensor"),
    "random": (lambda: draws, r"the objectives draw random numbers"),
    "remembers": (Remembers, r"the objectives keep tensors"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "reason"), UNCOMPILABLE.values(), ids=list(UNCOMPILABLE))
@pytest.mark.parametrize("data", [{}, DATA["loaders"]], ids=["rows", "loaders"])
def test_what_cannot_be_compiled_runs_as_it_is_after_one_warning(
    make: Callable[[], Any], reason: str, data: dict[str, Any]
) -> None:
    eager, compiled = (
        solver(SCHEMES["forward"], compile=c, problem=Problem(upper, make()), **data)
        for c in (False, True)
    )
    with pytest.warns(CompileWarning, match=reason) as caught:
        compiled.step()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    for _ in range(3):
        compiled.step()
    for _ in range(4):
        eager.step()
    assert torch.equal(eager.x, compiled.x)
    assert torch.equal(eager.y, compiled.y)


@graphs
@pytest.mark.parametrize(
    "name", slow_except(["a sweep"], ["rows", "larger batches", "a sweep", "loaders"])
)
def test_an_x_direction_that_cannot_be_compiled_goes_on_from_the_inner_steps(name: str) -> None:
    def only_in_y(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        value = lower(x, y, batch)
        return branches(x, y, batch) if x.requires_grad else value

    problem = Problem(upper, only_in_y)
    data = DATA.get(name, {})
    runs = [solver(SCHEMES["forward"], compile=c, problem=problem, **data) for c in (False, True)]
    with pytest.warns(CompileWarning, match="look at the value of a tensor"):
        assert_same(runs, 1)
    assert_same(runs, 3)


UNSUPPORTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "f3sa": (bilevel.F3SA(), {}, "F3SA cannot run compiled steps"),
    "lower optimizer": (
        F2SA(lower_optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
        {},
        "lower_optimizer decides how y moves",
    ),
    "accumulate": (F2SA(), {"accumulate": True}, "accumulate takes the terms of Phi apart"),
    "loss scale": (F2SA(), {"loss_scale": bilevel.LossScale()}, "loss_scale decides after each"),
    "chunks": (F2SA(), {"chunk_size": 2}, "chunk_size takes minibatches apart"),
}


@pytest.mark.parametrize(
    ("method", "options", "reason"), UNSUPPORTED.values(), ids=list(UNSUPPORTED)
)
def test_what_has_no_compiled_form_says_so(
    method: Any, options: dict[str, Any], reason: str
) -> None:
    with pytest.warns(CompileWarning, match=reason) as caught:
        compiled = solver(method, compile=True, **options)
    assert len(caught) == 1
    assert caught[0].filename == common.__file__  # where the solver is made
    eager = solver(method, compile=False, **options)
    for _ in range(3):
        eager.step()
        compiled.step()
    assert torch.equal(eager.x, compiled.x)


def test_an_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.1")
    with pytest.warns(CompileWarning, match=r"torch is 2\.8\.1, and compiled steps need 2\.11"):
        solver(F2SA(), compile=True)


@pytest.mark.parametrize("compile", [1, "yes", None])
def test_compile_is_yes_or_no(compile: Any) -> None:
    with pytest.raises(bilevel.errors.ArgumentTypeError, match=r"compile must be True or False"):
        solver(F2SA(), compile=compile)
