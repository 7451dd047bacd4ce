"""Variable: tensors, trees of tensors, modules and tables, seen as one list of leaves.

Algorithms see only the leaves; objectives see only the value, exactly as the user gave it.

Modules. Each copy of a module is a deep copy with **its own buffers**. Parameters that do not
require a gradient are shared between the copies, because nothing ever writes to them. Copies of a
compiled module run the same compiled code, on their own parameters. Buffers that a forward pass
changes, such as the running statistics of BatchNorm, change only in the inner steps of their own
copy: evaluations for the x direction or for the history restore them
(:func:`~bilevel.variables.buffers_kept`).

Tables. The gradient of a :class:`~bilevel.Table`, as that of an ``nn.Embedding(sparse=True)``, is
sparse: it holds the rows that were looked up. No operation of a step touches other rows.

Several ranks. A module may be wrapped in ``DistributedDataParallel`` or ``fully_shard``;
:attr:`Variable.averaging` says who averages its gradients over the ranks. A module that
``fully_shard`` has divided cannot be copied; a function that the user gives builds every copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from bilevel.errors import ArgumentError, NonFiniteError, StateError
from bilevel.variables.copying import check_builder, check_built_anew, copy_tree
from bilevel.variables.forms import Form, each, form_of, record, tensor
from bilevel.variables.gradients import global_norm, largest_entries, longest_step, require_finite
from bilevel.variables.layout import Layout
from bilevel.variables.leaves import (
    check_tensors,
    find_leaves,
    sparse_parameters,
    warn_of_ties,
)
from bilevel.variables.matching import match_leaves
from bilevel.variables.shards import local_part, overwrite
from bilevel.variables.sparse import empty_sparse_gradient, stored_values, sum_gradients
from bilevel.variables.table import Table
from bilevel.variables.tree import map_tree, walk


class Variable:
    """One point of x or y: the user's structure, and the tensors in it that are moved.

    Attributes:
        name: what messages call it, ``"x"`` or ``"y"``.
        value: the structure that the objectives receive.
        modules: the modules in the structure.
        leaves: the tensors that an algorithm moves, each once, in the order of the structure.
        names: for each leaf, how it is reached, such as ``"y['head'].weight"``.
        gradient_names: for each leaf, what messages call its gradient.
        row_sparse: for each leaf, whether its gradient is sparse and holds the rows looked up.
        averaging: for each leaf, who averages its gradient over the ranks.
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
        nodes = list(walk(value, name))
        self.modules = [node for _, node in nodes if isinstance(node, nn.Module)]
        named = find_leaves(nodes)
        self.names = [path for path, _ in named]
        self.leaves = [leaf for _, leaf in named]
        self.gradient_names = [f"the gradient of {path}" for path in self.names]
        sparse = sparse_parameters(self.modules)
        self.row_sparse = [id(leaf) in sparse for leaf in self.leaves]
        self._layout = Layout(self.modules, self.leaves)
        self.averaging = self._layout.averaging
        self.wrappers = self._layout.wrappers
        self._sparse_grads: list[list[Tensor]] = [[] for _ in self.leaves]
        self._build: Callable[[], Any] | None = None
        if not self.leaves:
            raise ArgumentError(f"{name} holds no tensor that could be moved: {value!r}")
        check_tensors(nodes, named)
        self._layout.check(name, named)
        devices = sorted({str(leaf.device) for leaf in self.leaves})
        if len(devices) > 1:
            raise ArgumentError(
                f"{name} lies on several devices ({', '.join(devices)}); it must lie on one"
            )

    @classmethod
    def copy_of(cls, value: Any, name: str, device: torch.device | None = None) -> Variable:
        """A copy of ``value`` whose leaves require gradients; ``value`` itself is never touched.

        A tensor or module that occurs twice stays one: whatever is tied is tied in every copy.
        If ``value`` is a function, it builds the copy, and again for every clone.
        """
        if callable(value) and not isinstance(value, nn.Module):
            check_builder(value, name)
            copied = cls(value(), name)
            copied._build = value
            copied.requires_grad_(True)
        else:
            warn_of_ties(walk(value, name))
            copied = cls._copied(value, name, device, share_frozen=True)
        for leaf, sparse, grads in copied._zipped_grads():
            if sparse:
                leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(_set_aside, grads)
                )
        return copied

    @classmethod
    def _copied(
        cls, value: Any, name: str, device: torch.device | None, *, share_frozen: bool
    ) -> Variable:
        given = cls(value, name)  # Errors name the paths of the user's own structure.
        if given._layout.sharded_modules:
            raise ArgumentError(
                f"{name} holds a module that fully_shard has divided, which cannot be copied; give "
                f"a function that builds it, such as {name}0=lambda: fully_shard(build())"
            )
        moved = {id(leaf) for leaf in given.leaves}
        reason = ""
        try:
            copied = copy_tree(value, moved, device, share_frozen=share_frozen)
            made = cls(copied, name)
            made.requires_grad_(True)
            if not all(leaf.is_leaf for leaf in made.leaves):
                reason = "its copies are results of a computation, as those of a ScriptModule"
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:  # the second is what pickle raises
            reason = str(error).partition("\n")[0]
        if reason:
            raise ArgumentError(
                f"{name} cannot be copied: {reason}. Give a function that builds it, such as "
                f"{name}0=lambda: build()"
            )
        # The order of the leaves depends on which of them require gradients.
        return cls(copied, name)

    def clone(self, name: str | None = None) -> Variable:
        """An independent copy at the same point."""
        name = self.name if name is None else name
        if self._build is None:
            return Variable.copy_of(self.value, name)
        built = Variable.copy_of(self._build, name)
        check_built_anew(self.name, self.leaves, built.leaves)
        built.assign(self, everything=True)
        return built

    def check_builder(self) -> None:
        """Raise now for a function that cannot build a second copy; the result will need one.

        What ``fully_shard`` divides is large, so that it is built only where a copy is needed.
        """
        if self._build is not None and not self._layout.sharded_modules:
            self.clone()

    def named_modules(self) -> Iterator[tuple[str, nn.Module, bool]]:
        """Every module and submodule, how it is reached, and whether DDP wraps it."""
        wrapped = {id(part) for wrapper in self.wrappers for part in wrapper.modules()}
        for path, node in walk(self.value, self.name):
            if isinstance(node, nn.Module):
                for name, part in node.named_modules():
                    yield f"{path}.{name}" if name else path, part, id(part) in wrapped

    @cached_property
    def owners(self) -> list[nn.Module]:
        """The modules in the structure and all inside these, which is slow to ask them for."""
        return [part for module in self.modules for part in module.modules()]

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of the modules in the structure, as they are now."""
        return [buffer for module in self.modules for buffer in module.buffers()]

    @property
    def fixed(self) -> list[Tensor]:
        """What the modules hold beside the leaves: parameters that are not moved, and buffers."""
        self.reshard()  # otherwise fully_shard may show whole tensors in place of the leaves
        moved = {id(leaf) for leaf in self.leaves}
        parameters = (p for module in self.modules for p in module.parameters())
        return [*(p for p in parameters if id(p) not in moved), *self.buffers]

    @property
    def device(self) -> torch.device:
        """Where the leaves lie."""
        return self.leaves[0].device

    def requires_grad_(self, flag: bool) -> None:
        """Make the leaves constants (False) or variables (True) of what is evaluated next."""
        self.reshard()
        for leaf in self.leaves:
            leaf.requires_grad_(flag)

    def _zipped_grads(self) -> Iterable[tuple[Tensor, bool, list[Tensor]]]:
        return zip(self.leaves, self.row_sparse, self._sparse_grads, strict=True)

    def grads(self) -> list[Tensor]:
        """The gradients that backward passes left on the leaves; zeros where there is none.

        Those of rows are sparse and coalesced, unless a dense gradient was added to them.
        """
        for leaf, sparse, parts in self._zipped_grads():
            if parts:
                leaf.grad = sum_gradients(parts if leaf.grad is None else [*parts, leaf.grad])
                parts.clear()
            elif leaf.grad is None:
                leaf.grad = empty_sparse_gradient(leaf) if sparse else torch.zeros_like(leaf)
            elif leaf.grad.is_sparse:
                leaf.grad = leaf.grad.coalesce()
        return [leaf.grad for leaf in self.leaves if leaf.grad is not None]

    @property
    def has_grads(self) -> bool:
        """Whether a backward pass left a gradient on any leaf."""
        return any(self._sparse_grads) or any(leaf.grad is not None for leaf in self.leaves)

    def take_grads(self) -> list[Tensor]:
        """:meth:`grads`, which are removed from the leaves."""
        grads = self.grads()
        self.clear_grads()
        return grads

    def clear_grads(self) -> None:
        """Forget all gradients."""
        for leaf, _, parts in self._zipped_grads():
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
        grads = stored_values(self.grads())
        longest = longest_step(grads)
        # The Euclidean norm bounds the largest entry and is several times as fast to compute.
        if abs(rate) * global_norm(grads).item() <= longest:  # false for NaN
            return
        if abs(rate) * torch.stack(largest_entries(grads)).amax().item() <= longest:
            return
        require_finite(step, self.gradient_names, grads)
        raise NonFiniteError(step, f"the step of {self.name}")

    def gradient_norm(self, grads: list[Tensor]) -> Tensor:
        """The Euclidean norm of gradients of the leaves."""
        return global_norm(grads)

    @torch.no_grad()
    def assign(self, other: Variable, *, everything: bool = False) -> None:
        """Move to the point of ``other``, in place.

        The buffers are copied too, and with ``everything`` the parameters that are not moved.
        """
        torch._foreach_copy_(stored_values(self.leaves), stored_values(other.leaves))
        others = (self.fixed, other.fixed) if everything else (self.buffers, other.buffers)
        for mine, theirs in zip(*others, strict=True):
            local_part(mine).copy_(local_part(theirs))
        self.reshard()

    @torch.no_grad()
    def contract_towards(self, other: Variable, share: float) -> None:
        """Multiply the distance to the point of ``other`` by ``share``, in place."""
        torch._foreach_lerp_(stored_values(self.leaves), stored_values(other.leaves), 1 - share)
        self.reshard()

    def reshard(self) -> None:
        """Make ``fully_shard`` drop the whole tensors it keeps, which no longer fit the leaves."""
        self._layout.reshard()

    def tensors_like(self, given: Any, argument: str) -> list[Tensor]:
        """For each leaf its tensor in ``given``, a value in the structure of this one.

        It may require a gradient; ``argument`` is what messages call it.
        """
        found = self.match(argument, given, lambda part: isinstance(part, Tensor), "a tensor")
        for path, leaf, part in zip(self.names, self.leaves, found, strict=True):
            if part is None or part.shape != leaf.shape:
                shown = "nothing" if part is None else f"a tensor of shape {tuple(part.shape)}"
                raise ArgumentError(
                    f"{argument} must be in the structure of {self.name}, but holds {shown} for "
                    f"{path} of the shape {tuple(leaf.shape)}"
                )
        return found

    def match(
        self, argument: str, given: Any, fits: Callable[[Any], bool], wanted: str
    ) -> list[Any]:
        """For each leaf what ``given`` has for it, see :func:`match_leaves`."""
        return match_leaves(self.value, self.leaves, argument, given, fits, wanted)

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

        return map_tree(self.value, replaced)

    def detached(self) -> Any:
        """A copy of the value for the user to keep; its tensors do not require gradients."""
        if self._build is not None:
            kept = self.clone()
        else:
            kept = Variable._copied(self.value, self.name, None, share_frozen=False)
        for _, node in walk(kept.value, self.name):
            if isinstance(node, Tensor | Table):
                node.requires_grad_(False)
        return kept.value

    def to_global(self, index: int, part: Tensor) -> Tensor:
        """``part``, shaped as leaf ``index``; as a DTensor if that is a table divided by rank."""
        return self._layout.to_global(self.leaves[index], part)

    def global_shape(self, index: int) -> tuple[int, ...]:
        """The shape of leaf ``index``, with the rows that other ranks hold."""
        return self._layout.global_shape(self.leaves[index])

    def state_dict(self) -> dict[str, Any]:
        """The leaves and buffers, copied."""
        return {
            "leaves": [
                self.to_global(i, leaf.detach().clone()) for i, leaf in enumerate(self.leaves)
            ],
            "buffers": [buffer.detach().clone() for buffer in self.buffers],
        }

    def state_form(self) -> Form:
        """The leaves and buffers, in their shapes; those of a divided table with all rows."""
        whole = [tensor(self.global_shape(i), leaf) for i, leaf in enumerate(self.leaves)]
        return record({"leaves": each(whole), "buffers": form_of(self.buffers)})

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a saved point, in place."""
        leaves = [self.to_global(i, leaf) for i, leaf in enumerate(self.leaves)]
        for kind, mine in (("leaves", leaves), ("buffers", self.buffers)):
            saved = state[kind]
            if [t.shape for t in mine] != [t.shape for t in saved]:
                raise StateError(
                    f"the saved {kind} of {self.name} have the shapes "
                    f"{[tuple(t.shape) for t in saved]}, but here they are "
                    f"{[tuple(t.shape) for t in mine]}"
                )
            for here, there in zip(mine, saved, strict=True):
                overwrite(here, there)
        self.reshard()


def _set_aside(grads: list[Tensor], leaf: Tensor) -> None:
    """Take a sparse gradient off its leaf; to add the next one to it would copy it every time."""
    if leaf.grad is not None and leaf.grad.is_sparse:
        grads.append(leaf.grad)
        leaf.grad = None
