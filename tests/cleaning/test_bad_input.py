"""What cannot be cleaned is refused: with a message that says why, and nothing written."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

from bilevel.cli.app import app
from tests.cleaning.files import Animals

runner = CliRunner()
Paths = dict[str, Path]


class Case(NamedTuple):
    """A change to good files, and what the message has to say."""

    write: Callable[[Animals, Path], Paths]
    spoil: Callable[[Paths], Any]
    message: str
    options: tuple[str, ...] = ("--label", "label")


def edit(name: str, change: Callable[[pd.DataFrame], Any]) -> Callable[[Paths], None]:
    def spoil(paths: Paths) -> None:
        change(pd.read_csv(paths[name], keep_default_na=False)).to_csv(paths[name], index=False)

    return spoil


def put(name: str, column: str, row: int, value: Any) -> Callable[[Paths], None]:
    def change(frame: pd.DataFrame) -> pd.DataFrame:
        frame[column] = frame[column].astype(object)
        frame.loc[row, column] = value
        return frame

    return edit(name, change)


def text(name: str, change: Callable[[str], str]) -> Callable[[Paths], Any]:
    return lambda paths: paths[name].write_text(change(paths[name].read_text()))


def content(name: str, data: bytes) -> Callable[[Paths], Any]:
    return lambda paths: paths[name].write_bytes(data)


def arrays(name: str, **changes: Any) -> Callable[[Paths], None]:
    def spoil(paths: Paths) -> None:
        with np.load(paths[name]) as file:
            found = dict(file)
        for key, change in changes.items():
            found[key] = change(found[key])
        np.savez(paths[name], **{k: v for k, v in found.items() if v is not None})

    return spoil


def at(row: int, value: float) -> Callable[[Any], Any]:
    def change(X: Any) -> Any:
        X = X.copy()
        X[row, 1] = value
        return X

    return change


def empty_folders(paths: Paths) -> None:
    for file in paths["train"].rglob("*.png"):
        file.unlink()


def one_array(paths: Paths) -> None:
    np.save(paths["train"].with_suffix(".npy"), np.zeros(3))
    paths["train"].with_suffix(".npy").replace(paths["train"])


def members(**files: bytes) -> Callable[[Paths], None]:
    """An archive with these members."""

    def spoil(paths: Paths) -> None:
        with zipfile.ZipFile(paths["train"], "w") as archive:
            for name, data in files.items():
                archive.writestr(name.replace("_npy", ".npy"), data)

    return spoil


def array_header(*shape: int) -> bytes:
    """The beginning of a file that claims to hold an array of that shape."""
    file = io.BytesIO()
    fields = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, fields)
    return file.getvalue()


def pipe(paths: Paths) -> None:
    paths["train"].unlink()
    os.mkfifo(paths["train"])


def disguised(kind: str) -> Callable[[Paths], None]:
    """An image of that kind under the name of a PNG."""
    return lambda paths: Image.new("RGB", (8, 8)).save(
        paths["train"] / "bee" / "other.png", format=kind
    )


def something_there(paths: Paths) -> None:
    out = paths["train"].parent / "out"
    out.mkdir()
    (out / "mine.txt").touch()


class Bomb:
    """Would leave a trace if it were unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("unpickled"),)


PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)
CSV, NPZ, IMAGES = Animals.write_csv, Animals.write_npz, Animals.write_images
HTML = "<img src=x onerror=alert(1)>"

CASES: dict[str, Case] = {
    # columns
    "label column missing": Case(
        CSV, lambda p: 0, "no column 'kind' (--label)", ("--label", "kind")
    ),
    "label not named": Case(CSV, lambda p: 0, "Name it by --label", ()),
    "id column missing": Case(
        CSV, lambda p: 0, "no column 'key' (--id)", ("--label", "label", "--id", "key")
    ),
    "feature missing in trusted": Case(
        CSV, edit("trusted", lambda f: f.drop(columns="size")), "trusted.csv has no column 'size'"
    ),
    "duplicate columns": Case(
        CSV,
        text("train", lambda t: t.replace("weight", "size", 1)),
        "more than one column named 'size'",
    ),
    "a million columns": Case(
        CSV,
        text("train", lambda t: "label," + ",".join(map(str, range(10**6))) + "\n"),
        "train.csv has 1,000,001 columns, and 100,000 at most are read from a table; save so many",
    ),
    "quotes without an end": Case(CSV, text("train", lambda t: t + '"'), "cannot be read as CSV"),
    "zero characters": Case(CSV, content("train", bytes(200)), "train.csv"),
    "no features": Case(CSV, edit("train", lambda f: f[["label"]]), "no column beside"),
    # labels
    "trusted label unknown": Case(
        CSV, put("trusted", "label", 2, "dog"), "trusted.csv has the label 'dog', which train.csv"
    ),
    "HTML as a label": Case(CSV, put("trusted", "label", 2, HTML), f"has the label '{HTML}'"),
    "markup as a label": Case(CSV, put("trusted", "label", 2, "[/red]"), "the label '[/red]'"),
    "one class": Case(
        CSV, edit("train", lambda f: f[f["label"] == "ant"]), "one class only, 'ant'"
    ),
    "no label": Case(
        CSV, put("train", "label", 7, ""), "no label in 1 rows of 'label', first in row 7"
    ),
    "a quantity as a label": Case(
        NPZ, arrays("train", y=lambda y: np.linspace(0.5, 1, len(y))), "a label is a class", ()
    ),
    "an infinite label": Case(
        Animals.write_parquet,
        lambda p: pd.read_parquet(p["train"]).assign(label=np.inf).to_parquet(p["train"]),
        "a label is a class",
    ),
    # rows
    "no rows": Case(CSV, edit("train", lambda f: f[:0]), "train.csv has no rows"),
    "no trusted rows": Case(CSV, edit("trusted", lambda f: f[:0]), "trusted.csv has no rows"),
    "fewer trusted rows than classes": Case(
        CSV, edit("trusted", lambda f: f[:2]), "has 2 rows, fewer than 5"
    ),
    # numbers
    "infinite": Case(CSV, put("train", "size", 5, "-inf"), "'size' has an infinite value in row 5"),
    "too large": Case(CSV, put("train", "size", 5, "1e300"), "too large to work with"),
    "text among numbers": Case(
        CSV, put("train", "size", 5, "big"), "'size' has the text 'big' in row 5"
    ),
    "text for numbers in trusted": Case(
        CSV, edit("trusted", lambda f: f.assign(size="big")), "has the text 'big' in row 0"
    ),
    "NaN in an array": Case(NPZ, arrays("train", X=at(5, np.nan)), "(NaN) in row 5, feature 1", ()),
    "infinite in a trusted array": Case(
        NPZ, arrays("trusted", X=at(5, np.inf)), "trusted.npz: X has an infinite value", ()
    ),
    "text in an array": Case(NPZ, arrays("train", X=lambda X: X.astype(str)), "array of <U", ()),
    "lists": Case(
        Animals.write_parquet,
        lambda p: (
            pd.read_parquet(p["train"])
            .assign(days=pd.Series([[1, 2]] * 240))
            .to_parquet(p["train"])
        ),
        "'days' holds 'ndarray', neither numbers nor text; leave it out by --ignore",
    ),
    # arrays
    "no X": Case(NPZ, arrays("train", X=lambda X: None), "has no array 'X'; it has 'y'", ()),
    "no y": Case(NPZ, arrays("train", y=lambda y: None), "has no array 'y'; it has 'X'", ()),
    "y too short": Case(NPZ, arrays("train", y=lambda y: y[1:]), "y is of shape (239,)", ()),
    "other width": Case(
        NPZ, arrays("trusted", X=lambda X: X[:, :2]), "of shape (2,), where (4,)", ()
    ),
    "objects": Case(NPZ, arrays("train", y=lambda y: y.astype(object)), "never loaded", ()),
    "terabytes": Case(
        NPZ,
        members(X_npy=array_header(10**9, 500), y_npy=array_header(10**9)),
        "train.npz: X claims to be of shape (1000000000, 500), which takes 4,000,000,000,000 bytes",
        (),
    ),
    "members that are no arrays": Case(
        NPZ, members(X=b"hello", y=b""), "train.npz: X is not an array", ()
    ),
    "a member whose header is wrong": Case(
        NPZ,
        members(X_npy=array_header(2, 2).replace(b"descr", b"what?"), y_npy=b""),
        "cannot be read as NPZ",
        (),
    ),
    "no features in an array": Case(
        NPZ, arrays("train", X=lambda X: X[:, :0]), "X is of shape (240, 0)", ()
    ),
    "a label of many digits": Case(
        CSV, put("train", "label", 3, "1" * 5000), "a label of 5,000 characters in row 3 of 'label'"
    ),
    "a pipe": Case(CSV, pipe, "train.csv is neither a file nor a folder"),
    "no label among text": Case(
        Animals.write_parquet,
        lambda p: (
            pd.read_parquet(p["train"])
            .assign(label=lambda f: f["label"].where(f.index != 5, None))
            .to_parquet(p["train"])
        ),
        "no label in 1 rows of 'label', first in row 5",
    ),
    # images
    **{
        f"{kind} named png": Case(
            IMAGES, disguised(kind), "other.png cannot be read as an image: it is not in", ()
        )
        for kind in ("EPS", "JPEG", "PPM", "ICO")
    },
    "image unreadable": Case(
        IMAGES,
        lambda p: (p["train"] / "bee" / "bad.png").write_bytes(PNG),
        "train/bee/bad.png cannot be read as an image",
        (),
    ),
    "image cut off": Case(
        IMAGES,
        lambda p: [f.write_bytes(f.read_bytes()[:-30]) for f in (p["trusted"] / "cat").iterdir()],
        "cannot be read as an image",
        (),
    ),
    "HTML as the name of a bad image": Case(
        IMAGES,
        lambda p: (p["train"] / "bee" / "<b onerror=alert(1)>.png").write_bytes(b"no"),
        "<b onerror=alert(1)>.png cannot be read",
        (),
    ),
    "images without a class": Case(
        IMAGES,
        lambda p: Image.new("L", (8, 8)).save(p["train"] / "loose.png"),
        "1 images in no folder of a class, such as 'loose.png'",
        (),
    ),
    "no images": Case(IMAGES, empty_folders, "has no images in it", ()),
    "label of a folder": Case(IMAGES, lambda p: 0, "leave out --label"),
    # files that are not what their names say
    "PNG named csv": Case(CSV, content("train", PNG), "is not text: it is a PNG image"),
    "pickle named csv": Case(CSV, content("trusted", pickle.dumps([1])), "it is a Python pickle"),
    "Latin-1": Case(
        CSV,
        lambda p: p["train"].write_bytes(p["train"].read_bytes().replace(b"ant", b"\xe4nt")),
        "not text in UTF-8",
    ),
    "empty file": Case(CSV, content("train", b""), "train.csv is empty"),
    "CSV named parquet": Case(
        Animals.write_parquet, content("train", b"size,label\n1,ant\n"), "Parquet file: it is text"
    ),
    "Parquet cut off": Case(
        Animals.write_parquet,
        lambda p: p["train"].write_bytes(p["train"].read_bytes()[:500]),
        "cannot be read as Parquet",
    ),
    "pickle named npz": Case(
        NPZ, content("train", pickle.dumps(Bomb())), "is not an NPZ file: it is a Python pickle", ()
    ),
    "array named npz": Case(
        NPZ,
        one_array,
        "not an NPZ file: it is a NumPy array (NPY)",
        (),
    ),
    "a table and a folder": Case(
        lambda a, f: {**CSV(a, f), "trusted": IMAGES(a, f)["trusted"]},
        lambda p: 0,
        "is a folder",
    ),
    "an array and images": Case(
        lambda a, f: {**NPZ(a, f), "trusted": IMAGES(a, f)["trusted"]},
        lambda p: 0,
        "trusted is a folder of images, where an array is expected",
        (),
    ),
    "unknown ending": Case(
        lambda a, f: {**CSV(a, f), "train": CSV(a, f)["train"].rename(f / "train.xlsx")},
        lambda p: 0,
        "ends in '.xlsx'",
    ),
    "no such file": Case(CSV, lambda p: p["train"].unlink(), "train.csv does not exist"),
    "a name that is too long": Case(
        lambda a, f: {**CSV(a, f), "train": f / f"{'x' * 300}.csv"},
        lambda p: 0,
        "cannot be read: File name too long",
    ),
    # CSV
    "too many fields": Case(
        CSV,
        text("train", lambda t: t.replace("\n", "\n1,2,hill,walks,ant,more\n", 1)),
        "cannot be read as CSV",
    ),
    "too few fields": Case(
        CSV,
        lambda p: p["train"].write_text(p["train"].read_text() + "1,2,hill\n"),
        "no label in 1 rows of 'label', first in row 240",
    ),
    "a quote that does not end": Case(
        CSV,
        lambda p: p["train"].write_text(p["train"].read_text() + '1,2,hill,"walks,ant\n'),
        "cannot be read as CSV",
    ),
    "semicolons and decimal commas": Case(
        CSV,
        text("train", lambda table: table.replace(",", ";").replace(".", ",")),
        "is separated by ';', not by ','",
    ),
    "UTF-16": Case(
        CSV,
        lambda p: p["train"].write_bytes(p["train"].read_text().encode("utf-16")),
        "train.csv is text in UTF-16; save it as UTF-8",
    ),
    "a column of fractions without a name": Case(
        CSV,
        lambda p: (
            pd.read_csv(p["train"])
            .assign(Unnamed=0.25)
            .rename(columns={"Unnamed": ""})
            .to_csv(p["train"], index=False)
        ),
        "has a column without a name",
    ),
    "a label that is not Unicode": Case(
        NPZ,
        arrays("train", y=lambda y: np.where(np.arange(len(y)) == 3, "a\ud800", y.astype(str))),
        r"has the label 'a\ud800' in row 3",
        (),
    ),
    "a zero byte in a label": Case(
        CSV,
        text("train", lambda t: t + "1,2,hill,walks,an\0t\n"),
        "has a zero byte in line 242",
    ),
    "a zero byte in a number": Case(
        CSV,
        text("train", lambda t: t + "1,\0002,hill,walks,ant\n" + "1,2,hill,walks,ant\n" * 9),
        "has a zero byte in line 242",
    ),
    "semicolons": Case(
        CSV, text("train", lambda t: t.replace(",", ";")), "separated by ';', not by ','"
    ),
    # where results go
    "output in the place of a file of results": Case(
        CSV,
        lambda p: (p["train"].parent / "out" / "model.json").mkdir(parents=True),
        "model.json is a folder, where a file of that name is to be written",
        ("--label", "label", "--overwrite"),
    ),
    "output beneath a file": Case(
        CSV,
        lambda p: 0,
        "cannot be written",
        ("--label", "label", "--out", "train.csv/out"),
    ),
    "output whose name is too long": Case(
        CSV, lambda p: 0, "File name too long", ("--label", "label", "--out", "n" * 256)
    ),
    "figures in the place of a folder": Case(
        CSV, lambda p: 0, "is a folder, not a file", ("--label", "label", "--json", ".")
    ),
    "figures in the place of what is read": Case(
        CSV, lambda p: 0, "is read or written", ("--label", "label", "--json", "trusted.csv")
    ),
    "figures in the place of a result": Case(
        CSV, lambda p: 0, "is read or written", ("--label", "label", "--json", "out/labels.csv")
    ),
    "results in the place of what is read": Case(
        lambda animals, folder: {
            name: path.rename(folder / file)
            for (name, path), file in zip(
                animals.write_csv(folder).items(),
                ("corrected.csv", "labels.csv", "fresh.csv"),
                strict=True,
            )
        },
        lambda p: 0,
        "labels.csv is read",
        ("--label", "label", "--overwrite", "--out", "."),
    ),
    "trusted is what is to be judged": Case(
        CSV, lambda p: 0, "both as the samples", ("--label", "label", "--trusted", "train.csv")
    ),
    "checkpoints among the results": Case(
        CSV,
        lambda p: 0,
        "out/saved lies in",
        ("--label", "label", "--checkpoint", "out/saved"),
    ),
    "output not empty": Case(
        CSV,
        something_there,
        "is not empty; name another folder, or replace the results in it by --overwrite",
    ),
    "output is a file": Case(
        CSV, lambda p: (p["train"].parent / "out").touch(), "is a file, not a folder"
    ),
}


@pytest.fixture(scope="module")
def animals() -> Animals:
    return Animals()


def no_work(*args: Any, **options: Any) -> None:
    raise AssertionError("it was not refused before the work")


@pytest.mark.parametrize("name", CASES)
def test_refused(
    animals: Animals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    case = CASES[name]
    paths = case.write(animals, tmp_path)
    case.spoil(paths)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    monkeypatch.setattr("bilevel.cleaning.estimator.LabelCleaner.fit", no_work)
    result = runner.invoke(
        app,
        [
            *("clean", str(paths["train"]), "--trusted", str(paths["trusted"])),
            *("--out", str(tmp_path / "out"), *case.options),
        ],
    )
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("error: ")
    assert case.message in result.stderr
    assert not result.stdout  # which is for results
    after = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert after == before


def test_results_do_not_go_among_the_samples(animals: Animals, tmp_path: Path) -> None:
    paths = IMAGES(animals, tmp_path)
    result = runner.invoke(
        app,
        [
            *("clean", str(paths["train"]), "--trusted", str(paths["trusted"])),
            *("--out", str(paths["train"] / "cleaned")),
        ],
    )
    assert result.exit_code == 1
    assert "which holds samples" in result.output


@pytest.mark.parametrize(
    "option", [("--threshold", "1.5"), ("--seed", "-1"), ("--colour", "red")], ids=lambda o: o[0]
)
def test_bad_options(tmp_path: Path, option: tuple[str, str]) -> None:
    result = runner.invoke(
        app, ["clean", "a.csv", "--trusted", "b.csv", "--out", str(tmp_path / "out"), *option]
    )
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()
