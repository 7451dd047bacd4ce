"""``bilevel clean``: from files to labels, model and report."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from bilevel.cleaning import load_model
from bilevel.cleaning.columns import CategoryColumn, NumberColumn, TextColumn
from bilevel.cleaning.encoding import TableEncoder, fit
from bilevel.cleaning.files import clean_files
from bilevel.cleaning.files import write as write_results
from bilevel.cleaning.findings import clean
from bilevel.cleaning.reading import from_frame, read
from bilevel.cleaning.samples import open_image
from bilevel.cleaning.saved import CleanedModel
from bilevel.cli.app import app
from bilevel.data.output import written
from bilevel.errors import ArgumentError, InputError
from tests.cleaning.files import Animals
from tests.marks import slow_except

runner = CliRunner()
FILES = {"labels.csv", "model.json", "model.safetensors", "report.html"}


def run(paths: dict[str, Path], out: Path, *options: str, code: int = 0) -> str:
    result = runner.invoke(
        app,
        [
            *("clean", str(paths["train"]), "--trusted", str(paths["trusted"])),
            *("--out", str(out), *options),
        ],
    )
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def animals() -> Animals:
    return Animals()


@pytest.fixture
def one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights take one step, where it does not matter what they find."""
    assert clean.__kwdefaults__ is not None
    monkeypatch.setitem(clean.__kwdefaults__, "max_steps", 1)


hasty = pytest.mark.usefixtures("one_step")


@pytest.fixture(scope="module")
def cleaned(animals: Animals, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes for arrays; not to be changed."""
    folder = tmp_path_factory.mktemp("cleaned")
    run(animals.write_npz(folder), folder / "out")
    return folder / "out"


KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "csv": (Animals.write_csv, ("--label", "label")),
    "parquet": (Animals.write_parquet, ("--label", "label")),
    "npz": (Animals.write_npz, ()),
    "npz of pictures": (lambda a, f: a.write_npz(f, pictures=True), ()),
    "images": (Animals.write_images, ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_except(["csv", "images"], KINDS))
def test_every_kind_of_input(animals: Animals, tmp_path: Path, kind: str) -> None:
    write, options = KINDS[kind]
    paths, out = write(animals, tmp_path), tmp_path / "new" / "cleaned"
    output = run(paths, out, *options, "--json", str(tmp_path / "figures.json"))
    tables = {"corrected.csv"} if kind in ("csv", "parquet") else set()
    assert {file.name for file in out.iterdir()} == FILES | tables

    table = pd.read_csv(out / "labels.csv", keep_default_na=False)
    assert list(table.columns) == [
        *("row", "id", "given_label", "weight", "label_quality", "verdict", "suggested_label")
    ]
    assert table["row"].tolist() == list(range(240))
    order = np.arange(240)
    if kind == "images":  # in the order of their names, by which they are known
        order = np.array([int(Path(name).stem) for name in table["id"]])
        assert table["id"][0] == "ant/" + Path(table["id"][0]).name
    assert (table["given_label"] == animals.labels[order]).all()
    suspect = (table["verdict"] == "suspect").to_numpy()
    assert (suspect == animals.bad[order]).mean() > 0.9
    assert table["label_quality"][suspect].max() < table["label_quality"][~suspect].min()
    assert table["weight"].between(0, 1).all()
    right = np.array(["ant", "bee", "cat"])[animals.true[order]]
    assert (table["suggested_label"] == right).mean() > 0.9
    assert (table["suggested_label"] == table["given_label"])[~suspect].all()

    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["suspect"] == suspect.sum() == np.sum(figures["confusions"])
    assert {out / name for name in figures["files"]} == set(out.iterdir())
    first, *lines = output.strip().splitlines()
    assert first == f"figures: {tmp_path / 'figures.json'}"  # written before anything is said
    low, high = figures["wrong_share_interval"]
    assert low <= figures["wrong_share"] <= high
    assert len(figures["label_next"]) == 20
    assert "of all labels are wrong, between" in lines[4]
    if tables:
        fixed = pd.read_csv(out / "corrected.csv", keep_default_na=False)
        assert fixed.drop(columns="label").columns.tolist() == ["size", "weight", "home", "about"]
        assert (fixed["label"] == table["suggested_label"]).all()
        assert lines[5].startswith("Columns: number 'size', 'weight'; category 'home'")
    assert f"{suspect.sum()} labels look wrong" in lines[1]
    assert str(out) in output
    assert f"{suspect.sum()}</span> of 240 labels look wrong" in (out / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_except(["parquet", "npz of pictures"], KINDS))
def test_the_saved_model_predicts_as_the_fitted_one(
    animals: Animals, tmp_path: Path, kind: str
) -> None:
    write, options = KINDS[kind]
    paths = write(animals, tmp_path)
    label = options[1] if options else None
    found = clean_files(paths["train"], paths["trusted"], label=label)
    write_results(found, tmp_path / "out")
    model = load_model(tmp_path / "out")

    fresh = read(paths["fresh"], label=label)
    features = found.encoder.encode(fresh)
    assert (model.predict(paths["fresh"]) == found.cleaner.predict(features)).all()
    expected = found.cleaner.predict_proba(features)
    np.testing.assert_array_equal(model.predict_proba(str(paths["fresh"])), expected)
    assert model.classes == found.cleaner.classes_.tolist()
    assert (model.predict(paths["fresh"]) == fresh.labels).mean() > 0.9


@pytest.mark.slow
def test_a_saved_model_takes_frames_and_arrays(
    animals: Animals, cleaned: Path, tmp_path: Path
) -> None:
    run(animals.write_csv(tmp_path), tmp_path / "out", "--label", "label")
    for out, data in ((tmp_path / "out", animals.frame), (cleaned, animals.numbers)):
        model = load_model(str(out))
        assert (model.predict(data[-40:]) == animals.labels[-40:]).mean() > 0.9
    with pytest.raises(ArgumentError, match="list"):
        model.predict([1, 2])
    with pytest.raises(InputError, match="where an array is expected"):
        model.predict(animals.frame)


@pytest.mark.slow
def test_what_is_no_model_is_refused(cleaned: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no model that can be read"):
        load_model(tmp_path)
    shutil.copytree(cleaned, tmp_path / "out")
    description = json.loads((tmp_path / "out" / "model.json").read_text())
    for change, message in (
        ({"format": "other"}, "does not describe a label cleaner"),
        ({"version": 9}, "of version 9"),
        ({"classes": None, "sharpness": None}, "lacks"),
    ):
        (tmp_path / "out" / "model.json").write_text(json.dumps({**description, **change}))
        with pytest.raises(InputError, match=message):
            load_model(tmp_path / "out")
    (tmp_path / "out" / "model.json").write_text(json.dumps(description))
    (tmp_path / "out" / "model.safetensors").write_bytes(b"\x80\x04.")
    with pytest.raises(InputError, match="no model that can be read"):
        load_model(tmp_path / "out")


def changed(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(description: Any) -> None:
        for key in path[:-1]:
            description = description[key]
        description[path[-1]] = to

    return change


FORGED_MODELS: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
    "too few classes": (changed("classes", to=["ant", "bee"]), {}),
    "one class": (changed("classes", to=["ant"]), {}),
    "a class twice": (changed("classes", to=["ant", "ant", "bee"]), {}),
    "classes that are no text": (changed("classes", to=[1, 2, 3]), {}),
    "no sharpness": (changed("sharpness", to=math.nan), {}),
    "negative sharpness": (changed("sharpness", to=-1.0), {}),
    "sharpness in words": (changed("sharpness", to="high"), {}),
    "an unknown encoder": (changed("features", "kind", to="sounds"), {}),
    "an unknown column": (changed("features", "columns", 0, "kind", to="sound"), {}),
    "a column without a scale": (changed("features", "columns", 0, "scale", to=0), {}),
    "a mean in words": (changed("features", "columns", 0, "mean", to="middle"), {}),
    "a category that is none": (changed("features", "columns", 2, "values", to=7), {}),
    "a word too many": (changed("features", "columns", 3, "vocabulary", to=["a", "b"]), {}),
    "columns that are none": (changed("features", "columns", to=5), {}),
    "weights of another size": (lambda d: None, {"weight": np.zeros((2, 3), np.float32)}),
    "weights that are not finite": (lambda d: None, {"bias": np.full(3, np.nan, np.float32)}),
    "idf of another size": (lambda d: None, {"idf.0": np.ones(2)}),
    "columns that are not there": (lambda d: None, {"columns": np.array([10**9])}),
}


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    run(Animals().write_csv(folder), folder / "out", "--label", "label")
    return folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize("name", FORGED_MODELS)
def test_forged_models_are_refused(saved_model: Path, tmp_path: Path, name: str) -> None:
    change, tensors = FORGED_MODELS[name]
    description = json.loads((saved_model / "model.json").read_text())
    found = load_file(saved_model / "model.safetensors")
    change(description)
    (tmp_path / "model.json").write_text(json.dumps(description))
    save_file({**found, **tensors}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="lacks what it needs"):
        load_model(tmp_path)


def test_columns_are_taken_for_what_they_look_like(animals: Animals) -> None:
    samples = from_frame(animals.frame[:240], "animals", label="label")
    encoder = fit(samples)
    assert isinstance(encoder, TableEncoder)
    assert {column.name: type(column) for column in encoder.columns} == {
        "size": NumberColumn,
        "weight": NumberColumn,
        "home": CategoryColumn,
        "about": TextColumn,
    }
    X = encoder.encode(samples)
    np.testing.assert_allclose(X[:, [0]].toarray().ravel().std(), 1.0)
    homes = X[:, 2:6].toarray()
    assert (homes.sum(1) == 1).all()
    assert encoder.columns[2].values == ["elsewhere", "hill", "hive", "house"]

    # text by its definition: (1 + log count) idf, of unit length
    text = encoder.columns[3]
    words = animals.frame["about"][0].split()
    counts = {w: words.count(w) for w in set(words) if len(w) > 1 and w in text.vocabulary}
    row = np.zeros(len(text.vocabulary))
    frequency = [sum(w in t.split() for t in animals.frame["about"][:240]) for w in text.vocabulary]
    for word, count in counts.items():
        i = text.vocabulary.index(word)
        row[i] = (1 + np.log(count)) * (1 + np.log(241 / (1 + frequency[i])))
    np.testing.assert_allclose(X[[0], 6:].toarray().ravel(), row / np.linalg.norm(row))


@pytest.mark.slow
@hasty
def test_the_user_has_the_last_word_on_columns(animals: Animals, tmp_path: Path) -> None:
    frame = animals.frame.assign(code=[f"{k:03}" for k in animals.true])
    paths = {}
    for name, part in animals.parts.items():
        paths[name] = tmp_path / f"{name}.csv"
        frame[part].to_csv(paths[name], index=False)
    options = ("--label", "label", "--category", "code", "--ignore", "size", "--text", "home")
    run(paths, tmp_path / "out", *options, "--ignore", "about")
    columns = json.loads((tmp_path / "out" / "model.json").read_text())["features"]["columns"]
    assert {column["name"]: column["kind"] for column in columns} == {
        "weight": "number",
        "home": "text",
        "code": "category",
    }
    assert columns[-1]["values"] == ["000", "001", "002"]  # as written, not as numbers
    output = run(paths, tmp_path / "no", *options, "--ignore", "colour", code=1)
    assert "no column 'colour'" in output
    output = run(paths, tmp_path / "no", *options, "--text", "code", code=1)
    assert "named twice" in output


@pytest.mark.parametrize("empty", ["", None, np.nan], ids=["text", "None", "NaN"])
def test_a_comma_at_the_end_of_every_line_names_no_rows(
    animals: Animals, tmp_path: Path, empty: Any
) -> None:
    frame = animals.frame.assign(**{"": empty})
    assert from_frame(frame, "t", label="label").ids is None
    frame.to_csv(tmp_path / "train.csv", index=False)
    assert (tmp_path / "train.csv").read_text().splitlines()[1].endswith(",")
    assert read(tmp_path / "train.csv", label="label").ids is None


def test_an_unknown_category_is_none_of_the_known_ones() -> None:
    column = CategoryColumn.fitted("home", np.array(["hill", "hive"], dtype=object))
    new = np.array(["hive", "moon"], dtype=object)
    assert column.encode(new, "").toarray().tolist() == [[0, 1], [0, 0]]


def test_a_column_of_names_that_occur_once_is_left_out(animals: Animals) -> None:
    frame = animals.frame.assign(name=[f"n{i}" for i in range(len(animals.frame))], nothing="")
    encoder = fit(from_frame(frame, "animals", label="label"))
    assert "name" not in encoder.describe()["columns"]
    assert encoder.notices == (
        "The column 'name' was left out: nothing in it occurs twice.",
        "The column 'nothing' was left out: it is empty.",
    )


def test_columns_that_number_or_date_the_rows_are_left_out(animals: Animals) -> None:
    count = len(animals.frame)
    frame = animals.frame.assign(
        row=np.arange(7.0, count + 7),
        customer_id=np.random.default_rng(0).permutation(count) + 1000.0,
        day=[f"2024-01-{i % 28 + 1:02}" for i in range(count)],
    )
    encoder = fit(from_frame(frame, "animals", label="label"))
    assert encoder.notices == (
        "The column 'row' was left out: it numbers the rows.",
        "The column 'customer_id' was left out: it identifies the rows.",
        "The column 'day' was left out: it holds dates.",
    )


def test_missing_numbers_are_taken_for_the_mean(animals: Animals) -> None:
    frame = animals.frame.copy()
    frame.loc[frame.index[::5], "size"] = np.nan
    samples = from_frame(frame, "animals", label="label")
    size = fit(samples).encode(samples)[:, [0]].toarray().ravel()
    assert (size[::5] == 0).all()
    assert abs(size.mean()) < 1e-9


@pytest.mark.slow
def test_trusted_samples_are_optional(animals: Animals, tmp_path: Path) -> None:
    paths = animals.write_csv(tmp_path)
    result = runner.invoke(
        app, ["clean", str(paths["train"]), "--label", "label", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    assert "without trusted samples" in result.output
    table = pd.read_csv(tmp_path / "out" / "labels.csv")
    assert ((table["verdict"] == "suspect") == animals.bad[:240]).mean() > 0.8


@pytest.mark.slow
@hasty
def test_csv_as_people_write_it(animals: Animals, tmp_path: Path) -> None:
    """A byte order mark, quotes, commas and line ends within values, and the index of a table."""
    frame = animals.frame.copy()
    frame["label"] = frame["label"].map({"ant": 'the "ant", red', "bee": "bee\nline", "cat": "NA"})
    frame["about"] += ',\n"quoted"'
    paths = {}
    for name, part in animals.parts.items():
        paths[name] = tmp_path / f"{name}.csv"
        frame[part].to_csv(paths[name], encoding="utf-8-sig", index=True)
    run(paths, tmp_path / "out", "--label", "label")
    table = pd.read_csv(tmp_path / "out" / "labels.csv", keep_default_na=False, dtype=str)
    assert table["given_label"].tolist() == frame["label"][:240].tolist()
    assert table["id"].tolist() == [str(i) for i in range(240)]
    columns = json.loads((tmp_path / "out" / "model.json").read_text())["features"]["columns"]
    assert [c["name"] for c in columns] == ["size", "weight", "home", "about"]


@pytest.mark.slow
@hasty
def test_ids_are_kept_as_they_are_written(animals: Animals, tmp_path: Path) -> None:
    frame = animals.frame.assign(key=[f"{i:05}" for i in range(len(animals.frame))])
    paths = {}
    for name, part in animals.parts.items():
        paths[name] = tmp_path / f"{name}.tsv"
        frame[part].to_csv(paths[name], index=False, sep="\t")
    run(paths, tmp_path / "out", "--label", "label", "--id", "key")
    table = pd.read_csv(tmp_path / "out" / "labels.csv", dtype=str)
    assert table["id"].tolist() == frame["key"][:240].tolist()


def test_truth_values_are_categories_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("flag,label\nTRUE,a\nFALSE,b\nTRUE,a\nFALSE,b\n")
    samples = read(tmp_path / "t.csv", label="label")
    assert samples.table["flag"].tolist() == ["TRUE", "FALSE", "TRUE", "FALSE"]


@hasty
def test_labels_that_are_numbers_are_counted_as_people_do(animals: Animals) -> None:
    names = np.array(["2", "10", "1"])[animals.true]
    frame = animals.frame.assign(label=names)
    train, trusted = (
        from_frame(frame[animals.parts[name]], name, label="label") for name in ("train", "trusted")
    )
    assert clean(train, trusted).classes == ["1", "2", "10"]


@pytest.mark.parametrize("kind", [np.int8, np.float32, bool, "S3"])
def test_labels_of_any_kind_are_text(animals: Animals, tmp_path: Path, kind: Any) -> None:
    wanted = {bool: ["True", "False"], "S3": ["7", "12"]}.get(kind, ["1", "0"])
    values = np.array([7, 12]).astype(kind) if kind == "S3" else np.array([1, 0]).astype(kind)
    np.savez(tmp_path / "x.npz", X=animals.numbers, y=values[(animals.true == 1).astype(int)])
    labels = read(tmp_path / "x.npz", label=None).labels
    assert labels is not None
    assert labels.tolist() == [wanted[int(k == 1)] for k in animals.true]


@pytest.mark.slow
def test_threshold_and_seed(animals: Animals, tmp_path: Path) -> None:
    paths = animals.write_npz(tmp_path)
    found = {}
    for name, options in {
        "none": ("--threshold", "0"),
        "all": ("--threshold", "1"),
        "one": ("--seed", "3"),
        "same": ("--seed", "3"),
        "other": ("--seed", "4"),
    }.items():
        run(paths, tmp_path / name, *options)
        found[name] = pd.read_csv(tmp_path / name / "labels.csv")
    assert (found["none"]["verdict"] == "ok").all()
    assert ((found["all"]["verdict"] == "suspect") == (found["all"]["label_quality"] < 1)).all()
    pd.testing.assert_frame_equal(found["one"], found["same"])
    assert not found["one"]["weight"].equals(found["other"]["weight"])
    for name in FILES - {"report.html"}:  # the report has the seconds
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()


@hasty
def test_overwriting_replaces_what_the_command_writes_and_nothing_else(
    animals: Animals, cleaned: Path, tmp_path: Path
) -> None:
    paths, out = animals.write_npz(tmp_path), tmp_path / "out"
    shutil.copytree(cleaned, out)
    (out / "mine.txt").write_text("mine")
    (out / "labels.csv").write_text("old")
    output = run(paths, out, code=1)
    assert "--overwrite" in output
    assert (out / "labels.csv").read_text() == "old"
    run(paths, out, "--overwrite")
    assert (out / "labels.csv").read_text().startswith("row,id,")
    assert (out / "mine.txt").read_text() == "mine"
    assert {file.name for file in out.iterdir()} == FILES | {"mine.txt"}
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
@hasty
def test_what_fails_in_the_end_leaves_nothing(
    animals: Animals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = animals.write_npz(tmp_path)
    before = sorted(tmp_path.rglob("*"))

    def fail(model: Any, folder: Path) -> None:
        (folder / "model.json").write_text("half of")
        raise OSError("the disk is full")

    monkeypatch.setattr(CleanedModel, "save", fail)
    output = run(paths, tmp_path / "deep" / "out", code=1)
    assert "out cannot be written: the disk is full" in output
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "out").mkdir()
    run(paths, tmp_path / "out", code=1)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_labels_that_look_like_formulas_are_not_computed(animals: Animals, tmp_path: Path) -> None:
    names = {"ant": "+1+1", "bee": "@SUM(1+1)", "cat": "-1"}
    animals = copy.copy(animals)
    animals.frame = animals.frame.assign(label=animals.frame["label"].map(names))
    paths = animals.write_csv(tmp_path)
    run(paths, tmp_path / "out", "--label", "label")
    table = pd.read_csv(tmp_path / "out" / "labels.csv", dtype=str)
    assert set(table["given_label"]) == {"'+1+1", "'@SUM(1+1)", "-1"}
    assert set(table["suggested_label"]) == {"'+1+1", "'@SUM(1+1)", "-1"}
    assert load_model(tmp_path / "out").classes == sorted(names.values(), key=str)


def test_results_may_be_read_by_whom_the_system_lets_read(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    usual = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    with written(tmp_path / "out", overwrite=False) as part:
        (part / "file").write_text("")
        (part / "file").chmod(0o600)
    assert stat.S_IMODE((tmp_path / "out" / "file").stat().st_mode) == usual


def test_images_of_all_kinds(tmp_path: Path) -> None:
    grey = np.full((8, 8), 90, dtype=np.uint8)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    Image.fromarray(np.dstack([grey, grey, grey, np.zeros_like(grey)])).save(tmp_path / "clear.png")
    Image.fromarray(grey).convert("P").save(tmp_path / "palette.gif")
    expected = {"grey.png": ("L", 90), "deep.png": ("L", 90), "clear.png": ("RGB", (255,) * 3)}
    for name, (mode, pixel) in expected.items():
        image = open_image(tmp_path / name)
        assert (image.mode, image.getpixel((3, 3))) == (mode, pixel)
    assert open_image(tmp_path / "palette.gif").mode == "RGB"


def test_large_and_mixed_images_are_brought_to_one_size(animals: Animals, tmp_path: Path) -> None:
    paths = animals.write_images(tmp_path)
    some = next((paths["train"] / "ant").iterdir())
    Image.open(some).resize((90, 60)).convert("RGB").save(some)
    samples = read(paths["train"], label=None)
    encoder = fit(samples)
    assert encoder.encode(samples).shape == (240, 32 * 32 * 3)
    assert "32 x 32" in encoder.notices[0]


@pytest.mark.slow
@hasty
def test_names_of_images_may_be_anything(animals: Animals, tmp_path: Path) -> None:
    """Markup, quotes, commas, line ends, and bytes that are no text."""
    paths = animals.write_images(tmp_path)
    strange = '<img src=x onerror=alert(1)>, "b"\n'
    for part in paths.values():
        (part / "bee").rename(part / strange)
    some = sorted((paths["train"] / strange).iterdir())
    some[0].rename(some[0].with_name("<script>.png"))
    some[1].rename(os.fsdecode(os.fsencode(some[1].parent) + b"/\xff.png"))
    run(paths, tmp_path / "out")
    table = pd.read_csv(tmp_path / "out" / "labels.csv")
    assert set(table["given_label"]) == {"ant", strange, "cat"}
    assert {f"{strange}/<script>.png", f"{strange}/\\xff.png"} < set(table["id"])
    assert "<img src=x" not in (tmp_path / "out" / "report.html").read_text()
    model = load_model(tmp_path / "out")
    assert strange in model.classes
    assert set(model.predict(paths["fresh"])) <= set(model.classes)


@pytest.mark.slow
def test_without_the_extra_the_command_names_it(tmp_path: Path) -> None:
    for module in ("jinja2", "PIL"):
        code = (
            f"import sys; sys.modules[{module!r}] = None; from bilevel.__main__ import main;"
            "sys.argv = ['bilevel', 'clean', 'a.csv', '--trusted', 'b.csv', '--out', 'c'];main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 1
        assert "bilevel[clean]" in done.stderr
        assert not done.stdout
    assert not list(tmp_path.iterdir())


def test_without_pyarrow_parquet_names_its_extra(
    animals: Animals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = animals.write_parquet(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "bilevel[parquet]" in run(paths, tmp_path / "out", "--label", "label", code=1)


def test_the_model_is_described_in_full(animals: Animals, cleaned: Path) -> None:
    """Enough to apply it with NumPy alone."""
    about = json.loads((cleaned / "model.json").read_text())
    parts = load_file(cleaned / "model.safetensors")
    X = animals.numbers[-40:]
    clip = about["scaling"]["clip"]
    z = np.clip((X - parts["mean"]) / parts["scale"], -clip, clip)
    logits = about["sharpness"] * (z @ parts["weight"].astype(float) + parts["bias"])
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(p, load_model(cleaned).predict_proba(X), rtol=1e-9)
