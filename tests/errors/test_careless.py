"""Careless use: what cannot work is refused at the door, by an error that says what to do."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bilevel
from bilevel import F2SA, Problem, Solver
from bilevel.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    OutputError,
)


def upper(x: Any, y: Any, batch: Any) -> Tensor:
    return ((y - 1) ** 2).mean()


def lower(x: Any, y: Any, batch: Any) -> Tensor:
    return ((y - x) ** 2).mean()


def run(x0: Any = None, y0: Any = None, **options: Any) -> bilevel.Result:
    x0 = torch.zeros(3) if x0 is None else x0
    y0 = torch.zeros(3) if y0 is None else y0
    problem = Problem(options.pop("upper", upper), options.pop("lower", lower))
    return bilevel.minimize(problem, x0, y0, steps=2, **options)


def _no_arguments() -> Any:
    return 0.1


def _two_arguments(x: Any, y: Any) -> Any:
    return y.sum()


_of_none: Any = _no_arguments
_of_two: Any = _two_arguments
WRONG_FUNCTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "upper": (lambda: Problem(_of_two, lower), r"upper must be a function of \(x, y,"),
    "lower": (lambda: Problem(upper, _of_none), r"lower must be a function of \(x, y, batch\)"),
    "x_set": (
        lambda: Solver(Problem(upper, lower, x_set=lambda: 0), torch.zeros(3), torch.zeros(3)),
        "x_set must be a callable that projects a tensor",
    ),
    "lower_lr": (lambda: F2SA(lower_lr=_of_none), "lower_lr must be a positive number or a fun"),
    "multiplier": (
        lambda: F2SA(multiplier=_of_two),
        "multiplier must be a positive number",
    ),
    "lower_optimizer": (
        lambda: F2SA(lower_optimizer=_of_none),
        "lower_optimizer must be a function of the parameters",
    ),
    "callback": (
        lambda: run(callback=lambda solver: None),
        r"callback must be a function of \(solver, info\)",
    ),
    "lower_data": (
        lambda: run(lower_data=lambda: None),
        "lower_data must be a function of one arg",
    ),
}


@pytest.mark.parametrize("name", WRONG_FUNCTIONS)
def test_functions_of_other_arguments_are_refused(name: str) -> None:
    call, said = WRONG_FUNCTIONS[name]
    with pytest.raises(ArgumentTypeError, match=said):
        call()


@pytest.mark.parametrize("answer", [torch.zeros(2), np.zeros(2)], ids=["tensor", "array"])
def test_a_callback_that_returns_neither_true_nor_false_is_told_so(answer: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="callback must return True to end the run"):
        run(callback=lambda solver, info: answer)


class Promise:
    """What calling an async function gives; it is true, and its work has not begun."""

    def __await__(self) -> Iterator[None]:
        yield


def test_a_callback_that_would_have_to_be_awaited_ends_no_run() -> None:
    with pytest.raises(ArgumentTypeError, match="callback must return True to end the run"):
        run(callback=lambda solver, info: Promise())


@pytest.mark.parametrize("data", ["data.csv", b"data"], ids=["text", "bytes"])
def test_text_is_no_data(data: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="lower_data must be a tensor"):
        run(lower_data=data)


def _through(y: Any) -> dict[str, Any]:
    return {
        "y0": y,
        "upper": lambda x, y, batch: ((y(torch.ones(1, 3)) - 1) ** 2).sum(),
        "lower": lambda x, y, batch: (y(x[None]) ** 2).sum(),
    }


@pytest.mark.parametrize(
    ("x0", "said"),
    [
        (torch.zeros(3).to(torch.float8_e4m3fn), "16 bits or more can be moved"),
        (torch.zeros(3).to(torch.complex64), "has dtype torch.complex64"),
    ],
    ids=["float8", "complex"],
)
def test_types_in_which_no_step_can_be_computed_are_refused(x0: Tensor, said: str) -> None:
    with pytest.raises(ArgumentTypeError, match=said):
        run(x0=x0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(ArgumentTypeError, match="x is a nested tensor"):
        run(x0=nested)


def test_modules_without_shapes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="weight has no shape yet; call the lazy module once"):
        run(**_through(nn.LazyLinear(1)))


def _scripted() -> nn.Module:
    scripted: nn.Module = torch.jit.script(nn.Linear(3, 1))
    return scripted


def _normed() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(3, 1))


def _locked() -> nn.Module:
    module = nn.Linear(3, 1)
    module.lock = threading.Lock()  # type: ignore[assignment]
    return module


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("build", [_scripted, _normed, _locked])
def test_modules_that_cannot_be_copied_can_be_built(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(ArgumentError, match=r"y cannot be copied: .* such as y0=lambda: build\(\)"):
        run(**_through(build()))
    assert run(**_through(build)).steps == 2


BUILT_ONCE = torch.zeros(3)
BUILT_BADLY: dict[str, tuple[Callable[[], Tensor], str]] = {
    "shared": (lambda: BUILT_ONCE, "the same tensors twice"),
    "a view": (lambda: BUILT_ONCE.view(3), "the same tensors twice"),
    "computed": (lambda: 2 * torch.zeros(3, requires_grad=True), "results of a computation"),
}


@pytest.mark.parametrize("variable", ["x", "y"])
@pytest.mark.parametrize("method", ["f2sa", "aid"])  # with two copies of y and with one
@pytest.mark.parametrize("name", BUILT_BADLY)
def test_a_function_that_builds_no_copies_is_refused(name: str, method: str, variable: str) -> None:
    build, message = BUILT_BADLY[name]
    with pytest.raises(ArgumentError, match=f"{variable}0 is a function .* gave {message}"):
        run(method=method, **{f"{variable}0": build})
    assert not BUILT_ONCE.any()


def test_a_function_that_builds_other_shapes_is_refused() -> None:
    sizes = iter((3, 4))
    with pytest.raises(ArgumentError, match=r"the shapes \[\(3,\)\] and then of \[\(4,\)\]"):
        run(y0=lambda: torch.zeros(next(sizes)))


def test_what_a_function_builds_need_not_require_gradients() -> None:
    built, given = run(x0=lambda: torch.zeros(3), y0=lambda: torch.zeros(3)), run()
    assert torch.equal(built.x, given.x)
    assert not built.x.requires_grad


@pytest.mark.parametrize("path", ["", "a\0b", "a\udc80"], ids=["empty", "null", "no UTF-8"])
def test_paths_that_would_lose_a_run_are_refused(path: str) -> None:
    with pytest.raises(ArgumentError, match="must be a path"):
        run(checkpoint=path)
    with pytest.raises(ArgumentError, match="must be a path"):
        Solver(Problem(upper, lower), torch.zeros(3), torch.zeros(3)).save(path)


@pytest.mark.parametrize("path", [".", "/"])
def test_a_state_is_not_saved_as_a_folder(path: str) -> None:
    with pytest.raises(OutputError, match="it is a folder"):
        Solver(Problem(upper, lower), torch.zeros(3), torch.zeros(3)).save(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in folders")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="it is a pipe or a device"):
        Solver(Problem(upper, lower), torch.zeros(3), torch.zeros(3)).load(tmp_path / "pipe")
