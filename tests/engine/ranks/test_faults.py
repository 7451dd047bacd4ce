"""Ranks that disagree, meet bad numbers or die: every one of them stops with an error."""

from __future__ import annotations

import logging
import os
import random
import signal
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import bilevel
from bilevel.errors import RanksWarning
from tests.engine.ranks import tasks
from tests.engine.ranks.ranks import Ranks, raised
from tests.engine.ranks.tasks import METHODS, SAMPLES, START, solve
from tests.marks import slow_except

DOUBLE = torch.float64


def _differing(rank: int, name: str) -> tuple[str, str]:
    half = slice(4 * rank, 4 * (rank + 1))
    calls: dict[str, Callable[[], Any]] = {
        "steps": lambda: solve("plain tensors", "F2SA", DOUBLE, half, steps=5 + rank),
        "method": lambda: _minimize(method=bilevel.F2SA(0.1, 0.5, inner_steps=2 + rank)),
        "kind": lambda: solve(("plain tensors", "plain module")[rank], "F2SA", DOUBLE, half),
        "seed": lambda: solve("plain tensors", "F2SA", DOUBLE, half, seed=rank),
        "data": lambda: _minimize(samples=16 - 8 * rank),
        "shape": lambda: _minimize(x0=torch.zeros(SAMPLES + rank, dtype=DOUBLE)),
        "optimizer": lambda: _minimize(
            method=bilevel.F2SA(0.1, upper_optimizer=lambda p: torch.optim.SGD(p, lr=0.1 + rank))
        ),
        "frozen": lambda: _minimize(y0=_half_frozen(rank)),
        "sweeps": lambda: _minimize(
            samples=16 - rank, y0=START["DDP"](DOUBLE), direction_batch_size="all", batch_size=4
        ),
        "own mistake": lambda: _minimize(batch_size=4 - 4 * rank),
        "objective": lambda: _minimize(
            upper=lambda x, y, batch: y if rank else tasks.upper(x, y, batch)
        ),
    }
    return raised(calls[name])


def _half_frozen(rank: int) -> nn.Module:
    module = tasks.network(DOUBLE)
    module.get_submodule("0").requires_grad_(False).get_parameter("bias").fill_(rank)
    return module


def _minimize(samples: int = SAMPLES, **options: Any) -> bilevel.Result:
    data = tuple(tensor[:samples] for tensor in tasks.samples(1, DOUBLE))
    problem = bilevel.Problem(options.pop("upper", tasks.upper), options.pop("lower", tasks.lower))
    defaults: dict[str, Any] = {
        "x0": torch.zeros(SAMPLES, dtype=DOUBLE),
        "y0": torch.zeros(3, dtype=DOUBLE),
        "upper_data": data,
        "lower_data": data,
        "method": METHODS["F2SA"],
        "steps": 4,
    }
    return bilevel.minimize(problem, **defaults | options)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("steps", "steps is 5 on rank 0 and 6 on rank 1"),
        ("method", "method.inner_steps is 2 on rank 0 and 3 on rank 1"),
        ("kind", "y is 'float64 [3]' on rank 0 and 'absent' on rank 1"),
        ("seed", "seed is 0 on rank 0 and 1 on rank 1"),
        ("data", "[16, 8] samples of upper_data"),
        ("shape", "x is 'float64 [16]' on rank 0 and 'float64 [17]' on rank 1"),
        ("frozen", "parameters of y that require no gradient differ"),
        ("sweeps", "[16, 15] samples of upper_data"),
        ("optimizer", "lr is 0.1 on rank 0 and 1.1 on rank 1"),
    ],
)
def test_ranks_that_disagree_all_say_in_what(two: Ranks, name: str, said: str) -> None:
    for kind, message in two.run(_differing, name):
        assert kind == "DistributedError"
        assert said in message


@pytest.mark.parametrize(
    ("name", "mine", "said"),
    [
        ("own mistake", "ArgumentError", "batch_size must be a whole number"),
        ("objective", "ObjectiveError", "must return a scalar"),
    ],
)
def test_the_mistake_of_one_rank_is_told_to_all(
    two: Ranks, name: str, mine: str, said: str
) -> None:
    first, second = two.run(_differing, name)
    assert second[0] == mine
    assert said in second[1]
    assert first[0] == "DistributedError"
    assert f"rank 1 could not go on: {mine}" in first[1]
    assert said in first[1]


# Numbers that are not finite


def _broken(rank: int, kind: str, method: str, where: str) -> tuple[str, int, bool]:
    """On rank 1 something becomes infinite in the third outer step."""
    calls = 0

    def bad(name: str, value: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if rank == 0 or where != name or calls < 20:
            return value
        return value * float("nan") if name == "value" else _Infinite.apply(value)

    def upper(x: Any, y: Any, batch: Any) -> Tensor:
        return bad("gradient", bad("value", tasks.upper(x, y, batch)))

    with pytest.raises(bilevel.errors.NonFiniteError) as caught:
        _minimize(upper=upper, y0=START[kind](DOUBLE), steps=50, **tasks.how(method))
    error = caught.value
    return error.quantity, error.step, bool(torch.isfinite(error.result.x).all())


class _Infinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


@pytest.mark.parametrize("where", ["value", "gradient"])
@pytest.mark.parametrize("method", ["F2SA", "F2SA, one pass, one term at a time", "F3SA"])
@pytest.mark.parametrize("kind", START)
def test_a_bad_number_on_one_rank_stops_all_at_the_same_place(
    two: Ranks, kind: str, method: str, where: str
) -> None:
    first, second = two.run(_broken, kind, method, where)
    assert first == second
    quantity, step, finite = first
    assert ("upper(x, y)" if where == "value" else "the gradient of y") in quantity
    assert step > 0
    assert finite


# What one of them wants, all do


def _stopped(rank: int) -> tuple[str, int]:
    result = solve(
        "plain tensors",
        "F2SA",
        DOUBLE,
        slice(None),
        steps=9,
        callback=lambda solver, info: rank == 1 and info.step == 3,
    )
    return result.outcome.name, result.steps


def test_a_callback_on_one_rank_stops_all(two: Ranks) -> None:
    assert two.run(_stopped) == [("STOPPED", 4)] * 2


def _logged_by_one(rank: int, logs: int) -> tuple[list[int], int, list[float]]:
    steps: list[int] = []

    def callback(solver: bilevel.Solver, info: Any) -> bool:
        steps.append(info.step)
        return bool(info.step == 3)

    mine = {"callback": callback} if rank == logs else {}
    result = solve("plain tensors", "F2SA", DOUBLE, slice(None), steps=9, **mine)
    return steps, result.steps, result.x.tolist()


@pytest.mark.parametrize("logs", [0, 1])
def test_one_rank_alone_may_have_a_callback(two: Ranks, logs: int) -> None:
    answers = two.run(_logged_by_one, logs)
    assert [steps for steps, *_ in answers] == [[0, 1, 2, 3] if r == logs else [] for r in (0, 1)]
    assert answers[0][1:] == answers[1][1:]
    assert answers[0][1] == 4


def _moved_apart(rank: int, by: str) -> tuple[str, str]:
    """What moves x differs between the ranks in a way that no description of it shows."""
    problem = bilevel.problems.Quadratic(seed=0)

    def rate(k: int) -> float:
        return 0.2 if by == "schedule" and rank and k > 2 else 0.1

    def x_set(x: Tensor) -> Tensor:
        return x.clamp(max=0.1 + rank) if by == "set" else x

    method = bilevel.F2SA(lower_lr=0.5, upper_lr=rate)
    solved = bilevel.Problem(problem.upper, problem.lower, x_set=x_set)
    return raised(lambda: bilevel.minimize(solved, problem.x0, problem.y0, method=method, steps=6))


@pytest.mark.parametrize("by", ["schedule", "set"])
def test_an_x_that_the_ranks_do_not_share_is_refused(two: Ranks, by: str) -> None:
    for name, message in two.run(_moved_apart, by):
        assert name == "DistributedError"
        assert "x differs between the ranks" in message


def _copies_moved_apart(rank: int, by: str) -> tuple[str, str]:
    """What moves the copies of y differs between the ranks; x moves by means, and is the same."""
    problem = bilevel.problems.Quadratic(seed=0)
    rate = {"lower_lr": 0.5, "penalty_lr": 0.5}
    if by in rate:
        rate[by] = lambda k: 0.5 if k < 5 or not rank else 0.4  # type: ignore[assignment]

    def y_set(y: Tensor) -> Tensor:
        return y.clamp(max=0.1 + rank)

    method = bilevel.F2SA(upper_lr=0.1, **rate)
    solved = bilevel.Problem(problem.upper, problem.lower, y_set=y_set if by == "set" else None)
    return raised(lambda: bilevel.minimize(solved, problem.x0, problem.y0, method=method, steps=6))


@pytest.mark.parametrize(("by", "copy"), [("lower_lr", "z"), ("penalty_lr", "y"), ("set", "y")])
def test_copies_of_y_that_the_ranks_do_not_share_are_refused(
    two: Ranks, by: str, copy: str
) -> None:
    for name, message in two.run(_copies_moved_apart, by):
        assert name == "DistributedError"
        assert f"{copy} differs between the ranks" in message


def _exchanged(rank: int) -> tuple[str, str]:
    """The same entries on both ranks, in another order: as the sums of two mixtures are."""
    problem = bilevel.problems.Quadratic(seed=0)
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=bilevel.F2SA(0.5, 0.1))
    for leaf in solver.state.x.leaves if rank else ():
        leaf.data = leaf.data.flip(0)
    assert solver.ranks is not None
    return raised(partial(solver.ranks.require_same_leaves, solver.state.variables()))


def test_entries_in_another_order_are_not_the_same(two: Ranks) -> None:
    for name, message in two.run(_exchanged):
        assert name == "DistributedError"
        assert "x differs between the ranks" in message


def _other_metrics(rank: int) -> tuple[str, str]:
    problem = bilevel.problems.Quadratic(seed=0)

    def upper(x: Any, y: Any, batch: Any) -> Any:
        return problem.upper(x, y, batch), {f"of rank {rank}": 1.0}

    solved = bilevel.Problem(upper, problem.lower)
    return raised(lambda: bilevel.minimize(solved, problem.x0, problem.y0, steps=2))


def test_metrics_of_other_names_are_not_averaged(two: Ranks) -> None:
    for name, message in two.run(_other_metrics):
        assert name == "DistributedError"
        assert "'upper/of rank 0' on rank 0 and 'upper/of rank 1' on rank 1" in message


def _callback_raises(rank: int) -> tuple[str, str]:
    def callback(solver: bilevel.Solver, info: Any) -> None:
        if rank == 1 and info.step == 3:
            raise KeyError("mine")

    return raised(
        lambda: solve("plain tensors", "F2SA", DOUBLE, slice(None), steps=9, callback=callback)
    )


def test_a_callback_that_raises_on_one_rank_raises_on_all(two: Ranks) -> None:
    first, second = two.run(_callback_raises)
    assert second == ("KeyError", "'mine'")
    assert first[0] == "DistributedError"
    assert "the callback raised on another rank after step 3" in first[1]


def _ended(rank: int, **limit: float) -> tuple[str, int]:
    result = solve("plain tensors", "F2SA", DOUBLE, slice(None), steps=10**5, **limit)
    return result.outcome.name, result.steps


@pytest.mark.slow
def test_time_and_tolerance_end_all_ranks_after_the_same_step(two: Ranks) -> None:
    first, second = two.run(_late)
    assert first == second
    assert first[0] == "OUT_OF_TIME"
    first, second = two.run(_at_rest)
    assert first == second
    assert first[0] == "CONVERGED"


def _late(rank: int) -> tuple[str, int]:
    return _ended(rank, max_seconds=0.3)


def _at_rest(rank: int) -> tuple[str, int]:
    return _ended(rank, tolerance=0.9, max_seconds=60.0)


def _interrupted(rank: int, folder: Path) -> tuple[str, int]:
    def callback(solver: bilevel.Solver, info: Any) -> bool:
        if rank == 1 and info.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return False

    result = solve(
        "plain tensors", "F2SA", DOUBLE, slice(None), steps=9, callback=callback, checkpoint=folder
    )
    return result.outcome.name, result.steps


def test_a_signal_to_one_rank_ends_all_with_everything_saved(two: Ranks, tmp_path: Path) -> None:
    assert two.run(_interrupted, tmp_path) == [("INTERRUPTED", 4)] * 2
    assert (tmp_path / "step-000000000004").is_dir()


# What cannot be done says why


def _refused(rank: int, name: str) -> tuple[str, str]:
    table = bilevel.Table(torch.zeros(SAMPLES, dtype=DOUBLE))
    half = bilevel.Table(torch.zeros(8, dtype=DOUBLE), first=8 * rank, rows=SAMPLES)
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    view = DistributedDataParallel(tasks.network(DOUBLE), gradient_as_bucket_view=True)
    meta = nn.Linear(3, 1, device="meta")
    auto = bilevel.F2SA()
    fsdp = START["FSDP2"](DOUBLE)
    options: dict[str, dict[str, Any]] = {
        "method": {"method": bilevel.SOBA()},
        "whole table": {"x0": table},
        "other rows": {"x0": half},
        "estimates of rows": {"x0": half, "method": METHODS["F3SA"]},
        "batch norm": {"y0": norm},
        "bucket view": {"y0": view},
        "meta": {"y0": meta},
        "divided, not built": {"y0": fsdp()},
        "older FSDP": {"y0": _of_older_fsdp()},
        "older FSDP, built": {"y0": _of_older_fsdp},
        "divided, auto": {"y0": fsdp, "method": auto},
        "parameters outside": {"y0": fsdp, "lower": _ridge},
        "group": {"process_group": "all"},
    }
    return raised(lambda: _minimize(**options[name]))


def _of_older_fsdp() -> nn.Module:
    return FullyShardedDataParallel(tasks.network(DOUBLE), device_id=torch.device("cpu"))


def _ridge(x: Any, y: Any, batch: Any) -> Tensor:
    return sum((p**2).sum() for p in y.parameters()) + tasks.lower(x, y, batch)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("method", "SOBA cannot run on several ranks; use F2SA"),
        ("whole table", "divide a Table by rows, with mine = bilevel.distributed.rows(n)"),
        ("other rows", "this rank holds those from"),
        ("estimates of rows", "F3SA cannot move tables whose rows are divided over ranks"),
        ("batch norm", "y.1 is a BatchNorm1d, whose running statistics would differ"),
        ("bucket view", "DistributedDataParallel(gradient_as_bucket_view=True)"),
        ("meta", "y.weight is on the meta device"),
        ("divided, not built", "y0=lambda: fully_shard(build())"),
        ("older FSDP", "y holds FullyShardedDataParallel"),
        ("older FSDP, built", "y holds FullyShardedDataParallel"),
        ("divided, auto", "give both as numbers"),
        ("parameters outside", "lower(x, y, batch) returned a DTensor"),
        ("group", "process_group must be 'default', None or"),
    ],
)
def test_what_cannot_be_done_says_why(two: Ranks, name: str, said: str) -> None:
    for _, message in two.run(_refused, name):
        assert said in message


def test_what_is_wrapped_needs_its_ranks() -> None:
    table = bilevel.Table(torch.zeros(8, dtype=DOUBLE), first=0, rows=SAMPLES)
    assert "made for several ranks" in raised(lambda: _minimize(x0=table))[1]


def _refused_by_an_older_torch(rank: int, name: str) -> tuple[str, str]:
    options: dict[str, dict[str, Any]] = {
        "fully_shard": {"y0": START["FSDP2"](DOUBLE)},
        "Table": {"x0": bilevel.Table(torch.zeros(8, dtype=DOUBLE), first=8 * rank, rows=SAMPLES)},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", "2.8.0+cpu")
        return raised(lambda: _minimize(**options[name]))


@pytest.mark.parametrize("name", ["fully_shard", "Table"])
def test_what_an_older_torch_cannot_do_is_refused(two: Ranks, name: str) -> None:
    """With torch 2.8 the steps of a divided module in single precision are wrong."""
    for _, message in two.run(_refused_by_an_older_torch, name):
        assert name in message
        assert "needs torch 2.11 or later, not 2.8.0+cpu" in message


# A rank that dies


def _to_the_end(
    rank: int, kind: str, folder: Path, die_at: int | None = -1
) -> tuple[list[float], list[float]]:
    """Rank 1 dies at so many evaluations of f; None: at one that is for a checkpoint."""
    calls = 0

    def upper(x: Any, y: Any, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        now = calls == die_at if die_at is not None else calls > 20 and _within("snapshot")
        if rank == 1 and now:
            os.kill(os.getpid(), signal.SIGKILL)
        return tasks.upper(x, y, batch)

    result = _minimize(
        upper=upper,
        y0=START[kind](DOUBLE),
        batch_size=3,
        method=METHODS["F2SA, AdamW"],
        steps=20,
        checkpoint=bilevel.Checkpoint(folder, every_steps=3, every_seconds=None),
    )
    return result.x.tolist(), result.history["upper"].tolist()


def _within(function: str) -> bool:
    return any(frame.name == function for frame in traceback.extract_stack())


@pytest.mark.slow
@pytest.mark.parametrize(
    "written",
    slow_except(["True"], [False, True]),
    ids=["in a step", "while a checkpoint is made"],
)
@pytest.mark.parametrize("kind", slow_except(["FSDP2"], ["plain module", "DDP", "FSDP2"]))
def test_a_rank_is_killed_and_the_run_goes_on_to_the_same_bits(
    two: Ranks, kind: str, written: bool, tmp_path: Path
) -> None:
    die_at = None if written else random.Random().randrange(5, 80)  # 5 in each of 20 steps
    with Ranks(2, tmp_path) as doomed:
        survivor, dead = doomed.run(_dying, kind, tmp_path / "killed", die_at)
        assert dead is None, die_at
        assert survivor[0] == "DistributedError", survivor
        assert "another rank cannot be reached" in survivor[1]
    whole = two.run(_to_the_end, kind, tmp_path / "whole")
    assert two.run(_to_the_end, kind, tmp_path / "killed") == whole == [whole[0]] * 2, die_at


def _dying(rank: int, kind: str, folder: Path, die_at: int | None) -> tuple[str, str]:
    return raised(lambda: _to_the_end(rank, kind, folder, die_at))


def test_ranks_that_do_not_know_of_each_other_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = bilevel.problems.Quadratic(seed=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.warns(RanksWarning, match="2 ranks were launched"):
        bilevel.Solver(problem, problem.x0, problem.y0, method="f2sa")
    bilevel.Solver(problem, problem.x0, problem.y0, method="f2sa", process_group=None)


def _announced(rank: int, process_group: str | None) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bilevel").addHandler(handler)
    try:
        problem = bilevel.problems.Quadratic(seed=0)
        bilevel.Solver(problem, problem.x0, problem.y0, process_group=process_group)
    finally:
        logging.getLogger("bilevel").removeHandler(handler)
    return said


def test_ranks_that_work_together_unasked_say_so_once(two: Ranks) -> None:
    [first], others = two.run(_announced, "default")
    assert "2 ranks solve this problem together" in first
    assert "process_group=None" in first
    assert others == []
    assert two.run(_announced, None) == [[], []]
