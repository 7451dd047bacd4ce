"""Trees: nested dicts, lists and tuples whose leaves are tensors and modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from bilevel.errors import ArgumentError, ArgumentTypeError

_DEEPEST = 100


def walk(
    tree: Any, path: str, inside: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Every tensor and module of a tree with the path to it, such as ``"y['head'][0]"``.

    ``inside`` are the dicts, lists and tuples that the tree is in.
    """
    if any(tree is outer for outer in inside):
        raise ArgumentError(f"{path} holds itself; a variable is a tree, in which nothing does")
    if len(inside) > _DEEPEST:
        raise ArgumentError(f"{path[:60]}... is more than {_DEEPEST} levels deep; make it flatter")
    if isinstance(tree, Tensor | nn.Module):
        yield path, tree
    elif isinstance(tree, dict):
        for key, child in tree.items():
            yield from walk(child, f"{path}[{key!r}]", (*inside, tree))
    elif isinstance(tree, list | tuple):
        for index, child in enumerate(tree):
            yield from walk(child, f"{path}[{index}]", (*inside, tree))
    elif tree is not None:
        raise ArgumentTypeError(
            f"{path} is {type(tree).__name__} {tree!r}, but a variable is a tensor, an nn.Module, "
            f"or a dict, list or tuple of these; use torch.as_tensor for numbers and arrays"
        )


def map_tree(tree: Any, function: Callable[[Tensor | nn.Module], Any]) -> Any:
    """The tree with every tensor and module replaced by ``function`` of it."""
    if isinstance(tree, Tensor | nn.Module):
        return function(tree)
    if isinstance(tree, dict):
        mapped = copy.copy(tree)  # keeps what a subclass adds, such as a default factory
        mapped.update((key, map_tree(child, function)) for key, child in tree.items())
        return mapped
    if isinstance(tree, list | tuple):
        children = [map_tree(child, function) for child in tree]
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)
    return tree
