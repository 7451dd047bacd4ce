"""The figures on the pages are those of the files that the benchmarks wrote."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from bilevel.cli.experiments import digits
from tests.docs.pages import DOCS, ROOT, load_script

CLEANER = "LabelCleaner"
OURS, COMPILED = "bilevel F2SA, all samples", "bilevel F2SA, all samples, compiled"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_script("measured", monkeypatch)


def test_tables_are_as_measured(measured: Any) -> None:
    for name in measured.TABLES:
        assert (DOCS / name).read_text() == measured.page(name), "run python docs/measured.py"


def span(values: Iterable[float], form: str) -> str:
    values = list(values)
    return f"{min(values):{form}} to {max(values):{form}}"


# --- figures that sentences name ------------------------------------------------------------------


def in_the_readme(measured: Any) -> Iterator[str]:
    others = [name for names in measured.PEERS.values() for name in names if "bilevel" not in name]

    def seconds(name: str, column: str) -> float:
        return float(measured.fastest("peers-0.3", name, column) or "inf")

    best, steady = (
        min(seconds(name, column) for name in others) for column in ("seconds", "steady")
    )
    yield (
        f"{seconds(OURS, 'seconds'):.2f} s with everything, the best other {best:.2f} s; "
        f"once compiled {seconds(COMPILED, 'steady'):.2f} s and {steady:.2f} s"
    )
    steps = measured.lm_rows()
    captured, sobo = steps["the same, captured"], steps["SOBO"]
    work = captured["milliseconds"] / steps["plain AdamW, captured"]["milliseconds"]
    yield (
        f"{work:.0f} times the work of plain training, {captured['memory_ratio']:.1f} times the "
        f"memory; a second-order method: {sobo['ratio']:.0f} and {sobo['memory_ratio']:.0f} times"
    )
    times = {
        data: measured.times_cleanlab(measured.labels_by(data)) for data in measured.PEOPLE.values()
    }
    small = times.pop("a9a")
    large = itertools.chain(*times.values())
    yield f"in {span(large, '.1f')} times its time, {span(small, '.1f')} times with 500 rows"
    on_gpu = [row for row in measured.result("overhead-h200") if row["name"] == "bilevel, compiled"]
    yield f"compiled, {span((row['to_floor'] for row in on_gpu), '.1f')} times the time of JAX"


def in_the_benchmarks(measured: Any) -> Iterator[str]:
    steps = measured.lm_rows()
    names = "the same, captured", "plain AdamW, captured"
    ours, plain = (steps[name]["milliseconds"] for name in names)
    yield f"F²SA takes {ours / plain:.2f} times the plain step"

    def tenth(contestant: str, column: str) -> str:
        return f"{measured.fastest('peers-0.1', contestant, column):.2f} s"

    yield (
        f"{tenth(OURS, 'seconds')}, counting everything, where the best of the others, SOBA in JAX "
        f"in our box, takes {tenth('JAX SOBA, in a box', 'seconds')}; steady "
        f"{tenth(COMPILED, 'steady')} compiled, against {tenth('jaxopt, implicit', 'steady')} for "
        f"JAXopt, {tenth('JAX SOBA', 'steady')} for SOBA in JAX with a sigmoid and "
        f"{tenth('JAX SOBA, in a box', 'steady')} for the same in our box"
    )
    many = {row["runs"]: row["ratio"] for row in measured.result("many")}
    yield (
        f"32 seeds of label cleaning with minibatches of 50 take {many[32]:.2f} of the time that a "
        f"loop over `minimize` takes, 8 seeds {many[8]:.2f}"
    )
    tried = {"killed": 0, "damaged": 0}
    for row in measured.result("kill_resume"):
        tried[row["what"]] += row["tried"]
    yield f"kills {tried['killed']} runs over all methods"
    yield f"damages {tried['damaged']:,} files"
    growth = max(row["end_kb"] - row["start_kb"] for row in measured.result("soak"))
    yield f"within {growth / 1024:.0f} MB"
    rows = measured.result("auto")
    passed = sum(row["seconds"] <= 2 for row in rows)
    yield f"a search over {span((row['tuned']['tried'] for row in rows), 'd')} settings"
    yield f"on {len({row['problem'] for row in rows})} problems with five seeds each"
    yield f"Of {len(rows)} runs"
    yield f"{passed} ({passed / len(rows):.0%}) reached 90%"


def in_label_cleaning(measured: Any) -> Iterator[str]:
    ours = [row for row in measured.result("cleaning-random") if row["method"] == CLEANER]
    theirs = [row for row in measured.result("cleaning-random") if row["method"] == "cleanlab"]

    def seconds(rows: list[dict[str, Any]], data: str, model: str = "") -> str:
        found = [r["cpu_seconds"] for r in rows if r["data"] == data and model in r["model"]]
        return span(found, ".0f") if len(found) > 1 else f"{found[0]:.0f}"

    yield (
        f"`LabelCleaner` takes {seconds(ours, 'mnist')} s of the processor on MNIST, where "
        f"cleanlab takes {seconds(theirs, 'mnist')} s, {seconds(ours, 'newsgroups')} s on 20 "
        f"Newsgroups ({seconds(theirs, 'newsgroups')} s), and {seconds(ours, 'covertype')} s on "
        f"Covertype ({seconds(theirs, 'covertype', 'hidden')} s with the `MLPClassifier`)"
    )
    majority = measured.labels_by("cifar10n-aggregate")
    plain = majority["noisy and trusted", "the same, C = 0.01"]
    shown = []
    for rows in (plain, majority[CLEANER, "softmax regression"]):
        values = [100 * row["accuracy"] for row in rows]
        shown.append((statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5))
    (plain_mean, error), (mean, own_error) = shown
    yield (
        f"The standard errors of {plain_mean:.1f}% and {mean:.1f}% are {error:.1f} and "
        f"{own_error:.1f} points"
    )
    [mnist] = [row for row in ours if (row["data"], row["noise"]) == ("mnist", "30% uniform")]
    yield f"MNIST, 30%: an AUC of {mnist['weight_auc']:.3f}"
    [swept] = [
        row
        for row in measured.read(DOCS / "cleaning.json")
        if (row["contender"], row["corruption"], row["batch"]) == ("f2sa-sweep", 0.3, 500)
    ]
    yield f"falls from {swept['best_auc']['mean']:.2f} to {swept['auc']['mean']:.2f}"


def in_the_theory(measured: Any) -> Iterator[str]:
    gaps: dict[str, list[float]] = {}
    for row in measured.read(DOCS / "cleaning.json"):
        gaps.setdefault(row["contender"], []).append(row["gap"]["mean"])
    pairs = zip(gaps["f2sa-paper"], gaps["f2sa"], strict=True)
    yield f"the two are {span((theirs / ours for theirs, ours in pairs), '.0f')} times apart"


@pytest.mark.parametrize(
    ("page", "sentences"),
    [
        ("README.md", in_the_readme),
        ("docs/benchmarks.md", in_the_benchmarks),
        ("docs/benchmarks-labels.md", in_label_cleaning),
        ("docs/theory.md", in_the_theory),
    ],
)
def test_sentences_name_what_was_measured(measured: Any, page: str, sentences: Any) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert [each for each in sentences(measured) if each not in text] == []


@pytest.mark.slow
def test_the_readme_says_what_the_demo_has() -> None:
    found = digits.load(seed=0)
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"wrong labels among {len(found.corrupted):,} real handwritten digits" in text
    assert f"does well on {len(found.trusted[1])} trusted ones" in text
    assert f"how many of the {int(found.corrupted.sum()):,} wrong labels" in text


# --- what is said without a figure ----------------------------------------------------------------


def test_a_step_costs_its_batch_and_not_the_table(measured: Any) -> None:
    ratios = [row["ratio"] for row in measured.result("table") if row["kind"] == "table"]
    assert max(ratios) < 1.1


def test_every_killed_run_and_every_damaged_file_held(measured: Any) -> None:
    assert all(row["tried"] == row["held"] for row in measured.result("kill_resume"))


def test_no_tensor_is_left_over_by_a_long_run(measured: Any) -> None:
    assert all(row["start_tensors"] == row["end_tensors"] for row in measured.result("soak"))


def test_no_run_on_auto_crashed_or_ended_above_its_start(measured: Any) -> None:
    rows = measured.result("auto")
    assert all(row["ending"]["crash"] is None and row["share_end"] >= -0.01 for row in rows)


def test_wrong_labels_are_found_better_than_by_cleanlab(measured: Any) -> None:
    a_plain_fit_predicts_as_well = []
    for data in measured.PEOPLE.values():
        found = measured.labels_by(data)
        for score in ("auc", "f1"):
            assert measured.best(found, CLEANER, score) > measured.best(found, "cleanlab", score)
        for row in found[CLEANER, "softmax regression"]:
            assert row["right_after"] > row["right_before"] - 1e-9  # up to rounding
        plain = (
            measured.best(found, by, "accuracy")
            for by in ("trusted only", "noisy only", "noisy and trusted")
        )
        if max(plain) > measured.best(found, CLEANER, "accuracy"):
            a_plain_fit_predicts_as_well.append(data)
    assert a_plain_fit_predicts_as_well == ["cifar10n-aggregate"]  # where 9% are wrong
