"""Two ranks with half the batch each take the steps of one process with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bilevel
from tests.engine.ranks.ranks import Ranks
from tests.engine.ranks.tasks import (
    METHODS,
    SAMPLES,
    START,
    batches,
    lower,
    network,
    numbers,
    samples,
    solve,
    upper,
)
from tests.marks import slow_except

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def _all_kinds(rank: int, method: str, dtype: torch.dtype) -> dict[str, Any]:
    part = slice(4 * rank, 4 * (rank + 1))
    found = {}
    for kind in START:
        result = solve(kind, method, dtype, part)
        found[kind] = result.x, numbers(result.y), result.history
    return found


@pytest.mark.parametrize("method", slow_except(["F2SA"], METHODS))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_iterates_are_those_of_one_process(two: Ranks, method: str, dtype: torch.dtype) -> None:
    answers = two.run(_all_kinds, method, dtype)
    close = {"rtol": 0, "atol": TOLERANCE[dtype]}
    for kind in START:
        alone = solve(
            "plain tensors" if kind == "plain tensors" else "plain module",
            method,
            dtype,
            slice(None),
        )
        for answer in answers:
            x, y, history = answer[kind]
            assert x.abs().max() > 0.01, "x did not move"
            torch.testing.assert_close(x, alone.x, **close)
            torch.testing.assert_close(y, numbers(alone.y), **close)
            for name in ("upper", "lower", "gap", "direction_norm"):
                mine, theirs = (torch.from_numpy(h[name]) for h in (history, alone.history))
                torch.testing.assert_close(mine, theirs, rtol=0, atol=100 * TOLERANCE[dtype])


# Steps that are found, and what belongs to a rank


def _auto(rank: int, kind: str) -> Any:
    method = bilevel.F2SA()
    result = _rows(kind, slice(8 * rank, 8 * (rank + 1)), method)
    return result.x, {name: h.tolist() for name, h in result.history.items() if name != "seconds"}


def _rows(kind: str, part: slice, method: Any, **options: Any) -> bilevel.Result:
    data = tuple(tensor[part] for tensor in samples(1, torch.float64))
    return bilevel.minimize(
        bilevel.Problem(upper, lower),
        torch.zeros(SAMPLES, dtype=torch.float64),
        START[kind](torch.float64),
        upper_data=data,
        lower_data=data,
        method=method,
        steps=30,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain tensors", "plain module", "DDP"])
def test_steps_that_are_found_are_those_of_one_process(two: Ranks, kind: str) -> None:
    first, second = two.run(_auto, kind)
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1]
    alone = _rows(kind if kind == "plain tensors" else "plain module", slice(None), bilevel.F2SA())
    torch.testing.assert_close(first[0], alone.x, rtol=1e-6, atol=1e-6)
    for name in ("lower_lr", "upper_lr", "multiplier"):
        there = torch.tensor(first[1][name], dtype=torch.float64)
        torch.testing.assert_close(there, torch.from_numpy(alone.history[name]), rtol=1e-5, atol=0)


def _seen(rank: int) -> tuple[list[float], Any]:
    """What a rank draws, and where x ends."""
    drawn: list[float] = []

    def noted(x: Any, y: Any, batch: Any) -> Any:
        drawn.extend([*batch[2].tolist(), float(torch.rand(()))])
        return lower(x, y, batch)

    data = samples(1, torch.float64)
    result = bilevel.minimize(
        bilevel.Problem(upper, noted),
        torch.zeros(SAMPLES, dtype=torch.float64),
        torch.full((3,), float(rank), dtype=torch.float64),  # all begin where the first does
        upper_data=data,
        lower_data=data,
        batch_size=4,
        method=METHODS["F2SA"],
        steps=3,
    )
    return drawn, (result.x, result.y)


def test_each_rank_has_its_own_samples_and_all_have_the_same_x(two: Ranks) -> None:
    (mine, first), (theirs, second) = two.run(_seen)
    assert len(mine) == len(theirs)
    assert mine != theirs
    assert set(mine) & set(theirs) <= set(range(SAMPLES)), "the same random numbers"
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert two.run(_seen)[0][0] == mine


def _alone(rank: int) -> Any:
    method = METHODS["F2SA"]
    own = _rows("plain tensors", slice(8 * rank, 8 * rank + 8), method, process_group=None).x
    group = [torch.distributed.new_group([number]) for number in range(2)][rank]
    of_one = _rows("plain tensors", slice(8 * rank, 8 * rank + 8), method, process_group=group).x
    assert torch.equal(own, of_one)
    return own


@pytest.mark.slow
def test_ranks_may_run_for_themselves(two: Ranks) -> None:
    for rank, x in enumerate(two.run(_alone)):
        alone = _rows("plain tensors", slice(8 * rank, 8 * rank + 8), METHODS["F2SA"]).x
        assert torch.equal(x, alone)


# A table divided by rows


def _table(
    mine: slice, data: Any, optimizer: Any, folder: Any = None, steps: int = 10
) -> bilevel.Result:
    rate = {"upper_lr": 5.0} if optimizer is None else {"upper_optimizer": optimizer}
    return bilevel.minimize(
        bilevel.Problem(upper, lower, x_set=bilevel.sets.Box(-0.2, 0.2)),
        bilevel.Table(
            torch.zeros(mine.stop - mine.start, dtype=torch.float64),
            first=mine.start,
            rows=SAMPLES,
        ),
        torch.zeros(3, dtype=torch.float64),
        upper_data=data,
        lower_data=data,
        method=bilevel.F2SA(lower_lr=0.1, inner_steps=3, **rate),
        steps=steps,
        checkpoint=folder,
    )


def _adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.03)


def _divided(rank: int, optimizer: Any, folder: Any = None, steps: int = 10) -> Any:
    mine = bilevel.distributed.rows(SAMPLES)
    data = tuple(tensor[mine] for tensor in samples(1, torch.float64))
    result = _table(mine, data, optimizer, folder, steps)
    return mine, result.x.values, result.y, result.history["direction_norm"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [None, _adagrad])
def test_rows_of_a_table_move_as_in_one_process(two: Ranks, optimizer: Any, tmp_path: Path) -> None:
    whole = _table(slice(0, SAMPLES), samples(1, torch.float64), optimizer)
    assert len(set(whole.x.values.tolist())) > 8
    down, up = tmp_path / "down", tmp_path / "up"
    _table(slice(0, SAMPLES), samples(1, torch.float64), optimizer, up, 6)
    answers = two.run(_divided, optimizer)
    two.run(_divided, optimizer, down, 6)
    for ranks in (answers, two.run(_divided, optimizer, up, 10)):
        assert [answer[0] for answer in ranks] == [slice(0, 8), slice(8, 16)]
        values = torch.cat([answer[1] for answer in ranks])
        torch.testing.assert_close(values, whole.x.values, rtol=0, atol=1e-12)
        for _, _, y, norms in ranks:
            torch.testing.assert_close(y, whole.y, rtol=0, atol=1e-12)
            expected = torch.from_numpy(whole.history["direction_norm"])
            torch.testing.assert_close(torch.from_numpy(norms), expected, rtol=1e-10, atol=0)
    resumed = _table(slice(0, SAMPLES), samples(1, torch.float64), optimizer, down, 10)
    torch.testing.assert_close(resumed.x.values, whole.x.values, rtol=0, atol=1e-12)


def test_rows_are_divided_as_torch_does_it(two: Ranks) -> None:
    assert bilevel.distributed.rows(5) == slice(0, 5)
    for count in (2, 3, 16):
        chunks = torch.arange(count).chunk(2)
        for rank, mine in enumerate(two.run(_rows_of, count)):
            assert torch.equal(torch.arange(count)[mine], chunks[rank])


def _rows_of(rank: int, count: int) -> slice:
    return bilevel.distributed.rows(count)


# Modules that need thought


class Tied(nn.Module):
    """A parameter that is used twice and known by two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(3, 1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(features))))
        return self.last(self.frozen * hidden)


def _kinds_of_tied() -> dict[str, Any]:
    def divided() -> nn.Module:
        module = Tied()
        fully_shard(module)
        return module

    return {"plain": Tied(), "DDP": DistributedDataParallel(Tied()), "FSDP2": divided}


def _tied(rank: int) -> Any:
    found = {}
    for kind, y0 in _kinds_of_tied().items():
        result = _module(y0, slice(8 * rank, 8 * rank + 8))
        found[kind] = result.x, numbers(result.y)
    return found


def _module(y0: Any, part: slice, lower: Any = lower) -> bilevel.Result:
    data = tuple(tensor[part] for tensor in samples(1, torch.float64))
    return bilevel.minimize(
        bilevel.Problem(upper, lower),
        torch.zeros(SAMPLES, dtype=torch.float64),
        y0,
        upper_data=data,
        lower_data=data,
        method=METHODS["F2SA"],
        steps=5,
    )


@pytest.mark.slow
def test_tied_and_frozen_parameters(two: Ranks) -> None:
    alone = _module(Tied(), slice(None))
    for found in two.run(_tied):
        for x, y in found.values():
            torch.testing.assert_close(x, alone.x, rtol=0, atol=1e-12)
            torch.testing.assert_close(y, numbers(alone.y), rtol=0, atol=1e-12)


def _unused(rank: int) -> Any:
    """A module of which each batch may leave a part unused, and x in another."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.one = nn.Linear(3, 1).double()
            self.other = nn.Linear(3, 1).double()

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.one(features) if features[0, 0] > 0 else self.other(features)

    part = slice(4 * rank, 4 * rank + 4)
    module = DistributedDataParallel(Branches(), find_unused_parameters=True)
    result = bilevel.minimize(
        bilevel.Problem(upper, lower),
        torch.zeros(SAMPLES, dtype=torch.float64),
        module,
        upper_data=batches(1, torch.float64, part),
        lower_data=batches(2, torch.float64, part),
        method=METHODS["F2SA"],
        steps=5,
    )
    return result.x


def test_parameters_that_a_rank_does_not_use(two: Ranks) -> None:
    first, second = two.run(_unused)
    assert torch.equal(first, second)
    assert first.abs().max() > 0.01


def _one_call(x: Any, y: Any, batch: Any) -> torch.Tensor:
    """Batch norm in DDP cannot be called twice in one graph with every torch (2.11)."""
    features, target, rows = batch
    return (x[rows].sigmoid() * (y(features)[:, 0] - target) ** 2).mean()


def _batch_norm(rank: int) -> Any:
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    wrapped = DistributedDataParallel(module)
    result = _module(wrapped, slice(8 * rank, 8 * rank + 8), _one_call)
    return result.x, [b.clone() for b in result.y.buffers()], [b.clone() for b in module.buffers()]


def test_batch_norm_in_ddp_moves_its_own_statistics(two: Ranks) -> None:
    (first, buffers, given), (second, _, _) = two.run(_batch_norm)
    assert torch.equal(first, second)
    assert not torch.equal(buffers[0], given[0])
    assert torch.equal(given[0], torch.zeros(4, dtype=torch.float64)), "the user's was changed"


def _messages(rank: int, method: str, measure: bool) -> int:
    """How many reductions an outer step of one process's own tensors takes."""
    data = samples(1, torch.float64)
    solver = bilevel.Solver(
        bilevel.Problem(upper, lower),
        torch.zeros(SAMPLES, dtype=torch.float64),
        network(torch.float64),
        method=METHODS[method],
        upper_data=data,
        lower_data=data,
    )
    solver.step()
    count = 0
    reduce = torch.distributed.all_reduce

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return reduce(*arguments, **options)

    torch.distributed.all_reduce = counted
    try:
        solver.step(measure=measure)
    finally:
        torch.distributed.all_reduce = reduce
    return count


@pytest.mark.parametrize(("method", "inner"), [("F2SA", 3), ("F3SA", 1)])
def test_all_gradients_of_a_step_are_one_message(two: Ranks, method: str, inner: int) -> None:
    assert two.run(_messages, method, False) == [inner + 1] * 2
    assert two.run(_messages, method, True) == [inner + 2] * 2  # what is reported


# A model as x: weights of samples from their features


def _judged(x: Any, y: Any, batch: Any) -> torch.Tensor:
    features, target, _ = batch
    return (x(features)[:, 0].sigmoid() * (y(features)[:, 0] - target) ** 2).mean()


def _judge(part: slice, x0: Any, y0: Any, method: Any) -> bilevel.Result:
    data = tuple(tensor[part] for tensor in samples(1, torch.float64))
    return bilevel.minimize(
        bilevel.Problem(upper, _judged),
        x0,
        y0,
        upper_data=data,
        lower_data=data,
        method=method,
        steps=6,
    )


_JUDGES = {
    "F2SA": METHODS["F2SA"],
    "F2SA, one pass": bilevel.F2SA(
        lower_lr=0.1,
        inner_steps=3,
        single_pass=True,
        upper_optimizer=lambda p: torch.optim.Adam(p, lr=0.05),
    ),
    "F3SA": METHODS["F3SA"],
}


def _judges(rank: int, method: str) -> Any:
    found = {}
    for kind, other in (("DDP", "DDP"), ("FSDP2", "FSDP2"), ("plain module", "FSDP2")):
        x0, y0 = START[kind](torch.float64), START[other](torch.float64)
        result = _judge(slice(8 * rank, 8 * rank + 8), x0, y0, _JUDGES[method])
        norms = torch.from_numpy(result.history["direction_norm"])
        found[kind, other] = numbers(result.x), numbers(result.y), norms
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", _JUDGES)
def test_x_may_be_a_wrapped_module_too(two: Ranks, method: str) -> None:
    start = network(torch.float64)
    alone = _judge(slice(None), start, start, _JUDGES[method])
    assert not torch.equal(numbers(alone.x)[0], numbers(start)[0])
    for found in two.run(_judges, method):
        for x, y, norms in found.values():
            torch.testing.assert_close(x, numbers(alone.x), rtol=0, atol=1e-12)
            torch.testing.assert_close(y, numbers(alone.y), rtol=0, atol=1e-12)
            expected = torch.from_numpy(alone.history["direction_norm"])
            torch.testing.assert_close(norms, expected, rtol=1e-9, atol=0)


def _in_parts(rank: int, kind: str, method: str) -> Any:
    part = slice(8 * rank, 8 * rank + 8)
    return _rows(kind, part, METHODS[method], direction_batch_size="all", chunk_size=3).x


@pytest.mark.slow
@pytest.mark.parametrize("method", ["F2SA", "F3SA"])
@pytest.mark.parametrize("kind", START)
def test_a_direction_from_all_samples_in_parts(two: Ranks, kind: str, method: str) -> None:
    alone = _rows(kind if kind == "plain tensors" else "plain module", slice(None), METHODS[method])
    for x in two.run(_in_parts, kind, method):
        torch.testing.assert_close(x, alone.x, rtol=0, atol=1e-11)
