"""Products of matrices that have a factor in common, taken as one.

The copies of y look at the same samples, so a step computes A y and A z with the same A, and for
the gradients B'A and C'A. One product reads A once:

    A [y z] = [Ay Az],      [B C]' A = [B'A; C'A]

A compiler does not see this. It pays where A is larger than what has to be put side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

PRODUCTS = (aten.mm.default, aten.addmm.default)


def merge_products(module: GraphModule) -> None:
    """Rewrite the graph, in place."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    while (found := next(_mergeable(module.graph), None)) is not None:
        _merge(module.graph, *found)
        stable_topological_sort(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()


def _mergeable(graph: Graph) -> Iterator[tuple[list[Node], int]]:
    """Products that none of the others leads to, and which of their factors they share."""
    products = [node for node in graph.nodes if node.target in PRODUCTS and _plain(node)]
    for common in (0, 1):
        groups: dict[Node, list[Node]] = {}
        for product in products:
            groups.setdefault(_factors(product)[common], []).append(product)
        for shared, group in groups.items():
            alone = [
                product
                for product in group
                if not _leads_to(product, [other for other in group if other is not product])
            ]
            own = [_factors(product)[1 - common] for product in alone]
            if len(alone) > 1 and sum(map(_size, own)) <= _size(shared):
                yield alone, common


def _merge(graph: Graph, products: list[Node], common: int) -> None:
    """Put one product in the place of several."""
    shared = _factors(products[0])[common]
    own = [_factors(product)[1 - common] for product in products]
    along = 1 - common
    with graph.inserting_before(products[-1]):
        together = _together(graph, own, along)
        factors = (shared, together) if common == 0 else (together, shared)
        whole = _call(graph, aten.mm.default, *factors)
        start = 0
        for product, factor in zip(products, own, strict=True):
            end = start + factor.meta["val"].shape[along]
            part = _call(graph, aten.slice.Tensor, whole, along, start, end)
            if product.target is aten.addmm.default:
                part = _call(graph, aten.add.Tensor, part, product.args[0])
            product.replace_all_uses_with(part)
            graph.erase_node(product)
            start = end


def _together(graph: Graph, factors: list[Node], along: int) -> Node:
    """The factors side by side; what is transposed anyway, is so afterwards, and stays in order."""
    if all(f.target is aten.permute.default and f.args[1] == [1, 0] for f in factors):
        flipped = _call(graph, aten.cat.default, [f.args[0] for f in factors], 1 - along)
        return _call(graph, aten.permute.default, flipped, [1, 0])
    return _call(graph, aten.cat.default, factors, along)


def _call(graph: Graph, target: Callable[..., Any], *arguments: Any) -> Node:
    """A node for a call, which knows what its value looks like."""
    node = graph.call_function(target, arguments)
    values = torch.fx.node.map_arg(arguments, lambda argument: argument.meta["val"])
    mode = next(value for value in _flat(values) if hasattr(value, "fake_mode")).fake_mode
    with mode:
        node.meta["val"] = target(*values)
    return node


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _plain(product: Node) -> bool:
    """Whether nothing but the factors, and what is added, decides."""
    return not product.kwargs and all(isinstance(factor, Node) for factor in _factors(product))


def _factors(product: Node) -> tuple[Node, Node]:
    first, second = product.args[-2:]
    return first, second  # type: ignore[return-value]


def _size(node: Node) -> int:
    return int(node.meta["val"].numel())


def _leads_to(node: Node, others: list[Node]) -> bool:
    """Whether one of the others is computed from the node."""
    ahead, seen = [node], {node}
    while ahead:
        for user in ahead.pop().users:
            if user in others:
                return True
            if user not in seen:
                seen.add(user)
                ahead.append(user)
    return False
