"""``bilevel mix``: which text is like the target, from files to files."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

import bilevel
from bilevel.cli.app import app
from bilevel.errors import ArgumentError, InputError, InterruptedRunError
from bilevel.mixing import load_model
from bilevel.mixing.files import mix_texts, named_paths, spoiled
from tests.mixing.texts import markov_text

runner = CliRunner()
FILES = {"weights.json", "weights.csv", "weights.png", "model.safetensors", "model.json"}
TEXT = markov_text(6000, seed=0)


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Path]:
    sources, target = spoiled(TEXT)
    paths = {name: tmp_path / f"{name}.txt" for name in (*sources, "target")}
    for name, text in {**sources, "target": target}.items():
        paths[name].write_text(text, encoding="utf-8")
    return paths


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is written after one step; not to be changed."""
    out = tmp_path_factory.mktemp("mixed") / "out"
    mix_texts(*spoiled(TEXT), steps=1).write(out)
    return out


def run(texts: dict[str, Path], out: Path, *options: str, code: int = 0) -> str:
    sources = [f"--source={name}={path}" for name, path in texts.items() if name != "target"]
    given = [*sources, "--target", str(texts["target"]), "--out", str(out), *options]
    result = runner.invoke(app, ["mix", *given])
    assert result.exit_code == code, result.output
    assert not (code and result.stdout)  # which is for results
    return " ".join((result.stderr if code else result.stdout).split())


def test_spoiled_sources_are_what_they_are_called() -> None:
    sources, target = spoiled(TEXT)
    assert sources["clean"] + TEXT[1800:3600] + sources["reversed"][::-1] + target == TEXT
    assert sorted(sources["shuffled"]) == sorted(TEXT[1800:3600])
    assert sources["shuffled"] != TEXT[1800:3600]


@pytest.mark.slow
def test_the_clean_source_wins_and_everything_is_written(
    texts: dict[str, Path], tmp_path: Path
) -> None:
    out, figures = tmp_path / "mixed", tmp_path / "mixed.json"
    output = run(texts, out, "--steps", "50", "--json", str(figures))
    assert {file.name for file in out.iterdir()} == FILES
    found = json.loads(figures.read_text())
    weights = found["weights"]
    # Later the model sees from the letters before whether they go backwards. What it can tell apart
    # does no harm, and its weight comes back.
    assert weights["clean"] > 0.6
    assert max(weights["shuffled"], weights["reversed"]) < 0.3
    assert f"To be trained on: clean {weights['clean']:.1%}, " in output
    assert found["characters"] == {"clean": 1800, "shuffled": 1800, "reversed": 1800}
    mixture = bilevel.Mixture.load(out)
    assert mixture.weights == weights
    assert len((out / "weights.csv").read_text().splitlines()) == len(mixture.history["step"]) + 1
    model = load_model(out)
    target = texts["target"].read_text()
    assert model.loss(target) == pytest.approx(found["loss"], abs=1e-5)
    # of a letter that is the next with 0.8 and the one after with 0.2, no model knows more
    entropy = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    assert entropy - 0.1 < model.loss(target) < math.log(8) - 0.3
    assert model.loss(target) < model.loss(target[::-1]) - 0.3
    assert str(out) in output


@pytest.mark.slow
def test_sources_learned_by_heart_are_not_trusted(texts: dict[str, Path], tmp_path: Path) -> None:
    assert "guessing" not in run(texts, tmp_path / "of their kind", "--steps", "1")
    for name, sentence in {"clean": "abcdefgh", "shuffled": "hgfedcba", "reversed": "ab"}.items():
        texts[name].write_text(sentence * 100)
    texts["target"].write_text("acegbdfh" * 100)
    output = run(texts, tmp_path / "by heart", "--steps", "40")
    assert "worse than guessing (2.079), so do not trust the weights" in output  # log 8


@pytest.mark.slow
def test_a_folder_of_texts_is_one_source(texts: dict[str, Path], tmp_path: Path) -> None:
    text = texts["clean"].read_text()
    folder = tmp_path / "clean"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "2.txt").write_text(text[900:])
    (folder / "a.txt").write_text(text[:900])
    (folder / "notes.md").write_text("0123456789" * 10)
    figures = tmp_path / "mixed.json"
    given = {**texts, "clean": folder}
    run(given, tmp_path / "mixed", "--steps", "1", "--json", str(figures))
    found = json.loads(figures.read_text())
    assert found["characters"]["clean"] == 1801  # a line's end between them
    assert found["vocabulary"] == 9


@pytest.mark.slow
def test_same_seed_same_files(texts: dict[str, Path], tmp_path: Path) -> None:
    for name, seed in (("one", "1"), ("two", "1"), ("three", "2")):
        run(texts, tmp_path / name, "--steps", "1", "--seed", seed)
    one, two, three = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two", "three")
    )
    assert one == two != three


@pytest.mark.slow
def test_nothing_is_written_where_something_is(texts: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "mixed"
    out.mkdir()
    (out / "weights.json").write_text("mine")
    assert "is not empty" in run(texts, out, "--steps", "1", code=1)
    assert (out / "weights.json").read_text() == "mine"
    run(texts, out, "--steps", "1", "--overwrite")
    assert {file.name for file in out.iterdir()} == FILES


def test_bad_input_is_named_and_leaves_nothing(texts: dict[str, Path], tmp_path: Path) -> None:
    short, latin, empty = tmp_path / "short.txt", tmp_path / "latin.txt", tmp_path / "empty"
    short.write_text("to be")
    latin.write_bytes("na\xefve ".encode("latin1") * 100)
    empty.mkdir()
    out = tmp_path / "mixed"
    for path, message in (
        (tmp_path / "none.txt", "none.txt cannot be read"),
        (short, "the source 'clean' has 5 characters; it needs 64 or more"),
        (latin, "latin.txt is not text in UTF-8"),
        (empty, "empty is a folder without a file that ends in .txt"),
    ):
        assert message in run({**texts, "clean": path}, out, code=1)
    assert "the target has 5 characters" in run({**texts, "target": short}, out, code=1)
    inside = tmp_path / "texts"
    inside.mkdir()
    (inside / "a.txt").write_text(TEXT)
    assert "which holds samples" in run({**texts, "clean": inside}, inside / "out", code=1)
    assert not out.exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "not 0"),
        (["a=b.txt"], "not 1"),
        (["a.txt", "b=b.txt"], "--source 'a.txt' must be NAME=PATH"),
        (["=a.txt", "b=b.txt"], "'=a.txt' must be NAME=PATH"),
        (["a=1.txt", "a=2.txt"], "--source names 'a' twice"),
    ],
)
def test_sources_have_to_be_named(given: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        named_paths(given)
    assert named_paths(["a=x=1.txt", "b=2"]) == {"a": Path("x=1.txt"), "b": Path("2")}


def test_the_demo_brings_its_own_texts(texts: dict[str, Path], tmp_path: Path) -> None:
    assert "omit --source and --target" in run(texts, tmp_path / "out", "--demo", code=2)
    result = runner.invoke(app, ["mix", "--source", "a=b.txt"])
    assert result.exit_code == 2
    assert "--target" in result.output


@pytest.mark.skipif(not os.environ.get("BILEVEL_DATA"), reason="needs BILEVEL_DATA")
def test_shakespeare_as_it_is_gains_weight_over_what_was_spoiled(tmp_path: Path) -> None:
    sources, target = spoiled(bilevel.data.shakespeare())
    weights = mix_texts(sources, target, steps=180).mixture.weights
    assert weights["clean"] > 0.6
    assert max(weights["shuffled"], weights["reversed"]) < 0.3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "another"}, "does not describe a model of characters"),
        ({"version": 2}, "of version 2, but this release reads only version 1"),
        pytest.param({"characters": "abc"}, "does not fit the model", marks=pytest.mark.slow),
        pytest.param({"size": {"layers": 1}}, "does not fit the model", marks=pytest.mark.slow),
        pytest.param({"size": {"depth": 1}}, "lacks what a model needs", marks=pytest.mark.slow),
        pytest.param({"size": {"heads": 7}}, "lacks what a model needs", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_was_changed_is_refused(
    change: dict[str, object], message: str, mixed: Path, tmp_path: Path
) -> None:
    shutil.copytree(mixed, tmp_path / "mixed")
    description = tmp_path / "mixed" / "model.json"
    description.write_text(json.dumps({**json.loads(description.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        load_model(tmp_path / "mixed")


def test_a_character_that_the_model_does_not_know_is_named(mixed: Path) -> None:
    with pytest.raises(ArgumentError, match="text has the character 'z'"):
        load_model(mixed).loss("abz")


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(texts: dict[str, Path], tmp_path: Path) -> None:
    kept = ("--checkpoint", str(tmp_path / "kept"))
    run(texts, tmp_path / "short", "--steps", "3", *kept)
    refused = run(texts, tmp_path / "again", "--steps", "6", *kept, code=1)
    assert "--resume" in refused
    run(texts, tmp_path / "long", "--steps", "6", *kept, "--resume")
    run(texts, tmp_path / "whole", "--steps", "6")
    weights = [
        json.loads((tmp_path / out / "weights.json").read_text())["weights"]
        for out in ("long", "whole")
    ]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_run_that_is_interrupted_says_so(tmp_path: Path) -> None:
    sources, target = spoiled(TEXT)

    def interrupt(stage: str) -> None:
        if stage.startswith("step 1 "):
            signal.raise_signal(signal.SIGTERM)

    kept = tmp_path / "kept"
    with pytest.raises(InterruptedRunError, match="interrupted after 1 steps"):
        mix_texts(sources, target, steps=5, checkpoint=kept, tell=interrupt)
    resumed = mix_texts(sources, target, steps=5, checkpoint=kept)
    assert resumed.mixture.weights == mix_texts(sources, target, steps=5).mixture.weights
