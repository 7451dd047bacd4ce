"""Functions that are traced and compiled once, and then run without being asked again."""

from __future__ import annotations

import functools
import operator
import subprocess
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

OPTIONS: dict[str, Any] = {
    "size_asserts": False,  # the guards have looked at every size
}
"""For the compiler of kernels, see ``torch._inductor.config``."""

CPU_OPTIONS: dict[str, Any] = {
    **OPTIONS,
    "cpp_wrapper": True,  # kernels are called from C++, and there is one file to compile, not ten
    "cpp_cache_precompile_headers": False,  # takes longer than compiling a few files without
}
"""The same on a CPU, where the time of a call counts."""


class NotCompiledError(Exception):
    """Why something cannot be compiled. It ends in a warning; no user sees it."""


class Ready(NamedTuple):
    """Compiled code and what it is called with."""

    code: Callable[..., Any]
    arguments: tuple[Any, ...]

    def run(self) -> None:
        """Do it; everything happens in place."""
        self.code(*self.arguments)

    def same(self, other: Ready | None) -> bool:
        """Whether it is the same code on the same tensors."""
        return (
            other is not None
            and self.code is other.code
            and all(map(operator.is_, self.arguments, other.arguments))
        )


class Traced:
    """A method that changes tensors in place and returns nothing, compiled.

    Calling it runs nothing. It checks whether what was compiled before is right for the arguments,
    by the guards that ``torch.compile`` keeps on everything the method saw when it was traced,
    compiles if not, and gives a :class:`Ready`, which may be run many times.
    """

    def __init__(self, method: Callable[..., None], device: torch.device) -> None:
        self._options = _cpu_options() if device.type == "cpu" else OPTIONS
        assert isinstance(method, types.MethodType)
        plain = method.__func__
        # a code object of its own: what is compiled lives as long as that, and no longer
        own = types.FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__)
        self._function = torch.compile(
            types.MethodType(own, method.__self__),
            backend=self._backend,
            fullgraph=True,
            dynamic=False,
        )
        self._ready: Ready | None = None
        self.compilations = 0

    def __call__(self, *arguments: Any) -> Ready:
        """What to run for these arguments."""
        from torch._dynamo.exc import Unsupported

        if self.compilations:
            with suppress(Unsupported):  # there is nothing yet for these arguments
                return self._ready_for(arguments)
        # numbers are taken as they are: to find out which may vary takes a second trace
        with torch._dynamo.config.patch(trace_autograd_ops=True, specialize_float=True):
            try:
                return self._ready_for(arguments)
            except Exception as error:  # whatever it is, the run can go on without
                while not isinstance(error, NotCompiledError) and error.__cause__ is not None:
                    error = error.__cause__  # type: ignore[assignment]
                reason = next(iter(str(error).strip().splitlines()), "")
                if not isinstance(error, NotCompiledError):
                    reason = f"{type(error).__name__}: {reason}"
                raise NotCompiledError(reason) from error

    def _ready_for(self, arguments: tuple[Any, ...]) -> Ready:
        self._ready = None
        self._function(*arguments)
        assert self._ready is not None, "the compiled function was not called"
        return self._ready

    def _backend(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What ``torch.compile`` calls with a new graph."""
        from torch._inductor.compile_fx import compile_fx

        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        if output.args[0]:
            raise NotCompiledError("the objectives keep tensors beside what they return")
        code: Any = compile_fx(graph, inputs, inner_compile=_compile, config_patches=self._options)
        self.compilations += 1

        def get_ready(*arguments: Any) -> tuple[()]:
            self._ready = Ready(code, arguments)
            return ()

        return get_ready


@functools.cache
def _cpu_options() -> dict[str, Any]:
    """With a compiler that knows every processor there is, the processor need not be tried out."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        compiler = get_cpp_compiler()
        asked = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True)
        recent = int(asked.stdout.split(".")[0]) >= (15 if "clang" in compiler else 12)
    except (RuntimeError, OSError, ValueError):  # no compiler at all will be noticed soon enough
        recent = False
    return {**CPU_OPTIONS, "cpp.vec_isa_ok": True} if recent else CPU_OPTIONS


def _compile(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """Compile a graph of primitive operations, unless it draws random numbers."""
    from torch._inductor.compile_fx import compile_fx_inner

    for node in graph.graph.nodes:
        # compiled code draws other numbers, and not the same ones for copies that share samples
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise NotCompiledError(f"the objectives draw random numbers ({node.target})")
    return compile_fx_inner(graph, inputs, **options)
