"""Tables: the iterates of plain tensors, at the cost of the rows that were looked up."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import bilevel
from bilevel import Table
from bilevel.errors import (
    ArgumentError,
    ArgumentTypeError,
    NonFiniteError,
    ObjectiveError,
    RowError,
    StateError,
)
from bilevel.problem import Ball, Box, Rows, Simplex
from bilevel.variables import GradientSum, Variable, add_gradients, sum_gradients

ROWS = 40
GENERATOR = torch.Generator().manual_seed(0)
FEATURES = torch.randn(ROWS, 3, generator=GENERATOR, dtype=torch.float64)
TARGETS = torch.randn(ROWS, generator=GENERATOR, dtype=torch.float64)
STARTS = torch.randn(ROWS, generator=GENERATOR, dtype=torch.float64)
LOWER_DATA = (FEATURES, TARGETS, torch.arange(ROWS))
UPPER_DATA = (FEATURES.flip(0), TARGETS + 1, torch.arange(ROWS).flip(0))


def lower(x: Any, y: Tensor, batch: Any) -> Tensor:
    features, targets, index = batch
    return (torch.sigmoid(x[index]) * (features @ y - targets) ** 2).mean() + 0.1 * (y**2).sum()


def upper(x: Any, y: Tensor, batch: Any) -> Tensor:
    """f looks rows up as well, twice, and others than g."""
    features, targets, index = batch
    return ((features @ y - targets) ** 2).mean() + 0.01 * (x[index] * x[index % 7]).mean()


PLAIN = bilevel.F2SA(0.1, 0.1)


def solver_of(x0: Any, method: Any = PLAIN, steps: int = 0, **options: Any) -> bilevel.Solver:
    problem = options.pop("problem", None) or bilevel.Problem(
        upper, lower, x_set=options.pop("x_set", None)
    )
    settings: dict[str, Any] = {
        "upper_data": UPPER_DATA,
        "lower_data": LOWER_DATA,
        "batch_size": 8,
        **options,
    }
    y0 = settings.pop("y0", torch.zeros(3, dtype=torch.float64))
    solver = bilevel.Solver(problem, x0, y0, method=method, **settings)
    for _ in range(steps):
        solver.step()
    return solver


def plain(value: Any) -> Any:
    """A table as its tensor."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return value.values if isinstance(value, Table) else value


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
            if issubclass(type(o), Tensor) and not o.is_sparse
        )

    table = Table(torch.zeros(12_345))
    before = large()
    solver = solver_of(table, steps=2, y0=torch.zeros(3), problem=_single_precision())
    assert large() == before + 1
    assert len(solver.x) == 12_345


def _single_precision() -> bilevel.Problem:
    def converted(batch: Any) -> Any:
        return batch[0].float(), batch[1].float(), batch[2]

    return bilevel.Problem(
        lambda x, y, batch: upper(x, y, converted(batch)),
        lambda x, y, batch: lower(x, y, converted(batch)),
    )


# -- the iterates of a plain tensor ----------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "f2sa": bilevel.F2SA(0.1, 0.1, inner_steps=3),
    "f2sa, single pass": bilevel.F2SA(0.1, 0.1, inner_steps=3, single_pass=True),
    "f2sa, independent": bilevel.F2SA(0.1, 0.1, inner_steps=3, coupling="independent"),
    "f2sa, midpoint": bilevel.F2SA(0.1, 0.1, inner_steps=3, scheme="midpoint"),
    "f2sa, central": bilevel.F2SA(0.1, 0.1, inner_steps=2, scheme="central", order=4),
    "f2sa, lower step found": bilevel.F2SA(upper_lr=0.1, inner_steps=3),
    "f2ba": bilevel.F2BA(0.1, 0.1, inner_steps=2),
    "bome": bilevel.BOME(0.1, 0.1, inner_steps=2),
    "bome, gap": bilevel.BOME(0.1, 0.1, inner_steps=2, barrier="gap", coupling="independent"),
    "vpbgd": bilevel.VPBGD(0.1, 0.1, inner_steps=2),
    "vpbgd, from y": bilevel.VPBGD(0.1, 0.1, inner_steps=2, start="y"),
    "meha": bilevel.MEHA(0.1, 0.1),
    "sobo": bilevel.SOBO(0.1, 0.1),
    "soba": bilevel.SOBA(0.1, 0.1),
    "aid": bilevel.AID(0.1, 0.1),
    "itd": bilevel.ITD(0.1, 0.1, inner_steps=3),
    "no-bilevel": bilevel.NoBilevel(0.1),
}
DENSE: dict[str, Any] = {
    "f3sa": bilevel.F3SA(0.1, 0.1, momentum=0.5),
    "f3sa, combined": bilevel.F3SA(0.1, 0.1, momentum=0.5, recursion="combined"),
    "f2ba, accelerated": bilevel.F2BA(0.1, 0.1, inner_steps=2, acceleration=bilevel.Nesterov(0.5)),
    "ma-soba": bilevel.MASOBA(0.1, 0.1, averaging=0.5),
}


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


@pytest.mark.parametrize("method", ["f2sa", "f3sa", "meha", "soba"])
@pytest.mark.parametrize(
    "options",
    [{"batch_size": None}, {"direction_batch_size": "all", "chunk_size": 7}],
    ids=["deterministic", "all"],
)
def test_steps_of_x_are_found_where_every_direction_is_over_all_samples(
    method: str, options: dict[str, Any]
) -> None:
    table, tensor = (solver_of(x0, method, 20, **options) for x0 in (Table(STARTS), STARTS))
    torch.testing.assert_close(table.x.values, tensor.x, rtol=1e-6, atol=1e-9)
    assert bool((table.x.values != STARTS).all())


@pytest.mark.parametrize("options", [{}, {"direction_batch_size": 20}], ids=["batch", "larger"])
def test_steps_of_x_that_no_two_directions_could_tell_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"upper_lr='auto' .* x\.values .*SparseAdam"):
        solver_of(Table(STARTS), "f2sa", **options)


def per_sample(x: Any, y: Any, batch: Any) -> Tensor:
    """One lower parameter per sample."""
    _, targets, index = batch
    rows = y[index]
    return ((rows - targets - x) ** 2).mean() + 0.1 * (rows**4).mean()


PER_SAMPLE = bilevel.Problem(
    lambda x, y, batch: ((y[batch[2]] - 1) ** 2).mean() + 0.1 * x**2, per_sample
)


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


# -- optimizers ------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    # for the rows, and what it is for a whole tensor of which every row has a gradient
    "sparse adam": (
        lambda p: torch.optim.SparseAdam(p, lr=0.05, eps=1e-30),  # which has another place there
        lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-30),
    ),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1),) * 2,
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1),) * 2,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("extra", [{}, {"x_set": Box(-0.3, 0.3)}], ids=["free", "box"])
def test_sparse_optimizers_are_the_dense_ones_where_every_row_is_touched(
    name: str, extra: dict[str, Any]
) -> None:
    by_rows, whole = OPTIMIZERS[name]
    ends = []
    for x0, factory in ((Table(STARTS), by_rows), (STARTS, whole)):
        method = bilevel.F2SA(0.1, inner_steps=2, upper_optimizer=factory)
        solver = solver_of(x0, method, 6, batch_size=None, **extra)
        ends.append(plain(solver.x))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_move_the_rows_of_the_batch_alone(name: str) -> None:
    data = LOWER_DATA[0][:9], LOWER_DATA[1][:9], LOWER_DATA[2][:9]
    problem = bilevel.Problem(lambda x, y, b: ((b[0] @ y - b[1]) ** 2).mean(), lower)
    method = bilevel.F2SA(0.1, inner_steps=1, upper_optimizer=OPTIMIZERS[name][0])
    solver = solver_of(Table(STARTS), method, 20, problem=problem, lower_data=data)
    moved = solver.x.values != STARTS
    assert bool(moved[:9].all())
    assert not bool(moved[9:].any())


@pytest.mark.parametrize("method", [bilevel.F3SA, bilevel.MASOBA])
def test_sparse_adam_takes_the_dense_directions_of_momentum(method: Any) -> None:
    sparse, whole = OPTIMIZERS["sparse adam"]
    ends = [
        plain(solver_of(x0, method(0.1, upper_optimizer=factory), 5).x)
        for x0, factory in ((Table(STARTS), sparse), (STARTS, whole))
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)


class OwnAdam(torch.optim.Adam):
    """What a user derives from Adam."""


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (torch.optim.Adam, r"of x\.values is Adam\(\.\.\.\), .* use torch\.optim\.SparseAdam"),
        (OwnAdam, r"of x\.values is Adam"),
        (torch.optim.AdamW, r"is AdamW"),
        (lambda p: torch.optim.SGD(p, momentum=0.9), r"is SGD\(momentum=0\.9\)"),
        (lambda p: torch.optim.SGD(p, weight_decay=0.1), r"is SGD\(weight_decay=0\.1\)"),
        (lambda p: torch.optim.Adagrad(p, weight_decay=0.1), r"Adagrad\(weight_decay=0\.1\)"),
    ],
)
def test_optimizers_that_move_every_row_are_refused(factory: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        solver_of(Table(STARTS), bilevel.F2SA(0.1, upper_optimizer=factory))


def test_sparse_adam_is_refused_beside_a_plain_tensor() -> None:
    problem = bilevel.Problem(
        lambda x, y, b: upper(x["w"], y, b) + x["b"] ** 2, lambda x, y, b: lower(x["w"], y, b)
    )
    method = bilevel.F2SA(0.1, upper_optimizer=torch.optim.SparseAdam)
    b = torch.tensor(3.0, dtype=torch.float64)
    with pytest.raises(ArgumentTypeError, match=r"no dense gradients, as x\['b'\] has them"):
        solver_of({"w": Table(STARTS), "b": b}, method, problem=problem)


class Recorder(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.seen: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.extend(p.grad for group in self.param_groups for p in group["params"])


def test_an_optimizer_of_the_users_own_is_given_each_row_once() -> None:
    made: list[Recorder] = []

    def factory(params: Any) -> Recorder:
        made.append(Recorder(params))
        return made[0]

    # duplicates within the batch, and the same rows at y and at z
    data = FEATURES[:4], TARGETS[:4], torch.tensor([3, 9, 3, 3])
    problem = bilevel.Problem(lambda x, y, b: ((b[0] @ y - b[1]) ** 2).mean(), lower)
    solver_of(
        Table(STARTS),
        bilevel.F2SA(0.1, upper_optimizer=factory),
        1,
        problem=problem,
        lower_data=data,
        batch_size=None,
    )
    (gradient,) = made[0].seen
    assert gradient.is_coalesced()
    assert gradient.indices().tolist() == [[3, 9]]


# -- what a step costs -----------------------------------------------------------------------------

MANY = 100_003  # more than any block of indices
LOOKUPS = {
    "aten.index_select.default",  # rows out
    "aten.index.Tensor",
    "aten.index_add_.default",  # rows in
    "aten.index_put_.default",
    "aten.detach.default",
}


class WholeTable(TorchDispatchMode):
    """Which operations see a dense tensor as large as the table."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        parts: list[Any] = [*args, *(kwargs or {}).values(), out]
        while parts:
            part = parts.pop()
            if isinstance(part, list | tuple):
                parts.extend(part)
            elif isinstance(part, Tensor) and not part.is_sparse and part.numel() >= MANY:
                self.seen.add(str(func))
        return out


def _seen_in_a_step(solver: bilevel.Solver) -> set[str]:
    solver.step()
    with WholeTable() as whole:
        solver.step()
        solver.step(measure=False)
    return whole.seen


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("x_set", [None, Box(-1, 1)], ids=["free", "box"])
def test_a_step_touches_the_rows_of_its_batch_alone(name: str, x_set: Any) -> None:
    table = Table(torch.zeros(MANY, dtype=torch.float64))
    assert _seen_in_a_step(solver_of(table, SETTINGS[name], x_set=x_set)) <= LOOKUPS


@pytest.mark.parametrize("name", ["f2sa", "f2sa, single pass", "f2ba", "vpbgd", "no-bilevel"])
def test_a_step_of_a_lower_table_touches_the_rows_of_its_batch_alone(name: str) -> None:
    table = Table(torch.zeros(MANY, dtype=torch.float64))
    x0 = torch.tensor(0.3, dtype=torch.float64)
    solver = solver_of(x0, SETTINGS[name], problem=PER_SAMPLE, y0=table)
    assert _seen_in_a_step(solver) <= LOOKUPS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_an_optimizer_touches_the_rows_of_its_batch_alone(name: str) -> None:
    table = Table(torch.zeros(MANY, dtype=torch.float64))
    method = bilevel.F2SA(0.1, inner_steps=2, upper_optimizer=OPTIMIZERS[name][0])
    # they add to the table, and to their own states, by sparse tensors
    sparse = {"aten.add_.Tensor", "aten.sparse_mask.default"}
    assert _seen_in_a_step(solver_of(table, method)) <= LOOKUPS | sparse


def test_the_cost_test_would_notice_a_whole_table() -> None:
    tensor = torch.zeros(MANY, dtype=torch.float64)
    assert not _seen_in_a_step(solver_of(tensor)) <= LOOKUPS


# -- the run around it -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        bilevel.F2SA(0.1, 0.1, inner_steps=2),
        bilevel.F2SA(0.1, inner_steps=2, upper_optimizer=OPTIMIZERS["sparse adam"][0]),
        bilevel.F3SA(0.1, 0.1, momentum=0.5),
    ],
    ids=["plain", "sparse adam", "f3sa"],
)
def test_a_saved_state_goes_on_bit_for_bit(method: Any) -> None:
    whole = solver_of(Table(STARTS), method, 9, seed=3)
    half = solver_of(Table(STARTS), method, 5, seed=3)
    state = copy.deepcopy(half.state_dict())
    half.step()
    resumed = solver_of(Table(torch.zeros_like(STARTS)), method, 2, seed=4)
    resumed.load_state_dict(state)
    for _ in range(4):
        resumed.step()
    assert torch.equal(resumed.x.values, whole.x.values)
    assert torch.equal(resumed.y, whole.y)


def test_same_seed_same_bits_and_another_seed_not() -> None:
    first, again, other = (solver_of(Table(STARTS), steps=9, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.x.values, again.x.values)
    assert not torch.equal(first.x.values, other.x.values)


def test_a_state_of_another_number_of_rows_is_refused() -> None:
    state = solver_of(Table(STARTS)).state_dict()
    with pytest.raises(StateError, match=r"leaves of x have the shapes \[\(40,\)\]"):
        solver_of(Table(torch.zeros(41, dtype=torch.float64))).load_state_dict(state)


def test_what_is_handed_out_is_the_users_to_keep_and_to_start_from() -> None:
    solver = solver_of(Table(STARTS), steps=2)
    handed = solver.x
    before = handed.values.clone()
    solver.step()
    assert torch.equal(handed.values, before)
    assert handed.values.numpy().shape == (ROWS,)  # it requires no gradient
    assert not handed[[1]].requires_grad
    handed.requires_grad_(True)
    handed[torch.tensor([2, 2])].sum().backward()
    assert handed.values.grad.to_dense()[2] == 2  # nothing of the run is left on it
    assert isinstance(solver_of(handed.requires_grad_(False), steps=1).x, Table)


def test_a_step_leaves_no_gradient_behind_not_even_when_it_breaks() -> None:
    def breaking(x: Any, y: Tensor, batch: Any) -> Tensor:
        return lower(x, y, batch) / (0.0 if batch[2].max() < limit else 1.0)

    limit = 0
    solver = solver_of(Table(STARTS), problem=bilevel.Problem(upper, breaking))
    solver.step()
    limit = ROWS
    with pytest.raises(NonFiniteError) as caught:
        solver.step()
    assert caught.value.state is not None
    x = solver.state.x
    assert x.leaves[0].grad is None
    assert x.grads()[0]._nnz() == 0


def test_a_gradient_that_is_not_finite_is_named() -> None:
    problem = bilevel.Problem(lambda x, y, b: upper(x, y, b) + x[b[2]].abs().sqrt().mean(), lower)
    solver = solver_of(Table(torch.zeros(ROWS, dtype=torch.float64)), problem=problem)
    with pytest.raises(NonFiniteError, match=r"gradient of x\.values.*step 0"):
        solver.step()


@pytest.mark.parametrize("select", ["last", "best", "random"])
def test_minimize_returns_a_table(select: Any) -> None:
    found, known = (
        bilevel.minimize(
            bilevel.Problem(upper, lower),
            x0,
            torch.zeros(3, dtype=torch.float64),
            upper_data=UPPER_DATA,
            lower_data=LOWER_DATA,
            batch_size=8,
            method=bilevel.F2SA(0.1, 0.1),
            steps=12,
            select=select,
        )
        for x0 in (Table(STARTS), STARTS)
    )
    assert isinstance(found.x, Table)
    assert found.selected_step == known.selected_step
    torch.testing.assert_close(found.x.values, known.x, rtol=1e-9, atol=1e-12)
    for quantity, series in known.history.items():
        if quantity != "seconds":
            np.testing.assert_allclose(found.history[quantity], series, rtol=1e-9, atol=1e-12)


def test_a_table_is_moved_to_a_device_and_keeps_its_dtype() -> None:
    problem = _single_precision()
    solver = solver_of(
        Table(STARTS.float()), steps=2, problem=problem, y0=torch.zeros(3), device="cpu"
    )
    assert solver.x.dtype == torch.float32
    low = solver_of(Table(STARTS.bfloat16()), steps=2, problem=problem, y0=torch.zeros(3))
    assert low.x.dtype == torch.bfloat16
    assert bool((low.x.values != STARTS.bfloat16()).any())


def test_an_objective_that_looks_nothing_up_is_refused() -> None:
    problem = bilevel.Problem(
        lambda x, y, b: (y**2).sum(), lambda x, y, b: (x[b[2]].detach().sum() * y**2).sum()
    )
    with pytest.raises(ObjectiveError, match="depends on x"):
        solver_of(Table(STARTS), problem=problem)


# -- exact hypergradients --------------------------------------------------------------------------


def test_exact_hypergradients_of_tables_are_those_of_tensors() -> None:
    batches = {"upper_batch": UPPER_DATA, "lower_batch": LOWER_DATA}
    problem, y0 = bilevel.Problem(upper, lower), torch.zeros(3, dtype=torch.float64)
    found, known = (
        bilevel.hypergradient(problem, x0, y0, **batches) for x0 in (Table(STARTS), STARTS)
    )
    torch.testing.assert_close(found, known, rtol=1e-9, atol=1e-12)
    check, expected = (
        bilevel.check_hypergradient(problem, x0, y0, multiplier=1e4, **batches)
        for x0 in (Table(STARTS), STARTS)
    )
    assert check.relative_error == pytest.approx(expected.relative_error, rel=1e-6)
    torch.testing.assert_close(check.direction, expected.direction, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("scheme", ["forward", "midpoint"])
def test_exact_hypergradients_with_a_lower_table(scheme: Any) -> None:
    batches = {"upper_batch": UPPER_DATA, "lower_batch": LOWER_DATA}
    x0, method = torch.tensor(0.3, dtype=torch.float64), bilevel.F2SA(0.1, 0.1, scheme=scheme)
    found, known = (
        bilevel.check_hypergradient(PER_SAMPLE, x0, y0, multiplier=100.0, method=method, **batches)
        for y0 in (Table(STARTS), STARTS)
    )
    assert found.exact == pytest.approx(float(known.exact), rel=1e-9)
    assert found.direction == pytest.approx(float(known.direction), rel=1e-7)


# -- gradients by rows -----------------------------------------------------------------------------


def sparse(rows: list[int], values: list[float]) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([rows]), torch.tensor(values), (5,), check_invariants=True
    )


FEW, MORE = sparse([3, 1, 3], [1.0, 2.0, 3.0]), sparse([0, 3], [5.0, -4.0])
EVERY = torch.arange(5.0)


@pytest.mark.parametrize(
    "parts",
    [[FEW], [FEW, MORE], [FEW, EVERY], [EVERY, FEW, MORE], [EVERY, EVERY], [MORE, MORE, FEW]],
)
def test_parts_join_to_their_sum(parts: list[Tensor]) -> None:
    expected = torch.stack([part.to_dense() for part in parts]).sum(0)
    total = GradientSum()
    for part in parts:
        total.add([part.clone(), torch.ones(2)])
    found, beside = total.gradients()
    assert torch.equal(sum_gradients(parts).to_dense(), expected)
    assert torch.equal(found.to_dense(), expected)
    assert beside.tolist() == [len(parts)] * 2
    assert found.is_sparse == all(part.is_sparse for part in parts)


@pytest.mark.parametrize("mine", [FEW, EVERY])
@pytest.mark.parametrize("others", [MORE, EVERY])
def test_gradients_are_added_with_a_weight(mine: Tensor, others: Tensor) -> None:
    (found,) = add_gradients([mine.clone()], [others], alpha=-2.0)
    assert torch.equal(found.to_dense(), mine.to_dense() - 2 * others.to_dense())


def test_gradients_of_many_backward_passes_are_joined_once() -> None:
    x = Variable.copy_of(Table(torch.zeros(5)), "x")
    for row in (4, 2, 4):
        (x.value[[row]] * row).sum().backward()
        assert x.leaves[0].grad is None  # set aside: a sum of two would copy all that came before
    (gradient,) = x.grads()
    assert gradient.is_coalesced()
    assert gradient.indices().tolist() == [[2, 4]]
    assert gradient.values().tolist() == [2.0, 8.0]
    x.value[[2]].sum().backward()  # and once more after they were asked for
    assert x.take_grads()[0].to_dense().tolist() == [0, 0, 3, 0, 8]
    assert x.grads()[0]._nnz() == 0
