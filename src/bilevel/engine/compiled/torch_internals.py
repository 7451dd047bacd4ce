"""Every use of torch's internals in compiled steps, in one file.

Each part below says what it does, why, and what happens with a torch that is built differently.
All of them were tried with torch 2.11.0 and 2.13.0. Elsewhere one rule holds: what only saves time
is left out, and where a result would depend on an internal that is missing, torch's error becomes
a :class:`NotCompiledError`, after which the run goes on eagerly.
"""

from __future__ import annotations

import functools
import operator
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule

from bilevel.engine.execution import NotCompiledError
from bilevel.errors.extras import torch_version

TRIED = ((2, 11), (2, 13))
"""The first and the last minor version of torch with which the shortcuts were tried."""

READS_VALUES = "the objectives look at the value of a tensor, as item() or an if does"

Code: TypeAlias = Callable[[tuple[Any, ...]], Any]
"""A function of all arguments in one tuple. It works in place, and its return value is not used."""


def tried() -> bool:
    """Whether the shortcuts were tried with this version of torch; if not, they are not taken."""
    first, last = TRIED
    return first <= torch_version() <= last


def output_of(graph: GraphModule) -> Any:
    """What a graph returns."""
    return graph.graph.output_node().args[0]


# --------------------------------------------------------------------------------------------------
# Errors. torch.compile has no public base class for what it raises.


@functools.cache
def compile_errors() -> tuple[type[Exception], ...]:
    """What ``torch.compile`` raises where it cannot compile a function.

    Dynamo wraps most errors into subclasses of RuntimeError. It lets its own assertions, indices
    out of range and, as the only class of its own without a base, a full cache through.
    """
    from torch._dynamo import exc

    full_cache = getattr(exc, "FailOnRecompileLimitHit", RuntimeError)
    return (RuntimeError, IndexError, AssertionError, full_cache)


BUILD_ERRORS = (RuntimeError, OSError, ImportError)
"""What can happen while C++ is compiled, written to a file and loaded."""


def refusal(error: Exception) -> NotCompiledError:
    """The reason, in one line, behind an error of torch; an assertion of this package is raised."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NotCompiledError):
            return cause
        if isinstance(cause, GuardOnDataDependentSymNode):
            return NotCompiledError(READS_VALUES)
        if isinstance(cause, AssertionError) and _raised_here(cause):
            raise cause
        cause = getattr(cause, "inner_exception", None) or cause.__cause__ or cause.__context__
    while getattr(error, "inner_exception", None) is not None:  # the wrapper only names the backend
        error = error.inner_exception  # type: ignore[attr-defined]
    first_line = next(iter(str(error).strip().splitlines()), "")
    return NotCompiledError(f"{type(error).__name__}: {first_line}")


def _raised_here(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return bool(module.startswith(__package__))


# --------------------------------------------------------------------------------------------------
# Tracing. Results depend on this part: without these settings and states nothing is compiled.


TRACING = {
    "trace_autograd_ops": True,  # torch.autograd.grad is part of a step
    "specialize_float": True,  # floats are constants: to find out which vary takes another trace
}
"""Settings of dynamo."""


@contextmanager
def settings_of_tracing() -> Iterator[None]:
    """Inside, dynamo has these settings, and no list of values left by another function."""
    with ExitStack() as stack:
        try:
            from torch._dynamo.symbolic_convert import TensorifyState

            stack.enter_context(torch._dynamo.config.patch(TRACING))
            TensorifyState.clear()
        except (ImportError, AttributeError) as error:
            raise NotCompiledError(
                f"torch {torch.__version__} lacks an internal: {error}"
            ) from error
        yield


@contextmanager
def traced_once(graph: GraphModule) -> Iterator[None]:
    """Refuse a graph that holds for certain values only; inside, torch does not trace it again.

    Values of tensors change between two checks of the guards. Of a float64 tensor without a
    dimension on a CPU torch keeps what its ``item()`` would be, and where nobody asks for it traces
    a second time, with the values on a list as constants. That second trace omits the last write to
    the tensor, such as a step that moves it (seen with torch 2.13). Torch does not trace again for
    what is on the list already, so everything is put there.
    """
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch._guards import TracingContext
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    fake_mode = TracingContext.get().fake_mode
    if fake_mode is None or fake_mode.shape_env is None:
        raise NotCompiledError(f"torch {torch.__version__} keeps no record of symbolic values")
    shapes = fake_mode.shape_env
    values = (node.meta.get("example_value") for node in graph.graph.nodes)
    symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
    used = [value.node.expr for value in values if isinstance(value, symbolic)]
    for expression in [*used, *(guard.expr for guard in shapes.guards)]:
        if expression.free_symbols - free_unbacked_symbols(expression):
            raise NotCompiledError(READS_VALUES)
    if not TensorifyState.empty():  # this is a second trace, or uses the list of another function
        raise NotCompiledError("torch leaves out what is written to tensors without a dimension")
    try:
        for symbol in shapes.var_to_sources:
            TensorifyState.specialize(str(symbol))
        yield
    finally:
        TensorifyState.clear()


# --------------------------------------------------------------------------------------------------
# Kernels. If compile_fx changes, dynamo reports that the backend failed, and nothing is compiled.


def compile_kernels(
    graph: GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    prepare: Callable[[GraphModule], dict[str, Any]],
) -> Callable[[tuple[Any, ...]], Code]:
    """Compile a graph with inductor; the result gives the code once it is told real arguments.

    Args:
        graph, inputs: what dynamo gives to a backend.
        options: settings of inductor.
        prepare: rewrites a graph of primitive operations, and returns more settings for it.
    """
    from torch._functorch import config as autograd_config
    from torch._inductor import compile_fx, config

    kernels: list[Any] = []

    def compile_primitives(primitives: GraphModule, inputs: Any, **arguments: Any) -> Any:
        settings = prepare(primitives)
        with built_in_background(), config.patch(settings):
            compiled = compile_fx.compile_fx_inner(primitives, inputs, **arguments)
        if not output_of(primitives):
            kernels.append(compiled)
        return compiled

    # The cache of autograd would return a result without calling compile_primitives.
    with autograd_config.patch(enable_autograd_cache=False):
        wrapped: Any = compile_fx.compile_fx(
            graph, inputs, inner_compile=compile_primitives, config_patches=dict(options)
        )
    return functools.partial(_shortest, wrapped, kernels)


def sort_nodes(graph: Graph) -> None:
    """Sort the nodes so that each follows its inputs, and move no more of them than necessary."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


# --------------------------------------------------------------------------------------------------
# Shorter calls. They save time only: with 32 rows of 20 features an inner step takes 1.7 times as
# long without _shortest and 1.2 times as long without _direct; with 50 rows of 784 features, 1.2
# and 1.1 times. With another torch they are not taken.


def _shortest(wrapped: Callable[..., Any], kernels: list[Any], arguments: tuple[Any, ...]) -> Code:
    """The kernels themselves, where the wrapper around them only hands its arguments on.

    Whether it does is seen by calling it once with a function that records in place of the kernel.
    It has no outputs to look after, because everything is written in place.
    """
    handed_on: list[tuple[Any, ...]] = []

    def record(inputs: list[Any]) -> tuple[()]:
        handed_on.append(tuple(inputs))
        return ()

    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    if tried() and len(kernels) == 1 and not autocast:
        (kernel,) = kernels
        run = kernel.current_callable
        kernel.current_callable = record
        try:
            wrapped(*arguments)
        finally:
            kernel.current_callable = run
        same = [len(seen) for seen in handed_on] == [len(arguments)]
        if same and all(map(operator.is_, handed_on[0], arguments)):
            return _direct(run, arguments)
    return lambda inputs: wrapped(*inputs)


def _direct(run: Callable[[list[Any]], Any], arguments: tuple[Any, ...]) -> Code:
    """The C++ function itself, where the generated Python function only hands handles to it.

    The Python function also converts arguments that are not tensors, appends the constant tensors
    of its module, and unpacks outputs. Without any of these it is not needed.
    """
    cells = [cell.cell_contents for cell in getattr(run, "__closure__", None) or ()]
    if len(cells) == 1 and isinstance(cells[0], Later):
        (entry,) = cells
        names, module = run.__code__.co_names, run.__globals__
        constants = any(isinstance(module.get(name), torch.Tensor) for name in names)
        if not constants and all(isinstance(argument, torch.Tensor) for argument in arguments):
            handles: Callable[..., Any] = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
            return lambda inputs: entry.function(handles(inputs))
    return lambda inputs: run(list(inputs))


# --------------------------------------------------------------------------------------------------
# Compiling C++. This part saves time only.


class Later:
    """A function whose C++ is still being compiled. The first call waits for the compiler."""

    def __init__(self, get: Callable[[], Callable[..., Any]]) -> None:
        self._get = get

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function itself."""
        try:
            return self._get()
        except BUILD_ERRORS as error:
            raise refusal(error) from error

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


@contextmanager
def built_in_background() -> Iterator[None]:
    """Inside, torch hands on a :class:`Later` where it would wait for the C++ compiler.

    An outer step consists of two graphs or more. So Python traces the second while the C++ of the
    first is compiled. With another torch each is waited for.
    """
    if not tried():
        yield
        return
    from torch._inductor.codecache import CppWrapperCodeCache

    cache: Any = CppWrapperCodeCache
    before = vars(cache).get("load_pybinding")

    def load(*arguments: Any, **options: Any) -> Later:
        return Later(cache.load_pybinding_async(*arguments, **options, submit_fn=_in_background))

    cache.load_pybinding = load
    try:
        yield
    finally:
        if before is None:  # the method is inherited
            del cache.load_pybinding
        else:
            cache.load_pybinding = before


def _in_background(build: Callable[[], None]) -> Future[None]:
    """Run it in a thread of its own, which does nothing but wait for a compiler."""
    thread = ThreadPoolExecutor(1)
    future = thread.submit(build)
    thread.shutdown(wait=False)
    return future


@functools.cache
def compiler_options() -> dict[str, Any]:
    """With a recent C++ compiler torch need not try out which vector instructions it knows."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        compiler = get_cpp_compiler()
        asked = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True)
        recent = int(asked.stdout.split(".")[0]) >= (15 if "clang" in compiler else 12)
    except (ImportError, RuntimeError, OSError, ValueError):  # a missing compiler is reported later
        recent = False
    return {"cpp.vec_isa_ok": True} if recent else {}
