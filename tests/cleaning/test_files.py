"""What is in tables, from the file that was read to the files that are written."""

from __future__ import annotations

import csv
import datetime
import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from bilevel.cleaning import report, table_files
from bilevel.cleaning.columns import CategoryColumn, ColumnChoices
from bilevel.cleaning.encoding import TableEncoder, fit
from bilevel.cleaning.estimator import LabelCleaner
from bilevel.cleaning.files import clean_files, write
from bilevel.cleaning.findings import GRID, Findings, clean
from bilevel.cleaning.reading import from_frame, read
from bilevel.cleaning.samples import ArraySamples, TableSamples
from bilevel.cleaning.saved import load_model
from bilevel.cli.app import app
from tests.cleaning.files import Animals
from tests.cleaning.test_report import data_of

NAMES = np.array(["ant", "bee", "cat"])


@pytest.fixture(autouse=True)
def one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights take one step, because it does not matter here what they find."""
    assert clean.__kwdefaults__ is not None
    monkeypatch.setitem(clean.__kwdefaults__, "max_steps", 1)


def parquet(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_parquet(path)
    return path


# --- suspects -------------------------------------------------------------------------------------


@pytest.fixture
def separated(monkeypatch: pytest.MonkeyPatch) -> Findings:
    """All labels are so surely right that their qualities are within one step of the grid."""
    fit_to_data = LabelCleaner.fit

    def fit(cleaner: LabelCleaner, *data: Any, **options: Any) -> LabelCleaner:
        fit_to_data(cleaner, *data, **options)
        cleaner.label_quality_ = 1 - np.random.default_rng(0).random(240) / (2 * GRID)
        cleaner.threshold_ = float(np.sort(cleaner.label_quality_)[2])
        cleaner._issue = cleaner.label_quality_ <= cleaner.threshold_
        return cleaner

    monkeypatch.setattr(LabelCleaner, "fit", fit)
    animals = Animals()
    train, trusted = (
        ArraySamples(name, animals.numbers[rows], animals.labels[rows])
        for name, rows in animals.parts.items()
        if name != "fresh"
    )
    return clean(train, trusted)


def test_suspects_are_the_issues_of_the_estimator(separated: Findings, tmp_path: Path) -> None:
    issues = separated.cleaner.label_issues()["is_label_issue"].to_numpy()
    assert issues.any()
    qualities = separated.cleaner.label_quality_
    cells = np.floor(qualities * GRID)
    assert np.isin(cells[~issues], cells[issues]).any()  # there is something to tell apart
    assert (separated.suspect == issues).all()
    assert np.abs(separated.quality / GRID - qualities).max() <= 1 / GRID
    assert separated.quality.max() <= GRID
    write(separated, tmp_path / "out")
    table = pd.read_csv(tmp_path / "out" / "labels.csv")
    assert ((table["verdict"] == "suspect") == issues).all()
    assert ((table["label_quality"] < separated.to_json()["threshold"]) == issues).all()
    data = data_of(report.render(separated))
    assert ((np.array(data["quality"]) < data["threshold"]) == issues).all()


def test_with_a_threshold_suspects_are_of_a_lower_quality(separated: Findings) -> None:
    found = clean(separated.samples, separated.trusted, threshold=0.9999)
    assert found.threshold == GRID - 1
    assert (found.suspect == (found.cleaner.label_quality_ < 0.9999)).all()


# --- truth values ---------------------------------------------------------------------------------


def test_truth_values_are_the_same_however_they_are_written_and_stored(tmp_path: Path) -> None:
    flags = np.array([True, False, True, True, False, False])
    wanted = np.stack([~flags, flags], axis=1).astype(float).tolist()
    some = pd.DataFrame({"flag": flags, "label": NAMES[flags.astype(int)]})
    places = {"parquet": parquet(some, tmp_path / "t.parquet")}
    for true, false in (("TRUE", "FALSE"), ("true", "false"), ("True", "False")):
        written = some.assign(flag=np.where(flags, true, false))
        places[true] = tmp_path / f"{true}-.csv"
        written.to_csv(places[true], index=False)
    places["mixed"] = tmp_path / "mixed.csv"
    places["mixed"].write_text("flag\nTRUE\nfalse\ntrue\nTrue\nFalse\nfalse\n")
    for fitted in places:
        column = CategoryColumn.fitted("flag", read_flags(places[fitted]))
        for other in places:
            found = column.encode(read_flags(places[other]), other)
            assert found.toarray().tolist() == wanted, (fitted, other)
            frames = [pd.read_parquet] if other == "parquet" else [pd.read_csv]
            found = column.encode(from_frame(frames[0](places[other]), "f").table["flag"], other)
            assert found.toarray().tolist() == wanted, (fitted, other)


def read_flags(path: Path) -> Any:
    samples = read(path, label=None, labelled=False)
    assert isinstance(samples, TableSamples)
    return samples.table["flag"]


@pytest.mark.parametrize("kind", [object, "boolean"])
def test_missing_truth_values_are_the_empty_text(tmp_path: Path, kind: Any) -> None:
    frame = pd.DataFrame({"flag": pd.Series([True, None, False], dtype=kind)})
    assert from_frame(frame, "f").table["flag"].tolist() == ["True", "", "False"]
    assert read_flags(parquet(frame, tmp_path / "t.parquet")).tolist() == ["True", "", "False"]


def test_a_saved_model_takes_truth_values_of_files_and_frames(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    true = rng.random(200) < 0.5
    given = np.where(rng.random(200) < 0.1, ~true, true)
    frame = pd.DataFrame({"flag": true, "noise": rng.normal(size=200), "label": given * 1})
    frame.assign(flag=np.where(true, "TRUE", "FALSE")).to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    write(clean_files(tmp_path / "t.csv", None, label="label"), tmp_path / "out")
    model = load_model(tmp_path / "out")
    expected = model.predict_proba(tmp_path / "t.csv")
    assert (expected.argmax(1) == true).mean() > 0.9
    for data in (pd.read_csv(tmp_path / "t.csv"), frame, tmp_path / "t.parquet"):
        np.testing.assert_allclose(model.predict_proba(data), expected, rtol=1e-12)


# --- the table with the suggested labels ----------------------------------------------------------

CELLS = {
    "zip": ["00750", "12345", "00001"],
    "version": ["1.10", "1.0", "2.00"],
    "tiny": ["2.720e-08", "-1.5", " -2.50"],
    "digits": ["-2.4724341564337804", "0.1", "0.30000000000000004"],
    "big": ["9007199254740993", "9007199254740995", "1"],
    "flag": ["TRUE", "FALSE", "TRUE"],
    "gap": ["", "3", "4"],
    "text": ['a "quoted", one', "two\r\nlines", "NA"],
    "cr": ["a\rb", "x", " y "],
}


def corrected(path: Path, trusted: Path, out: Path, **options: Any) -> tuple[Findings, str]:
    found = clean_files(path, trusted, label="label", **options)
    write(found, out, overwrite=True)
    with (out / "corrected.csv").open(encoding="utf-8", newline="") as file:
        return found, file.read()


def as_text(source: Any, separator: str = ",") -> pd.DataFrame:
    return pd.read_csv(source, dtype=str, keep_default_na=False, sep=separator)


@pytest.mark.parametrize(("ending", "separator"), [("csv", ","), ("tsv", "\t")])
def test_all_but_the_labels_is_kept_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, separator: str
) -> None:
    monkeypatch.setattr(table_files, "_PIECE", 1)  # so that the table comes in several pieces
    animals = Animals(train=1200)
    cells = {name: np.resize(values, len(animals.frame)) for name, values in CELLS.items()}
    frame = pd.concat([pd.DataFrame(cells), animals.frame[["label", "size", "weight"]]], axis=1)
    paths = {}
    for name in ("train", "trusted"):
        paths[name] = tmp_path / f"{name}.{ending}"
        frame[animals.parts[name]].to_csv(
            paths[name], index=False, sep=separator, encoding="utf-8-sig", quoting=csv.QUOTE_ALL
        )
    choices = ColumnChoices(ignore=["cr", "text"])
    found, text = corrected(paths["train"], paths["trusted"], tmp_path / "out", choices=choices)
    before, after = as_text(paths["train"], separator), as_text(io.StringIO(text, newline=""))
    assert found.suspect.any()
    assert (after["label"] == found.table()["suggested_label"]).all()
    pd.testing.assert_frame_equal(after.drop(columns="label"), before.drop(columns="label"))
    assert after.columns.tolist() == frame.columns.tolist()


def test_formulas_are_not_computed_in_the_corrected_table(tmp_path: Path) -> None:
    animals = Animals()
    values = np.resize(["=1+1", "-1", " -2.50", "-inf", "@A1"], len(animals.frame))
    animals.frame["note"] = values
    paths = animals.write_csv(tmp_path)
    choices = ColumnChoices(ignore=["note"])
    _, text = corrected(paths["train"], paths["trusted"], tmp_path / "out", choices=choices)
    after = as_text(io.StringIO(text))["note"].tolist()
    assert after[:5] == ["'=1+1", "-1", " -2.50", "-inf", "'@A1"]


def test_a_corrected_table_has_the_types_of_its_parquet_file(tmp_path: Path) -> None:
    animals = Animals()
    count = len(animals.frame)
    frame = animals.frame[["size", "weight"]].assign(
        count=pd.Series(np.resize([9007199254740993, None, 2], count), dtype="Int64"),
        flag=pd.Series(np.resize([True, None, False], count), dtype="boolean"),
        small=np.resize(np.array([0.1, 2.0], dtype=np.float32), count),
        label=np.array([1.0, 2.0, 3.0])[np.searchsorted(NAMES, animals.labels)],
    )
    paths = {
        name: parquet(
            frame[animals.parts[name]].reset_index(drop=True), tmp_path / f"{name}.parquet"
        )
        for name in ("train", "trusted")
    }
    found, text = corrected(paths["train"], paths["trusted"], tmp_path / "out")
    after = as_text(io.StringIO(text))
    assert found.suspect.any()
    assert (after["label"] == found.table()["suggested_label"] + ".0").all()
    assert after["count"][:3].tolist() == ["9007199254740993", "", "2"]
    assert after["flag"][:3].tolist() == ["True", "", "False"]
    assert after["small"][:2].tolist() == ["0.1", "2.0"]
    assert (after["size"].astype(float) == frame["size"][:240]).all()
    assert after.columns.tolist() == frame.columns.tolist()


def test_the_corrected_table_is_of_what_was_judged_even_if_the_file_was_changed_since(
    tmp_path: Path,
) -> None:
    animals = Animals()
    paths = animals.write_csv(tmp_path)
    before = as_text(paths["train"])
    found = clean_files(paths["train"], paths["trusted"], label="label")
    paths["train"].write_text("label\n")
    write(found, tmp_path / "out")
    after = as_text(tmp_path / "out" / "corrected.csv")
    pd.testing.assert_frame_equal(after.drop(columns="label"), before.drop(columns="label"))


# --- columns of other types -----------------------------------------------------------------------

DATES: dict[str, Any] = {
    "timestamps": pd.date_range("2024-01-01", periods=7),
    "timestamps with hours": pd.date_range("2024-01-01", periods=7, freq="7h"),
    "timestamps of a zone": pd.date_range("2024-01-01", periods=7, tz="Europe/Berlin"),
    "dates": [datetime.date(2024, 1, day) for day in range(1, 7)],
    "dates of which some are missing": [datetime.date(2024, 1, 1), None],
}


@pytest.mark.parametrize("name", DATES)
def test_dates_are_left_out_and_said(tmp_path: Path, name: str) -> None:
    animals = Animals()
    days = pd.Series(DATES[name])
    places = np.resize(np.arange(len(days)), len(animals.frame))
    frame = animals.frame.assign(day=days.iloc[places].array)
    path = parquet(frame, tmp_path / "t.parquet")
    for samples in (read(path, label="label"), from_frame(frame, "frame", label="label")):
        encoder = fit(samples)
        assert encoder.notices == ("The column 'day' was left out: it holds dates.",)
        assert samples.values("day", np.array([0]))[0].startswith("2024-01-01")


def test_ignored_columns_may_hold_anything(tmp_path: Path) -> None:
    animals = Animals()
    frame = animals.frame.assign(
        pieces=pd.Series([[1, 2]] * len(animals.frame)),
        content=b"\xff\x00",
        pause=pd.Timedelta("1h"),
        when=datetime.time(1, 2),
    )
    animals.frame = frame
    paths = animals.write_parquet(tmp_path)
    odd = ["pieces", "content", "pause", "when"]
    options = [part for name in odd for part in ("--ignore", name)]
    result = CliRunner().invoke(
        app,
        [
            *("clean", str(paths["train"]), "--trusted", str(paths["trusted"])),
            *("--label", "label", "--out", str(tmp_path / "out"), *options),
        ],
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "corrected.csv").exists()
    model = load_model(tmp_path / "out")
    assert isinstance(model.encoder, TableEncoder)
    assert not set(odd) & {column.name for column in model.encoder.columns}
    # a model needs no other columns than those that it was trained on
    assert (model.predict(paths["fresh"]) == model.predict(frame[-40:])).all()
