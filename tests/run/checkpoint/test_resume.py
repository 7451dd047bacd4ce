"""A run that is stopped and goes on is the run that was never stopped; another run is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from benchmarks.kill_resume import TASKS, digest
from bilevel import F2SA, Checkpoint, Outcome, Problem, Solver, Table
from bilevel.errors import CheckpointError, CheckpointWarning, StateError
from bilevel.methods.f2ba import Nesterov
from bilevel.problems import Quadratic
from bilevel.run.checkpoint import read, write
from bilevel.stepping.schedules import Power
from tests.engine.compiled.common import LOWER_DATA, SCHEMES, UPPER_DATA, graphs, graphs_only  # noqa: F401
from tests.engine.compiled.common import lower as weighted
from tests.engine.compiled.common import upper as trusted
from tests.marks import slow_except
from tests.methods.test_contract import VARIANTS, Case, variants


def stopping_at(step: int) -> Any:
    return lambda solver, info: info.step == step


def in_parts(folder: Path, options: dict[str, Any], stops: list[int], steps: int) -> Any:
    """The result of a run that ended after each of these steps and went on from its files."""
    often = Checkpoint(folder, every_steps=4)
    for stop in stops:
        torch.manual_seed(stop)  # the world outside has moved on
        part = bilevel.minimize(
            **options, steps=steps, checkpoint=often, callback=stopping_at(stop)
        )
        assert part.outcome is Outcome.STOPPED
    return bilevel.minimize(**options, steps=steps, checkpoint=often)


def assert_same(found: Any, expected: Any) -> None:
    assert digest(found) == digest(expected)
    for name, column in expected.history.items():
        if name != "seconds":
            np.testing.assert_array_equal(found.history[name], column)
    assert (np.diff(found.history["seconds"]) > 0).all()
    assert found.seconds >= found.history["seconds"][-1]


def quadratic(method: Any, **more: Any) -> dict[str, Any]:
    problem = Quadratic(sigma_f=0.2, sigma_g=0.2, seed=0)
    data = {"upper_data": problem.upper_noise, "lower_data": problem.lower_noise}
    return {"problem": problem, "x0": problem.x0, "y0": problem.y0, "method": method} | data | more


@pytest.mark.slow
@variants
def test_every_method_goes_on_bit_for_bit(case: Case, tmp_path: Path) -> None:
    options = quadratic(case.method())
    whole = bilevel.minimize(**options, steps=14)
    assert_same(in_parts(tmp_path, options, [2, 9], 14), whole)


def test_all_methods_are_among_them() -> None:
    assert {case.name for case in VARIANTS} == set(bilevel.METHODS)


QUICK = ["f2sa", "f3sa", "soba", *(name for name in TASKS if name not in bilevel.METHODS)]


@pytest.mark.parametrize("name", slow_except(QUICK, [name for name in TASKS if name != "compiled"]))
def test_every_kind_of_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    whole = bilevel.minimize(**TASKS[name](), steps=14)
    often = Checkpoint(tmp_path, every_steps=3)
    for stop in (1, 7):
        bilevel.minimize(**TASKS[name](), steps=14, checkpoint=often, callback=stopping_at(stop))
    assert_same(bilevel.minimize(**TASKS[name](), steps=14, checkpoint=often), whole)


@pytest.mark.slow
@pytest.mark.parametrize("select", ["last", "best", "random"])
@pytest.mark.parametrize("record_every", [1, 3])
def test_what_is_selected_and_recorded_is_the_same(
    select: Any, record_every: int, tmp_path: Path
) -> None:
    options = quadratic(F2SA(0.5, 0.2), select=select, record_every=record_every)
    whole = bilevel.minimize(**options, steps=20)
    found = in_parts(tmp_path, options, [3, 12], 20)
    assert found.selected_step == whole.selected_step
    assert_same(found, whole)


@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop", "Adagrad", "NAdam", "AdamW", "Rprop"])
def test_optimizers_go_on(optimizer: str, tmp_path: Path) -> None:
    make = partial(getattr(torch.optim, optimizer), lr=0.02)
    options = quadratic(F2SA(inner_steps=2, lower_optimizer=make, upper_optimizer=make))
    whole = bilevel.minimize(**options, steps=12)
    assert_same(in_parts(tmp_path, options, [5], 12), whole)


def compiled(name: str) -> dict[str, Any]:
    return {
        "problem": Problem(trusted, weighted),
        "x0": torch.zeros(20, dtype=torch.float64),
        "y0": torch.zeros(3, dtype=torch.float64),
        "method": SCHEMES[name],
        "upper_data": UPPER_DATA,
        "lower_data": LOWER_DATA,
        "batch_size": 4,
        "compile": True,
    }


@pytest.mark.slow
@graphs
@pytest.mark.parametrize(
    ("name", "late"),
    [("forward", True), ("single pass", False), ("accelerated", False), ("upper optimizer", False)],
)
def test_compiled_runs_go_on(
    name: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        monkeypatch.setattr(
            "bilevel.engine.compiled.evaluator.may_return_early", lambda state: True
        )
    whole = bilevel.minimize(**compiled(name), steps=11)
    assert_same(in_parts(tmp_path, compiled(name), [5], 11), whole)


def test_the_same_loader_may_be_given_again(tmp_path: Path) -> None:
    """Its generator has moved on in the meantime, and is put back."""

    def options() -> dict[str, Any]:
        data = TensorDataset(torch.linspace(0, 1, 12).reshape(6, 2))
        loader = DataLoader(
            data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5)
        )
        problem = Problem(
            lambda x, y, batch: ((y - 1) ** 2).sum(),
            lambda x, y, batch: ((y - x - batch[0].mean(0)) ** 2).sum(),
        )
        start = {"x0": torch.zeros(2), "y0": torch.zeros(2)}
        return {"problem": problem, "method": F2SA(0.2, 0.1), "lower_data": loader, **start}

    whole = bilevel.minimize(**options(), steps=12)
    assert_same(in_parts(tmp_path, options(), [3, 8], 12), whole)


def test_other_starts_are_forgotten(tmp_path: Path) -> None:
    options = quadratic(F2SA(0.5, 0.2))
    whole = bilevel.minimize(**options, steps=9)
    bilevel.minimize(**options, steps=9, checkpoint=tmp_path, callback=stopping_at(4))
    elsewhere = options | {"x0": options["x0"] + 1, "y0": options["y0"] - 1}
    assert_same(bilevel.minimize(**elsewhere, steps=9, checkpoint=tmp_path), whole)


def test_a_complete_run_returns_at_once_and_with_more_steps_goes_on(tmp_path: Path) -> None:
    calls = 0

    def counted(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return ((y - x) ** 2).sum()

    problem = Problem(lambda x, y, batch: ((y - 1) ** 2).sum(), counted)
    options: dict[str, Any] = {
        "problem": problem, "x0": torch.zeros(2), "y0": torch.zeros(2), "method": F2SA(0.2, 0.1),
        "record_every": 4,
    }  # fmt: skip
    first = bilevel.minimize(**options, steps=6, checkpoint=tmp_path)
    assert first.history["step"].tolist() == [0, 4, 5]
    calls = 0
    again = bilevel.minimize(**options, steps=6, checkpoint=tmp_path)
    # g at both copies in each of 10 inner steps and for x, in the step that fits y at the last x,
    # and a few to see that it is the same problem
    assert calls < 2 * (10 + 1) + 5
    assert_same(again, first)
    assert again.outcome is Outcome.COMPLETED
    more = bilevel.minimize(**options, steps=11, checkpoint=tmp_path)
    assert more.history["step"].tolist() == [0, 4, 8, 10]
    assert_same(more, bilevel.minimize(**options, steps=11))
    with pytest.raises(CheckpointError, match=r"11.*steps=7"):
        bilevel.minimize(**options, steps=7, checkpoint=tmp_path)


def test_a_solver_can_look_into_the_file_of_a_run_but_not_the_other_way_round(
    tmp_path: Path,
) -> None:
    options = quadratic(F2SA(0.5, 0.2))
    bilevel.minimize(**options, steps=5, checkpoint=tmp_path)
    solver = Solver(**options)
    solver.load(tmp_path / "step-000000000005.safetensors")
    assert solver.k == 5
    solver.step()
    solver.save(tmp_path / "step-000000000006.safetensors")
    with pytest.raises(CheckpointError, match=r"written by Solver\.save, not by minimize"):
        bilevel.minimize(**options, steps=9, checkpoint=tmp_path)


def test_memory_of_modules_comes_back_in_its_order(tmp_path: Path) -> None:
    """A convolution in channels_last, with Adam's moments in that order too."""

    def fresh() -> Solver:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 1))
        images = torch.randn(6, 3, 4, 4)

        def loss(x: Tensor, y: nn.Module, batch: Tensor) -> Tensor:
            return ((y(batch) - x) ** 2).mean()

        return Solver(
            Problem(loss, loss),
            torch.zeros(1),
            model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
            method=F2SA(upper_lr=0.1, lower_optimizer=lambda p: torch.optim.Adam(p, lr=0.01)),
            upper_data=images, lower_data=images, batch_size=3,
        )  # fmt: skip

    whole = fresh()
    for _ in range(3):
        whole.step()
    whole.save(tmp_path / "a")
    again = fresh()
    again.load(tmp_path / "a")
    moments = again.state.y_updates[0].optimizer.state_dict()["state"][0]["exp_avg"]
    assert moments.is_contiguous(memory_format=torch.channels_last)
    for _ in range(3):
        whole.step()
        again.step()
    for a, b in zip(whole.y.state_dict().values(), again.y.state_dict().values(), strict=True):
        assert torch.equal(a, b)


# Another run


def rows_run(**more: Any) -> dict[str, Any]:
    rows = torch.linspace(-1, 1, 24).reshape(8, 3)
    problem = Problem(distance, pulled, x_set=bilevel.sets.Box(-1, 1))
    return {
        "problem": problem, "x0": torch.zeros(3), "y0": torch.zeros(3), "method": F2SA(0.2, 0.1),
        "upper_data": rows, "lower_data": (rows, rows + 1), "batch_size": 4,
    } | more  # fmt: skip


def distance(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return ((y - batch) ** 2).mean()


def pulled(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return ((y - x - batch[0]) ** 2).mean() + 0.1 * (y**2).sum()


def pushed(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return pulled(x, y, batch)


def with_adam(lr: float) -> F2SA:
    return F2SA(lower_lr=0.1, upper_optimizer=lambda p: torch.optim.Adam(p, lr=lr))


def box(high: float) -> bilevel.sets.Box:
    return bilevel.sets.Box(-torch.ones(3), torch.full((3,), high))


ROWS = torch.linspace(-1, 1, 24).reshape(8, 3)
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "method": ({}, {"method": "f3sa"}, "method.kind is 'F2SA' there and 'F3SA' here"),
    "rate": ({}, {"method": F2SA(0.3, 0.1)}, "method.lower_lr is 0.2 there and 0.3 here"),
    "schedule": (
        {"method": F2SA(Power(0.2, 10, -0.5), 0.1)},
        {"method": F2SA(Power(0.2, 10, -0.6), 0.1)},
        "method.lower_lr.exponent is -0.5 there and -0.6 here",
    ),
    "function": (
        {"method": F2SA(lambda k: 0.2, 0.1)},
        {"method": F2SA(lambda k: 0.1, 0.1)},
        "method.lower_lr(0) is 0.2 there and 0.1 here",
    ),
    "given for auto": ({}, {"method": F2SA()}, "method.lower_lr is 0.2 there and 'auto' here"),
    "acceleration": (
        {"method": bilevel.F2BA(0.2, 0.1, acceleration=Nesterov(0.5))},
        {"method": bilevel.F2BA(0.2, 0.1, acceleration=Nesterov(0.6))},
        "method.acceleration",
    ),
    "optimizer": (
        {"method": with_adam(0.1)},
        {"method": with_adam(0.2)},
        "optimizers.x[0].groups[0].lr is 0.1 there and 0.2 here",
    ),
    "seed": ({}, {"seed": 1}, "seed is 0 there and 1 here"),
    "batch size": ({}, {"batch_size": 2}, "batch_size is 4 there and 2 here"),
    "sweep": ({}, {"direction_batch_size": "all"}, "direction_batch_size is None there and 'all'"),
    "set": (
        {},
        {"problem": Problem(distance, pulled, x_set=bilevel.sets.Box(-1, 2))},
        "problem.x_set.high is 1 there and 2 here",
    ),
    "bounds": (
        {"problem": Problem(distance, pulled, x_set=box(1.0))},
        {"problem": Problem(distance, pulled, x_set=box(2.0))},
        "problem.x_set.high is 'float32 [3], SHA-256 ",
    ),
    "objective": (
        {},
        {"problem": Problem(distance, pushed, x_set=bilevel.sets.Box(-1, 1))},
        "problem.lower is 'pulled' there and 'pushed' here",
    ),
    "fewer rows": (
        {},
        {"lower_data": (ROWS[1:], ROWS[1:])},
        "lower_data[0] is 'float32 [8, 3]' there and 'float32 [7, 3]' here",
    ),
    "other rows": ({}, {"lower_data": (ROWS, 9 * ROWS), "upper_data": 2 * ROWS}, "upper(x, y) was"),
    "a list": (
        {"lower_data": [(ROWS,)] * 3, "batch_size": 4},
        {"lower_data": [(ROWS,)] * 4, "batch_size": 4},
        "lower_data is 'list of 3' there and 'list of 4' here",
    ),
    "precision": (
        {},
        {"x0": torch.zeros(3, dtype=torch.float64)},
        "x is 'float32 [3]' there and 'float64 [3]' here",
    ),
    "recorded": ({}, {"record_every": 2}, "record_every is 1 there and 2 here"),
    "selected": ({}, {"select": "best"}, "select is 'last' there and 'best' here"),
}


@pytest.mark.parametrize(("there", "here", "reason"), OTHERS.values(), ids=list(OTHERS))
def test_another_run_is_refused_by_what_differs(
    there: dict[str, Any], here: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    first = bilevel.minimize(**rows_run(**there), steps=3, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        bilevel.minimize(**rows_run(**here), steps=3, checkpoint=tmp_path)
    assert_same(bilevel.minimize(**rows_run(**there), steps=3, checkpoint=tmp_path), first)


def test_objectives_that_differ_inside_are_known_by_their_values(tmp_path: Path) -> None:
    def solver(strength: float) -> Solver:
        def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
            return pulled(x, y, batch) + strength * ((y - 1) ** 2).sum()

        return Solver(**rows_run(problem=Problem(distance, lower)))

    first, other = solver(0.1), solver(0.11)
    for _ in range(9):
        first.step()
    first.save(tmp_path / "a")
    solver(0.1).load(tmp_path / "a")
    before = other.state_dict()
    with pytest.raises(CheckpointError, match=r"lower\(x, y\) was .* at the saved point and is"):
        other.load(tmp_path / "a")
    assert other.k == 0
    torch.testing.assert_close(other.state_dict()["state"], before["state"], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::bilevel.errors.UnrepeatableWarning")
def test_an_objective_with_dice_of_its_own_is_not_taken_for_another(tmp_path: Path) -> None:
    dice = random.Random(0)

    def noisy(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return distance(x, y, batch) * (1 + dice.random())

    options = rows_run(problem=Problem(noisy, pulled))
    bilevel.minimize(**options, steps=3, checkpoint=tmp_path)
    assert bilevel.minimize(**options, steps=5, checkpoint=tmp_path).steps == 5


def test_many_differences_are_not_all_told(tmp_path: Path) -> None:
    first, other = (Solver(**rows_run(y0={str(i): torch.zeros(n) for i in range(9)}, problem=p))
                    for n, p in ((3, sums), (2, sums)))  # fmt: skip
    first.save(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"y\['4'\] is .* here, and 4 more$"):
        other.load(tmp_path / "a")


sums = Problem(
    lambda x, y, batch: sum((part**2).sum() for part in y.values()),
    lambda x, y, batch: sum(((part - x.sum()) ** 2).sum() for part in y.values()),
)


def test_another_version_is_told(tmp_path: Path) -> None:
    solver = Solver(**rows_run())
    solver.save(tmp_path / "a")
    content = read(tmp_path / "a")
    assert content["versions"]["torch"] == torch.__version__
    write(tmp_path / "a", content | {"versions": content["versions"] | {"torch": "2.4.0"}})
    with pytest.warns(CheckpointWarning, match=r"2\.4\.0"):
        solver.load(tmp_path / "a")


def test_a_run_that_breaks_leaves_its_last_good_file(tmp_path: Path) -> None:
    broken = False

    def cliff(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return pulled(x, y, batch) * (float("nan") if broken else 1.0)

    def breaks(solver: Solver, info: Any) -> None:
        nonlocal broken
        broken = info.step == 4

    options = rows_run(problem=Problem(distance, cliff))
    often = Checkpoint(tmp_path, every_steps=2)
    whole = bilevel.minimize(**options, steps=8)
    with pytest.raises(bilevel.errors.NonFiniteError):
        bilevel.minimize(**options, steps=8, checkpoint=often, callback=breaks)
    broken = False
    assert max(path.name for path in tmp_path.iterdir()) == "step-000000000004.safetensors"
    assert_same(bilevel.minimize(**options, steps=8, checkpoint=often), whole)


def test_a_table_of_many_rows_comes_back(tmp_path: Path) -> None:
    options = TASKS["a table"]()
    result = bilevel.minimize(**options, steps=3, checkpoint=tmp_path)
    assert isinstance(result.x, Table)
    again = bilevel.minimize(**TASKS["a table"](), steps=3, checkpoint=tmp_path)
    assert torch.equal(again.x.values, result.x.values)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (3, "checkpoint must be a folder or a bilevel.Checkpoint"),
        (True, "checkpoint must be a folder"),
        (b"run", "checkpoint must be a folder"),
    ],
)
def test_checkpoint_must_be_a_folder(bad: Any, message: str) -> None:
    with pytest.raises(bilevel.errors.ArgumentTypeError, match=message):
        bilevel.minimize(**rows_run(), steps=1, checkpoint=bad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": None}, "folder must be a path, not None"),
        ({"every_steps": 0}, "every_steps must be a whole number of at least 1, not 0"),
        ({"every_steps": 1.5}, "every_steps must be a whole number"),
        ({"every_seconds": -1.0}, "every_seconds must be finite and at least 0, not -1.0"),
        ({"every_seconds": float("nan")}, "every_seconds must be finite"),
        ({"every_seconds": "60"}, "every_seconds must be a number, not '60'"),
        ({"keep": 0}, "keep must be a whole number of at least 1, not 0"),
    ],
)
def test_bad_choices_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Checkpoint(**{"folder": "run", **options})
    assert dataclasses.is_dataclass(Checkpoint)


class Outside:
    """A loop of somebody else's, which hands its batch on."""

    def __init__(self, batch: Tensor) -> None:
        self.batch = batch

    def solver(self, **more: Any) -> Solver:
        problem = Problem(
            lambda x, y, batch: ((y - 1) ** 2).mean(),
            lambda x, y, batch: ((y - x - batch) ** 2).mean(),
        )
        method = F2SA(0.1, 0.1, inner_steps=2)
        return Solver(
            problem, torch.zeros(2), torch.zeros(2), method=method, **more,
            lower_data=lambda _: self.batch,
        )  # fmt: skip


@pytest.mark.parametrize(
    "more", [{}, {"upper_data": torch.randn(9, 2), "batch_size": 3}], ids=["alone", "beside rows"]
)
def test_a_run_on_batches_from_outside_goes_on(more: dict[str, Any], tmp_path: Path) -> None:
    batches = [torch.full((3, 2), float(k)) for k in range(8)]

    def steps(outside: Outside, solver: Solver, part: list[Tensor]) -> None:
        for batch in part:
            outside.batch = batch
            solver.step()

    outside = Outside(batches[0])
    solver = outside.solver(**more)
    steps(outside, solver, batches[:4])
    solver.save(tmp_path / "state")
    solver.lower_solution()  # leaves the run where it is
    steps(outside, solver, batches[4:])
    later = Outside(torch.randn(3, 2))
    again = later.solver(**more)
    again.load(tmp_path / "state")
    steps(later, again, batches[4:])
    assert torch.equal(again.x, solver.x)
    assert torch.equal(again.y, solver.y)


FORGED: dict[str, tuple[tuple[Any, ...], list[Any]]] = {
    "steps taken": (("solver", "state", "k"), [-5, "abc", None, 2.5, [], torch.zeros(2)]),
    "a rate": (
        ("solver", "state", "policy", "found", "drift"), ["abc", None, [], torch.zeros(2)]
    ),
    "all rates": (("solver", "state", "policy", "found"), [{}, [], 5]),
    "indices used": (("solver", "draw", "lower", "used"), [-5, 10**15, "abc", None, 0.5, []]),
    "indices drawn": (("solver", "draw", "lower", "block"), [-5, "abc", None, []]),
    "a generator": (("solver", "draw", "lower", "generator"), [-5, torch.zeros(0)]),
    "the rows of signs": (("run", "guard", "signs", "rows"), ["abc", None, []]),
    "the seconds": (("run", "clock", "seconds"), ["abc", [], torch.zeros(2)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_forged_files_with_a_right_checksum_are_refused(name: str, tmp_path: Path) -> None:
    rows = torch.linspace(-1, 1, 30).reshape(10, 3)
    problem = Problem(
        lambda x, y, batch: ((y - 1 - batch) ** 2).mean(),
        lambda x, y, batch: ((y - x - batch) ** 2).mean(),
    )

    def run(folder: Path, steps: int) -> bilevel.Result:
        return bilevel.minimize(
            problem, torch.zeros(3), torch.zeros(3), steps=steps, checkpoint=folder,
            upper_data=rows, lower_data=rows, batch_size=4,
        )  # fmt: skip

    run(tmp_path / "good", 3)
    (file,) = (tmp_path / "good").glob("*3.safetensors")
    path, values = FORGED[name]
    for number, value in enumerate(values):
        content = read(file)
        part = content
        for key in path[:-1]:
            part = part[key]
        assert path[-1] in part
        part[path[-1]] = value
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / file.name, content)
        with pytest.raises(CheckpointError, match="was refused"):
            run(folder, 5)


def test_a_type_of_tensors_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", {"part": {"dtype": torch.float32}})
    data = (tmp_path / "a").read_bytes()[:-32].replace(b"float32", b"float33")
    (tmp_path / "a").write_bytes(data + hashlib.sha256(data).digest())
    with pytest.raises(CheckpointError, match="'float33' is not a type of tensors"):
        read(tmp_path / "a")


def test_a_forged_position_in_a_list_of_batches_is_refused() -> None:
    def solver() -> Solver:
        problem = Problem(
            lambda x, y, b: ((y - 1) ** 2).mean(), lambda x, y, b: ((y - x) ** 2).mean()
        )
        return Solver(problem, torch.zeros(1), torch.zeros(1), lower_data=[torch.zeros(1)] * 4)

    for position in (-1, 10**12, "abc", None):
        state = solver().state_dict()
        state["draw"]["lower"]["position"] = position
        with pytest.raises(StateError):
            solver().load_state_dict(state)
