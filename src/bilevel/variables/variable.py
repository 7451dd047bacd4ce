"""Tensors, trees of tensors, modules and tables, seen as one list of leaves.

A :class:`Variable` is one point of a problem's x or y: the value exactly as the objectives receive
it, and beside it the flat list of tensors that an algorithm moves. Algorithms see only the leaves;
objectives see only the value.

Modules. Each copy of a module is a deep copy with **its own buffers**. Parameters that do not
require a gradient are not copied but shared, because nothing ever writes to them. Copies of a
compiled module run the same compiled code, on their own parameters. Buffers that a
forward pass changes (the running statistics of BatchNorm, say) move with the inner steps of their
own copy and only with those: evaluations for the x direction or for the history put them back
(:func:`buffers_kept`).

Tables. The gradient of a :class:`~bilevel.Table`, as that of an ``nn.Embedding(sparse=True)``, is
sparse: it holds the rows that were looked up. Nothing here that happens in every step touches the
others (:mod:`bilevel.variables`).

Several ranks. A module may be wrapped in ``DistributedDataParallel`` or ``fully_shard``; how its
gradients become means over the ranks is in :attr:`Variable.averaged`. What ``fully_shard`` has
divided cannot be copied, and is built anew for every copy, by a function that the user gives.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bilevel.errors import (
    ArgumentError,
    ArgumentTypeError,
    CompileWarning,
    NonFiniteError,
    StateError,
    warn,
)
from bilevel.variables.shards import fill, is_sharded, part_of, row_part
from bilevel.variables.sparse import entries, joined, untouched
from bilevel.variables.table import Table


class Averaged(Enum):
    """Who sees to it that the gradient of a leaf is the mean over the ranks.

    Attributes:
        parted: whether each rank holds a part of the leaf.
    """

    HERE = ("every rank holds it, and its run averages", False)
    BY_WRAPPER = ("DistributedDataParallel", False)
    IN_PARTS = ("fully_shard", True)
    BY_NOBODY = ("the rows are of this rank alone", True)

    def __init__(self, who: str, parted: bool) -> None:
        self.who = who
        self.parted = parted


class Variable:
    """One point: the user's structure and the tensors in it that are moved.

    Attributes:
        name: what messages call it, ``"x"`` or ``"y"``.
        value: the structure that the objectives receive.
        leaves: the tensors that an algorithm moves, each once, in the order of the structure.
        names: for each leaf, how it is reached, such as ``"y['head'].weight"``.
        gradient_names: what messages call its gradient.
        by_rows: for each leaf whether its gradient is that of the rows which were looked up.
        averaged: for each leaf who averages its gradient over the ranks.
        wrappers: the ``DistributedDataParallel`` modules in the structure.

    Example:
        >>> start = {"w": torch.zeros(2), "b": torch.ones(1)}
        >>> y = Variable.copy_of(start, "y")
        >>> y.names
        ["y['w']", "y['b']"]
        >>> y.value["w"] is start["w"]
        False
    """

    def __init__(self, value: Any, name: str) -> None:
        self.name = name
        self.value = value
        named: dict[int, tuple[str, Tensor]] = {}
        self._placed: list[tuple[str, nn.Module]] = []
        for path, node in _walk(value, name):
            if isinstance(node, nn.Module):
                self._placed.append((path, node))
                for leaf_name, leaf in node.named_parameters():
                    if leaf.requires_grad or isinstance(node, Table):
                        named.setdefault(id(leaf), (f"{path}.{leaf_name}", leaf))
            else:
                named.setdefault(id(node), (path, node))
        self._modules = [module for _, module in self._placed]
        self.names = [path for path, _ in named.values()]
        self.gradient_names = [f"the gradient of {path}" for path in self.names]
        self.leaves = [leaf for _, leaf in named.values()]
        looked_up = {id(leaf) for module in self._modules for leaf in _looked_up(module)}
        self.by_rows = [id(leaf) in looked_up for leaf in self.leaves]
        self._parts: list[list[Tensor]] = [[] for _ in self.leaves]
        self._build: Callable[[], Any] | None = None
        self._tables = {
            id(part.values): part
            for module in self._modules
            for part in module.modules()
            if isinstance(part, Table) and part.divided
        }
        inner = [part for module in self._modules for part in module.modules()]
        self.wrappers = [part for part in inner if isinstance(part, DistributedDataParallel)]
        self._divided = [part for part in inner if callable(getattr(part, "reshard", None))]
        wrapped = {id(leaf) for wrapper in self.wrappers for leaf in wrapper.parameters()}
        self.averaged = [self._averaged(leaf, id(leaf) in wrapped) for leaf in self.leaves]
        self._check()

    def _averaged(self, leaf: Tensor, wrapped: bool) -> Averaged:
        if is_sharded(leaf):
            return Averaged.IN_PARTS
        if id(leaf) in self._tables:
            return Averaged.BY_NOBODY
        return Averaged.BY_WRAPPER if wrapped else Averaged.HERE

    def _check(self) -> None:
        if not self.leaves:
            raise ArgumentError(f"{self.name} holds no tensor that could be moved: {self.value!r}")
        for path, leaf in zip(self.names, self.leaves, strict=True):
            if not leaf.is_floating_point():
                raise ArgumentTypeError(
                    f"{path} has dtype {leaf.dtype}, but only floating point tensors can be moved; "
                    f"convert it, for example with .float()"
                )
            if leaf.layout != torch.strided:
                raise ArgumentTypeError(
                    f"{path} is of the layout {leaf.layout}, but only dense tensors can be moved; "
                    f"convert it with .to_dense(), or use a bilevel.Table, of which a step moves "
                    f"only some rows"
                )
            _refuse_meta(path, leaf)
            if is_sharded(leaf) and not (self._divided and _by_rows_only(leaf)):
                raise ArgumentError(
                    f"{path} is a DTensor that lies as {getattr(leaf, 'placements', None)}; only "
                    f"modules that fully_shard has divided along the first dimension are known here"
                )
        for where, module in self._placed:
            for path, tensor in (*module.named_parameters(), *module.named_buffers()):
                _refuse_meta(f"{where}.{path}", tensor)  # what is frozen is computed with too
        for wrapper in self.wrappers:
            for option in ("gradient_as_bucket_view", "static_graph"):
                if getattr(wrapper, option):
                    raise ArgumentError(
                        f"{self.name} holds DistributedDataParallel({option}=True), but a step "
                        f"has several backward passes and keeps the gradients of each; leave it out"
                    )
        devices = {leaf.device for leaf in self.leaves}
        if len(devices) > 1:
            places = ", ".join(sorted(map(str, devices)))
            raise ArgumentError(
                f"{self.name} lies on several devices ({places}); it must lie on one"
            )

    @classmethod
    def copy_of(cls, value: Any, name: str, device: torch.device | None = None) -> Variable:
        """A copy of ``value`` whose leaves require gradients; ``value`` itself is never touched.

        A parameter or module that occurs twice stays one; a plain tensor that does becomes two.
        A function builds what cannot be copied, anew whenever it is called.
        """
        if callable(value) and not isinstance(value, nn.Module):
            _check_builder(value, name)
            copied = cls(value(), name)
            copied._build = value
        else:
            copied = cls._copied(value, name, device, share_frozen=True)
        for leaf, by_rows, parts in zip(copied.leaves, copied.by_rows, copied._parts, strict=True):
            if by_rows:
                leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(_set_aside, parts)
                )
        return copied

    @classmethod
    def _copied(
        cls, value: Any, name: str, device: torch.device | None, *, share_frozen: bool
    ) -> Variable:
        """A copy; without ``share_frozen``, of the parameters that require no gradient too."""
        # a bad structure is named by the user's own paths before anything is copied
        given = cls(value, name)
        if given._divided:
            raise ArgumentError(
                f"{name} holds a module that fully_shard has divided, which cannot be copied; give "
                f"a function that builds it, such as {name}0=lambda: fully_shard(build())"
            )
        moved = {id(leaf) for leaf in given.leaves}
        share = share_frozen and device is None
        memo: dict[int, Any] = {}
        nodes = [node for _, node in _walk(value, name)]
        # modules first: a parameter that also stands beside its module stays a parameter of it
        for node in sorted(nodes, key=lambda node: isinstance(node, Tensor)):
            _copy(node, memo, device, moved, share)

        def copy_for(node: Tensor | nn.Module) -> Any:
            if isinstance(node, nn.Module | nn.Parameter):
                return memo[id(node)]
            return memo[id(node)].clone()  # one zeros(3) given for two parts is two variables

        copied = _map(value, copy_for)
        cls(copied, name).requires_grad_(True)
        return cls(
            copied, name
        )  # again: the order of the leaves depends on what requires gradients

    def clone(self, name: str | None = None) -> Variable:
        """An independent copy at the same point."""
        name = self.name if name is None else name
        if self._build is None:
            return Variable.copy_of(self.value, name)
        built = Variable.copy_of(self._build, name)
        built.assign(self, everything=True)
        return built

    def named_modules(self) -> Iterator[tuple[str, nn.Module, bool]]:
        """Every module inside, how it is reached, and whether something wraps it."""
        wrapped = {id(part) for wrapper in self.wrappers for part in wrapper.modules()}
        for path, node in _walk(self.value, self.name):
            if isinstance(node, nn.Module):
                for name, part in node.named_modules():
                    yield f"{path}.{name}" if name else path, part, id(part) in wrapped

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of the modules in the structure, as they are now."""
        return [buffer for module in self._modules for buffer in module.buffers()]

    @property
    def fixed(self) -> list[Tensor]:
        """What else the modules in the structure hold: parameters that are not moved, buffers."""
        self.reassemble()  # meanwhile the modules hold whole tensors in the place of the parts
        moved = {id(leaf) for leaf in self.leaves}
        parameters = (p for module in self._modules for p in module.parameters())
        return [*(p for p in parameters if id(p) not in moved), *self.buffers]

    @property
    def device(self) -> torch.device:
        """Where the leaves lie."""
        return self.leaves[0].device

    def requires_grad_(self, flag: bool) -> None:
        """Make the leaves constants (False) or not (True) for what is evaluated next."""
        self.reassemble()
        for leaf in self.leaves:
            leaf.requires_grad_(flag)

    def grads(self) -> list[Tensor]:
        """The gradients that backward passes left on the leaves; zeros where there is none.

        Those of rows are sparse, with each row once, unless something dense was added to them.
        """
        grads = []
        for leaf, by_rows, parts in zip(self.leaves, self.by_rows, self._parts, strict=True):
            if parts:
                leaf.grad = joined(parts if leaf.grad is None else [*parts, leaf.grad])
                parts.clear()
            elif leaf.grad is None:
                leaf.grad = untouched(leaf) if by_rows else torch.zeros_like(leaf)
            elif leaf.grad.is_sparse:
                leaf.grad = leaf.grad.coalesce()
            grads.append(leaf.grad)
        return grads

    @property
    def has_grads(self) -> bool:
        """Whether a backward pass left a gradient on any leaf."""
        return any(self._parts) or any(leaf.grad is not None for leaf in self.leaves)

    def take_grads(self) -> list[Tensor]:
        """:meth:`grads`, and the leaves are left without."""
        grads = self.grads()
        self.clear_grads()
        return grads

    def clear_grads(self) -> None:
        """Forget all gradients."""
        for leaf, parts in zip(self.leaves, self._parts, strict=True):
            leaf.grad = None
            parts.clear()

    def set_grads(self, grads: Sequence[Tensor]) -> None:
        """Put ``grads`` on the leaves, as a backward pass would have."""
        self.clear_grads()
        for leaf, grad in zip(self.leaves, grads, strict=True):
            leaf.grad = grad

    def require_finite_grads(self, step: int, rate: float = 1.0) -> None:
        """Raise :class:`~bilevel.errors.NonFiniteError` unless all gradients are finite.

        A step of length ``rate`` along them must not overflow either.
        """
        grads = entries(self.grads())
        longest = longest_step(grads)
        # the Euclidean norm is no smaller than the largest entry and several times as fast to get
        if abs(rate) * norm(grads).item() <= longest:  # false for NaN
            return
        if abs(rate) * torch.stack(largest_entries(grads)).amax().item() <= longest:
            return
        require_finite(step, self.gradient_names, grads)
        raise NonFiniteError(step, f"the step of {self.name}")

    def norm(self, grads: list[Tensor]) -> Tensor:
        """The Euclidean norm of gradients of the leaves."""
        return norm(grads)

    @torch.no_grad()
    def assign(self, other: Variable, *, everything: bool = False) -> None:
        """Move to the point of ``other``, in place; parameters that are not moved, if asked for."""
        torch._foreach_copy_(entries(self.leaves), entries(other.leaves))
        others = (self.fixed, other.fixed) if everything else (self.buffers, other.buffers)
        for mine, theirs in zip(*others, strict=True):
            part_of(mine).copy_(part_of(theirs))
        self.reassemble()

    def reassemble(self) -> None:
        """Have what ``fully_shard`` keeps in one piece put together anew, from the parts."""
        for module in self._divided:
            module.reshard()  # type: ignore[operator]

    @torch.no_grad()
    def approach(self, other: Variable, share: float) -> None:
        """Leave only a share of the distance to the point of ``other``, in place."""
        torch._foreach_lerp_(entries(self.leaves), entries(other.leaves), 1 - share)
        self.reassemble()

    def structured(self, tensors: Sequence[Tensor]) -> Any:
        """``tensors``, one per leaf, in the structure of the value.

        A module becomes a dictionary from parameter names to tensors, and a table a tensor.
        """
        by_leaf = dict(zip(map(id, self.leaves), tensors, strict=True))

        def replaced(node: Tensor | nn.Module) -> Any:
            if isinstance(node, Table):
                return by_leaf[id(node.values)]
            if isinstance(node, nn.Module):
                return {n: by_leaf[id(p)] for n, p in node.named_parameters() if id(p) in by_leaf}
            return by_leaf[id(node)]

        return _map(self.value, replaced)

    def detached(self) -> Any:
        """A copy of the value for the user to keep; its tensors do not require gradients."""
        if self._build is not None:
            return self.clone().value
        kept = Variable._copied(self.value, self.name, None, share_frozen=False)
        for _, node in _walk(kept.value, self.name):
            if isinstance(node, Tensor | Table):
                node.requires_grad_(False)
        return kept.value

    def state_dict(self) -> dict[str, Any]:
        """The leaves and buffers, copied."""
        return {
            "leaves": [self.whole(i, leaf.detach().clone()) for i, leaf in enumerate(self.leaves)],
            "buffers": [buffer.detach().clone() for buffer in self.buffers],
        }

    def whole(self, index: int, part: Tensor) -> Tensor:
        """A tensor that lies as leaf ``index``; of a table that the ranks share, as a DTensor."""
        table = self._tables.get(id(self.leaves[index]))
        return part if table is None else row_part(part, table.rows)

    def shape(self, index: int) -> tuple[int, ...]:
        """Of leaf ``index``, with the parts that other ranks hold."""
        leaf = self.leaves[index]
        table = self._tables.get(id(leaf))
        return tuple(leaf.shape) if table is None else (table.rows, *leaf.shape[1:])

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a saved point, in place."""
        for kind, mine in (("leaves", self.leaves), ("buffers", self.buffers)):
            saved = state[kind]
            if kind == "leaves":
                mine = [self.whole(i, leaf) for i, leaf in enumerate(mine)]
            if [t.shape for t in mine] != [t.shape for t in saved]:
                raise StateError(
                    f"the saved {kind} of {self.name} have the shapes "
                    f"{[tuple(t.shape) for t in saved]}, but here they are "
                    f"{[tuple(t.shape) for t in mine]}"
                )
            for here, there in zip(mine, saved, strict=True):
                fill(here, there)
        self.reassemble()


@contextmanager
def held(*variables: Variable) -> Iterator[None]:
    """Inside, the variables are constants: no gradient flows to them and none is computed."""
    for variable in variables:
        variable.requires_grad_(False)
    try:
        yield
    finally:
        for variable in variables:
            variable.requires_grad_(True)


@contextmanager
def buffers_kept(*variables: Variable) -> Iterator[None]:
    """Afterwards the buffers of the variables are as they were before."""
    saved = [
        (owner, name, buffer, buffer.clone())
        for variable in variables
        for module in variable._modules
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for owner, name, buffer, before in saved:
            buffer.copy_(before)
            owner._buffers[name] = buffer  # a forward pass may have put another in its place


@contextmanager
def buffers_copied(*variables: Variable) -> Iterator[None]:
    """Inside, the buffers are copies, which a graph may keep; afterwards their values are taken on.

    What a forward pass changes in place later must not be held by a graph that is still needed.
    """
    copies: dict[int, Tensor] = {}
    saved = [
        (owner, name, buffer)
        for variable in variables
        for module in variable._modules
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    for owner, name, buffer in saved:
        owner._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
    try:
        yield
    finally:
        for owner, name, buffer in saved:
            latest = owner._buffers[name]
            if latest is not None:
                buffer.copy_(latest)
            owner._buffers[name] = buffer


@contextmanager
def substituted(variable: Variable, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the objectives see ``tensors`` where the leaves of the variable are.

    They may depend on other tensors, which the leaves of a module cannot.
    """
    by_leaf = dict(zip(map(id, variable.leaves), tensors, strict=True))
    value = variable.value
    places: list[tuple[dict[str, Any], str, Tensor]] = [
        (owner._parameters, name, leaf)
        for module in variable._modules
        for owner in module.modules()
        for name, leaf in owner._parameters.items()
        if id(leaf) in by_leaf and leaf is not None
    ]
    try:
        for parameters, name, leaf in places:
            parameters[name] = by_leaf[id(leaf)]
        variable.value = _map(
            value, lambda node: node if isinstance(node, nn.Module) else by_leaf[id(node)]
        )
        yield
    finally:
        for parameters, name, leaf in places:
            parameters[name] = leaf
        variable.value = value


def _check_builder(build: Callable[[], Any], name: str) -> None:
    """Refuse a function that cannot be called without arguments, as one that builds things is."""
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise ArgumentTypeError(
            f"{name} must be tensors, a module, or a function without arguments that builds these, "
            f"not {build!r} ({error})"
        ) from error
    except ValueError:  # it has no signature; then it is seen when it is called
        return


def differentiate(
    values: Sequence[Tensor],
    leaves: Sequence[Tensor],
    wrappers: Sequence[Any] = (),
    seeds: Sequence[Tensor] | None = None,
) -> None:
    """Leave the gradient of the sum of the values on the leaves, by the route on which hooks fire.

    With ``seeds`` each value counts so many times.

    A ``DistributedDataParallel`` expects one backward pass after each forward pass, and would not
    average a second; it is told of every one that begins. What ``fully_shard`` has divided is not
    in the graph itself; its gradients come with those of everything that requires one.
    """
    assert leaves, "without any, torch would leave gradients on all that requires one"
    for wrapper in wrappers:
        if any(leaf.requires_grad for leaf in wrapper.parameters()):
            wrapper.reducer._rebuild_buckets()
            outputs = list(values) if wrapper.find_unused_parameters else []
            wrapper.reducer.prepare_for_backward(outputs)
    if any(map(is_sharded, leaves)):
        torch.autograd.backward(values, seeds)
    elif seeds is None or _engine is None:
        torch.autograd.backward(values, seeds, inputs=leaves)
    else:
        # the graph is not kept, nor is one of the gradients made
        options = {"allow_unreachable": True, "accumulate_grad": True}
        _engine(tuple(values), tuple(seeds), False, False, tuple(leaves), **options)


# What torch.autograd.backward calls, after it has looked at its arguments for as long as several
# small operations take. None: this version of torch does not have it.
_engine: Callable[..., Any] | None = getattr(torch.autograd.graph, "_engine_run_backward", None)


def require_finite(step: int, names: list[str], tensors: list[Tensor]) -> None:
    """Raise :class:`~bilevel.errors.NonFiniteError` for the first tensor that is not finite.

    One reduction decides for all; only when it is not finite (which a sum of huge finite numbers
    may also be) are the tensors looked at one by one, to name the quantity.
    """
    if len(tensors) == 1:
        total = tensors[0].detach().sum()
    else:
        total = torch.stack(torch._foreach_norm(tensors)).sum()
    if math.isfinite(total.item()):
        return
    name = first_not_finite(names, tensors)
    if name is not None:
        raise NonFiniteError(step, name)


def first_not_finite(names: Sequence[str], tensors: Sequence[Tensor]) -> str | None:
    """The name of the first tensor that holds a number that is not finite, if one does."""
    named = zip(names, tensors, strict=True)
    return next((name for name, t in named if not bool(torch.isfinite(t).all())), None)


def largest_entries(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest absolute value in each tensor, NaN where it holds one; 0 for an empty one."""
    eager = tensors[0].is_cuda and not torch.compiler.is_compiling()
    if eager and all(t.numel() for t in tensors):  # few launches for many tensors
        return list(torch._foreach_norm(list(tensors), ord=math.inf))
    return [t.abs().amax() if t.numel() else t.sum() for t in tensors]


def longest_step(grads: Sequence[Tensor]) -> float:
    """How far one step along ``grads`` may go at most in any entry, with a margin."""
    return float(torch.finfo(grads[0].dtype).max) / 4


def norm(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of all entries together, as a 0-dimensional tensor."""
    total: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(entries(tensors))))
    return total


def _refuse_meta(path: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise ArgumentError(
            f"{path} is on the meta device and has no values; materialise the module first, for "
            f"example with module.to_empty(device='cpu') and load_state_dict"
        )


def _looked_up(module: nn.Module) -> Iterator[Tensor]:
    """The parameters of a module whose gradients are sparse."""
    for part in module.modules():
        if isinstance(part, Table):
            yield part.values
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            yield part.weight


def _by_rows_only(leaf: Any) -> bool:
    """Whether the ranks hold consecutive rows of it."""
    return len(leaf.placements) == 1 and leaf.placements[0].is_shard(0)


def _set_aside(parts: list[Tensor], leaf: Tensor) -> None:
    """Take a sparse gradient off its leaf: to add the next to it would copy it every time."""
    if leaf.grad is not None and leaf.grad.is_sparse:
        parts.append(leaf.grad)
        leaf.grad = None


def _walk(node: Any, path: str) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Every tensor and module of a tree with the path to it."""
    if isinstance(node, Tensor | nn.Module):
        yield path, node
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from _walk(child, f"{path}[{key!r}]")
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _walk(child, f"{path}[{index}]")
    elif node is not None:
        raise ArgumentTypeError(
            f"{path} is {type(node).__name__} {node!r}, but a variable is a tensor, an nn.Module, "
            f"or a dict, list or tuple of these; use torch.as_tensor for numbers and arrays"
        )


def _map(node: Any, function: Callable[[Tensor | nn.Module], Any]) -> Any:
    """The tree with every tensor and module replaced by ``function`` of it."""
    if isinstance(node, Tensor | nn.Module):
        return function(node)
    if isinstance(node, dict):
        mapped = copy.copy(node)  # keeps what a subclass adds, such as a default factory
        mapped.update((key, _map(child, function)) for key, child in node.items())
        return mapped
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(_map(child, function) for child in node))
    if isinstance(node, list | tuple):
        return type(node)(_map(child, function) for child in node)
    return node


def _copy(
    node: Tensor | nn.Module,
    memo: dict[int, Any],
    device: torch.device | None,
    moved: set[int],
    share: bool,
) -> None:
    """Put a copy of ``node`` into ``memo``; ``moved`` are the ids of what may not be shared."""
    if id(node) in memo:  # a tensor or module that occurs twice stays one
        return
    if isinstance(node, Tensor):
        fresh: Any = node.detach().to(
            device=device, copy=True, memory_format=torch.contiguous_format
        )
    else:
        if share:
            frozen = (p for p in node.parameters() if not p.requires_grad)
            memo.update((id(p), p) for p in frozen if id(p) not in moved)
        fresh = copy.deepcopy(node, memo)  # which leaves gradients and compiled code behind
        _compile_like(fresh, node)
        if device is not None:
            fresh.to(device)
    memo[id(node)] = fresh


def _compile_like(fresh: nn.Module, node: nn.Module) -> None:
    """Compile the parts of a copy that ``module.compile()`` compiled in place in the original."""
    parts = dict(fresh.named_modules())
    for name, part in node.named_modules():
        compiled = part._compiled_call_impl
        if compiled is None:
            continue
        # torch keeps the arguments of compile() nowhere else
        cells = zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True)
        compiler = next((cell.cell_contents for free, cell in cells if free == "self"), None)
        if not callable(compiler):
            warn(
                CompileWarning(
                    f"{type(part).__name__}.compile() of this version of torch cannot be repeated "
                    f"on a copy, which runs as it is; give torch.compile(module) instead"
                )
            )
            return
        parts[name]._compiled_call_impl = compiler(parts[name]._call_impl)
