"""Matrix products with factors in common become one product.

The copies of y use the same samples, so a step computes A y and A z with the same A, and for the
gradients B'A and C'A. One product reads A once, which a compiler does not see:

    A [y z] = [Ay Az],      [B C]' A = [B'A; C'A]

It pays where A is larger than what has to be concatenated. On a GPU, where a small product takes no
longer than its launch, it also pays to compute a block that is not used: with the trusted samples T
in f, [A; T] [y z] = [Ay Az; Ty *].

On a CPU the layout and the threads matter as well. Logits of many samples and few classes, Ay, have
few columns to share among threads, and BLAS may share them badly (seen: two threads took longer
than one, and at some sizes three times as long as necessary). So each thread is given its rows of
A. The logits are then laid out class by class, so that what follows is vectorized over the samples:
a row of ten logits does not fill a vector register.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from bilevel.engine.compiled.torch_internals import sort_nodes

aten = torch.ops.aten

PRODUCTS = (aten.mm.default, aten.addmm.default)

SMALL = 1 << 22
"""On a GPU, products whose factors have fewer entries take hardly longer than their launch."""

MANY_ROWS, FEW_COLUMNS = 32, 32
"""Products with at least as many rows and at most as many columns are shared among CPU threads."""

LEAST_ROWS = 16
"""The fewest rows that are worth a thread."""


def merge_products(module: GraphModule, *, wasteful: bool) -> None:
    """Rewrite the graph in place; ``wasteful``: also where unused blocks have to be computed."""
    if _depends_on_layout(module.graph):
        return
    while (blocks := next(_mergeable(module.graph, wasteful), None)) is not None:
        blocks.merge(module.graph, by_rows=not wasteful)
        sort_nodes(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()


def share_rows(module: GraphModule, *, threads: int) -> None:
    """Share the rows of products with many rows and few columns among the threads."""
    graph = module.graph
    if _depends_on_layout(graph):
        return
    for node in [node for node in graph.nodes if _is_product(node)]:
        left, right = _factors(node)
        rows, columns = left.length(0), right.length(1)
        if rows < MANY_ROWS or columns > min(FEW_COLUMNS, rows // 2) or left.transposed:
            continue  # copying the right factor should cost less than reading the left one
        most = min(threads, rows // LEAST_ROWS)
        parts = max(part for part in range(1, most + 1) if rows % part == 0)
        with graph.inserting_before(node):
            by_rows = _copy(graph, node.args[-1]) if right.transposed else node.args[-1]
            product = _in_parts(graph, left.matrix, by_rows, parts)
            result = _transpose(graph, _copy(graph, _transpose(graph, product)))
            if node.target is aten.addmm.default:
                result = _call(graph, aten.add.Tensor, result, node.args[0])
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()


class _Factor(NamedTuple):
    """A factor of a product: a matrix, or the transpose of one."""

    matrix: Node
    transposed: bool

    @classmethod
    def of(cls, node: Node) -> _Factor:
        if node.target is aten.permute.default and node.args[1] == [1, 0]:
            assert isinstance(node.args[0], Node)
            return cls(node.args[0], True)
        return cls(node, False)

    def length(self, dim: int) -> int:
        return int(self.matrix.meta["val"].shape[1 - dim if self.transposed else dim])

    @property
    def size(self) -> int:
        return int(self.matrix.meta["val"].numel())


class _Blocks:
    """Products L_i R_j as blocks of one product; none of them is computed from another."""

    def __init__(self, products: list[Node]) -> None:
        self._products = {_factors(product): product for product in products}
        self._left = list(dict.fromkeys(left for left, _ in self._products))
        self._right = list(dict.fromkeys(right for _, right in self._products))

    def pays(self, wasteful: bool) -> bool:
        """Whether merging them saves time."""
        if len(self._products) < 2:
            return False
        left, right = (sum(factor.size for factor in side) for side in (self._left, self._right))
        if len(self._left) == 1 and right <= left:
            return True
        if len(self._right) == 1 and left <= right:
            return True
        return (
            wasteful
            and left + right <= SMALL
            and 2 * len(self._products) > len(self._left) * len(self._right)
        )

    def merge(self, graph: Graph, *, by_rows: bool) -> None:
        """Replace the products by one; ``by_rows``: copy factors row by row, as CPUs prefer."""
        with graph.inserting_before(next(iter(reversed(self._products.values())))):
            left = _together(graph, self._left, 0, by_rows=by_rows)
            right = _together(graph, self._right, 1, by_rows=by_rows)
            if by_rows and len(self._right) > 1:
                self._share(graph, right)
            whole = _call(graph, aten.mm.default, left, right)
            for (above, beside), product in self._products.items():
                part = _part(graph, whole, 0, self._left, above)
                part = _part(graph, part, 1, self._right, beside)
                if product.target is aten.addmm.default:
                    part = _call(graph, aten.add.Tensor, part, product.args[0])
                product.replace_all_uses_with(part)
                graph.erase_node(product)

    def _share(self, graph: Graph, right: Node) -> None:
        """Let other products with one of the right factors read its row-by-row copy."""
        own = set(self._products.values())
        for node in graph.nodes:
            if _is_product(node) and node not in own:
                _, factor = _factors(node)
                if factor.transposed and factor in self._right and not _leads_to(node, {right}):
                    node.args = (*node.args[:-1], _part(graph, right, 1, self._right, factor))


def _mergeable(graph: Graph, wasteful: bool) -> Iterator[_Blocks]:
    """Products connected by common factors, or with one in common, where merging them pays."""
    groups: list[tuple[set[tuple[int, _Factor]], list[Node]]] = []
    for node in graph.nodes:
        if _is_product(node):
            factors = set(enumerate(_factors(node)))
            touched = [group for group in groups if group[0] & factors]
            groups = [group for group in groups if group not in touched]
            members = [member for _, others in touched for member in others]
            groups.append((factors.union(*(known for known, _ in touched)), [*members, node]))
    for _, group in groups:
        found = dict.fromkeys(pair for product in group for pair in enumerate(_factors(product)))
        sharing = (
            [product for product in group if _factors(product)[side] == factor]
            for side, factor in sorted(found, key=lambda pair: -pair[1].size)
        )
        for products in (group, *sharing):
            others = set(products)
            blocks = _Blocks([p for p in products if not _leads_to(p, others - {p})])
            if blocks.pays(wasteful):
                yield blocks


def _in_parts(graph: Graph, left: Node, right: Any, parts: int) -> Node:
    """A product whose rows are computed in this many parts at the same time."""
    if parts == 1:
        return _call(graph, aten.mm.default, left, right)
    rows, inner = left.meta["val"].shape
    columns = right.meta["val"].shape[1]
    each = _call(graph, aten.view.default, left, [parts, rows // parts, inner])
    same = _call(graph, aten.unsqueeze.default, right, 0)
    same = _call(graph, aten.expand.default, same, [parts, inner, columns])
    product = _call(graph, aten.bmm.default, each, same)
    return _call(graph, aten.view.default, product, [rows, columns])


def _depends_on_layout(graph: Graph) -> bool:
    """Whether an operation depends on the memory layout of a tensor."""
    return any(node.target is aten.as_strided.default for node in graph.nodes)


def _is_product(node: Node) -> bool:
    return node.target in PRODUCTS and not node.kwargs


def _factors(product: Node) -> tuple[_Factor, _Factor]:
    left, right = product.args[-2:]
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    return _Factor.of(left), _Factor.of(right)


def _together(graph: Graph, factors: list[_Factor], along: int, *, by_rows: bool) -> Node:
    """The factors concatenated. A transpose of them all is taken last, unless ``by_rows``."""
    if all(factor.transposed for factor in factors) and not (by_rows and len(factors) > 1):
        return _transpose(graph, _cat(graph, [factor.matrix for factor in factors], 1 - along))
    whole = [_transpose(graph, f.matrix) if f.transposed else f.matrix for f in factors]
    return _cat(graph, whole, along)


def _cat(graph: Graph, matrices: list[Node], along: int) -> Node:
    return matrices[0] if len(matrices) == 1 else _call(graph, aten.cat.default, matrices, along)


def _transpose(graph: Graph, matrix: Node) -> Node:
    return _call(graph, aten.permute.default, matrix, [1, 0])


def _copy(graph: Graph, matrix: Any) -> Node:
    """A copy in row-major order."""
    return _call(graph, aten.clone.default, matrix, memory_format=torch.contiguous_format)


def _part(graph: Graph, whole: Node, dim: int, factors: list[_Factor], wanted: _Factor) -> Node:
    """The rows or columns that belong to one factor."""
    if len(factors) == 1:
        return whole
    place = factors.index(wanted)
    start = sum(factor.length(dim) for factor in factors[:place])
    return _call(graph, aten.slice.Tensor, whole, dim, start, start + wanted.length(dim))


def _call(graph: Graph, target: Callable[..., Any], *arguments: Any, **options: Any) -> Node:
    """A node for a call, with the shape and type of its value."""
    node = graph.call_function(target, arguments, options)
    values = torch.fx.node.map_arg(arguments, lambda argument: argument.meta["val"])
    first = values[0][0] if isinstance(values[0], list | tuple) else values[0]
    with first.fake_mode:
        node.meta["val"] = target(*values, **options)
    return node


def _leads_to(node: Node, others: set[Node]) -> bool:
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
