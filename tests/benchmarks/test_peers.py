"""``python -m benchmarks peers``: clock, crossings, table and the protocol, without any peer."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.commands import app
from benchmarks.peers import environment, race
from benchmarks.peers.environment import Environment
from benchmarks.peers.lineup import LINEUP, Contestant, grid
from benchmarks.peers.race import Row
from benchmarks.peers.starter import AT_LEAST, SPACING, Kept, Log, follow
from benchmarks.peers.task import Task
from bilevel.cli.experiments.judge import TARGETS, Judge, crossings
from bilevel.errors import ArgumentError, BilevelError
from bilevel.problems import HyperCleaning

CONTESTANTS = Path(race.__file__).parent / "contestants"


class Clock:
    """Goes on only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_clock_runs_while_the_contestant_works_and_not_while_weights_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    def solve() -> Iterator[np.ndarray]:
        for chunk in itertools.count(1):
            clock.now += 3.0 if chunk == 1 else 0.5
            yield np.full(2, chunk, np.float32)

    save = np.save

    def slow_save(*arguments: object) -> None:
        clock.now += 100.0
        save(*arguments)

    monkeypatch.setattr(np, "save", slow_save)
    log = follow(solve, 5.0, tmp_path, cpu=clock, wall=clock)
    assert log.chunks == [3.0, 0.5, 0.5, 0.5, 0.5]
    assert [kept.cpu for kept in log.kept] == [3.0, 3.5, 4.0, 4.5, 5.0]
    assert np.load(log.kept[-1].file(tmp_path)).tolist() == [5.0, 5.0]


def test_what_is_kept_grows_with_the_logarithm_of_the_time(tmp_path: Path) -> None:
    clock = Clock()

    def solve() -> Iterator[np.ndarray]:
        while True:
            clock.now += 0.01
            yield np.zeros(1, np.float32)

    log = follow(solve, 10.0, tmp_path, cpu=clock, wall=clock)
    times = [kept.cpu - log.kept[0].cpu for kept in log.kept[1:]]
    # as long as chunks are longer than the spacing all are kept, then one per factor
    assert len(times) < 20 + math.log(10 / 0.2) / math.log(SPACING) + 2
    assert max(later / early for early, later in itertools.pairwise(times[20:])) < SPACING + 0.06
    assert log.kept[-1].cpu == pytest.approx(10.0, abs=0.011)


def test_a_run_that_is_timed_keeps_what_it_is_told_and_goes_on_for_the_usual_cost(
    tmp_path: Path,
) -> None:
    clock = Clock()

    def solve() -> Iterator[np.ndarray]:
        for chunk in itertools.count(1):
            clock.now += 1.0
            yield np.full(1, chunk, np.float32)

    log = follow(solve, 1e9, tmp_path, [2, 7], cpu=clock, wall=clock)
    assert [(kept.chunk, kept.cpu) for kept in log.kept] == [(2, 2.0), (7, 7.0)]
    assert np.load(log.kept[-1].file(tmp_path)).tolist() == [7.0]
    assert len(log.chunks) == AT_LEAST
    log = follow(solve, 1e9, tmp_path, [AT_LEAST + 5], cpu=clock, wall=clock)
    assert len(log.chunks) == AT_LEAST + 5
    log = follow(solve, 4.0, tmp_path, [2, 7], cpu=clock, wall=clock)
    assert [kept.chunk for kept in log.kept] == [2]  # the time was over


def test_a_contestant_that_ends_by_itself_is_no_fault(tmp_path: Path) -> None:
    log = follow(lambda: iter([np.zeros(1, np.float32)]), 1e9, tmp_path)
    assert [kept.chunk for kept in log.kept] == [1]
    log.save(tmp_path)
    assert Log.load(tmp_path) == log


def test_crossings_are_the_first_gaps_not_above_the_targets() -> None:
    assert TARGETS == (0.1, 0.05, 0.02)
    assert crossings([0.5, 0.1, 0.2, 0.04, 0.06]) == [1, 3, None]
    assert crossings([0.5, 0.01]) == [1, 1, 1]
    assert crossings([math.inf]) == [None, None, None]


def test_no_gap_is_computed_after_the_last_target() -> None:
    gaps = iter([0.3, 0.01, 0.5])
    crossings(gaps)
    assert list(gaps) == [0.5]


@pytest.fixture
def problem() -> HyperCleaning:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(30, 4, generator=generator)
    labels = torch.arange(30) % 3
    return HyperCleaning(images, labels, images[:9], labels[:9], weights="box")


def test_the_task_comes_back_as_it_was(problem: HyperCleaning, tmp_path: Path) -> None:
    task = race.task_of(problem)
    task.save(tmp_path)
    loaded = Task.load(tmp_path)
    assert np.array_equal(loaded.features, problem.lower_data[0].numpy())
    assert np.array_equal(loaded.trusted_labels, problem.upper_data[1].numpy())
    assert (loaded.classes, loaded.ridge) == (3, 0.01)
    assert type(loaded.classes) is int


def test_the_gap_is_1_without_bilevel_and_0_at_the_best(problem: HyperCleaning) -> None:
    weights = torch.linspace(0, 1, 30)
    judge = Judge(problem, float(problem.value(weights)))
    assert judge.gap(problem.x0) == pytest.approx(1.0, abs=1e-3)
    assert judge.gap(weights) == pytest.approx(0.0, abs=1e-3)
    assert judge.none == pytest.approx(float(problem.value(problem.x0)), abs=1e-5)
    assert math.isinf(Judge(problem, -1.0).gap(torch.full((30,), math.nan)))


def test_steady_seconds_take_the_first_chunk_at_the_usual_cost(
    problem: HyperCleaning, tmp_path: Path
) -> None:
    goal = torch.linspace(0, 1, 30)
    judge = Judge(problem, float(problem.value(goal)))
    log = Log([3.0, 0.5, 0.5], [Kept(1, 3.0, 9.0), Kept(2, 3.5, 10.0), Kept(3, 4.0, 11.0)])
    log.save(tmp_path)
    for kept, weights in zip(log.kept, (problem.x0, goal, problem.x0), strict=True):
        np.save(kept.file(tmp_path), weights.numpy())
    row = race.judged(Contestant("one", "-", []), {"rate": 1.0}, tmp_path, judge)
    assert row.seconds == (3.5, 3.5, 3.5)
    assert row.steady == (1.0, 1.0, 1.0)
    assert row.wall == (10.0, 10.0, 10.0)
    assert row.chunks == (2, 2, 2)
    assert row.chunk == 0.5
    assert row.gap == pytest.approx(1.0, abs=1e-3)
    later = race.timed(row, Log([5.0, 1.0, 1.0], [Kept(2, 6.0, 7.0)]))
    assert (later.seconds, later.steady, later.wall) == ((6.0,) * 3, (2.0,) * 3, (7.0,) * 3)
    assert race.timed(row, Log([1.0], [])).seconds == (None, None, None)


def test_times_are_medians_and_what_was_not_reached_took_forever() -> None:
    times = [(1.0, 2.0, 9.0), (3.0, 4.0, None), (2.0, None, None)]
    rows = [
        Row("a", True, {}, seconds=t, steady=t, wall=t, chunk=c, gap=0.1)
        for t, c in zip(times, (1.0, 3.0, 2.0), strict=True)
    ]
    found = race.medians(rows)
    assert found.seconds == found.steady == found.wall == (2.0, 4.0, None)
    assert (found.chunk, found.runs, found.gap) == (2.0, 3, 0.1)
    failed = Row("b", False, {}, failure="no wheel")
    assert race.medians([failed]) == failed


def test_the_best_setting_is_the_first_at_the_hardest_target() -> None:
    rows = [
        Row("a", True, {"s": 1}, seconds=(1.0, 2.0, 4.0), steady=(1.0, 2.0, 4.0), gap=0.0),
        Row("a", True, {"s": 2}, seconds=(2.0, 2.5, 3.0), steady=(1.0, 1.0, 1.5), gap=0.01),
        Row("b", False, {"s": 3}, seconds=(1.0, None, None), steady=(1.0, None, None), gap=0.06),
        Row("b", False, {"s": 4}, gap=0.2),
        Row("c", False, {"s": 5}, failure="no wheel"),
    ]
    by_seconds, by_steady = race.KINDS.values()
    assert [row.settings["s"] for row in race.best_of(rows, by_seconds)] == [2, 3, 5]
    once = Row("a", True, {"s": 6}, seconds=(1.0, 1.0, 1.0), steady=(0.5, 0.5, 0.5))
    twice = [replace(row, runs=2) for row in rows[:2]]
    assert race.best_of([once, *twice], by_seconds) == [twice[1]]
    first = replace(rows[0], steady=(0.1, 0.2, 0.3))
    assert race.best_of([first, *rows[1:]], by_steady)[0] is first
    shown = race.table([first, *rows[1:]])
    cells = {str(column.header): list(column.cells) for column in shown.columns}
    assert cells["2% s"] == ["3.00", "-", "-"]
    assert cells["2% steady s"] == ["0.30", "-", "-"]
    shown = race.table(rows)
    cells = {str(column.header): list(column.cells) for column in shown.columns}
    assert cells["contestant"] == ["a", "b", "c"]
    assert cells["best setting"] == ["s 2", "s 3", "no wheel"]
    assert cells["2% s"] == ["3.00", "-", "-"]
    assert cells["x s"] == ["1.00", "-", "-"]
    assert cells["gap"] == ["1.0%", "6.0%", "-"]


def test_every_contestant_has_its_file_and_as_many_settings() -> None:
    assert {len(contestant.settings) for contestant in LINEUP} == {4}
    assert len({contestant.name for contestant in LINEUP}) == len(LINEUP)
    for contestant in LINEUP:
        assert (CONTESTANTS / f"{contestant.module}.py").exists()
        assert set(contestant.needs) <= set(environment.EXTRA)


def test_a_grid_has_every_combination() -> None:
    assert grid({"a": 0}, b=(1, 2), c=(3,)) == [{"a": 0, "b": 1, "c": 3}, {"a": 0, "b": 2, "c": 3}]


@pytest.mark.slow
def test_the_command_races_in_processes_and_reports_who_could_not(
    problem: HyperCleaning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake_mnist(corruption: float, **_: object) -> HyperCleaning:
        return problem

    settings = {"sweep": True, "per_visit": 1.0, "lower_lr": 0.3, "batch_size": 5}
    lineup = [
        Contestant("ours", "f2sa", [settings], own=True),
        Contestant("broken", "f2sa", [{**settings, "per_visit": -1.0}]),
        Contestant("absent", "f2sa", [settings], needs=("jax",)),
    ]
    monkeypatch.setattr(HyperCleaning, "mnist", fake_mnist)
    monkeypatch.setattr(race, "LINEUP", lineup)
    here = Environment(Path(sys.executable), {"jax": "no wheel for this machine"})
    monkeypatch.setattr(environment, "prepare", lambda: here)
    file = tmp_path / "peers.json"
    result = CliRunner().invoke(
        app, ["peers", "--seconds", "0.1", "--repeats", "2", "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text())
    options = {"corruption": 0.3, "seconds": 0.1, "repeats": 2, "seed": 0}
    assert figures["options"] == options
    ours, broken, absent = figures["rows"]
    assert ours["failure"] is None
    assert ours["chunk"] > 0
    assert math.isfinite(ours["gap"])
    assert "upper_lr" in broken["failure"]
    assert absent["failure"] == "jax: no wheel for this machine"


@pytest.mark.slow
def test_a_run_is_timed_again_at_the_same_steps(problem: HyperCleaning, tmp_path: Path) -> None:
    race.task_of(problem).save(tmp_path)
    near = Judge(problem, float(problem.value(problem.x0)) - 1e-4)  # and so soon reached
    course = race.Course(Environment(Path(sys.executable), {}), tmp_path, 2.0, 0, near)
    settings = {"sweep": True, "per_visit": 1.0, "lower_lr": 0.3, "batch_size": 5}
    ours = Contestant("ours", "f2sa", [settings], own=True)
    row = course.run(ours, settings)
    assert None not in row.chunks
    again = course.again(ours, row)
    assert again.chunks == row.chunks
    assert again.seconds != row.seconds
    assert all(time is not None and time > 0 for time in (*again.seconds, *again.wall))
    far = replace(course, judge=Judge(problem, -1.0))
    assert far.again(ours, row).seconds == (None,) * 3, "it was not looked at again"
    broken = replace(row, settings={**settings, "per_visit": -1.0})
    assert course.again(ours, broken).seconds == (None,) * 3


@pytest.mark.parametrize("options", [{"corruption": 0.2}, {"seconds": 0.0}, {"repeats": 0}])
def test_what_cannot_be_raced_is_refused(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(ArgumentError, match=name):
        race.run(**options)


def test_an_environment_is_made_once_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def create(folder: Path, **_: object) -> None:
        made.append(folder)
        folder.mkdir()

    monkeypatch.setattr(environment.venv, "create", create)
    failing = environment.EXTRA["jaxopt"]
    monkeypatch.setattr(
        environment, "_install", lambda _, packages: "too old" if packages == failing else None
    )
    folder = tmp_path / "peers"
    first, second = environment.prepare(folder), environment.prepare(folder)
    assert first == second
    assert made == [folder]
    assert first.reason(("jax", "jaxopt")) == "jaxopt: too old"
    assert first.reason(("jax",)) is None


def test_an_environment_without_its_base_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.venv, "create", lambda folder, **_: folder.mkdir())
    monkeypatch.setattr(environment, "_install", lambda python, packages: "no network")
    with pytest.raises(BilevelError, match="no network"):
        environment.prepare(tmp_path / "peers")
    assert not (tmp_path / "peers" / "installed.json").exists()
