"""Which tensors of a tree are moved, and which tensors cannot be."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bilevel.errors import ArgumentError, ArgumentTypeError, TiedWarning, warn
from bilevel.variables.table import Table


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
    for where, node in nodes:
        if isinstance(node, nn.Module):  # Objectives read the frozen parameters and buffers too.
            for path, tensor in (*node.named_parameters(), *node.named_buffers()):
                _refuse_meta(f"{where}.{path}", tensor)


def _refuse_meta(path: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise ArgumentError(
            f"{path} is on the meta device and has no values; materialise the module first, for "
            f"example with module.to_empty(device='cpu') and load_state_dict"
        )
