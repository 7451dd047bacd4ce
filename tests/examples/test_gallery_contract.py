"""Every example of the gallery follows one contract, which the runner and the site rely on."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.docs.pages import DOCS, load_script

runner: Any = importlib.import_module("examples.gallery._runner")
lines: Any = importlib.import_module("examples.gallery._lines")
NAMES = runner.names()
RESULTS = json.loads(runner.RESULTS.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_what_the_site_shows(name: str) -> None:
    module = runner.module(name)
    title, underline, *text = inspect.getdoc(module).splitlines()
    assert title
    assert set(underline) == {"="}
    assert len(underline) >= len(title)
    assert text[-1] == f".. gallery-result:: {name}"
    assert isinstance(module.MEASURE, str)
    assert module.BETTER in (min, max)
    parameters = inspect.signature(module.compare).parameters
    assert list(parameters)[:2] == ["seed", "small"]
    assert parameters["seed"].default == 0
    assert parameters["small"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["small"].default is False


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_results_are_those_of_an_example(name: str) -> None:
    module, found = runner.module(name), RESULTS[name]
    assert (found["measure"], found["better"]) == (module.MEASURE, module.BETTER.__name__)
    assert found["small"] is False
    assert {row["seed"] for row in found["rows"]} == set(range(5))
    assert len({tuple(row["values"]) for row in found["rows"]}) == 1
    assert (DOCS / "gallery" / f"{name}.png").exists(), "run make figures"


@pytest.mark.slow
def test_a_picture_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    script = load_script("draw_gallery", monkeypatch)
    rows = [{"values": {"F2SA": seed, "uniform": 2 * seed}} for seed in (1.0, 2.0)]
    script.draw_example({"measure": "m", "better": "min", "rows": rows}, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# --- the runner -----------------------------------------------------------------------------------


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An example that is in no file; its code is that of the package's `__init__`."""
    made = SimpleNamespace(
        MEASURE="error", BETTER=min, compare=lambda seed, small: {"a": seed, "b": 2.0}
    )
    monkeypatch.setattr(runner, "module", lambda name: made)
    return made


def test_a_seed_is_one_row(example: SimpleNamespace) -> None:
    row = runner.run_seed("__init__", 3, small=True)
    assert row["seed"] == 3
    assert row["values"] == {"a": 3.0, "b": 2.0}
    assert row["cpu_seconds"] >= 0


def test_rows_are_merged_by_seed(example: SimpleNamespace) -> None:
    results: dict[str, Any] = {}
    for seed in (1, 0, 1):
        runner.merge(results, "__init__", runner.run_seed("__init__", seed, False), small=False)
    assert [row["seed"] for row in results["__init__"]["rows"]] == [0, 1]
    assert results["__init__"]["better"] == "min"


@pytest.mark.parametrize("changed", ["size", "measure", "competitors"])
def test_rows_of_something_else_are_dropped(example: SimpleNamespace, changed: str) -> None:
    results: dict[str, Any] = {}
    runner.merge(results, "__init__", runner.run_seed("__init__", 0, False), small=False)
    if changed == "measure":
        example.MEASURE = "accuracy"
    if changed == "competitors":
        example.compare = lambda seed, small: {"c": 1.0, "b": 2.0}
    row = runner.run_seed("__init__", 1, False)
    runner.merge(results, "__init__", row, small=changed == "size")
    assert [row["seed"] for row in results["__init__"]["rows"]] == [1]


# --- lines ----------------------------------------------------------------------------------------

SOURCE = '''"""A module
of two lines."""

import a
from b import (
    c,
)

# a comment
TEXT = """two
lines"""  # counted


def f(x):
    """A docstring."""
    # why
    return (
        x
    )
'''


def test_lines_are_counted_without_imports_comments_docstrings_and_blanks() -> None:
    assert lines.code_lines(SOURCE) == 6


def test_a_fingerprint_is_that_of_the_code_alone() -> None:
    same = re.sub("# a comment\n|    # why\n", "", SOURCE).replace("A docstring", "Another")
    assert lines.fingerprint(same) == lines.fingerprint(SOURCE)
    assert lines.fingerprint(SOURCE.replace("return (", "return (2 * ")) != lines.fingerprint(
        SOURCE
    )


SOLVING = [name for name in NAMES if hasattr(runner.module(name), "solve")]


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_before_a_comparison_is_what_solves(name: str) -> None:
    source = (runner.FOLDER / f"{name}.py").read_text()
    alone = lines.without_comparison(source)
    assert (lines.COMPARISON in source) == (name in SOLVING)
    if name in SOLVING:
        assert "def solve(" in alone
        assert "def compare(" not in alone
        assert "solve(" in source.removeprefix(alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVING)
def test_what_stands_before_a_comparison_runs_by_itself(name: str) -> None:
    pytest.importorskip("sklearn")
    source = (runner.FOLDER / f"{name}.py").read_text()
    alone: dict[str, Any] = {
        "__package__": "examples.gallery",
        "__name__": "examples.gallery.alone",
    }
    exec(compile(lines.without_comparison(source), name, "exec"), alone)
    found, known = (
        np.asarray(way(small=True)) for way in (alone["solve"], runner.module(name).solve)
    )
    assert np.array_equal(found, known)
    assert np.isfinite(found).all()


def test_the_runner_says_which_examples_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gallery", "no_such_example"])
    with pytest.raises(SystemExit):
        runner.main()
    assert "no_such_example" in capsys.readouterr().err


# --- the text of the pages ------------------------------------------------------------------------


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    script = load_script("_ext/gallery_text", monkeypatch)
    monkeypatch.setattr(script, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(script, "EXAMPLES", tmp_path)
    source = '"""A title\n=======\n"""\n\n\ndef compare(seed):\n    return {}\n'
    (tmp_path / "one.py").write_text(source)
    (tmp_path / "_helper.py").write_text("")
    return script


def write(texts: Any, ours: list[float], theirs: list[float], better: str = "min") -> None:
    rows = [
        {"seed": seed, "values": {"F2SA": a, "uniform": b}, "cpu_seconds": 1.0}
        for seed, (a, b) in enumerate(zip(ours, theirs, strict=True))
    ]
    found = {"measure": "error, %", "better": better, "small": False, "code": "", "rows": rows}
    texts.RESULTS.write_text(json.dumps({"one": found}))


def test_what_is_not_measured_is_said_to_be_so(texts: Any) -> None:
    assert "Not measured yet" in texts.result_text("one")
    assert "not measured yet" in texts.summary_text("pages")
    assert re.search(texts.others(), "_helper.py")
    assert not re.search(texts.others(), "one.py")


@pytest.mark.parametrize(
    ("ours", "theirs", "better", "said"),
    [
        ([1.0, 1.1, 1.2], [2.0, 2.2, 2.1], "min", "**Ahead**"),
        ([1.0, 1.1, 1.2], [2.0, 2.2, 2.1], "max", "**Behind**"),
        ([1.0, 3.0, 2.0], [2.0, 2.2, 2.1], "min", "**Neither"),
        ([1.0], [2.0], "min", "One seed"),
    ],
)
def test_a_verdict_needs_two_standard_errors(
    texts: Any, ours: list[float], theirs: list[float], better: str, said: str
) -> None:
    write(texts, ours, theirs, better)
    assert said in texts.result_text("one")
    assert ("yes" in texts.summary_text("pages")) == (said == "**Ahead**")


def test_a_result_is_a_table_with_its_errors_and_lines(texts: Any) -> None:
    write(texts, [1.0, 3.0], [4.0, 4.0])
    text = texts.result_text("one")
    assert "**F2SA**\n     - 2.0\n     - 1.0\n" in text
    assert "2 lines of code" in text
    assert "changed since" in text  # the code that was measured is another


def test_lengths_of_others_stand_beside_ours(texts: Any, tmp_path: Path) -> None:
    peers = json.loads(texts.PEERS.read_text())
    assert all(peer["lines"] > 0 and len(peer["commit"]) == 40 for peer in peers)
    texts.PEERS = tmp_path / "peers.json"
    made = {"repository": "a/b", "commit": "0" * 40, "file": "c.py", "lines": 50, "compares": None}
    texts.PEERS.write_text(json.dumps([made | {"ours": "one"}, made | {"ours": "none"}]))
    text = texts.lines_text("pages", "a/b")
    assert "- 50\n     - nothing\n     - :doc:`A title </pages/one>`\n     - 2\n     - 2\n" in text
    compared = f"X = 1\n{lines.COMPARISON} ---\nY = 2\n"
    (tmp_path / "one.py").write_text((tmp_path / "one.py").read_text() + compared)
    assert "     - 3\n     - 4\n" in texts.lines_text("pages", "a/b")
    assert "not there yet" in text
    assert "c.py" not in texts.lines_text("pages", "another/one")


def test_an_example_has_half_of_the_lines_of_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its comparison beside those that compare, and without it beside the others."""
    texts = load_script("_ext/gallery_text", monkeypatch)
    for peer in json.loads(texts.PEERS.read_text()):
        alone, whole = texts.lengths(peer["ours"])
        assert 2 * (whole if peer["compares"] else alone) <= peer["lines"], peer
