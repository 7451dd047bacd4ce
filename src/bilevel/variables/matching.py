"""What a user gives for the parts of a variable, one for each of its leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.variables.table import Table


def match_leaves(
    value: Any,
    moved_leaves: Sequence[Tensor],
    argument: str,
    given: Any,
    fits: Callable[[Any], bool],
    wanted: str,
) -> list[Any]:
    """For each leaf what ``given`` has for it; None where it has nothing.

    Args:
        value: a tensor, a module, or a tree of these.
        moved_leaves: those of its tensors that are moved.
        argument: what messages call ``given``.
        given: one thing for all leaves, or a tree of such in the shape of the value. For a
            module it is a dict by the names of parameters, or another module with the same names.
        fits: whether something is such a thing.
        wanted: what such a thing is, for messages.
    """
    found: dict[int, Any] = {}
    leaves = set(map(id, moved_leaves))

    def moved(module: nn.Module) -> dict[str, Tensor]:
        return {name: p for name, p in module.named_parameters() if id(p) in leaves}

    def collect(node: Any, part: Any, path: str) -> None:
        if part is None or node is None:
            return
        if isinstance(part, type):
            raise ArgumentTypeError(f"{path} is the class {part.__name__}; give an instance of it")
        if isinstance(node, Table):
            node = node.values
        if isinstance(part, nn.Module) and not fits(part):
            part = part.values if isinstance(part, Table) else dict(part.named_parameters())
            if isinstance(node, nn.Module):
                part = {name: p for name, p in part.items() if name in moved(node)}
        if isinstance(node, nn.Module) and (fits(part) or isinstance(part, dict)):
            node = moved(node)
        if fits(part):
            if isinstance(node, Tensor):
                found[id(node)] = part
            elif isinstance(node, dict | list | tuple):
                for child in node.values() if isinstance(node, dict) else node:
                    collect(child, part, path)
        elif isinstance(part, dict) and isinstance(node, dict):
            unknown = [key for key in part if key not in node]
            if unknown:
                raise ArgumentError(
                    f"{path} names {unknown!r}, but the variable has only {list(node)!r}"
                )
            for key, child in part.items():
                collect(node[key], child, f"{path}[{key!r}]")
        elif isinstance(part, list | tuple) and isinstance(node, list | tuple):
            if len(part) != len(node):
                raise ArgumentError(
                    f"{path} has {len(part)} parts, but the variable has {len(node)}"
                )
            for index, child in enumerate(part):
                collect(node[index], child, f"{path}[{index}]")
        else:
            raise ArgumentTypeError(
                f"{path} must be {wanted}, or a tree of such in the shape of the variable, not "
                f"{part!r}"
            )

    collect(value, given, argument)
    return [found.get(id(leaf)) for leaf in moved_leaves]
