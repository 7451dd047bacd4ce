"""``bilevel reproduce cleaning`` on made-up samples: clock, costs, summaries and the command."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bilevel.cli.app import app
from bilevel.cli.experiments.cleaning import Reproduction, Tuned, leads, runs, tuning
from bilevel.cli.experiments.cleaning.contenders import CONTENDERS, Contender, Sizes
from bilevel.cli.experiments.cleaning.reproduction import Lead, Spread, Summary, reproduce
from bilevel.cli.experiments.cleaning.runs import (
    SPACING,
    CleaningTask,
    Point,
    Run,
    Snapshot,
    follow,
)
from bilevel.cli.experiments.cleaning.settings import Choice, Trial
from bilevel.cli.experiments.judge import Judge, auc
from bilevel.errors import ArgumentError
from bilevel.problems import HyperCleaning

BATCH = 5
BY_NAME = {contender.name: contender for contender in CONTENDERS}


def made_up(weights: str, train: int = 48, trusted: int = 12) -> HyperCleaning:
    generator = torch.Generator().manual_seed(0)
    count = train + trusted
    true = torch.arange(count) % 3
    images = torch.eye(3, 4)[true] * 2 + torch.randn(count, 4, generator=generator)
    given = torch.where(torch.arange(count) < train // 4, (true + 1) % 3, true)
    return HyperCleaning(
        images[:train],
        given[:train],
        images[train:],
        true[train:],
        weights=weights,
        true_labels=true[:train],
        test_images=images,
        test_labels=true,
    )


@pytest.fixture
def task() -> CleaningTask:
    problems = {weights: made_up(weights) for weights in ("sigmoid", "box")}
    return CleaningTask(0.3, problems, Judge(problems["box"], 0.2))


class Clock:
    """Each reading is a second after the one before."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_weights_are_kept_at_steps_that_grow_geometrically(task: CleaningTask) -> None:
    contender = CONTENDERS[0]
    problem = task.problems[contender.weights]
    solver = contender.solver(problem, contender.choices[0], BATCH, 0)
    kept, failure = follow(solver, 50.0, problem.weight, Clock())
    steps = [one.step for one in kept]
    assert failure is None
    assert steps[:6] == [0, 1, 2, 3, 4, 5]
    assert steps[-1] == 50
    assert all(late <= math.ceil(SPACING * early) for early, late in itertools.pairwise(steps[1:]))
    # a step takes one second of this clock, and what is between steps none
    assert [one.seconds for one in kept] == steps
    assert torch.equal(kept[0].weights, torch.full((48,), 0.5))
    assert torch.equal(kept[-1].weights, problem.weight(solver.x))


def test_a_run_that_breaks_says_why_and_keeps_what_it_had(task: CleaningTask) -> None:
    contender = CONTENDERS[0]
    settings = {"per_visit": 1.0, "lower_lr": 1e30, "multiplier": 5.0}
    one = runs.run(task, contender, settings, batch=BATCH, seed=0, seconds=5.0)
    assert one.failure is not None
    assert "finite" in one.failure
    assert one.last.step < 20
    assert math.isfinite(one.last.value)


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_gradients_are_those_that_a_step_evaluates(
    contender: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = 0

    def counting(level: str) -> None:
        evaluate = getattr(HyperCleaning, level)

        def counted(self, x, y, batch):
            nonlocal seen
            seen += len(batch[1])
            return evaluate(self, x, y, batch)

        monkeypatch.setattr(HyperCleaning, level, counted)

    counting("_upper")
    counting("_lower")
    problem = made_up(contender.weights)
    solver = contender.solver(problem, contender.choices[0], BATCH, 0)
    solver.step(measure=False)
    seen = 0  # what else is looked at only once
    solver.step(measure=False)
    products = {"sobo": 6 * BATCH, "soba": 2 * BATCH}.get(contender.name, 0)
    counted = contender.gradients_per_step(solver, Sizes(BATCH, 48, 12)) * BATCH
    assert counted == seen + products


def test_everyone_has_as_many_settings_to_choose_from() -> None:
    assert {len(contender.choices) for contender in CONTENDERS} == {12}
    assert len(BY_NAME) == len(CONTENDERS) == 6


def test_the_step_of_x_is_given_per_visit_of_a_sample() -> None:
    for contender in CONTENDERS:
        settings = {**contender.choices[0], "per_visit": 2.0}
        solver = contender.solver(made_up(contender.weights), settings, BATCH, 0)
        assert solver.method.upper_lr == 2.0 * (48 if contender.sweep else BATCH)


def test_a_point_is_judged_at_the_exact_lower_solution(task: CleaningTask) -> None:
    weights = torch.linspace(0, 1, 48)
    point = task.point(Snapshot(7, 1.5, weights), 3.0)
    problem = made_up("box")
    assert point.value == pytest.approx(float(problem.value(weights)), abs=1e-5)
    assert point.gap == pytest.approx((point.value - 0.2) / (task.judge.none - 0.2))
    assert point.accuracy == problem.accuracy(problem.lower_solution(weights))
    assert (point.step, point.gradients, point.seconds) == (7, 21.0, 1.5)
    without = task.without_bilevel()
    assert without.gap == pytest.approx(1.0, abs=1e-4)
    assert without.auc == 0.5


def test_auc_counts_pairs_and_halves_ties() -> None:
    score = torch.tensor([0.0, 0.5, 0.5, 1.0])
    assert auc(score, torch.tensor([False, False, True, True])) == 3.5 / 4


def point(step: int, value: float, auc: float = 0.5) -> Point:
    return Point(step, 3.0 * step, 0.1 * step, value, value, 0.9, auc)


def a_run(name: str, seed: int, points: list[Point]) -> Run:
    return Run(name, 0.1, 50, seed, {}, points, None)


def test_a_summary_is_over_seeds_at_common_steps() -> None:
    first = a_run("f2sa", 0, [point(0, 1.0), point(1, 0.5), point(2, 0.04, 0.9), point(4, 0.01)])
    second = a_run("f2sa", 1, [point(0, 1.0), point(1, 0.09), point(3, 0.03)])
    found = Summary.of([first, second])
    assert found.curve.step.tolist() == [0, 1, 3.5]
    assert found.curve.value.tolist() == pytest.approx([1.0, 0.295, 0.02])
    assert found.curve.low.tolist() == pytest.approx([1.0, 0.09, 0.01])
    assert found.value == Spread(pytest.approx(0.02), pytest.approx(0.02 / math.sqrt(2)))
    assert found.best_auc.mean == pytest.approx(0.7)
    ten, five, two = found.seconds
    assert ten.mean == pytest.approx((0.2 + 0.1) / 2)
    assert five.mean == pytest.approx((0.2 + 0.3) / 2)
    assert two is None  # the second seed did not come there


def test_a_lead_compares_after_as_many_gradients() -> None:
    def summary(name: str, points: list[Point]) -> Summary:
        return Summary.of([a_run(name, 0, points)])

    ours = summary("f2sa", [point(0, 1.0), point(1, 0.9), point(4, 0.5), point(16, 0.3)])
    theirs = summary("sobo", [point(0, 1.0), point(2, 0.8), point(4, 0.4), point(100, 0.1)])
    lead = Lead.of(ours, theirs, unit=0.5)
    # at 2 steps ours is half way between 0.9 and 0.5 in logarithms; 100 steps it never took
    assert (lead.points, lead.ahead) == (2, 1)
    assert lead.largest == pytest.approx((0.8 - 0.7) / 0.5)
    assert lead.least == pytest.approx((0.4 - 0.5) / 0.5)

    first = summary("f2sa", [point(0, 1.0), point(1, 0.9)])
    late = Lead.of(first, theirs, unit=0.5)
    assert (late.points, late.ahead, late.least, late.largest) == (0, 0, None, None)
    (line,) = leads(Reproduction({}, [], [late]))
    assert "SOBO was not evaluated after as few gradients" in line
    nothing = summary("f2sa", [point(0, 1.0)])
    assert Lead.of(nothing, theirs, unit=0.5).points == 0


def chosen_by_the_lowest_gap(choice: Choice) -> bool:
    gaps = [trial.gap for trial in choice.trials if trial.gap is not None]
    return Trial(choice.settings, min(gaps)) in choice.trials


def test_the_packages_settings_are_complete_and_of_the_grids() -> None:
    tuned = Tuned.packaged()
    for corruption in runs.CORRUPTIONS:
        for batch in runs.BATCHES:
            for contender in CONTENDERS:
                assert tuned.of(contender.name, corruption, batch) in contender.choices
    for choice in tuned.choices:
        assert [trial.settings for trial in choice.trials] == BY_NAME[choice.contender].choices
        assert chosen_by_the_lowest_gap(choice)


def test_settings_that_are_missing_or_no_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"'soba' for corruption 0\.2"):
        Tuned.packaged().of("soba", 0.2, 50)
    file = tmp_path / "settings.json"
    with pytest.raises(ArgumentError, match=r"settings\.json does not hold settings"):
        Tuned.load(file)
    file.write_text('{"choices": [{}]}')
    with pytest.raises(ArgumentError, match="KeyError"):
        Tuned.load(file)


@pytest.mark.parametrize("options", [{"seconds": 0.0}, {"seeds": 0}])
def test_what_cannot_be_run_is_refused(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(ArgumentError, match=name):
        reproduce(**options)


@pytest.fixture
def no_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_mnist(corruption: float, *, weights: str, **_: object) -> HyperCleaning:
        return made_up(weights, 600, 500)

    monkeypatch.setattr(HyperCleaning, "mnist", fake_mnist)


@pytest.mark.slow
@pytest.mark.usefixtures("no_mnist")
def test_the_command_tunes_and_another_can_read_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "CONTENDERS", CONTENDERS[:1])
    file = tmp_path / "settings.json"
    options = ["--seconds", "0.04", "--tune", str(file)]
    found = CliRunner().invoke(app, ["reproduce", "cleaning", *options])
    assert found.exit_code == 0, found.output
    tuned = Tuned.load(file)
    assert (len(tuned.choices), tuned.seconds, tuned.seed) == (4, 0.01, tuning.SEED)
    for choice in tuned.choices:
        assert [trial.settings for trial in choice.trials] == CONTENDERS[0].choices
        assert chosen_by_the_lowest_gap(choice)
    unfit = CliRunner().invoke(app, ["reproduce", "cleaning", "--settings", str(file)])
    assert unfit.exit_code == 1
    assert "no settings of 'f2sa-paper'" in " ".join(unfit.stderr.split())


@pytest.mark.slow
@pytest.mark.usefixtures("no_mnist")
def test_the_command_writes_table_plot_and_figures(tmp_path: Path) -> None:
    figures, plot = tmp_path / "cleaning.json", tmp_path / "deep" / "cleaning.png"
    options = ["--seconds", "0.01", "--seeds", "1", "--json", str(figures), "--plot", str(plot)]
    done = CliRunner().invoke(app, ["reproduce", "cleaning", *options])
    assert done.exit_code == 0, done.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(figures.read_text())
    assert written["options"] == {"seconds": 0.01, "seeds": 1, "seed": 0}
    assert len(written["rows"]) == 24
    tuned = Tuned.packaged()
    for row in written["rows"]:
        assert row["settings"] == tuned.of(row["contender"], row["corruption"], row["batch"])
        assert row["curve"]["step"][0] == 0
        assert row["curve"]["value"][-1] == pytest.approx(row["value"]["mean"], rel=1e-4)
    output = " ".join(done.stdout.split())
    found = written["f2sa_over_sobo_at_equal_gradients"]
    assert [lead["batch"] for lead in found] == [50, 500] * 2
    for lead in found:  # on a slow machine there may be nothing to compare
        start = f"p {lead['corruption']}, batch {lead['batch']}: "
        if lead["points"]:
            start += "after as many gradients F²SA is ahead of SOBO at "
            assert f"{start}{lead['ahead']} of {lead['points']} evaluations" in output
        else:
            assert f"{start}SOBO was not evaluated" in output
    assert "p 0.3, batch 500, seed 0, soba:" in output
