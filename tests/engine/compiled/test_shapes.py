"""Objectives of many shapes: compiled steps are those of eager code, or run as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bilevel import F2SA, Problem, Solver
from tests.engine.compiled.common import (
    LOWER_DATA,
    SETTINGS,
    UPPER_DATA,
    assert_same,
    evaluator,
    graphs,
)
from tests.marks import slow_except

Build = Callable[[], tuple[Any, Any, Callable[..., Tensor]]]
"""x0, y0, and the predictions of (x, y, rows), of which f and g are mean squared errors."""

SHAPES: dict[str, Build] = {}
LOOKING_AT_DATA: dict[str, Build] = {}
DOUBLE = torch.float64


def shape(build: Build) -> Build:
    SHAPES[build.__name__] = build
    return build


def looks_at_data(build: Build) -> Build:
    LOOKING_AT_DATA[build.__name__] = build
    return build


def zeros(*size: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.zeros(*size, dtype=dtype)


def spread(*size: int) -> Tensor:
    count = torch.Size(size).numel()
    return torch.linspace(-0.5, 0.7, count, dtype=DOUBLE).reshape(size)


@shape
def nested_trees() -> Any:
    y = {"a": [spread(3), (zeros(()), {"b": spread(1, 3)})], "empty": None}
    return (
        zeros(1),
        y,
        lambda x, y, rows: (
            rows @ y["a"][0] + y["a"][1][0] + (rows * y["a"][1][1]["b"]).sum(1) + 0.1 * x
        ),
    )


@shape
def integer_buffers() -> Any:
    class Picks(nn.Module):
        order: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(spread(3))
            self.register_buffer("order", torch.tensor([2, 0, 1]))

        def forward(self, rows: Tensor) -> Tensor:
            return rows[:, self.order] @ self.weight

    return zeros(1), Picks(), lambda x, y, rows: y(rows) + x


@shape
def broadcasting() -> Any:
    return zeros(1, 1), spread(3, 1), lambda x, y, rows: (rows[:, None] * y.T + x).sum((1, 2))


@shape
def in_place_on_fresh_tensors() -> Any:
    def predict(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        out[:, 0] = rows[:, 0] * y[0]
        out[:, 1:].add_(rows[:, 1:] * y[1:])
        return out.sum(1).add_(x.sum())

    return zeros(1), spread(3), predict


@shape
def convolution() -> Any:
    return (
        zeros(1),
        spread(2, 1, 2),
        lambda x, y, rows: functional.conv1d(rows[:, None], y).tanh().sum((1, 2)) + x,
    )


@shape
def embedding() -> Any:
    def predict(x: Any, y: nn.Embedding, rows: Tensor) -> Tensor:
        return (y((rows[:, 0] > 0).long()) * rows).sum(1) + x

    torch.manual_seed(0)
    return zeros(1), nn.Embedding(2, 3, dtype=DOUBLE), predict


@shape
def batch_norm_in_eval() -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(DOUBLE).eval()
    return zeros(1), layers, lambda x, y, rows: y(rows)[:, 0] + x


@shape
def dropout_in_eval() -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).to(DOUBLE).eval()
    return zeros(1), layers, lambda x, y, rows: y(rows)[:, 0] + x


@shape
def mixed_types() -> Any:
    y = {"half": spread(3).float(), "double": spread(3)}
    return (
        zeros(1, dtype=torch.float32),
        y,
        lambda x, y, rows: rows.float() @ y["half"] + rows @ y["double"] + x,
    )


@shape
def complex_views() -> Any:
    def predict(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        turned = torch.view_as_complex(y.reshape(3, 2)) * torch.polar(x.exp(), x)
        return (rows @ turned.real) + (rows @ turned.imag) ** 2

    return zeros(1), spread(6), predict


@shape
def fourier() -> Any:
    return zeros(1), spread(3), lambda x, y, rows: torch.fft.rfft(rows * y, dim=1).abs().sum(1) + x


@shape
def where_and_clamp() -> Any:
    return (
        zeros(1),
        spread(3),
        lambda x, y, rows: torch.where(
            rows[:, 0] > 0, (rows @ y).clamp(-0.5, 0.5), x - (rows @ y).relu()
        ),
    )


@shape
def einsum() -> Any:
    return zeros(3), spread(3, 3), lambda x, y, rows: torch.einsum("bi,ij,bj->b", rows, y, rows + x)


@shape
def a_loop() -> Any:
    def predict(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        state = torch.zeros_like(rows[:, 0])
        for step in range(3):
            state = torch.tanh(0.5 * state + rows[:, step] * y[step] + x.sum())
        return state

    return zeros(1), spread(3), predict


@shape
def attention() -> Any:
    def predict(x: Tensor, y: Any, rows: Tensor) -> Tensor:
        tokens = rows[:, :, None] * y["up"] + x
        mixed = functional.scaled_dot_product_attention(tokens @ y["q"], tokens @ y["k"], tokens)
        return mixed.mean((1, 2))

    return zeros(1), {"up": spread(4), "q": spread(4, 4), "k": spread(4, 4)}, predict


@shape
def layer_norm_and_gelu() -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 1)).to(DOUBLE)
    return zeros(1), layers, lambda x, y, rows: y(rows)[:, 0] + x


@shape
def cross_entropy() -> Any:
    def predict(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        return functional.cross_entropy(rows @ y + x, (rows[:, 0] > 0).long(), reduction="none")

    return zeros(2), spread(3, 2), predict


@shape
def sorting_and_cumulating() -> Any:
    return (
        zeros(1),
        spread(3),
        lambda x, y, rows: (
            (rows * y).sort(1).values.cumsum(1)[:, -1] + (rows * y).topk(2, dim=1).values.sum(1) + x
        ),
    )


@shape
def linear_algebra() -> Any:
    def predict(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        matrix = y @ y.T + x.exp() * torch.eye(3, dtype=y.dtype)
        return torch.linalg.solve(matrix, rows.T).sum(0) + torch.logdet(matrix)

    return zeros(1), spread(3, 3), predict


@shape
def padding_and_gathering() -> Any:
    def predict(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        padded = functional.pad(rows, (1, 1))
        places = torch.tensor([[1, 2, 3]]).expand(len(rows), 3)
        return (padded.gather(1, places) * y).sum(1).index_select(0, torch.arange(len(rows))) + x

    return zeros(1), spread(3), predict


@shape
def scatter() -> Any:
    def predict(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        kind = (rows[:, 0] > 0).long()
        sums = torch.zeros(2, dtype=rows.dtype).index_add(0, kind, rows @ y)
        return sums[kind] + x

    return zeros(1), spread(3), predict


@shape
def tied_weights() -> Any:
    weight = nn.Parameter(spread(3))
    return (
        zeros(1),
        {"in": weight, "out": weight},
        lambda x, y, rows: (rows * y["in"]).tanh() @ y["out"] + x,
    )


@shape
def recurrent_cell() -> Any:
    torch.manual_seed(0)
    cell = nn.GRUCell(3, 2, dtype=DOUBLE)
    return zeros(1), cell, lambda x, y, rows: y(rows, rows[:, :2]).sum(1) + x


@shape
def closures_and_defaults() -> Any:
    scale = 0.5

    def predict(x: Tensor, y: Tensor, rows: Tensor, power: int = 2) -> Tensor:
        return scale * (rows @ y) ** power + sum(x[i] for i in range(len(x)))

    return zeros(2), spread(3), predict


@looks_at_data
def rows_chosen_by_their_values() -> Any:
    return zeros(1), spread(3), lambda x, y, rows: (rows[rows[:, 0] > 0] @ y).sum() + x


@looks_at_data
def a_number_read_from_a_batch() -> Any:
    return zeros(1), spread(3), lambda x, y, rows: rows @ y + x + float(rows.sum().detach() > 0)


@looks_at_data
def a_branch_on_a_batch() -> Any:
    return (
        zeros(1),
        spread(3),
        lambda x, y, rows: rows @ y + x if rows.sum() > 0 else 2 * rows @ y - x,
    )


def runs(build: Build) -> list[Solver]:
    def made(compile: bool) -> Solver:
        x0, y0, predict = build()

        def upper(x: Any, y: Any, batch: Any) -> Tensor:
            return ((predict(x, y, batch[0]) - batch[1]) ** 2).mean()

        def lower(x: Any, y: Any, batch: Any) -> Tensor:
            parts = y.parameters() if isinstance(y, nn.Module) else tensors(y)
            decay = torch.stack([(part.double() ** 2).sum() for part in parts]).sum()
            return ((predict(x, y, batch[0]) - batch[1]) ** 2).mean() + 0.1 * decay

        method = F2SA(**{**SETTINGS, "lower_lr": 0.02, "upper_lr": 0.05})
        return Solver(
            Problem(upper, lower), x0, y0, method=method, compile=compile,
            upper_data=UPPER_DATA, lower_data=LOWER_DATA, batch_size=4,
        )  # fmt: skip

    return [made(False), made(True)]


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree or ()
    return [tensor for part in parts for tensor in tensors(part)]


# One of each way in which a shape could matter to what is traced: trees, buffers, several
# types, parameters that are tied, values that a function closes over.
QUICK = ["nested_trees", "integer_buffers", "tied_weights"]


@graphs
@pytest.mark.parametrize("name", slow_except(QUICK, SHAPES))
def test_compiled_steps_are_those_of_eager_code(name: str) -> None:
    both = runs(SHAPES[name])
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if name == "mixed_types" else {"rtol": 1e-9}
    assert_same(both, 4, **tolerance)
    evaluator(both[1])
    start = [leaf.clone() for leaf in runs(SHAPES[name])[0].state.solution.leaves]
    now = both[1].state.solution.leaves
    assert any(not torch.equal(a, b) for a, b in zip(start, now, strict=True))


@graphs
@pytest.mark.filterwarnings("ignore::bilevel.errors.CompileWarning")
@pytest.mark.parametrize("name", slow_except(["a_branch_on_a_batch"], LOOKING_AT_DATA))
def test_what_looks_at_data_takes_the_same_steps(name: str) -> None:
    """Compiled for whatever the batch holds, or not at all; never for one batch alone."""
    assert_same(runs(LOOKING_AT_DATA[name]), 6, rtol=1e-9)
