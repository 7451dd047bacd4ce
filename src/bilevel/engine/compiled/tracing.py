"""Functions that are traced and compiled once, and then run without being asked again."""

from __future__ import annotations

import functools
import gc
import operator
import subprocess
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch._guards import TracingContext

from bilevel.engine.compiled.building import Later, built_beside
from bilevel.engine.compiled.merging import merge_products, share_rows

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

OPTIONS: dict[str, Any] = {
    "size_asserts": False,  # the guards have looked at every size
}
"""For the compiler of kernels, see ``torch._inductor.config``."""

CPU_OPTIONS: dict[str, Any] = {
    **OPTIONS,
    "cpp_wrapper": True,  # kernels are called from C++, and there is one file to compile, not ten
    "cpp_cache_precompile_headers": False,  # takes longer than to compile a few files without
    "memory_planning": True,  # one allocation for what a call needs, not one for each part
}
"""The same on a CPU, where the time of a call counts."""


Code: TypeAlias = Callable[[tuple[Any, ...]], Any]
"""It takes the arguments together, and returns nothing of interest."""


FEW = 1 << 24
"""What needs fewer operations than this runs on one thread: a second costs more than it brings."""

ENTRY = 8
"""An entry of a tensor that is computed or copied counts as so many operations of a product."""


BY_VALUE = "the objectives look at the value of a tensor, as item() or an if does"


class Compiled(NamedTuple):
    """Compiled code, and whether it is better run by one thread ``alone``."""

    code: Code
    alone: bool


class NotCompiledError(Exception):
    """Why something cannot be compiled. It ends in a warning; no user sees it."""


class Ready(NamedTuple):
    """Compiled code, what it is called with, and whether it is better run by one thread.

    Everything happens in place.
    """

    code: Code
    arguments: tuple[Any, ...]
    alone: bool = False

    def same(self, other: Ready | None) -> bool:
        """Whether it is the same code on the same tensors."""
        return (
            other is not None
            and self.code is other.code
            and all(map(operator.is_, self.arguments, other.arguments))
        )


NOTHING = Ready(lambda inputs: None, ())
"""For a function in which nothing is computed."""


class Traced:
    """A method that changes tensors in place and returns nothing, compiled.

    Calling it runs nothing. It checks whether what was compiled before is right for the arguments,
    by the guards that ``torch.compile`` keeps on everything the method saw when it was traced,
    compiles if not, and gives a :class:`Ready`, which may be run many times.
    """

    def __init__(self, method: Callable[..., None], device: torch.device) -> None:
        assert isinstance(method, types.MethodType)
        plain = method.__func__
        # a code object of its own: what is compiled lives as long as that, and no longer
        own = types.FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__)
        self._backend = _Backend(device)
        with _uncollected():
            self._function = torch.compile(
                types.MethodType(own, method.__self__),
                backend=self._backend,
                fullgraph=True,
                dynamic=False,
            )

    @property
    def compilations(self) -> int:
        """How many times it was compiled."""
        return self._backend.compilations

    def __call__(self, *arguments: Any) -> Ready:
        """What to run for these arguments."""
        from torch._dynamo.symbolic_convert import TensorifyState

        if self.compilations:
            with suppress(Exception):  # there is nothing yet for these arguments
                return self._ready_for(arguments)
        with (
            # numbers are taken as they are: to find out which may vary takes another trace
            torch._dynamo.config.patch(trace_autograd_ops=True, specialize_float=True),
            warnings.catch_warnings(),
            _uncollected(),
        ):
            warnings.simplefilter("ignore")  # what torch says to itself while it compiles
            TensorifyState.clear()  # it outlives a trace, and may be that of another function
            try:
                return self._ready_for(arguments)
            except Exception as error:  # whatever it is, the run can go on without
                raise _refusal(error) from error

    def _ready_for(self, arguments: tuple[Any, ...]) -> Ready:
        self._backend.ready = NOTHING
        with torch.enable_grad():
            self._function(*arguments)
        return self._backend.ready


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, Python does not look for garbage.

    A compiler's modules and graphs are millions of objects, of which little is garbage; to look
    through them again and again is a tenth of the time until a step comes from the cache.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Backend:
    """What ``torch.compile`` calls with a new graph.

    It knows nothing of the function: torch keeps it with the code of the function, where no garbage
    collector would find a circle.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self.ready = NOTHING
        self.compilations = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if _outputs(graph):
            raise NotCompiledError("the objectives keep tensors beside what they return")
        fake_mode = TracingContext.get().fake_mode
        assert fake_mode is not None
        assert fake_mode.shape_env is not None
        _refuse_values(graph, fake_mode.shape_env)
        with _traced_once(fake_mode.shape_env):
            compiled = compile_graph(graph, inputs, _cpu_options() if self._on_cpu else OPTIONS)
        self.compilations += 1
        found: Compiled | None = None

        def get_ready(*arguments: Any) -> tuple[()]:
            nonlocal found
            if found is None:
                found = compiled(arguments)
            self.ready = Ready(found.code, arguments, found.alone and self._on_cpu)
            return ()

        return get_ready


def _refuse_values(graph: torch.fx.GraphModule, shapes: ShapeEnv) -> None:
    """Refuse a graph that holds for certain values of tensors: they move between two guards."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    numbers = (node.meta.get("example_value") for node in graph.graph.nodes)
    symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
    used = [number.node.expr for number in numbers if isinstance(number, symbolic)]
    for expression in [*used, *(guard.expr for guard in shapes.guards)]:
        if expression.free_symbols - free_unbacked_symbols(expression):
            raise NotCompiledError(BY_VALUE)


@contextmanager
def _traced_once(shapes: ShapeEnv) -> Iterator[None]:
    """Inside, torch does not trace a second time to take values for constants.

    Of a float64 tensor without a dimension on a CPU torch keeps what its ``item()`` would be, and
    where nobody asks for it traces again, for the values on a list. In that trace the last thing
    written to the tensor is left out, such as a step that moves it (seen with torch 2.13). It need
    not trace again for what is on the list already.
    """
    from torch._dynamo.symbolic_convert import TensorifyState

    if not TensorifyState.empty():  # this was such a trace, or has taken another's list for its own
        raise NotCompiledError("torch leaves out what is written to tensors without a dimension")
    try:
        for symbol in shapes.var_to_sources:
            TensorifyState.specialize(str(symbol))
        yield
    finally:
        TensorifyState.clear()


def compile_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]
) -> Callable[[tuple[Any, ...]], Compiled]:
    """Compile a graph; what comes back gives the code when it is first told real arguments."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    kernels: list[Any] = []
    work: list[int] = []
    with config.patch(enable_autograd_cache=False):  # which would not tell the kernels
        wrapped: Any = compile_fx(
            graph,
            inputs,
            inner_compile=functools.partial(_compile, kernels, work),
            config_patches=options,
        )
    return lambda arguments: Compiled(_shortest(wrapped, kernels, arguments), _alone(work))


def _alone(work: list[int]) -> bool:
    """Whether one thread is better than several."""
    return sum(work) < FEW


def _compile(
    kernels: list[Any],
    work: list[int],
    graph: torch.fx.GraphModule,
    inputs: Any,
    **options: Any,
) -> Any:
    """Compile a graph of primitive operations, unless it draws random numbers."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    for node in graph.graph.nodes:
        # compiled code draws other numbers, and not the same ones for copies that share samples
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise NotCompiledError(f"the objectives draw random numbers ({node.target})")
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs)
    merge_products(graph, wasteful=on_gpu)
    work.append(operations(graph))
    settings: dict[str, Any] = {}
    if not on_gpu:
        threads = 1 if _alone(work) else torch.get_num_threads()
        share_rows(graph, threads=threads)
        # or kernels wake other threads, which go on looking for work when there is none for them
        settings["cpp.threads"] = threads
    with built_beside(_refusal), config.patch(settings):
        compiled = compile_fx_inner(graph, inputs, **options)
    if not _outputs(graph):
        kernels.append(compiled)
    return compiled


def operations(graph: torch.fx.GraphModule) -> int:
    """How much work a graph is: its products of matrices and convolutions, and other entries."""
    from torch.utils.flop_counter import flop_registry

    total = 0
    for node in graph.graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        count = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if count is not None:
            args, kwargs = torch.fx.node.map_arg(
                (node.args, node.kwargs), lambda argument: argument.meta["val"]
            )
            total += int(count(*args, **kwargs, out_val=node.meta["val"]))
        elif not getattr(node.target, "is_view", False):
            total += ENTRY * node.meta["val"].numel()
    return total


def _shortest(wrapped: Callable[..., Any], kernels: list[Any], arguments: tuple[Any, ...]) -> Code:
    """The kernels themselves, where what is wrapped around them does nothing.

    It takes about as long as a small kernel. That it does nothing is seen from what it hands on,
    all outputs being written in place.
    """
    handed_on: list[tuple[Any, ...]] = []

    def record(inputs: list[Any]) -> tuple[()]:
        handed_on.append(tuple(inputs))
        return ()

    if len(kernels) == 1 and not torch._C._is_any_autocast_enabled():
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
    """What is called with a list that it may empty; where that hands on to C++, the C++ itself.

    What it does beside is for arguments that are no tensors, and for outputs.
    """
    inside = [cell.cell_contents for cell in getattr(run, "__closure__", None) or ()]
    match inside:
        case [Later() as entry] if all(isinstance(a, torch.Tensor) for a in arguments):
            handles: Callable[..., Any] = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
            return lambda inputs: entry.function(handles(inputs))
    return lambda inputs: run(list(inputs))


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


def _outputs(graph: torch.fx.GraphModule) -> Any:
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    return output.args[0]


def _refusal(error: Exception) -> NotCompiledError:
    """What an error while something was compiled comes to."""
    return NotCompiledError(_reason(error))


def _reason(error: Exception) -> str:
    """Why something was not compiled, in one line."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NotCompiledError):
            return str(cause)
        if isinstance(cause, GuardOnDataDependentSymNode):
            return BY_VALUE
        cause = getattr(cause, "inner_exception", None) or cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
