"""C++ that is compiled while something else goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.codecache import CppWrapperCodeCache
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.exc import CppCompileError
from torch._inductor.utils import fresh_cache

from bilevel import F2SA
from bilevel.engine.compiled import building
from bilevel.engine.compiled.building import Later, built_beside
from bilevel.errors import CompileWarning
from tests.engine.compiled.common import SETTINGS, assert_same, compiler, program, solver


def refusal(error: Exception) -> Exception:
    return LookupError(f"refused: {error}")


def test_a_function_is_waited_for_once() -> None:
    waits: list[int] = []

    def get() -> Callable[[int], int]:
        waits.append(1)
        return lambda number: number + 1

    later = Later(get, refusal)
    assert waits == []
    assert [later(1), later(2), later.function(3)] == [2, 3, 4]
    assert waits == [1]


def test_an_error_of_the_compiler_is_raised_as_what_it_comes_to() -> None:
    def get() -> Callable[..., Any]:
        raise OSError("no space left")

    with pytest.raises(LookupError, match="refused: no space left"):
        Later(get, refusal)()


def test_nobody_waits_inside_and_torch_is_as_it_was_after() -> None:
    before = CppWrapperCodeCache.load_pybinding
    with built_beside(refusal):
        with pytest.raises(KeyError), built_beside(refusal):
            raise KeyError
        assert CppWrapperCodeCache.load_pybinding != before
    assert CppWrapperCodeCache.load_pybinding == before
    assert "load_pybinding" not in vars(CppWrapperCodeCache)


@compiler
def test_all_is_begun_before_any_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    beside = building._beside

    class Watched:
        def __init__(self, build: Callable[[], None]) -> None:
            events.append("begun")
            self._future = beside(build)

        def result(self) -> None:
            events.append("waited for")
            self._future.result()

    monkeypatch.setattr(building, "_beside", Watched)
    runs = [solver(F2SA(**SETTINGS), compile=c) for c in (False, True)]
    with fresh_cache():
        assert_same(runs, 2)
    assert program(runs[1]).compilations == 3  # the inner step, that of x, and what is reported
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
    assert runs[1]._program is not None
    assert not runs[1]._program._works
    assert torch.is_grad_enabled()
