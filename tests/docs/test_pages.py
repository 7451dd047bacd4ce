"""Pages that are made from the code are up to date, and links between files lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.commands import app as benchmarks
from bilevel import errors
from bilevel.cli.app import app as bilevel
from tests.docs.pages import DOCS, ROOT, TEXTS, load_script, name_of


def test_how_to_choose_is_made_from_the_table_of_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    page = load_script("how_to_choose", monkeypatch).page()
    assert (DOCS / "how-to-choose.md").read_text() == page, "run docs/how_to_choose.py"


@pytest.mark.slow
def test_the_flat_valley_is_as_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = load_script("flat_valley", monkeypatch)
    runs = script.measured()
    assert (DOCS / "flat-valley.md").read_text() == script.page(runs), "run docs/flat_valley.py"
    # what the page says of them
    assert runs["F2SA()"].x_error < 0.01 < 1 < runs["F2SA()"].y_error
    for name in ('VPBGD(start="y")', "MEHA()"):
        assert max(runs[name].x_error, runs[name].y_error) < 0.02
    assert {name for name in runs if runs[name].diverged} == {'F2SA(scheme="central")', "AID()"}

    monkeypatch.setattr(script, "FIGURE", tmp_path / "figure.png")
    script.draw(runs)
    for figure in (tmp_path / "figure.png", DOCS / "flat-valley.png"):
        assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not re.match("https?://|(.*/)?(generated|gallery/pages)/", target):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [*TEXTS, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_commands_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    # "bilevel NAME" is a command where it stands in backticks or begins a line of a console.
    for pattern, known in (
        (r"`make ([a-z-]+)", targets),
        (r"python -m benchmarks ([a-z-]+)", names_of(benchmarks)),
        (r"(?:`|\$ |^    )bilevel ([a-z]+)\b(?! =)", names_of(bilevel)),
    ):
        assert set(re.findall(pattern, text, re.MULTILINE)) <= set(known)
    for script in re.findall(r"python (docs/\w+\.py)", text):
        assert (ROOT / script).exists(), script


def names_of(app: Any) -> list[str]:
    commands = (command.name or command.callback.__name__ for command in app.registered_commands)
    return [*commands, *(group.name for group in app.registered_groups)]


def test_the_readme_is_read_to_the_end() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_error_and_warning_is_explained() -> None:
    headings = re.findall(r"^### (\w+)$", (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert len(headings) == len(set(headings))
    assert set(headings) == set(errors.__all__) - {"warn"}


def test_every_page_is_in_llms_txt() -> None:
    text = (DOCS / "llms.txt").read_text()
    linked = set(re.findall(r"\(([\w/-]+)\.html\)", text))
    pages = {
        page.relative_to(DOCS).with_suffix("").as_posix()
        for page in TEXTS
        if DOCS in page.parents and DOCS / "api" not in page.parents
    }
    assert linked == (pages - {"index"}) | {"api/index", "gallery/pages/index"}


@pytest.mark.slow
def test_the_figures_are_as_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = load_script("draw_figures", monkeypatch)
    known, found = json.loads(script.FIGURES.read_text()), script.measure()
    assert known.keys() == found.keys()
    for name, columns in known.items():
        assert columns.keys() == found[name].keys()
        for column, values in columns.items():
            # Other processors round otherwise, and a run on "auto" steps amplifies that.
            relative, absolute = (0.05, 0.02) if name == "home" else (1e-3, 0.0)
            last = -1 if name == "home" and column == "upper" else slice(None)
            new, old = np.array(found[name][column])[last], np.array(values)[last]
            np.testing.assert_allclose(new, old, rtol=relative, atol=absolute)
    script.draw(tmp_path)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in script.FOLDER.glob("*.png")}


def test_the_notebooks_are_those_of_the_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("make_notebooks", monkeypatch)
    assert len(script.PAGES) == 4
    for page in script.PAGES:
        made = (script.FOLDER / f"{page.stem}.ipynb").read_text()
        assert made == script.notebook(page.read_text()), "run docs/make_notebooks.py"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=name_of)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads(path.read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    for cell in content["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code" and not code.startswith("!"):  # a shell's commands
            exec(code, namespace)


def test_docstrings_become_text_that_sphinx_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("_ext/docstrings", monkeypatch)
    formula = ["A step is", "", "    y <- y - gamma * g", "", "and", "", "Args:", "    x: it."]
    expected = ["A step is", "", "::", "", *formula[2:]]
    assert script.as_literal_blocks(formula) == expected
    announced = ["A step is::", "", "    y <- y", "", "Example:", "    >>> 1", "", "    >>> 2"]
    assert script.as_literal_blocks(announced) == announced
    names = ["Args:", "    problem, x0,", "        y0: as there.", "    steps: K."]
    assert script.with_joined_names(names) == ["Args:", "    problem, x0, y0: as there.", names[3]]


def test_ten_questions_of_others_are_answered_by_a_page_each() -> None:
    text = (DOCS / "faq.md").read_text()
    asked = text.split("## Ten questions")[1].split("\n## ")[0]
    questions = re.split(r"^\d+\. ", asked, flags=re.MULTILINE)[1:]
    assert len(questions) == 10
    for question in questions:
        assert re.search(r"\]\((?!http)[\w/.#-]+\.md", question), question  # a page of the site
        assert re.search(r"\]\(https://github\.com/[\w-]+/[\w-]+/issues/\d+\)", question), question
