"""Which tensors of a tree are moved, and which tensors cannot be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bilevel.errors import ArgumentError, ArgumentTypeError, HookWarning, TiedWarning, warn
from bilevel.variables.table import Table
from bilevel.variables.tree import walk

MOVED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The types in which steps can be computed."""


def find_leaves(nodes: Iterable[tuple[str, Tensor | nn.Module]]) -> list[tuple[str, Tensor]]:
    """The tensors that are moved, each once, by the path on which it was found first."""
    named: dict[int, tuple[str, Tensor]] = {}
    for path, node in nodes:
        if isinstance(node, Tensor):
            named.setdefault(id(node), (path, node))
            continue
        for name, leaf in node.named_parameters():
            if leaf.requires_grad or isinstance(node, Table):
                named.setdefault(id(leaf), (f"{path}.{name}", leaf))
    return list(named.values())


def warn_of_ties(nodes: Iterable[tuple[str, Tensor | nn.Module]]) -> None:
    """Warn of tensors that stand twice, unless they require gradients as parameters do.

    That is how parameters are tied, but ``[torch.zeros(3)] * 2`` may be meant as two variables.
    """
    first: dict[int, str] = {}
    for path, node in nodes:
        before = first.setdefault(id(node), path)
        if before != path and isinstance(node, Tensor) and not node.requires_grad:
            warn(
                TiedWarning(
                    f"{before} and {path} are one tensor, and so one variable; give a clone() for "
                    f"two, or an nn.Parameter where they are to be tied"
                )
            )


def warn_of_hooks(value: Any, name: str) -> None:
    """Warn of hooks on the gradients of what is to be moved, of which deep copies have none.

    A function that builds the copies gives them the hooks that they are meant to have.
    """
    if callable(value) and not isinstance(value, nn.Module):
        return
    for path, leaf in find_leaves(walk(value, name)):
        hooks = leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks", None)
        if leaf.is_leaf and any(hooks):
            warn(
                HookWarning(
                    f"{path} has a hook on its gradient, which the copies that are moved have not; "
                    f"if it changes the gradient, do so in the forward pass, or give a function "
                    f"that builds the copies with their hooks"
                )
            )


def sparse_parameters(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of the parameters whose gradients are sparse."""
    found = set()
    for module in modules:
        for part in module.modules():
            if isinstance(part, Table):
                found.add(id(part.values))
            elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                found.add(id(part.weight))
    return found


def check_tensors(
    nodes: Iterable[tuple[str, Tensor | nn.Module]], leaves: Iterable[tuple[str, Tensor]]
) -> None:
    """Refuse leaves that cannot be moved, and tensors without values anywhere in the tree."""
    for path, leaf in leaves:
        _refuse_lazy(path, leaf)
        if leaf.dtype not in MOVED:
            raise ArgumentTypeError(
                f"{path} has dtype {leaf.dtype}, but only floating point tensors of 16 bits or "
                f"more can be moved; convert it, for example with .float()"
            )
        if leaf.is_nested:
            raise ArgumentTypeError(
                f"{path} is a nested tensor, which cannot be moved; give a list of tensors"
            )
        if leaf.layout != torch.strided:
            raise ArgumentTypeError(
                f"{path} is of the layout {leaf.layout}, but only dense tensors can be moved; "
                f"convert it with .to_dense(), or use a bilevel.Table, of which a step moves "
                f"only some rows"
            )
        _refuse_meta(path, leaf)
    for where, node in nodes:
        if isinstance(node, nn.Module):  # Objectives read the frozen parameters and buffers too.
            for path, tensor in (*node.named_parameters(), *node.named_buffers()):
                _refuse_lazy(f"{where}.{path}", tensor)
                _refuse_meta(f"{where}.{path}", tensor)


def _refuse_lazy(path: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ArgumentError(
            f"{path} has no shape yet; call the lazy module once on a batch, which gives it one"
        )


def _refuse_meta(path: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise ArgumentError(
            f"{path} is on the meta device and has no values; materialise the module first, for "
            f"example with module.to_empty(device='cpu') and load_state_dict"
        )
