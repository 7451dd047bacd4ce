"""Checkpoints with a right checksum and wrong values: refused by our own error, or run."""

import copy
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel import Problem, Solver
from bilevel.errors import BilevelError, CheckpointError, StateError
from bilevel.run.checkpoint.file import read, write
from tests.marks import slow_except

Path = tuple[Any, ...]

MISSING = object()
ROWS = torch.linspace(-1, 1, 30).reshape(10, 3)
WRONG: list[Any] = [
    None, "abc", -1, 1.5, math.nan, -math.inf, 10**400, True, [], {"a": 1}, torch.zeros(2),
    torch.zeros(3, dtype=torch.int64), MISSING,
]  # fmt: skip


def problem() -> Problem:
    return Problem(
        lambda x, y, batch: ((y - 1 - (0 if batch is None else batch)) ** 2).mean(),
        lambda x, y, batch: ((y - x - (0 if batch is None else batch)) ** 2).mean(),
    )


def adam(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05)


def decaying(params: list[Tensor]) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(params, lr=0.05, momentum=0.9), 2)


def shared(params: list[Tensor]) -> torch.optim.Optimizer:
    return bilevel.SharedAdamW(params, lr=0.05)


SAMPLED = {"upper_data": ROWS, "lower_data": ROWS, "batch_size": 4}
GIVEN: dict[str, Any] = {"lower_lr": 0.1, "upper_lr": 0.1}
RUNS: dict[str, dict[str, Any]] = {
    "auto": {"method": "f2sa", **SAMPLED},
    "auto, deterministic": {"method": "f2sa"},
    "optimizers": {"method": bilevel.F2SA(lower_optimizer=adam, upper_optimizer=decaying)},
    "a shared optimizer": {"method": bilevel.F2SA(lower_optimizer=shared, upper_lr=0.1)},
    "f3sa": {"method": "f3sa", **SAMPLED},
    "aid": {"method": "aid"},
    "bome": {"method": "bome", **SAMPLED},
    "acceleration": {"method": bilevel.F2BA(**GIVEN, acceleration=bilevel.Nesterov())},
    "loss scale": {"method": bilevel.F2SA(**GIVEN), "loss_scale": bilevel.LossScale()},
    "a list of batches": {"method": bilevel.F2SA(**GIVEN), "lower_data": [ROWS[:4], ROWS[4:]]},
}


def places(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value in a tree, with the path to it."""
    if path:
        yield path, node
    children: Any = ()
    if isinstance(node, dict):
        children = node.items()
    elif isinstance(node, list | tuple):
        children = enumerate(node)
    for key, child in children:
        yield from places(child, (*path, key))


def forgeries(
    node: Any, skipped: Callable[[Path], bool], every: int = 5
) -> Iterator[tuple[Path, Any, Any]]:
    """Copies of a tree in each of which one value is wrong, in one of ``every`` possible ways."""
    for number, (path, value) in enumerate(places(node)):
        # how many merits there must be is only seen when the next ones are measured
        if skipped(path) or "merits" in path[-2:]:
            continue
        wrong = list(WRONG)
        if isinstance(value, Tensor) and value.numel():
            wrong += [value.reshape(-1)[:-1], value.unsqueeze(0)]
        elif isinstance(value, dict):
            wrong += [{**value, "extra": 5}, {**value, 7: None}]
        elif isinstance(value, list):
            wrong += [value + value, value[:-1], [*value, None]]
        elif isinstance(value, int | float):
            wrong += [-value - 1, value * 1000 + 999]
        for bad in wrong[number % every :: every]:
            forged = copy.deepcopy(node)
            part = forged
            for key in path[:-1]:
                if isinstance(part[key], tuple):
                    part[key] = list(part[key])
                part = part[key]
            if bad is MISSING:
                del part[path[-1]]
            else:
                part[path[-1]] = bad
            yield path, bad, forged


@pytest.mark.filterwarnings("ignore::bilevel.errors.BilevelWarning")
@pytest.mark.parametrize("name", slow_except(["a list of batches"], RUNS))
def test_a_forged_state_is_refused_or_runs(name: str) -> None:
    def solver() -> Solver:
        return Solver(problem(), torch.zeros(3), torch.zeros(3), **RUNS[name])

    saver = solver()
    for _ in range(4):
        saver.step()
    content = saver.snapshot()
    refused = 0
    for path, bad, forged in forgeries(content, lambda path: path[0] in ("settings", "versions")):
        loader = solver()
        before = loader.state_dict()
        try:
            loader.restore(FilePath("forged"), forged)
        except CheckpointError:
            refused += 1
            assert_equal(loader.state_dict(), before)
            continue
        try:
            loader.step()
        except BilevelError:
            continue
        except Exception as error:
            raise AssertionError(f"{path} = {bad!r} was loaded, and then: {error!r}") from error
    assert refused > 100


def assert_equal(one: Any, other: Any) -> None:
    """Hold two trees equal, tensors and NaN included."""
    ones, others = dict(places(one)), dict(places(other))
    assert ones.keys() == others.keys()
    for path, value in ones.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, others[path]), path
        elif not isinstance(value, dict | list | tuple) and value == value:
            assert value == others[path], path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bilevel.errors.BilevelWarning")
@pytest.mark.parametrize("select", slow_except(["best"], ["last", "best", "random"]))
def test_a_forged_run_is_refused_or_runs(select: str, tmp_path: FilePath) -> None:
    def run(folder: FilePath, steps: int) -> bilevel.Result:
        return bilevel.minimize(
            problem(), torch.zeros(3), torch.zeros(3), steps=steps, checkpoint=folder,
            method=bilevel.F2SA(**GIVEN), on_divergence="backtrack", tolerance=1e-3, select=select,
        )  # fmt: skip

    def skipped(path: Path) -> bool:
        return path[0] != "run" or path[1:2] == ("settings",) or "solver" in path[3:]

    run(tmp_path / "good", 4)
    (file,) = (tmp_path / "good").glob("*4.safetensors")
    refused = 0
    for path, bad, forged in forgeries(read(file), skipped, every=8):
        folder = tmp_path / "forged"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write(folder / file.name, forged)
        try:
            run(folder, 6)
        except BilevelError as error:
            refused += isinstance(error, CheckpointError)
        except Exception as error:
            raise AssertionError(f"{path} = {bad!r} was loaded, and then: {error!r}") from error
    assert refused > 50


def test_what_a_run_goes_back_to_is_checked_before_it_is_needed(tmp_path: FilePath) -> None:
    """A run that diverges later goes back to the state that its checkpoint holds."""

    def run(steps: int) -> bilevel.Result:
        return bilevel.minimize(
            problem(), torch.zeros(3), torch.zeros(3), steps=steps, checkpoint=tmp_path,
            method=bilevel.F2SA(**GIVEN), on_divergence="backtrack",
        )  # fmt: skip

    run(4)
    (file,) = tmp_path.glob("*4.safetensors")
    content = read(file)
    content["run"]["guard"]["good"]["solver"]["state"]["x"]["leaves"] = [torch.zeros(2)]
    write(file, content)
    with pytest.raises(CheckpointError, match=r"guard/good/solver/state/x/leaves/0 is a tensor of"):
        run(8)


def test_an_optimizer_with_state_of_its_own_still_loads() -> None:
    """Copies of such an optimizer cannot step, which must not be held against its state."""

    class Remembering(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.05, momentum=0.9)
            self.taken = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.taken += 1
            super().step()

    def solver() -> Solver:
        method = bilevel.F2SA(lower_optimizer=Remembering, upper_lr=0.1)
        return Solver(problem(), torch.zeros(3), torch.zeros(3), method=method)

    first, again = solver(), solver()
    for _ in range(3):
        first.step()
    again.load_state_dict(first.state_dict())
    first.step()
    again.step()
    assert torch.equal(first.x, again.x)


def test_messages_say_where_what_and_what_is_expected() -> None:
    solver = Solver(problem(), torch.zeros(3), torch.zeros(3))
    state = solver.state_dict()
    state["state"]["k"] = -5
    with pytest.raises(StateError, match=r"state/state/k is -5, where a whole number from 0"):
        solver.load_state_dict(state)
