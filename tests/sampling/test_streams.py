"""Streams: what batches look like, that they come again after a resume, and what sharing buys."""

from __future__ import annotations

import io
from collections import Counter, UserList, deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import bilevel
from bilevel.engine import EagerEvaluator
from bilevel.errors import ArgumentError, ArgumentTypeError, DataExhaustedError, StateError
from bilevel.problem import FORWARD, Phi
from bilevel.sampling import CombinedData, Draw, Indexed, Stream, stream_of, take_rows
from bilevel.variables import Variable

ROWS = 10
CPU = torch.device("cpu")


class Batch(NamedTuple):
    index: Any
    square: Any


class Squares(Dataset[dict[str, Tensor]]):
    """Row i is {"index": i, "square": i^2}."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(float(i)), "square": torch.tensor(float(i * i))}


class NoLength(Dataset[Tensor]):
    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor(float(i))


class Flow(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(rows())


class Again:
    """A re-iterable that is no sequence."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(chunks())


def rows() -> Tensor:
    """Row i is the number i."""
    return torch.arange(float(ROWS))


def chunks() -> list[Tensor]:
    return [rows()[:4], rows()[4:8], rows()[8:]]


def squares() -> Tensor:
    return rows() ** 2


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(generator: torch.Generator) -> Tensor:
    return torch.randn(3, generator=generator)


def endless() -> Iterator[Tensor]:
    return (torch.tensor([float(i % 7)]) for i in range(10**6))


class Kind(NamedTuple):
    """One way to give data: the data, the batch size that goes with it, whether 'all' works."""

    make: Callable[[], Any]
    batch_size: int | None = None
    sweeps: bool = True


KINDS = {
    "none": Kind(lambda: None, None),
    "tensor": Kind(rows, 3),
    "tensor, full": Kind(rows),
    "array": Kind(lambda: rows().numpy(), 3),
    "tuple": Kind(lambda: (rows(), squares().numpy()), 3),
    "dict": Kind(lambda: {"index": rows(), "square": squares()}, 3),
    "namedtuple": Kind(lambda: Batch(rows(), squares()), 3),
    "dataset": Kind(Squares, 3),
    "dataset, full": Kind(Squares),
    "iterable dataset": Kind(Flow, 3, sweeps=False),
    "loader": Kind(lambda: DataLoader(Squares(), batch_size=3)),
    "shuffled loader": Kind(lambda: DataLoader(Squares(), batch_size=3, shuffle=True)),
    "loader with a generator": Kind(
        lambda: DataLoader(Squares(), batch_size=3, shuffle=True, generator=seeded())
    ),
    "sampler with a generator": Kind(
        lambda: DataLoader(
            Squares(), batch_size=3, sampler=RandomSampler(Squares(), generator=seeded())
        )
    ),
    "list": Kind(chunks),
    "iterable": Kind(Again, sweeps=False),
    "generator": Kind(endless, sweeps=False),
    "function": Kind(lambda: noise, sweeps=False),
}
SAMPLED_HERE = ["tensor", "array", "tuple", "dict", "namedtuple", "dataset", "function"]


def stream(data: Any, batch_size: int | None = None, seed: int = 0, **options: Any) -> Stream:
    direction = options.pop("direction_batch_size", None)
    return stream_of(
        "lower_data",
        data,
        batch_size=batch_size,
        direction_batch_size=direction,
        seed=seed,
        device=options.pop("device", None),
        home=CPU,
    )


def stream_of_kind(name: str, seed: int = 0) -> Stream:
    kind = KINDS[name]
    return stream(kind.make(), kind.batch_size, seed)


def draws(source: Stream, count: int) -> list[Any]:
    return [source.next() for _ in range(count)]


def parts_of(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch) if isinstance(batch, list | tuple) else [batch]


def first(batch: Any) -> Tensor:
    part = parts_of(batch)[0]
    assert isinstance(part, Tensor)
    return part


def same(mine: Any, theirs: Any) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    pairs = zip(parts_of(mine), parts_of(theirs), strict=True)
    return type(mine) is type(theirs) and all(torch.equal(a, b) for a, b in pairs)


def all_same(mine: list[Any], theirs: list[Any]) -> bool:
    return all(same(a, b) for a, b in zip(mine, theirs, strict=True))


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


def problem_on_batches() -> bilevel.Problem:
    def mean(batch: Any) -> Tensor:
        return torch.tensor(0.5) if batch is None else first(batch).mean() / ROWS

    return bilevel.Problem(
        upper=lambda x, y, batch: ((y - mean(batch)) ** 2).sum(),
        lower=lambda x, y, batch: ((y - (1 + mean(batch)) * x) ** 2).sum(),
    )


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


# Sharing


def draw_of(upper: Any, lower: Any, batch_size: int | None = None, **options: Any) -> Draw:
    size = options.get("direction_batch_size")
    return Draw(
        stream(upper, batch_size, seed=0, direction_batch_size=size),
        stream(lower, batch_size, seed=1, direction_batch_size=size),
        **options,
    )


def test_shared_inner_samples_are_the_same_objects() -> None:
    at_y, at_z = draw_of(rows(), rows(), 3).inner(FORWARD.nodes, shared=True)
    assert at_y.lower is at_z.lower
    assert at_y.upper is at_z.upper


def test_independent_inner_samples_are_fresh_for_every_term() -> None:
    data = torch.arange(10**6)
    at_y, at_z = draw_of(data, data, 5).inner(FORWARD.nodes, shared=False)
    assert at_z.upper is None
    drawn = torch.cat([at_y.upper, at_y.lower, at_z.lower]).tolist()
    assert len(set(drawn)) == 15  # a repeat has a chance of 1e-4


@pytest.mark.parametrize("shared", [True, False])
def test_direction_samples_are_shared_or_not(shared: bool) -> None:
    ((at_y, at_z),) = draw_of(rows(), torch.arange(10**6), 5).direction(FORWARD.nodes, shared)
    assert (at_y.lower is at_z.lower) is shared
    assert torch.equal(at_y.lower, at_z.lower) is shared
    assert (at_z.upper_share == 0) is (not shared)


@pytest.mark.parametrize(
    ("method", "upper", "lower"),
    [
        (bilevel.F2SA(0.1, 0.1, inner_steps=7), 8, 8),
        (bilevel.F2SA(0.1, 0.1, inner_steps=7, coupling="independent"), 8, 16),
        (bilevel.F2SA(0.1, 0.1, inner_steps=7, single_pass=True), 7, 7),
        (bilevel.F3SA(0.1, 0.1), 2, 2),
        (bilevel.F3SA(0.1, 0.1, coupling="independent"), 2, 3),  # the paper's five samples
    ],
)
@pytest.mark.parametrize("measured", [True, False])
def test_a_step_draws_as_many_batches_as_its_algorithm_says(
    method: Any, upper: int, lower: int, measured: bool
) -> None:
    drawn = Counter[str]()

    def counting(level: str) -> Callable[[torch.Generator], Tensor]:
        def sample(generator: torch.Generator) -> Tensor:
            drawn[level] += 1
            return noise(generator)

        return sample

    solver = bilevel.Solver(
        problem_on_batches(), torch.ones(2), torch.zeros(2), method=method,
        upper_data=counting("upper"), lower_data=counting("lower"),
    )  # fmt: skip
    for _ in range(3):
        drawn.clear()
        solver.step(measure=measured)
        assert drawn == {"upper": upper, "lower": lower}


# The samples behind a direction

counts = st.integers(1, 40)


@pytest.mark.parametrize("kind", [list, tuple, deque, UserList])
def test_batches_may_be_any_sequences(kind: Any) -> None:
    rows = torch.arange(6.0)
    (taken,) = take_rows(kind([rows]), torch.tensor([4, 1]))
    assert torch.equal(taken, rows[[4, 1]])
    (taken,) = take_rows(kind([rows]), slice(1, 3))
    assert torch.equal(taken, rows[1:3])


@settings(deadline=None)
@given(counts, counts | st.none(), counts | st.just("all"))
def test_parts_make_up_the_whole(length: int, chunk: int | None, size: Any) -> None:
    size = min(size, length) if isinstance(size, int) else size
    parts = list(stream(torch.arange(length)).parts(size, chunk))
    taken = torch.cat([rows for rows, _ in parts])
    count = length if size == "all" else size
    assert len(taken) == count
    assert all(len(rows) <= (chunk or count) for rows, _ in parts)
    assert [share for _, share in parts] == [len(rows) / count for rows, _ in parts]
    if size == "all":
        assert torch.equal(taken, torch.arange(length))


SWEEPABLE = [name for name, kind in KINDS.items() if kind.sweeps and name != "none"]


@pytest.mark.parametrize("name", SWEEPABLE)
def test_all_is_every_row_once_and_leaves_the_minibatches_alone(name: str) -> None:
    source = stream_of_kind(name)
    source.next()
    parts = list(source.parts("all", 3))
    taken = torch.cat([first(batch) for batch, _ in parts])
    assert torch.equal(taken.sort().values, rows())
    assert sum(share for _, share in parts) == pytest.approx(1, rel=1e-12)
    assert [share for _, share in parts] == [len(first(batch)) / ROWS for batch, _ in parts]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"drop_last": True}, [0.5, 0.5]),
        ({"sampler": SubsetRandomSampler(range(6))}, [4 / 6, 2 / 6]),
        ({"sampler": RandomSampler(Squares(), num_samples=5)}, [0.8, 0.2]),
    ],
    ids=["drop_last", "subset", "num_samples"],
)
def test_the_shares_of_a_loader_are_of_what_it_gives(
    options: dict[str, Any], expected: list[float]
) -> None:
    loader = DataLoader(Squares(), batch_size=4, **options)
    assert [share for _, share in stream(loader).parts("all", None)] == pytest.approx(expected)


def test_levels_of_unequal_length_are_paired_until_both_end() -> None:
    draw = draw_of(rows()[:3], rows(), direction_batch_size="all", chunk_size=4)
    parts = [at_y for at_y, _ in draw.direction(FORWARD.nodes, shared=True)]
    assert [part.upper_share for part in parts] == [1, 0, 0]
    assert [part.lower_share for part in parts] == [0.4, 0.4, 0.2]
    assert torch.equal(parts[0].upper, rows()[:3])
    assert [part.upper for part in parts[1:]] == [None, None]
    assert torch.equal(torch.cat([part.lower for part in parts]), rows())


def test_independent_directions_have_parts_for_every_term() -> None:
    draw = draw_of(torch.arange(10**6), torch.arange(10**6), direction_batch_size=6, chunk_size=4)
    parts = list(draw.direction(FORWARD.nodes, shared=False))
    assert [(y.upper_share, y.lower_share, z.lower_share) for y, z in parts] == [
        (4 / 6, 4 / 6, 4 / 6),
        (2 / 6, 2 / 6, 2 / 6),
    ]
    drawn = [rows for y, z in parts for rows in (y.upper, y.lower, z.lower)]
    assert len(set(torch.cat(drawn).tolist())) == 18
    assert all(z.upper_share == 0 for _, z in parts)


@pytest.mark.parametrize("chunk", [7, 64, None])
@pytest.mark.parametrize("method", [bilevel.F2SA(lower_lr=1.0), bilevel.F3SA(momentum=0.3)])
def test_a_sweep_in_chunks_is_the_full_gradient(method: Any, chunk: int | None) -> None:
    problem = bilevel.problems.WeightedLogistic(train=60, trusted=20, dim=4)
    full = bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=5)
    chunked = bilevel.minimize(
        problem, problem.x0, problem.y0, method=method, steps=5,
        upper_data=problem.upper_data, lower_data=problem.lower_data,
        direction_batch_size="all", chunk_size=chunk,
    )  # fmt: skip
    torch.testing.assert_close(chunked.x, full.x, rtol=1e-12, atol=1e-14)
    for name in ("upper", "lower", "gap", "direction_norm"):
        np.testing.assert_allclose(chunked.history[name], full.history[name], rtol=1e-10)


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


# The noise of lam * (grad_x g(x, y) - grad_x g(x, z))

LOGISTIC = bilevel.problems.WeightedLogistic(train=200, trusted=50, dim=10)
MULTIPLIERS = (5.0, 20.0, 100.0, 500.0)


def per_sample_gradients(y: Tensor) -> Tensor:
    """The entry in which the x gradient of g on sample i alone is not zero, for each i, at x0."""
    features, labels, _ = LOGISTIC.lower_data
    x = LOGISTIC.x0
    return (
        torch.sigmoid(x)
        * torch.sigmoid(-x)
        * torch.nn.functional.softplus(-labels * (features @ y))
    )


def expected_noise(multiplier: float, shared: bool) -> float:
    """E ||direction - E direction||^2 with one sample, from all 200 samples."""
    n = len(LOGISTIC.x0)
    x = LOGISTIC.x0
    y, z = LOGISTIC.penalised_solution(x, multiplier), LOGISTIC.lower_solution(x)

    def variance(entries: Tensor) -> float:  # of e_i * entries_i with i uniform
        return float((entries**2).mean() - (entries**2).sum() / n**2)

    at_y, at_z = per_sample_gradients(y), per_sample_gradients(z)
    if shared:
        return multiplier**2 * variance(at_y - at_z)
    return multiplier**2 * (variance(at_y) + variance(at_z))


@cache
def measured_noise(multiplier: float, shared: bool, repeats: int = 400) -> float:
    x = Variable.copy_of(LOGISTIC.x0, "x")
    copies = [
        Variable.copy_of(LOGISTIC.penalised_solution(LOGISTIC.x0, multiplier), "y"),
        Variable.copy_of(LOGISTIC.lower_solution(LOGISTIC.x0), "z"),
    ]
    draw = Draw(stream(None), stream(LOGISTIC.lower_data, 1))
    evaluator = EagerEvaluator(LOGISTIC, draw)
    phi = Phi(FORWARD, x, copies, multiplier, shared)
    mean = LOGISTIC.penalised_gradient(LOGISTIC.x0, multiplier)
    total = 0.0
    for _ in range(repeats):
        ((at_y, at_z),) = draw.direction(FORWARD.nodes, shared)
        evaluator.backward(evaluator.evaluate(phi, [at_y, at_z]), 1.0, multiplier)
        total += float((x.take_grads()[0] - mean).square().sum())
    return total / repeats


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("multiplier", MULTIPLIERS)
def test_the_noise_of_the_direction_is_what_the_samples_say(
    multiplier: float, shared: bool
) -> None:
    assert measured_noise(multiplier, shared) == pytest.approx(
        expected_noise(multiplier, shared), rel=0.3
    )


def test_shared_noise_stays_and_independent_noise_grows_with_the_square() -> None:
    shared = [measured_noise(lam, shared=True) for lam in MULTIPLIERS]
    independent = [measured_noise(lam, shared=False) for lam in MULTIPLIERS]
    assert max(shared) < 3 * min(shared)
    slope = np.polyfit(np.log(MULTIPLIERS), np.log(independent), 1)[0]
    assert slope == pytest.approx(2, abs=0.1)
    assert independent[-1] > 1e5 * shared[-1]


def test_sharing_tames_the_noise_of_the_inner_steps_too() -> None:
    def spread(coupling: Any) -> float:
        """The variance over seeds of a full x direction after noisy inner steps."""
        method = bilevel.F2SA(
            lower_lr=0.2, upper_lr=1.0, multiplier=500.0, inner_steps=30, coupling=coupling
        )
        moved = []
        for seed in range(12):
            solver = bilevel.Solver(
                LOGISTIC, LOGISTIC.x0, LOGISTIC.lower_solution(LOGISTIC.x0), method=method,
                upper_data=LOGISTIC.upper_data, lower_data=LOGISTIC.lower_data,
                batch_size=10, chunk_size=200, direction_batch_size="all", seed=seed,
            )  # fmt: skip
            solver.step(measure=False)
            moved.append(solver.x)
        return float(torch.stack(moved).var(dim=0).sum())

    assert spread("independent") > 1e3 * spread("shared")


def test_data_of_several_kinds_come_together_and_go_on_where_they_were() -> None:
    data = CombinedData(
        {
            "rows": torch.arange(20.0),
            "listed": [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])],
            "made": lambda generator: torch.rand(2, generator=generator),
        },
        prepare=lambda name, batch: (name, batch),
    )

    def stream() -> Stream:
        return stream_of(
            "lower_data",
            data,
            batch_size=4,
            direction_batch_size=None,
            seed=7,
            device=None,
            home=torch.device("cpu"),
        )

    one, other = stream(), stream()
    assert one.sampled_here
    assert not one.probed  # what is listed may be an iterable that never gives the same again
    seen = [one.next() for _ in range(5)]
    assert [batch["listed"][1].item() for batch in seen] == [1, 2, 3, 1, 2]
    assert {name for batch in seen for name, _ in batch.values()} == {
        "lower_data['rows']",
        "lower_data['listed']",
        "lower_data['made']",
    }
    for _ in range(2):
        other.next()
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other.peek()["made"][1], one.peek()["made"][1])
    for _ in range(4):
        for (_, mine), (_, theirs) in zip(one.next().values(), other.next().values(), strict=True):
            assert torch.equal(mine, theirs)


def test_two_parts_of_one_kind_are_drawn_independently() -> None:
    parts = CombinedData({name: torch.arange(1000.0) for name in "ab"})
    options: dict[str, Any] = {"batch_size": 20, "direction_batch_size": None, "seed": 0}
    home = torch.device("cpu")
    batch = stream_of("lower_data", parts, device=None, home=home, **options).next()
    assert not torch.equal(batch["a"], batch["b"])


def test_together_of_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="lower_data"):
        stream_of(
            "lower_data",
            CombinedData({}),
            batch_size=None,
            direction_batch_size=None,
            seed=0,
            device=None,
            home=torch.device("cpu"),
        )


@pytest.mark.parametrize("function", [lambda: torch.zeros(2), lambda a, b: torch.zeros(2)])
def test_a_function_that_does_not_take_a_generator_is_refused(function: Any) -> None:
    problem = bilevel.Problem(lambda x, y, b: (y - 1) ** 2, lambda x, y, b: (y - x) ** 2)
    for name in ("upper_data", "lower_data"):
        with pytest.raises(ArgumentTypeError, match=f"{name} must be a function of one argument"):
            bilevel.Solver(problem, torch.tensor(0.0), torch.tensor(0.0), **{name: function})
