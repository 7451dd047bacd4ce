"""Draw: what the terms share, and the samples behind a direction."""

from __future__ import annotations

from collections import Counter, UserList, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
)

import bilevel
from bilevel.problem import FORWARD
from bilevel.sampling import take_rows
from tests.sampling.kinds import (
    KINDS,
    ROWS,
    Squares,
    draw_of,
    first,
    noise,
    problem_on_batches,
    rows,
    stream,
    stream_of_kind,
)

# Sharing


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
