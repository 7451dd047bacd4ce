"""Copies of trees, tensors and modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bilevel.errors import ArgumentError, CompileWarning, warn
from bilevel.errors.checks import check_function
from bilevel.variables.shards import local_part
from bilevel.variables.tree import map_tree, walk


def copy_tree(
    tree: Any, moved: set[int], device: torch.device | None, *, share_frozen: bool
) -> Any:
    """A copy of a tree of tensors and modules, on ``device`` (None: where each of them is).

    A tensor or module that occurs twice stays one: whatever is tied is tied in every copy.

    Args:
        tree: what is copied.
        moved: the ids of the tensors that will be changed, and so may never be shared.
        device: where the copy is put.
        share_frozen: whether the copy uses the other parameters of the original that require no
            gradient; only without a ``device``.
    """
    copies: dict[int, Any] = {}
    nodes = [node for _, node in walk(tree, "")]
    # Modules come first: a parameter that also stands beside its module stays a parameter of it.
    for node in sorted(nodes, key=lambda node: isinstance(node, Tensor)):
        if id(node) in copies:
            continue
        if isinstance(node, Tensor):
            copies[id(node)] = node.detach().to(
                device=device, copy=True, memory_format=torch.contiguous_format
            )
            continue
        if share_frozen and device is None:
            frozen = (p for p in node.parameters() if not p.requires_grad)
            copies.update((id(p), p) for p in frozen if id(p) not in moved)
        copies[id(node)] = _copy_module(node, copies, device)

    return map_tree(tree, lambda node: copies[id(node)])


def _copy_module(
    module: nn.Module, copies: dict[int, Any], device: torch.device | None
) -> nn.Module:
    copied = copy.deepcopy(module, copies)  # This copies neither gradients nor compiled code.
    _compile_like(copied, module)
    return copied if device is None else copied.to(device)


def _compile_like(copied: nn.Module, original: nn.Module) -> None:
    """Compile the parts of a copy that ``module.compile()`` compiled in place in the original."""
    parts = dict(copied.named_modules())
    for name, part in original.named_modules():
        compiled = part._compiled_call_impl
        if compiled is None:
            continue
        # torch keeps the arguments of compile() only in the closure of the compiled call.
        cells = zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True)
        compiler = next((cell.cell_contents for free, cell in cells if free == "self"), None)
        if not callable(compiler):
            warn(
                CompileWarning(
                    f"{type(part).__name__}.compile() of this version of torch cannot be repeated "
                    f"on a copy, so the copy runs without it; give torch.compile(module) instead"
                )
            )
            return
        parts[name]._compiled_call_impl = compiler(parts[name]._call_impl)


def check_built_anew(name: str, first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Refuse a function whose calls give the same tensors, some of other shapes, or no leaves.

    Copies that share their tensors would move each other, and what the user holds with them.
    """
    shapes = [[tuple(leaf.shape) for leaf in leaves] for leaves in (first, second)]
    places = ({local_part(leaf).data_ptr() for leaf in leaves} - {0} for leaves in (first, second))
    reason = ""
    if shapes[0] != shapes[1]:
        reason = f"tensors of the shapes {shapes[0]} and then of {shapes[1]}"
    elif not set.isdisjoint(*places):
        reason = "the same tensors twice"
    elif not all(leaf.is_leaf for leaf in second):
        reason = "results of a computation, which cannot be moved"
    if reason:
        raise ArgumentError(
            f"{name}0 is a function that builds every copy of {name}, but it gave {reason}; let it "
            f"build new ones that are alike at every call, or give what it returns in its place"
        )


def check_builder(build: Callable[[], Any], name: str) -> None:
    """Refuse a function that cannot be called without arguments."""
    check_function(
        name,
        build,
        expected="tensors, a module, or a function without arguments that builds these",
    )
