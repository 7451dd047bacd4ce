"""Tables: the iterates of plain tensors."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import bilevel
from bilevel import Table
from bilevel.errors import (
    ArgumentError,
    ArgumentTypeError,
    RowError,
)
from bilevel.problem.sets import Ball, Box, Rows, Simplex
from tests.marks import slow_except
from tests.variables.tables import (
    DENSE,
    LOWER_DATA,
    PER_SAMPLE,
    ROWS,
    SETTINGS,
    STARTS,
    TARGETS,
    lower,
    plain,
    single_precision,
    solver_of,
    upper,
)

# -- lookups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (5, 2), (5, 2, 3)])
@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([3, 0, 3]),
        torch.tensor([[1, 2], [4, 1]]),
        torch.tensor([4], dtype=torch.int32),
        torch.tensor(2),
        torch.empty(0, dtype=torch.int64),
        np.array([1, 1]),
        [0, 4],
        3,
        np.int64(2),
        slice(None),
        slice(4, 0, -2),
    ],
    ids=repr,
)
def test_rows_and_their_gradients_are_those_of_indexing(shape: tuple[int, ...], index: Any) -> None:
    values = torch.arange(float(np.prod(shape)), dtype=torch.float64).reshape(shape)
    known = values.clone().requires_grad_()
    at = (
        torch.arange(4, 0, -2) if isinstance(index, slice) and index.step else index
    )  # tensors know no such slice
    expected = known[at] if isinstance(at, slice) else known[torch.as_tensor(at).long()]
    table = Table(values)
    rows = table[index]
    assert torch.equal(rows, expected)
    assert torch.equal(table(index), rows)
    for looked_up in (rows, expected):
        weights = torch.arange(1.0, looked_up.numel() + 1, dtype=torch.float64)
        (looked_up.reshape(-1) * weights).sum().backward()
    assert table.values.grad.is_sparse
    assert torch.equal(table.values.grad.to_dense(), known.grad)


def test_a_lookup_can_be_differentiated_twice() -> None:
    values = torch.arange(1.0, 7.0, dtype=torch.float64)
    table, weights = Table(values), torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    cubes = (weights * table[[1, 4, 1]] ** 3).sum()
    (slope,) = torch.autograd.grad(cubes, table.values, create_graph=True)
    seen = torch.tensor([0, 101, 0, 0, 10, 0], dtype=torch.float64)
    torch.testing.assert_close(slope, 3 * seen * values**2)
    (product,) = torch.autograd.grad(slope, table.values, torch.full_like(values, 2.0))
    torch.testing.assert_close(product.to_dense(), 12 * seen * values)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (torch.tensor([0.0]), ArgumentTypeError, r"index.*torch\.float32"),
        (torch.tensor([True] * 5), ArgumentTypeError, r"dtype torch\.bool.*mask\.nonzero"),
        (torch.tensor([1], dtype=torch.uint8), ArgumentTypeError, r"dtype torch\.uint8"),
        ([0.5], ArgumentTypeError, r"dtype torch\.float32"),
        (True, ArgumentTypeError, r"dtype torch\.bool"),
        ((0, 1), ArgumentTypeError, r"not by \(0, 1\); what is inside a row"),
        (None, ArgumentTypeError, "not by None"),
        ("a", ArgumentTypeError, "not by 'a'"),
        (torch.tensor([0, 5, 9]), RowError, r"row 5 was .* Table of 5 rows, .* from 0 to 4"),
        (torch.tensor([-1]), RowError, "row -1"),
        (5, IndexError, "row 5"),
    ],
    ids=repr,
)
def test_what_is_not_a_row_is_refused(index: Any, error: type[Exception], message: str) -> None:
    for requires_grad in (True, False):
        table = Table(torch.zeros(5, 2)).requires_grad_(requires_grad)
        with pytest.raises(error, match=message):
            table[index]


def test_a_row_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(RowError(7, 5)))
    assert (error.row, error.rows, str(error)) == (7, 5, str(RowError(7, 5)))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (5, ArgumentTypeError, r"values"),
        ([1.0], ArgumentTypeError, r"not \[1\.0\]"),
        (torch.arange(3), ArgumentTypeError, r"values.*torch\.int64"),
        (torch.tensor(1.0), ArgumentError, r"at least one row, but has the shape \(\)"),
        (torch.zeros(0, 3), ArgumentError, r"shape \(0, 3\)"),
        (torch.zeros(3).to_sparse(), ArgumentError, r"layout torch\.sparse_coo"),
    ],
    ids=repr,
)
def test_what_cannot_be_a_table_is_refused(
    values: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Table(values)


def test_a_table_says_what_it_is() -> None:
    table = Table(torch.zeros(4, 2, dtype=torch.float64))
    assert (len(table), table.shape, table.dtype) == (4, (4, 2), torch.float64)
    assert table.device == torch.device("cpu")
    assert repr(table) == "Table(shape=(4, 2), dtype=torch.float64, device='cpu')"
    assert table.to(torch.bfloat16)[[0, 1]].dtype == torch.bfloat16
    rows = list(Table(torch.ones(3)))  # type: ignore[call-overload]
    assert len(rows) == 3  # iteration ends at the last row


@pytest.mark.slow
def test_the_users_tensor_is_the_table_until_a_run_copies_it_once() -> None:
    start = STARTS.clone()
    table = Table(start)
    assert table.values.data_ptr() == start.data_ptr()
    solver_of(table, steps=3)
    assert torch.equal(start, STARTS)
    assert table.values.grad is None

    def large() -> int:
        gc.collect()
        return sum(
            o.numel() == 12_345
            for o in gc.get_objects()
            if issubclass(type(o), Tensor) and not is_lazy(o) and not o.is_sparse
        )

    table = Table(torch.zeros(12_345))
    before = large()
    solver = solver_of(table, steps=2, y0=torch.zeros(3), problem=single_precision())
    assert large() == before + 1
    assert len(solver.x) == 12_345


# -- the iterates of a plain tensor ----------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS | DENSE)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"x_set": Box(-0.5, 0.5)},
        {"direction_batch_size": "all", "chunk_size": 7},
        {"direction_batch_size": 20},
    ],
    ids=["batch", "box", "all", "larger"],
)
def test_iterates_are_those_of_a_tensor(name: str, options: dict[str, Any]) -> None:
    method = (SETTINGS | DENSE)[name]
    if "single pass" in name and "direction_batch_size" in options:
        pytest.skip("refused for tensors too")
    table, tensor = (solver_of(x0, method, **options) for x0 in (Table(STARTS), STARTS))
    for _ in range(6):
        infos = table.step(), tensor.step()
        for quantity in ("upper", "lower", "gap", "direction_norm"):
            found, known = (getattr(info, quantity) for info in infos)
            torch.testing.assert_close(found, known, rtol=1e-9, atol=1e-12, equal_nan=True)
    assert isinstance(table.x, Table)
    torch.testing.assert_close(table.x.values.detach(), tensor.x, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(table.y, tensor.y, rtol=1e-9, atol=1e-12)
    if "x_set" in options:
        assert table.x.values.abs().max() <= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_except(["f2sa", "soba"], ["f2sa", "f3sa", "meha", "soba"]))
@pytest.mark.parametrize(
    "options",
    [{"batch_size": None}, {"direction_batch_size": "all", "chunk_size": 7}],
    ids=["deterministic", "all"],
)
def test_steps_of_x_are_found_where_every_direction_is_over_all_samples(
    method: str, options: dict[str, Any]
) -> None:
    table, tensor = (solver_of(x0, method, 60, **options) for x0 in (Table(STARTS), STARTS))
    torch.testing.assert_close(table.x.values, tensor.x, rtol=1e-6, atol=1e-9)
    assert bool((table.x.values != STARTS).all())


@pytest.mark.parametrize("options", [{}, {"direction_batch_size": 20}], ids=["batch", "larger"])
def test_steps_of_x_that_no_two_directions_could_tell_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"upper_lr='auto' .* x\.values .*SparseAdam"):
        solver_of(Table(STARTS), "f2sa", **options)


@pytest.mark.parametrize("name", SETTINGS | DENSE)
def test_iterates_of_a_lower_table_are_those_of_a_tensor(name: str) -> None:
    x0 = torch.tensor(0.3, dtype=torch.float64)
    ends = []
    for y0 in (Table(STARTS), STARTS):
        # rows without a sample have no curvature, on which conjugate gradients cannot go on
        options = {"batch_size": None} if name == "aid" else {}
        solver = solver_of(x0, (SETTINGS | DENSE)[name], 6, problem=PER_SAMPLE, y0=y0, **options)
        ends.append((solver.x, plain(solver.y)))
    for found, known in zip(*ends, strict=True):
        torch.testing.assert_close(found, known, rtol=1e-9, atol=1e-12)


def rows_of_a_tree(x: Any, index: Tensor) -> Tensor:
    return x["w"][index][..., 0] * x["b"] + x["w"][index][..., 1]


@pytest.mark.parametrize("name", SETTINGS | DENSE)
def test_a_table_in_a_tree_moves_beside_a_tensor(name: str) -> None:
    problem = bilevel.Problem(
        lambda x, y, b: upper(x["b"] + torch.zeros(ROWS, dtype=torch.float64), y, b),
        lambda x, y, b: lower({i: rows_of_a_tree(x, b[2]) for i in (b[2],)}, y, b),
    )
    start = torch.stack([STARTS, TARGETS], dim=1)
    b = torch.tensor(0.5, dtype=torch.float64)
    ends = [
        plain(solver_of({"w": w, "b": b}, (SETTINGS | DENSE)[name], 5, problem=problem).x)
        for w in (Table(start), start)
    ]
    for part in ("w", "b"):
        torch.testing.assert_close(ends[0][part], ends[1][part], rtol=1e-9, atol=1e-12)
    assert (ends[0]["b"] != b).item() == (name != "no-bilevel")


class Weigher(nn.Module):
    """A module that looks rows up in whatever it is given."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def __getitem__(self, index: Tensor) -> Tensor:
        return self.scale * self.rows(index).squeeze(-1)


def embedding(sparse: bool) -> nn.Embedding:
    return nn.Embedding.from_pretrained(STARTS[:, None].clone(), freeze=False, sparse=sparse)


@pytest.mark.parametrize("name", ["f2sa", "f2sa, midpoint", "bome", "f3sa", "soba"])
@pytest.mark.parametrize(
    "rows", [lambda: Table(STARTS[:, None]), lambda: embedding(True)], ids=["table", "embedding"]
)
def test_a_table_inside_a_module_is_a_sparse_embedding(
    name: str, rows: Callable[[], nn.Module]
) -> None:
    method = (SETTINGS | DENSE)[name]
    sparse, whole = (
        solver_of(Weigher(part), method, 5, x_set={"scale": Box(0, 0.8)})
        for part in (rows(), embedding(False))
    )
    for found, known in zip(sparse.x.parameters(), whole.x.parameters(), strict=True):
        torch.testing.assert_close(found, known, rtol=1e-9, atol=1e-12)
    assert not torch.equal(next(sparse.x.rows.parameters())[:, 0], STARTS)


def test_the_whole_of_a_table_may_be_used_as_well() -> None:
    def decayed(x: Any, y: Tensor, batch: Any) -> Tensor:
        return lower(x, y, batch) + 0.1 * (plain(x) ** 2).mean()

    problem = bilevel.Problem(
        lambda x, y, batch: upper(x, y, batch) + 0.3 * (plain(x) ** 2).mean(), decayed
    )
    ends = [
        plain(solver_of(x0, name, 5, problem=problem).x)
        for name in (bilevel.F2SA(0.1, 0.1, inner_steps=2), bilevel.BOME(0.1, 0.1, inner_steps=2))
        for x0 in (Table(STARTS), STARTS)
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ends[2], ends[3], rtol=1e-9, atol=1e-12)


def test_rows_that_no_batch_named_keep_their_bits() -> None:
    data = LOWER_DATA[0][:9], LOWER_DATA[1][:9], LOWER_DATA[2][:9]
    problem = bilevel.Problem(lambda x, y, b: ((b[0] @ y - b[1]) ** 2).mean(), lower)
    solver = solver_of(Table(STARTS), steps=20, problem=problem, lower_data=data)
    moved = solver.x.values != STARTS
    assert bool(moved[:9].all())
    assert not bool(moved[9:].any())


# -- sets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "x_set"),
    [
        ((ROWS,), Box(-0.2, float("inf"))),
        ((ROWS,), Box(STARTS - 0.1, STARTS + 0.2)),
        ((ROWS, 2), Box(torch.tensor([-0.1, -0.3]), torch.tensor([0.1, 0.0]))),
        ((ROWS, 2), Box(torch.full((1, 2), -0.1), 0.5 * torch.ones(ROWS, 1).cumsum(0))),
        ((ROWS, 2), Simplex()),
        ((ROWS, 2), Rows(Ball(0.4))),
        ((ROWS,), Rows(lambda row: row.clamp(-0.3, 0.3))),
    ],
)
def test_rows_are_projected_as_the_whole_would_be(shape: tuple[int, ...], x_set: Any) -> None:
    start = 0.5 * (STARTS if len(shape) == 1 else torch.stack([STARTS, -STARTS], dim=1))

    class Summed:
        def __init__(self, x: Any) -> None:
            self.x = x

        def __getitem__(self, index: Tensor) -> Tensor:
            return self.x[index].reshape(*index.shape, -1).square().sum(-1)

    problem = bilevel.Problem(
        lambda x, y, b: upper(Summed(x), y, b), lambda x, y, b: lower(Summed(x), y, b), x_set
    )
    method = bilevel.F2SA(0.1, 10.0)
    ends = [plain(solver_of(x0, method, 5, problem=problem).x) for x0 in (Table(start), start)]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ends[0], x_set(ends[0]), rtol=1e-12, atol=1e-12)


def test_the_start_is_projected_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bilevel.stepping.updates._BLOCK", 7)
    solver = solver_of(Table(STARTS), x_set=Box(STARTS.neg(), 0.2 + STARTS.neg()))
    assert torch.equal(solver.x.values, STARTS.clamp(-STARTS, 0.2 - STARTS))


@pytest.mark.parametrize(
    ("values", "x_set", "message"),
    [
        (STARTS, Simplex(), r"x_set is Simplex\(total=1\.0\) for x\.values.*sets\.Rows"),
        (STARTS, Ball(1.0), r"x_set is Ball\(radius=1\.0\) for x\.values"),
        (STARTS[:, None], Ball(1.0), r"x_set is Ball"),
        (STARTS, torch.relu, r"x_set is <built-in .* for x\.values"),
    ],
)
def test_a_set_that_ties_rows_together_is_refused(values: Tensor, x_set: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        solver_of(Table(values), x_set=x_set)


def test_sets_reach_tables_in_trees() -> None:
    problem = bilevel.Problem(
        lambda x, y, b: upper(x["w"], y, b) + x["b"] ** 2,
        lambda x, y, b: lower(x["w"], y, b),
        x_set={"w": Box(0, 0.1), "b": Ball(1.0)},
    )
    b = torch.tensor(3.0, dtype=torch.float64)
    solver = solver_of({"w": Table(STARTS), "b": b}, steps=2, problem=problem)
    assert 0 <= solver.x["w"].values.min() <= solver.x["w"].values.max() <= 0.1
    assert solver.x["b"].abs() <= 1


@pytest.mark.parametrize("bad", [Ball, 3])
def test_rows_of_what_does_not_project_are_refused(bad: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="Rows"):
        Rows(bad)
