"""Streams: what batches look like, and that they come again after a resume."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

import bilevel
from bilevel.errors import ArgumentError, ArgumentTypeError, DataExhaustedError, StateError
from bilevel.sampling import Indexed, Stream
from tests.sampling.kinds import (
    KINDS,
    ROWS,
    SAMPLED_HERE,
    Again,
    Batch,
    Frame,
    NoLength,
    Squares,
    all_same,
    draws,
    endless,
    first,
    noise,
    problem_on_batches,
    rows,
    same,
    seeded,
    squares,
    stream,
    stream_of_kind,
)

# What batches look like


@pytest.mark.parametrize(
    ("name", "kind", "keys", "size"),
    [
        ("tensor", Tensor, None, 3),
        ("array", Tensor, None, 3),
        ("tuple", tuple, [0, 1], 3),
        ("dict", dict, ["index", "square"], 3),
        ("namedtuple", Batch, [0, 1], 3),
        ("dataset", dict, ["index", "square"], 3),
        ("dataset, full", dict, ["index", "square"], ROWS),
        ("loader", dict, ["index", "square"], 3),
        ("tensor, full", Tensor, None, ROWS),
        ("iterable dataset", Tensor, None, 3),
        ("list", Tensor, None, 4),
        ("function", Tensor, None, 3),
    ],
)
def test_a_batch_has_the_structure_of_the_data(
    name: str, kind: type, keys: list[Any] | None, size: int
) -> None:
    batch = stream_of_kind(name).next()
    assert isinstance(batch, kind)
    assert len(first(batch)) == size
    if keys is not None:
        structure: Any = batch
        index, square = (structure[key] for key in keys)
        assert torch.equal(square, index**2)


def test_no_data_is_the_batch_none() -> None:
    assert draws(stream(None), 3) == [None, None, None]


def test_the_full_set_is_every_row_in_order() -> None:
    for batch in draws(stream(rows()), 2):
        assert torch.equal(batch, rows())


def test_a_dataset_of_pairs_is_collated() -> None:
    batch = stream(TensorDataset(rows(), squares()), 4).next()
    assert torch.equal(batch[0] ** 2, batch[1])


@pytest.mark.parametrize("name", ["loader", "list"])
def test_an_iterable_is_begun_again_when_it_ends(name: str) -> None:
    epoch = [first(batch).tolist() for batch in KINDS[name].make()]
    seen = [first(batch).tolist() for batch in draws(stream_of_kind(name), 3 * len(epoch))]
    assert seen == epoch * 3
    assert [row for batch in epoch for row in batch] == rows().tolist()


def test_a_shuffled_loader_gives_every_row_once_an_epoch_in_changing_order() -> None:
    source = stream_of_kind("shuffled loader")
    epochs = [torch.cat([first(b) for b in draws(source, 4)]).tolist() for _ in range(3)]
    assert all(sorted(epoch) == rows().tolist() for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_function_gets_a_generator_of_the_seed() -> None:
    expected = seeded(11)
    for batch in draws(stream(noise, seed=11), 3):
        assert torch.equal(batch, torch.randn(3, generator=expected))


def test_batches_are_moved_to_the_device() -> None:
    nested = [{"a": torch.ones(2), "b": (torch.ones(1, dtype=torch.float64),)}]
    moved = stream(nested, device=torch.device("meta")).next()
    assert moved["a"].device.type == moved["b"][0].device.type == "meta"
    assert stream(nested).next()["a"] is nested[0]["a"]


def test_a_wide_probe_has_more_rows_where_these_are_small() -> None:
    numbers = torch.arange(10_000.0)
    source = stream(numbers, batch_size=64)
    assert [len(batch) for batch in source.probe()] == 8 * [64]
    assert [len(batch) for batch in source.wide_probe()] == 8 * [512]
    together = torch.cat(source.wide_probe())
    assert len(together.unique()) == len(together)  # no row twice
    assert abs(together.mean() - numbers.mean()) < 10  # from everywhere, as rows may be sorted
    few = stream(numbers[:600], batch_size=64)
    assert torch.cat(few.wide_probe()).sort().values.equal(numbers[:600])
    large = stream(torch.zeros(1_000, 784), batch_size=64)
    assert [len(batch) for batch in large.wide_probe()] == 8 * [64]


# The same seed, the same batches


@pytest.mark.parametrize("name", SAMPLED_HERE)
def test_the_seed_decides(name: str) -> None:
    mine, again, other = (draws(stream_of_kind(name, seed), 8) for seed in (3, 3, 4))
    assert all_same(mine, again)
    assert not all_same(mine, other)


@pytest.mark.parametrize("name", KINDS)
def test_peeking_does_not_move(name: str) -> None:
    torch.manual_seed(0)
    expected = draws(stream_of_kind(name), 9)
    torch.manual_seed(0)
    source = stream_of_kind(name)
    peeked = [source.peek(), source.peek()]
    assert same(*peeked)
    assert all_same(draws(source, 9), expected)


def test_minibatches_are_uniform_and_independent() -> None:
    n = 4
    source = stream(torch.arange(n), 2, seed=1)
    pairs = Counter(tuple(source.next().tolist()) for _ in range(8000))
    expected = 8000 / n**2
    chi_square = sum((count - expected) ** 2 / expected for count in pairs.values())
    assert len(pairs) == n**2
    assert 4.6 < chi_square < 37.7  # the 0.5% and 99.9% quantiles with 15 degrees of freedom


def test_the_two_levels_draw_independently() -> None:
    seen: dict[str, list[float]] = {"upper": [], "lower": []}

    def objective(level: str) -> Callable[[Any, Any, Any], Tensor]:
        def value(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
            seen[level] += batch.tolist()
            return ((y - x) ** 2).sum()

        return value

    problem = bilevel.Problem(objective("upper"), objective("lower"))
    method = bilevel.F2SA(0.1, 0.1, inner_steps=50)
    solver = bilevel.Solver(
        problem, torch.zeros(1), torch.zeros(1), method=method,
        upper_data=rows(), lower_data=rows(), batch_size=1,
    )  # fmt: skip
    seen["upper"].clear()
    seen["lower"].clear()
    solver.step(measure=False)
    agreeing = sum(a == b for a, b in zip(seen["upper"], seen["lower"][::2], strict=True))
    assert agreeing < 20  # of 51, where 5 are expected


# Resuming


def solver_on(name: str, direction: Any = None) -> bilevel.Solver:
    kind = KINDS[name]
    return bilevel.Solver(
        problem_on_batches(),
        torch.ones(2),
        torch.zeros(2),
        method=bilevel.F2SA(inner_steps=2),
        upper_data=kind.make(),
        lower_data=kind.make(),
        batch_size=kind.batch_size,
        direction_batch_size=direction,
    )


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Saved and loaded as a checkpoint would be: plain types and tensors only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


SWEEPING = [(name, "all") for name, kind in KINDS.items() if kind.sweeps and name != "none"]


@pytest.mark.parametrize(("name", "direction"), [*((name, None) for name in KINDS), *SWEEPING])
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_resumed_run_sees_the_same_batches(name: str, direction: Any, stop: int) -> None:
    whole = solver_on(name, direction)
    states = []
    for _ in range(7):
        states.append(through_a_file(whole.state_dict()))
        whole.step()
    torch.manual_seed(99)  # the world outside has moved on
    resumed = solver_on(name, direction)
    resumed.load_state_dict(states[stop])
    while resumed.k < 7:
        resumed.step()
    assert torch.equal(resumed.x, whole.x)
    assert torch.equal(resumed.y, whole.y)


@pytest.mark.parametrize("name", ["shuffled loader", "loader with a generator"])
def test_a_solver_that_went_on_can_go_back(name: str) -> None:
    solver = solver_on(name)
    for _ in range(3):
        solver.step()
    state = solver.state_dict()
    for _ in range(4):
        solver.step()
    expected = solver.x
    solver.load_state_dict(state)
    for _ in range(4):
        solver.step()
    assert torch.equal(solver.x, expected)


@pytest.mark.parametrize("stop", [0, 1, 40, 41, 300, 655, 656])
def test_minibatches_are_those_of_one_draw_of_the_whole_block(stop: int) -> None:
    """However few of its numbers are drawn at a time, and wherever a run is resumed."""

    def stream(seed: int) -> Indexed:
        return Indexed(1000, lambda rows: rows, batch_size=100, seed=seed)

    generator = torch.Generator().manual_seed(3)
    blocks = [torch.randint(1000, (1 << 16,), generator=generator) for _ in range(2)]
    known = [batch for block in blocks for batch in block.split(100)[:655]]  # 36 are left over
    first = stream(3)
    found = [first.next().clone() for _ in range(stop)]
    resumed = stream(4)
    resumed.load_state_dict(first.state_dict())
    found += [resumed.next().clone() for _ in range(1310 - stop)]
    assert all(map(torch.equal, found, known))


def test_numbers_that_were_given_out_have_not_changed_when_more_are_drawn() -> None:
    stream = Indexed(1000, lambda rows: rows, batch_size=100, seed=0)
    values = torch.ones(1000, requires_grad=True)
    total = (values * values).index_select(0, stream.next()).sum()
    for _ in range(100):
        stream.next()
    total.backward()  # torch would refuse, had the numbers that it keeps been written to
    assert values.grad is not None
    assert values.grad.sum() == 200


def test_loaders_that_share_a_generator_resume() -> None:
    def fresh() -> bilevel.Solver:
        generator = seeded()
        upper, lower = (
            DataLoader(Squares(), batch_size=size, shuffle=True, generator=generator)
            for size in (4, 3)
        )
        return bilevel.Solver(
            problem_on_batches(), torch.ones(2), torch.zeros(2), method=bilevel.F2SA(inner_steps=1),
            upper_data=upper, lower_data=lower,
        )  # fmt: skip

    whole = fresh()
    states = []
    for _ in range(9):
        states.append(whole.state_dict())
        whole.step()
    for state in states:
        resumed = fresh()
        resumed.load_state_dict(state)
        while resumed.k < 9:
            resumed.step()
        assert torch.equal(resumed.x, whole.x)


@pytest.mark.parametrize("before", [0, 1, 65, 66, 131])
@pytest.mark.parametrize("direction", [None, 70_000])
def test_indices_resume_wherever_their_block_is(before: int, direction: int | None) -> None:
    data = torch.arange(100_000)
    source = stream(data, 1000, direction_batch_size=direction)

    def some(source: Stream) -> list[Any]:
        many = [rows for rows, _ in source.parts(direction, None)]
        return many + draws(source, 3)

    some(source)
    draws(source, before)
    state = source.state_dict()
    expected = some(source) + some(source)
    again = stream(data, 1000, seed=1)
    again.load_state_dict(state)
    assert all_same(some(again) + some(again), expected)


def test_a_generator_of_another_kind_on_the_iterable_is_none_of_our_business() -> None:
    class Augmenting(Again):
        generator = np.random.default_rng(0)

    source = stream(Augmenting())
    draws(source, 2)
    again = stream(Augmenting())
    again.load_state_dict(source.state_dict())
    assert torch.equal(again.next(), rows()[8:])


def test_an_iterator_past_the_saved_position_cannot_go_back() -> None:
    source = stream(endless())
    state = source.state_dict()
    draws(source, 3)
    with pytest.raises(StateError, match=r"lower_data"):
        source.load_state_dict(state)


# What cannot be drawn from


def test_an_iterator_that_ends_says_after_how_many_batches() -> None:
    source = stream(islice(endless(), 5))
    draws(source, 5)
    with pytest.raises(DataExhaustedError, match="lower_data ended after 5 batches"):
        source.next()


def test_an_iterable_without_batches_is_named() -> None:
    with pytest.raises(DataExhaustedError, match="lower_data"):
        stream(DataLoader(TensorDataset(torch.empty(0, 2)))).next()


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (torch.empty(0, 3), {}, ArgumentError, "lower_data"),
        ((), {}, ArgumentError, r"lower_data"),
        ({}, {}, ArgumentError, r"lower_data"),
        ([], {}, ArgumentError, r"lower_data"),
        (torch.tensor(1.0), {}, ArgumentError, "lower_data"),
        (rows().to_sparse(), {}, ArgumentTypeError, "lower_data"),
        (rows().to("meta"), {"batch_size": 2}, ArgumentError, "lower_data"),
        ((rows(), 3), {}, ArgumentTypeError, r"lower_data\[1\]"),
        ({"a": {"b": rows()}}, {}, ArgumentTypeError, r"lower_data\['a'\]"),
        ((rows(), rows()[:3]), {}, ArgumentError, r"len\(lower_data\[1\]\) = 3"),
        ({"a": rows(), "b": rows()[:3]}, {}, ArgumentError, r"len\(lower_data\['b'\]\) = 3"),
        (rows(), {"batch_size": 11}, ArgumentError, "batch_size=11"),
        (Squares(), {"batch_size": 11}, ArgumentError, "batch_size=11"),
        (
            rows(),
            {"direction_batch_size": 11},
            ArgumentError,
            "direction_batch_size=11",
        ),
        (
            rows(),
            {"direction_batch_size": np.int64(11)},
            ArgumentError,
            "direction_batch_size=11",
        ),
        (NoLength(), {}, ArgumentTypeError, "lower_data"),
        (Frame(), {}, ArgumentTypeError, r"lower_data.* pandas"),
        (3.5, {}, ArgumentTypeError, r"lower_data"),
    ],
)
def test_data_that_cannot_work_is_refused(
    data: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        stream(data, **options)


@pytest.mark.parametrize("name", ["iterable dataset", "iterable", "generator", "function"])
@pytest.mark.parametrize("size", ["all", 2])
def test_a_direction_size_needs_data_that_can_be_counted(name: str, size: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"direction_batch_size={size!r} needs"):
        list(stream_of_kind(name).parts(size, None))


@pytest.mark.parametrize("function", [lambda: torch.zeros(2), lambda a, b: torch.zeros(2)])
def test_a_function_that_does_not_take_a_generator_is_refused(function: Any) -> None:
    problem = bilevel.Problem(lambda x, y, b: (y - 1) ** 2, lambda x, y, b: (y - x) ** 2)
    for name in ("upper_data", "lower_data"):
        with pytest.raises(ArgumentTypeError, match=f"{name} must be a function of one argument"):
            bilevel.Solver(problem, torch.tensor(0.0), torch.tensor(0.0), **{name: function})
