"""Functions that are traced and compiled once, and then run without Python."""

from __future__ import annotations

import operator
import types
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from bilevel.engine.compiled import torch_internals as internals
from bilevel.engine.compiled.merging import merge_products, share_rows
from bilevel.engine.compiled.torch_internals import Code
from bilevel.engine.execution import NotCompiledError

OPTIONS: dict[str, Any] = {
    "size_asserts": False,  # the guards check every size
}
"""Settings of the compiler of kernels, see ``torch._inductor.config``."""

CPU_OPTIONS: dict[str, Any] = {
    **OPTIONS,
    "cpp_wrapper": True,  # kernels are called from C++, and one file is compiled instead of ten
    "cpp_cache_precompile_headers": False,  # it takes longer than compiling a few files without
    "memory_planning": True,  # one allocation for each call instead of one for each part
}
"""The same on a CPU, where the overhead of a call counts."""

FEW = 1 << 24
"""Graphs of fewer operations run on one thread: a second costs more time than it saves."""

ENTRY = 8
"""To compute or copy one entry of a tensor counts as this many operations of a product."""


class Compiled(NamedTuple):
    """Compiled code, and whether one thread ``alone`` runs it faster than several."""

    code: Code
    alone: bool


class Ready(NamedTuple):
    """Compiled code with its arguments, which it changes in place.

    ``alone`` says whether one thread runs it faster than several.
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

    A call runs nothing. It checks with the guards of ``torch.compile``, which cover everything that
    the method read while it was traced, whether the code compiled before is valid for the
    arguments, compiles if it is not, and returns a :class:`Ready`, which may be run many times.
    """

    def __init__(self, method: Callable[..., None], device: torch.device) -> None:
        assert isinstance(method, types.MethodType)
        plain = method.__func__
        # What is compiled lives as long as the code object, so each instance has its own.
        own = types.FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__)
        self._backend = _Backend(device)
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
        """The code to run for these arguments."""
        if self.compilations:
            # If the guards fail, so does tracing with torch's usual settings. To change these
            # settings would take longer than to check the guards.
            with suppress(*internals.compile_errors()):
                return self._ready_for(arguments)
        with (
            warnings.catch_warnings(),
            internals.settings_of_tracing(),
        ):
            warnings.simplefilter("ignore")  # torch warns of what its own compiler does
            try:
                return self._ready_for(arguments)
            except internals.compile_errors() as error:
                raise internals.refusal(error) from error

    def _ready_for(self, arguments: tuple[Any, ...]) -> Ready:
        self._backend.ready = NOTHING
        with torch.enable_grad():
            self._function(*arguments)
        return self._backend.ready


class _Backend:
    """The function that ``torch.compile`` calls with a new graph.

    It holds no reference to the traced function: torch keeps the backend with the code of that
    function, where the garbage collector would not find a cycle.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ready = NOTHING
        self.compilations = 0

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if internals.output_of(graph):
            raise NotCompiledError("the objectives keep tensors beside what they return")
        with internals.traced_once(graph):
            compiled = compile_graph(graph, inputs, self._device)
        self.compilations += 1
        found: Compiled | None = None

        def get_ready(*arguments: Any) -> tuple[()]:
            nonlocal found
            if found is None:
                found = compiled(arguments)
            self.ready = Ready(found.code, arguments, found.alone)
            return ()

        return get_ready


def compile_graph(
    graph: GraphModule, inputs: Sequence[Any], device: torch.device
) -> Callable[[tuple[Any, ...]], Compiled]:
    """Compile a graph; the result gives the code once it is told real arguments."""
    on_cpu = device.type == "cpu"
    options = {**CPU_OPTIONS, **internals.compiler_options()} if on_cpu else OPTIONS
    work = 0

    def prepare(primitives: GraphModule) -> dict[str, Any]:
        nonlocal work
        _refuse_random_numbers(primitives)
        merge_products(primitives, wasteful=not on_cpu)
        work += operations(primitives)
        if not on_cpu:
            return {}
        threads = 1 if work < FEW else torch.get_num_threads()
        share_rows(primitives, threads=threads)
        # Otherwise kernels wake more threads, which keep looking for work that is not there.
        return {"cpp.threads": threads}

    code_for = internals.compile_kernels(graph, inputs, options, prepare)
    return lambda arguments: Compiled(code_for(arguments), on_cpu and work < FEW)


def _refuse_random_numbers(graph: GraphModule) -> None:
    """Compiled code draws other numbers, and different ones for copies that share samples."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise NotCompiledError(f"the objectives draw random numbers ({node.target})")


def operations(graph: GraphModule) -> int:
    """The work in a graph: its matrix products and convolutions, and the entries of the rest."""
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
