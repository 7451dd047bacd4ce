"""A run on several ranks goes on from its checkpoint, on as many ranks or on others."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.errors import CheckpointError
from bilevel.run.checkpoint import read, write
from tests.engine.ranks import tasks
from tests.engine.ranks.ranks import Ranks, raised
from tests.engine.ranks.tasks import START, numbers, outputs, solve
from tests.marks import slow_except

DOUBLE = torch.float64
ADAM = bilevel.F2SA(
    lower_optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    upper_optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    inner_steps=2,
)


def _sampled(kind: str, steps: int, folder: Path | None, method: Any = ADAM) -> bilevel.Result:
    """Rows sampled at random, and noise in the objective: all that must come back."""

    def noisy(x: Any, y: Any, batch: Any) -> Tensor:
        return tasks.lower(x, y, batch) + 0.01 * torch.randn(()) * outputs(y, batch[0]).sum()

    data = tasks.samples(1, DOUBLE)
    return bilevel.minimize(
        bilevel.Problem(tasks.upper, noisy),
        torch.zeros(tasks.SAMPLES, dtype=DOUBLE),
        START[kind](DOUBLE),
        upper_data=data,
        lower_data=data,
        batch_size=4,
        method=method,
        steps=steps,
        checkpoint=None if folder is None else bilevel.Checkpoint(folder, every_steps=2, keep=2),
    )


def _resumed(rank: int, kind: str, folder: Path, method: Any = ADAM) -> list[Any]:
    whole = _sampled(kind, 7, None, method)
    _sampled(kind, 5, folder, method)
    result = _sampled(kind, 7, folder, method)
    return [(r.x, numbers(r.y), r.history["upper"].tolist()) for r in (whole, result)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_except(["plain tensors", "FSDP2"], START))
def test_on_as_many_ranks_bit_for_bit(two: Ranks, kind: str, tmp_path: Path) -> None:
    answers = two.run(_resumed, kind, tmp_path)
    first = answers[0][0]
    for whole, result in answers:
        for mine in (whole, result):
            assert torch.equal(mine[0], first[0])
            assert all(map(torch.equal, mine[1], first[1]))
            assert mine[2] == first[2]
    assert len(set(first[2])) == 7
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["step-000000000006", "step-000000000007"]
    files = sorted(path.name for path in (tmp_path / kept[-1]).iterdir())
    assert files == ["rank-00000.safetensors", "rank-00001.safetensors", "run.safetensors"]


@pytest.mark.slow
def test_estimates_of_f3sa_come_back(two: Ranks, tmp_path: Path) -> None:
    method = bilevel.F3SA(lower_lr=0.1, upper_lr=0.5, momentum=0.3)
    for kind in ("plain module", "FSDP2"):
        for whole, result in two.run(_resumed, kind, tmp_path / kind, method):
            assert torch.equal(whole[0], result[0])
            assert all(map(torch.equal, whole[1], result[1]))


# On another number of ranks. Samples are then drawn anew, so a full batch shows that all else is
# there: the run goes on to where one that was never stopped arrives.


def _full(folder: Path | None, steps: int, kind: str, part: slice) -> tuple[Tensor, list[Tensor]]:
    result = solve(
        kind,
        "F2SA, AdamW",
        DOUBLE,
        part,
        steps=steps,
        checkpoint=folder,
    )
    return result.x, numbers(result.y)


def _of_ranks(rank: int, ranks: int, folder: Path, steps: int, kind: str) -> Any:
    share = 8 // ranks
    return _full(folder, steps, kind, slice(share * rank, share * (rank + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", START)
def test_between_one_rank_and_two(two: Ranks, kind: str, tmp_path: Path) -> None:
    alone = "plain tensors" if kind == "plain tensors" else "plain module"
    # whole epochs, because batches begin anew
    whole = _full(None, 12, alone, slice(None))
    up, down = tmp_path / "up", tmp_path / "down"
    _full(up, 8, alone, slice(None))
    upwards = two.run(_of_ranks, 2, up, 12, kind)
    two.run(_of_ranks, 2, down, 8, kind)
    downwards = _full(down, 12, alone, slice(None))
    for x, y in (*upwards, downwards):
        torch.testing.assert_close(x, whole[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(y, whole[1], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_from_two_ranks_to_four(two: Ranks, tmp_path: Path) -> None:
    for kind in ("DDP", "FSDP2"):
        two.run(_of_ranks, 2, tmp_path / kind, 8, kind)
    with Ranks(4, tmp_path) as four:
        for kind in ("DDP", "FSDP2"):
            whole = _full(None, 12, "plain module", slice(None))
            for x, y in four.run(_of_ranks, 4, tmp_path / kind, 12, kind):
                torch.testing.assert_close(x, whole[0], rtol=0, atol=1e-12)
                torch.testing.assert_close(y, whole[1], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_streams_of_another_number_of_ranks_are_new(two: Ranks, tmp_path: Path) -> None:
    two.run(_save_solver, tmp_path / "two")
    solver = _solver()
    before = solver.draw.lower.state_dict()["generator"]
    solver.load(tmp_path / "two")
    assert solver.k == 3
    assert not torch.equal(solver.draw.lower.state_dict()["generator"], before)
    again = _solver()
    again.load(tmp_path / "two")
    assert torch.equal(again.x, solver.x)
    solver.step()
    again.step()
    assert torch.equal(again.x, solver.x)


def _solver(**options: Any) -> bilevel.Solver:
    data = tasks.samples(1, DOUBLE)
    return bilevel.Solver(
        bilevel.Problem(tasks.upper, tasks.lower),
        torch.zeros(tasks.SAMPLES, dtype=DOUBLE),
        torch.zeros(3, dtype=DOUBLE),
        method=bilevel.F2SA(lower_lr=0.1, upper_lr=0.5),
        **{"upper_data": data, "lower_data": data, "batch_size": 4} | options,
    )


def _save_solver(rank: int, path: Path) -> Any:
    solver = _solver()
    for _ in range(3):
        solver.step()
    solver.save(path)
    solver.save(path)  # over what is there
    again = _solver(seed=0)
    again.load(path)
    solver.step()
    again.step()
    assert torch.equal(solver.x, again.x)
    return raised(lambda: _solver(seed=1).load(path))


@pytest.mark.slow
def test_a_solver_saves_and_loads_and_refuses_another_run(two: Ranks, tmp_path: Path) -> None:
    for name, message in two.run(_save_solver, tmp_path / "state"):
        assert name == "CheckpointError"
        assert "seed is 0 there and 1 here" in message


# Damage


def _load(rank: int, path: Path) -> tuple[str, str]:
    return raised(lambda: _solver().load(path))


@pytest.mark.slow
@pytest.mark.parametrize("file", ["run", "rank-00000", "rank-00001"])
def test_a_damaged_file_is_refused_on_every_rank(two: Ranks, file: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    two.run(_save_solver, path)
    damaged = path / f"{file}.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    for name, message in two.run(_load, path):
        assert name in ("CheckpointError", "DistributedError")
        assert "checksum" in message
    if file != "rank-00001":  # of which one rank alone needs nothing
        with pytest.raises(CheckpointError, match="checksum"):
            _solver().load(path)


@pytest.mark.slow
def test_nothing_in_a_checkpoint_is_a_pickle(two: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "state"
    two.run(_save_solver, path)
    for file in path.iterdir():
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert json.loads(data[8 : 8 + length])["__metadata__"]["format"] == "bilevel checkpoint"


@pytest.mark.slow
def test_what_leads_out_of_the_folder_is_refused(two: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "state"
    two.run(_save_solver, path)
    shutil.copy(path / "rank-00000.safetensors", tmp_path / "rank-00000.safetensors")
    index = read(path / "run.safetensors")
    for about in index["index"].values():
        about["chunks"][0][2] = "../rank-00000.safetensors"
    write(path / "run.safetensors", index)
    with pytest.raises(CheckpointError, match="not the name of a file"):
        _solver().load(path)


def _unwritable(rank: int, folder: Path) -> Any:
    return raised(partial(_sampled, "plain tensors", 3, folder))


def test_a_folder_that_cannot_be_one_is_told_on_every_rank(two: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    names = [answer[0] for answer in two.run(_unwritable, tmp_path / "file")]
    assert names == ["OutputError", "DistributedError"]


# What a run goes back to


def _going_back(folder: Path | None, stop: int | None = None) -> bilevel.Result:
    """After the sixth step f is NaN once, and the run goes back to a state that it has kept."""
    broken = {"now": False, "before": False}

    def callback(solver: bilevel.Solver, info: Any) -> bool:
        broken["now"] = info.step == 5 and not broken["before"]
        return solver.k == stop

    def upper(x: Any, y: Any, batch: Any) -> Tensor:
        value = tasks.upper(x, y, batch)
        if broken["now"]:
            broken.update(now=False, before=True)
            return value * float("nan")
        return value

    data = tasks.samples(1, DOUBLE)
    with pytest.warns(bilevel.errors.DivergenceWarning) if stop is None else nullcontext():
        return bilevel.minimize(
            bilevel.Problem(upper, tasks.lower),
            torch.zeros(tasks.SAMPLES, dtype=DOUBLE),
            torch.zeros(3, dtype=DOUBLE),
            upper_data=data,
            lower_data=data,
            batch_size=4,
            method=bilevel.F2SA(lower_lr=0.1, upper_lr=0.5, inner_steps=1),
            on_divergence="backtrack",
            select="best",
            steps=9,
            callback=callback,
            checkpoint=folder,
        )


def _resumed_before_going_back(rank: int, folder: Path) -> list[Any]:
    whole = _going_back(None)
    _going_back(folder, 5)
    own = read(next(folder.glob("step-*5")) / f"rank-{rank:05d}.safetensors")["own"]
    kept = own["run"]["good"]["draw"]["lower"]["generator"]
    resumed = _going_back(folder)
    return [kept, *(tensor for result in (whole, resumed) for tensor in (result.x, result.y))]


@pytest.mark.slow
def test_each_rank_goes_back_to_samples_of_its_own(two: Ranks, tmp_path: Path) -> None:
    answers = two.run(_resumed_before_going_back, tmp_path)
    assert not torch.equal(answers[0][0], answers[1][0])
    for _, *points in answers:
        assert torch.equal(points[0], points[2])
        assert torch.equal(points[1], points[3])


def _go_on_and_go_back(rank: int, folder: Path) -> int:
    return _going_back(folder).steps


@pytest.mark.slow
def test_a_run_goes_back_on_another_number_of_ranks(two: Ranks, tmp_path: Path) -> None:
    _going_back(tmp_path, 5)
    assert two.run(_go_on_and_go_back, tmp_path) == [9, 9]
