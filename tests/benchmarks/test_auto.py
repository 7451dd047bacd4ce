"""``python -m benchmarks auto``: its problems, what it compares, and what counts as passed."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import bilevel
from benchmarks import auto
from benchmarks.auto import real, row, tuning
from benchmarks.auto.case import Case
from benchmarks.auto.judges import Logistic
from benchmarks.auto.row import Row, measure, profile
from benchmarks.auto.trajectory import Ending, Trajectory, follow, solve
from benchmarks.auto.tuning import Settings, Tuned, tune
from benchmarks.commands import app
from bilevel.data import Covertype, Mnist
from bilevel.errors import ArgumentError, MissingDataError

EVERYTHING = [name for members in auto.FAMILIES.values() for name in members]
MADE_HERE = [name for kind, members in auto.FAMILIES.items() if kind != "real" for name in members]
FINE = Ending(None, "STOPPED", [])
SETTINGS = Settings(0.5, 0.5, 10.0)


def _one_step(case: Case) -> None:
    assert math.isfinite(case.value(case.x0, case.y0))
    solver = bilevel.Solver(
        case.problem, case.x0, case.y0, method=bilevel.F2SA(1e-3, 1e-3), **case.data
    )
    solver.step()
    assert math.isfinite(case.value(solver.x, solver.y))


def test_there_are_at_least_sixty_problems() -> None:
    assert len(set(EVERYTHING)) == len(EVERYTHING) >= 60


@pytest.mark.parametrize("name", MADE_HERE)
def test_a_problem_has_a_finite_start_and_takes_a_step(name: str) -> None:
    _, case = auto.make(name, seed=1)
    _one_step(case)


def test_real_data_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    numbers = {f"X_{kind}": rng.normal(size=(90, 22)) for kind in ("train", "val", "test")}
    labels = {f"y_{kind}": rng.choice([-1, 1], 90) for kind in ("train", "val", "test")}
    np.savez(tmp_path / "ijcnn1.npz", **numbers, **labels)
    (tmp_path / "a9a").write_text("+1 3:1 11:1\n-1 5:1 123:1\n" * 40)
    (tmp_path / "a9a.t").write_text("-1 2:1\n+1 3:1\n" * 40)
    patches = torch.cat([torch.randn(300, 10), torch.zeros(300, 44)], 1)
    monkeypatch.setattr(
        real, "covertype", lambda data_dir: Covertype(patches, torch.arange(300) % 7)
    )
    images = torch.randint(256, (400, 28, 28), dtype=torch.uint8)
    digits = torch.arange(400) % 10
    monkeypatch.setattr(real, "mnist", lambda data_dir: Mnist(images, digits, images, digits))
    _one_step(real.strengths(0, tmp_path, name="ijcnn1"))
    _one_step(real.strengths(0, tmp_path, name="a9a"))
    _one_step(real.covtype(0, None, rows=200))
    _one_step(real.cleaning(0, None, rows=300))
    (tmp_path / "a9a.t").unlink()
    with pytest.raises(MissingDataError, match=r"a9a\.t"):
        real.read_a9a(tmp_path)


@pytest.mark.slow
def test_the_judges_agree_with_plain_descent() -> None:
    for name in ("lasso, strengths of groups", "hinge, strengths of features", "soft threshold"):
        _, case = auto.make(name, seed=0)
        # Plain subgradient steps with falling rates come close to the judged value.
        y = case.y0.double().requires_grad_()
        for k in range(800):
            [slope] = torch.autograd.grad(
                case.problem.lower(case.x0.double(), y, _double(case, "lower_data")), y
            )
            with torch.no_grad():
                y -= 0.3 / (1 + k / 30) * slope
        f = float(case.problem.upper(case.x0.double(), y, _double(case, "upper_data")).detach())
        assert f == pytest.approx(case.value(case.x0, case.y0), rel=5e-2)
    features, labels = torch.randn(50, 3), torch.ones(50)
    labels[::2] = -1
    strengths = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
    y = Logistic(features, labels).solve(strengths).requires_grad_()
    signed = (features * labels[:, None]).double()
    g = torch.nn.functional.softplus(-(signed @ y)).mean() + 0.5 * (strengths * y * y).sum()
    [slope] = torch.autograd.grad(g, y)
    assert float(slope.norm()) < 1e-4


def _double(case: Case, level: str) -> Any:
    batch = case.data.get(level)
    return None if batch is None else tuple(part.double() for part in batch)


def _path(values: list[float], seconds: float = 1.0, evaluations: float = 10.0) -> Trajectory:
    path = Trajectory()
    for k, value in enumerate(values):
        path.add(k, k * seconds, k * evaluations, value)
    return path


def _row(values: list[float], ending: Ending = FINE, tuned: list[float] | None = None) -> Row:
    """A tuned run that falls from 10 to 0 in 4 seconds and 80 evaluations, and another run."""
    best = Tuned(SETTINGS, 9, _path(tuned or [10.0, 8.0, 4.0, 1.0, 0.0], evaluations=20.0))
    return Row("p", "family", 0, best, _path(values), ending, silent=False)


def test_shares_are_of_the_tuned_decrease_at_multiples_of_its_cost() -> None:
    made = _row([10.0, 9.0, 9.0, 9.0, 5.0, 0.5, 2.0, 2.0, 3.0, 2.5])
    assert made.decrease == 10
    assert made.share_equal_seconds == 0.5
    assert made.share_twice_seconds == 0.7  # at 8 s, although 95% was reached on the way
    assert made.share_equal_evaluations == 0.7  # 80 evaluations: 8 entries
    assert made.share_end == 0.75
    assert made.seconds == 5 / 4
    assert made.evaluations == 50 / 80
    assert made.passed
    assert not made.above
    assert not _row([10.0, *[5.0] * 8, 0.5]).passed  # after nine seconds


def test_what_crashed_or_ended_above_its_start_has_not_passed() -> None:
    broken = _row([10.0, 0.0], Ending("NonFiniteError: f", "BROKEN", []))
    assert broken.crashed
    assert not broken.passed
    assert math.isinf(_row([10.0, 9.0]).seconds)
    assert _row([10.0, 9.0, 10.2]).above
    assert _row([10.0, math.nan]).above
    assert not _row([10.0, 9.0, 10.05]).above  # by half a percent of the tuned decrease
    assert _row([10.0, 9.0], tuned=[10.0, 11.0]).share_end > 1  # there was nothing to gain


def test_profiles_count_rows_by_the_cost_of_a_tolerance() -> None:
    crashed = _row([10.0, 0.0], Ending("E", "BROKEN", []))
    rows = [_row([10.0, 0.5, 0.0]), _row([10.0, 6.0, 5.0, 4.0, 0.9]), _row([10.0] * 9), crashed]
    assert profile(rows, "seconds", 0.1, [0.2, 0.25, 0.9, 1.0, 2.0]) == [0, 0.25, 0.25, 0.5, 0.5]
    assert profile(rows, "seconds", 0.01, [0.25, 0.5, 2.0]) == [0, 0.25, 0.25]
    assert profile(rows, "evaluations", 0.1, [0.125, 0.5]) == [0.25, 0.5]
    assert profile(rows, "seconds", 0.1, [0.5, 0.75, 1.0], tuned=True) == [0, 1, 1]


@pytest.mark.slow
def test_a_run_is_judged_at_growing_steps_and_its_evaluations_are_counted() -> None:
    _, case = auto.make("quadratic, kappa 10", seed=0)
    path, ending = follow(case, 0, SETTINGS.method(), steps=20)
    assert ending == Ending(None, "STOPPED", [])
    assert path.steps == [0, 1, 2, 3, 4, 6, 8, 11, 15, 20]
    assert path.values[-1] < path.values[0] == pytest.approx(case.value(case.x0, case.y0))
    assert all(b > a for a, b in zip(path.seconds, path.seconds[1:], strict=False))
    # T = 10: 11 of f and 22 of g in a step, and f at z for the history
    assert path.evaluations[2] - path.evaluations[1] == 34
    ends, _ = follow(case, 0, SETTINGS.method(), steps=20, every_mark=False)
    assert ends.steps == [0, 20]
    assert ends.values[-1] == path.values[-1]
    _, batches = auto.make("weighted logistic, batches of 20", seed=0)
    large = {**batches.data, "direction_batch_size": "all"}
    path, _ = follow(
        Case(batches.problem, batches.x0, batches.y0, batches.value, large), 0, steps=2
    )
    assert path.evaluations[2] - path.evaluations[1] > 34 + 9  # 200 rows are ten minibatches


def test_errors_of_any_kind_are_crashes() -> None:
    def broken(x: Any, y: Any, batch: Any) -> Any:
        raise LookupError("nobody expects this")

    _, case = auto.make("quadratic, kappa 10", seed=0)
    problem = bilevel.Problem(broken, broken)
    ending, value = solve(Case(problem, case.x0, case.y0, case.value), 0, None, 3)
    assert ending.crash is not None
    assert "nobody expects this" in ending.crash
    assert (ending.outcome, value) == ("BROKEN", math.inf)


@pytest.mark.slow
def test_the_search_finds_settings_that_descend_and_known_ones_are_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, case = auto.make("quadratic, f*1000 g*0.001 x*0.001 y*1000", seed=0)
    small = Case(case.problem, case.x0, case.y0, case.value, case.data, steps=12, trials=4)
    tuned = tune(small, seed=0)
    assert tuned.tried == 4 + tuning.NEIGHBOURS
    assert tuned.trajectory.values[-1] < 0.7 * tuned.trajectory.values[0]
    monkeypatch.setattr(tuning, "_search", None)
    again = tune(small, 0, tuned.settings, tuned.tried)
    assert (again.settings, again.tried) == (tuned.settings, tuned.tried)
    assert again.trajectory.values == tuned.trajectory.values


def test_a_rise_without_a_word_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    _, case = auto.make("quadratic, kappa 10", seed=0)
    small = Case(case.problem, case.x0, case.y0, case.value, case.data, steps=20)
    up = _path([1.0, 5.0])
    for alone, silent in (
        (Ending(None, "COMPLETED", []), True),
        (Ending(None, "COMPLETED", ["DivergenceWarning: f rose"]), False),
        (Ending(None, "DIVERGED", []), False),
    ):
        best = Tuned(SETTINGS, 9, _path([1.0, 0.0]))
        monkeypatch.setattr(row, "tune", lambda *given, best=best: best)
        monkeypatch.setattr(row, "follow", lambda *given, **more: (up, FINE))
        monkeypatch.setattr(row, "solve", lambda *given, alone=alone: (alone, 5.0))
        made = measure(small, "p", "family", 0)
        assert made.above
        assert made.silent == silent
        assert made.ending == alone


@pytest.mark.slow
def test_the_command_prints_draws_and_writes_what_need_not_be_searched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(seed: int, data_dir: Path | None) -> Case:
        case = _quadratic(seed, data_dir)
        return Case(case.problem, case.x0, case.y0, case.value, case.data, steps=4, trials=2)

    _quadratic = auto.FAMILIES["quadratic"]["quadratic, kappa 10"]
    monkeypatch.setattr(auto, "FAMILIES", {"few": {"one": small}, "real": auto.FAMILIES["real"]})
    file, picture = tmp_path / "auto.json", tmp_path / "auto.png"
    command = ["auto", "--family", "few", "--seeds", "2", "--json", str(file)]
    result = CliRunner().invoke(app, [*command, "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert "/2" in result.output
    assert picture.stat().st_size > 10_000
    figures = json.loads(file.read_text())
    assert [found["seed"] for found in figures["rows"]] == [0, 1]
    assert figures["options"] == {"family": ["few"], "problem": [], "seeds": 2, "jobs": 1}
    assert figures["machine"]["torch"] == torch.__version__
    monkeypatch.setattr(tuning, "_search", None)
    result = CliRunner().invoke(app, [*command, "--tuned", str(file)])
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(app, ["auto", "--family", "none"]).exit_code == 1


def test_problems_are_chosen_by_family_and_name_and_left_out_without_data(
    tmp_path: Path,
) -> None:
    assert auto._chosen([], []) == EVERYTHING
    assert auto._chosen(["min-max"], ["GAN"]) == [*auto.FAMILIES["min-max"], "GAN"]
    with pytest.raises(ArgumentError, match="problem"):
        auto._chosen([], ["none"])
    with pytest.warns(UserWarning, match="ijcnn1"):
        assert auto.run(problem=["ijcnn1"], seeds=1, data_dir=tmp_path) == []


@pytest.mark.slow
def test_problems_run_in_processes_of_their_own(tmp_path: Path) -> None:
    known = {"settings": dataclasses.asdict(SETTINGS), "tried": 9}
    name = "quadratic, kappa 1"
    rows = [{"problem": name, "seed": seed, "tuned": known} for seed in range(2)]
    (tmp_path / "known.json").write_text(json.dumps({"rows": rows}))
    made = auto.run(problem=[name], seeds=2, jobs=2, tuned=tmp_path / "known.json")
    assert [row.seed for row in made] == [0, 1]
    assert all(row.tuned.settings == SETTINGS for row in made)
    assert all(row.tuned.trajectory.values[-1] < row.auto.values[0] for row in made)
