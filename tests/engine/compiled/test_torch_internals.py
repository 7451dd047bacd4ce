"""The uses of torch's internals, and what happens where torch is built differently or fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.codecache import CppWrapperCodeCache
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.exc import CppCompileError
from torch._inductor.utils import fresh_cache

from bilevel import F2SA, Problem
from bilevel.engine.compiled import torch_internals as internals
from bilevel.engine.compiled import tracing
from bilevel.engine.compiled.torch_internals import Later, NotCompiledError, built_in_background
from bilevel.errors import CompileWarning
from tests.engine.compiled.common import (
    SETTINGS,
    assert_same,
    compiler,
    evaluator,
    graphs,
    lower,
    solver,
    upper,
)


def test_a_function_is_waited_for_once() -> None:
    waits: list[int] = []

    def get() -> Callable[[int], int]:
        waits.append(1)
        return lambda number: number + 1

    later = Later(get)
    assert waits == []
    assert [later(1), later(2), later.function(3)] == [2, 3, 4]
    assert waits == [1]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError("no space left"), NotCompiledError),
        (ImportError("undefined symbol"), NotCompiledError),
        (KeyboardInterrupt("stop"), KeyboardInterrupt),
        (TypeError("a mistake of ours"), TypeError),
    ],
)
def test_errors_of_the_compiler_refuse_and_others_pass(
    error: BaseException, raised: type[BaseException]
) -> None:
    def get() -> Callable[..., Any]:
        raise error

    with pytest.raises(raised, match=str(error)):
        Later(get)()


@pytest.mark.skipif(not internals.tried(), reason="with this torch the shortcut is not taken")
def test_nobody_waits_inside_and_torch_is_as_it_was_after(monkeypatch: pytest.MonkeyPatch) -> None:
    before = CppWrapperCodeCache.load_pybinding
    with built_in_background():
        with pytest.raises(KeyError), built_in_background():
            raise KeyError
        assert CppWrapperCodeCache.load_pybinding != before
    assert CppWrapperCodeCache.load_pybinding == before
    assert "load_pybinding" not in vars(CppWrapperCodeCache)
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    with built_in_background():
        assert CppWrapperCodeCache.load_pybinding == before


@pytest.mark.parametrize(
    ("version", "tried"),
    [("2.10.1", False), ("2.11.0+cu128", True), ("2.13.1", True), ("2.14.0a0", False)],
)
def test_shortcuts_are_taken_only_with_versions_that_were_tried(
    version: str, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert internals.tried() == tried


@compiler
def test_without_the_shortcuts_steps_are_compiled_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "tried", lambda: False)
    runs = [solver(F2SA(**SETTINGS), compile=c) for c in (False, True)]
    assert_same(runs, 3)
    assert evaluator(runs[1]).compilations == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch while it is imported
@pytest.mark.parametrize(
    "internal",
    [
        "torch._dynamo.symbolic_convert.TensorifyState",
        "torch._inductor.compile_fx.compile_fx_inner",
    ],
)
def test_a_run_goes_on_where_an_internal_is_missing(
    internal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [solver(F2SA(**SETTINGS), compile=c) for c in (False, True)]
    monkeypatch.delattr(internal)
    with pytest.warns(CompileWarning):
        runs[1].step()
    runs[0].step()
    assert_same(runs, 2, rtol=0, atol=0)


@graphs
def test_a_setting_that_torch_does_not_know_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(internals.TRACING, "unknown_setting", True)
    runs = [solver(F2SA(**SETTINGS), compile=c) for c in (False, True)]
    with pytest.warns(CompileWarning, match="lacks an internal: .*unknown_setting"):
        assert_same(runs, 2, rtol=0, atol=0)


def test_only_an_assertion_of_this_package_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    run = solver(F2SA(**SETTINGS), compile=True)
    with pytest.raises(AssertionError) as ours:
        tracing.Traced(len, torch.device("cpu"))
    with pytest.raises(AssertionError):
        internals.refusal(ours.value)
    refusal = internals.refusal(AssertionError("of torch"))
    assert str(refusal) == "AssertionError: of torch"

    def fails(*arguments: Any) -> Any:
        raise AssertionError("of torch")

    monkeypatch.setattr(tracing, "compile_graph", fails)
    with pytest.warns(CompileWarning, match="of torch"):
        run.step()


WEIGHTS = [0.1 * i for i in range(3 * 20)]


@compiler
def test_constant_tensors_reach_the_kernels() -> None:
    """The kernels take a tensor made of Python numbers as an argument that no caller has."""

    def weighted(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        penalties = torch.tensor(WEIGHTS, dtype=torch.float64).view(20, 3)
        return lower(x, y, batch) + 0.01 * (penalties * y**2).sum()

    problem = Problem(upper, weighted)
    runs = [solver(F2SA(**SETTINGS), compile=c, problem=problem) for c in (False, True)]
    assert_same(runs, 4)
    evaluator(runs[1])


@compiler
def test_all_is_begun_before_any_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    in_background = internals._in_background

    class Watched:
        def __init__(self, build: Callable[[], None]) -> None:
            events.append("begun")
            self._future = in_background(build)

        def result(self) -> None:
            events.append("waited for")
            self._future.result()

    monkeypatch.setattr(internals, "_in_background", Watched)
    runs = [solver(F2SA(**SETTINGS), compile=c) for c in (False, True)]
    with fresh_cache():
        assert_same(runs, 2)
    assert evaluator(runs[1]).compilations == 3  # the inner step, that of x, and what is reported
    assert events == ["begun"] * 3 + ["waited for"] * 3


@compiler
@pytest.mark.parametrize("broken", [0, 1], ids=["the inner step", "the step of x"])
def test_a_run_goes_on_where_the_compiler_fails(
    broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of a step, of which the first part was compiled."""
    build = CppBuilder.build
    programs: list[str] = []

    def failing(self: CppBuilder) -> None:
        if self.get_target_file_path().endswith(".main.so"):
            programs.append(self.get_target_file_path())
            if programs.index(self.get_target_file_path()) == broken:
                raise CppCompileError(["g++"], "no space left on device")
        build(self)

    monkeypatch.setattr(CppBuilder, "build", failing)
    runs = [solver(F2SA(**SETTINGS), compile=c) for c in (False, True)]
    with fresh_cache(), pytest.warns(CompileWarning, match="CppCompileError"):
        assert_same(runs, 3)
    assert not runs[1].evaluator._works
    assert torch.is_grad_enabled()
