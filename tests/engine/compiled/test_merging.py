"""Products with a factor in common become one, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from bilevel.engine.compiled.merging import PRODUCTS, merge_products, share_rows

A = torch.randn(9, 7, dtype=torch.float64)
Y, Z = torch.randn(3, 7, dtype=torch.float64), torch.randn(2, 7, dtype=torch.float64)


def both_copies(a: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return (a @ y.T).exp(), (a @ z.T).sin()


def with_gradients(a: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    u, v = (a @ y.T).tanh(), (a @ z.T).tanh()
    return u.T @ a, v.T @ a


def not_transposed(a: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return a @ y.T.contiguous(), a @ z.T.contiguous()


def with_bias(a: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return torch.addmm(y[:, 0], a, y.T), a @ z.T


def one_after_the_other(a: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    first = a @ y.T
    return first, a @ (z + first.sum()).T


def crosswise(a: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    """Either pair can be merged, but not both: they would wait for each other."""
    b = a.exp()
    at_y = a @ y.T
    from_y = b @ (z + at_y.sum()).T
    from_z = b @ z.T
    return at_y, from_y, from_z, a @ (z + from_z.sum()).T


def nothing_in_common(a: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return a @ y.T, a.exp() @ y.T


def scaled(a: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return torch.addmm(y[:, 0], a, y.T, alpha=2), a @ z.T


def samples_of_both_levels(a: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    trusted = a[2:6].exp()
    return a @ y.T, a @ z.T, trusted @ y.T


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (both_copies, 1),
        (with_gradients, 2),
        (not_transposed, 1),
        (with_bias, 1),
        (one_after_the_other, 2),
        (crosswise, 3),
        (nothing_in_common, 2),
        (scaled, 2),
        (samples_of_both_levels, 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_values_stay_and_products_are_fewer(
    function: Callable[..., tuple[Tensor, ...]], products: int
) -> None:
    traced = make_fx(function, tracing_mode="fake")(A, Y, Z)
    merge_products(traced, wasteful=False)
    traced.graph.lint()
    torch.testing.assert_close(traced(A, Y, Z), function(A, Y, Z))
    assert sum(node.target in PRODUCTS for node in traced.graph.nodes) == products


MANY = torch.randn(200, 7, dtype=torch.float64)


def from_columns(a: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    """The rows of the first factor do not lie one after the other."""
    return a.exp().T.contiguous().T @ y.T, a[:, 1:] @ z[:, 1:].T


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 500])
@pytest.mark.parametrize(
    ("function", "columns"),
    [
        (both_copies, [5]),
        (with_gradients, [5]),
        (not_transposed, [5]),
        (with_bias, [5]),
        (one_after_the_other, [3, 2]),
        (nothing_in_common, [3, 3]),
        (scaled, [2]),
        (samples_of_both_levels, [5]),
        (from_columns, [2]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_many_rows_are_shared_among_threads(
    function: Callable[..., tuple[Tensor, ...]], columns: list[int], threads: int
) -> None:
    traced = make_fx(function, tracing_mode="fake")(MANY, Y, Z)
    merge_products(traced, wasteful=False)
    share_rows(traced, threads=threads)
    traced.graph.lint()
    torch.testing.assert_close(traced(MANY, Y, Z), function(MANY, Y, Z))
    found = [
        tuple(node.meta["val"].shape)
        for node in traced.graph.nodes
        if node.target is torch.ops.aten.bmm.default
    ]
    parts = {1: 1, 2: 2, 3: 2, 16: 10, 500: 10}[threads]  # of the same size, of 16 rows or more
    wanted = [(parts, 200 // parts, count) for count in columns]
    assert sorted(found) == (sorted(wanted) if parts > 1 else [])


@pytest.mark.parametrize("threads", [1, 2])
def test_results_of_many_rows_lie_column_by_column(threads: int) -> None:
    traced = make_fx(lambda a, y: a @ y.T, tracing_mode="fake")(MANY, Y)
    share_rows(traced, threads=threads)
    assert traced(MANY, Y).stride() == (1, 200)


def test_few_rows_are_left_to_the_library_of_products() -> None:
    traced = make_fx(lambda a, y: a @ y.T, tracing_mode="fake")(MANY[:30], Y)
    before = traced.code
    share_rows(traced, threads=2)
    assert traced.code == before


def test_what_counts_on_how_tensors_lie_is_left_alone() -> None:
    def diagonal(a: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return (a @ y.T).as_strided((3,), (4,)), a @ z.T

    for a in (A, MANY):
        traced = make_fx(diagonal, tracing_mode="fake")(a, Y, Z)
        merge_products(traced, wasteful=False)
        share_rows(traced, threads=2)
        torch.testing.assert_close(traced(a, Y, Z), diagonal(a, Y, Z))


def test_on_a_gpu_a_block_that_nobody_asked_for_is_computed_too() -> None:
    traced = make_fx(samples_of_both_levels, tracing_mode="fake")(A, Y, Z)
    merge_products(traced, wasteful=True)
    traced.graph.lint()
    assert sum(node.target in PRODUCTS for node in traced.graph.nodes) == 1
    torch.testing.assert_close(traced(A, Y, Z), samples_of_both_levels(A, Y, Z))


def test_a_product_that_is_taken_twice() -> None:
    def twice(a: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return a @ y.T, a @ y.T, a @ z.T

    traced = make_fx(twice, tracing_mode="fake")(A, Y, Z)
    merge_products(traced, wasteful=False)
    torch.testing.assert_close(traced(A, Y, Z), twice(A, Y, Z))


def test_large_factors_are_not_copied_to_save_reading_a_small_one() -> None:
    few = A[:4]
    traced = make_fx(both_copies, tracing_mode="fake")(few, Y, Z)
    merge_products(traced, wasteful=False)
    assert sum(node.target in PRODUCTS for node in traced.graph.nodes) == 2
    merge_products(traced, wasteful=True)
    assert sum(node.target in PRODUCTS for node in traced.graph.nodes) == 1
