"""The report: what is in the file, and what it does in a real browser."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import io
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from bilevel.cleaning import report
from bilevel.cleaning.encoding import fit
from bilevel.cleaning.findings import GRID, Findings, clean
from bilevel.cleaning.reading import from_frame
from bilevel.cleaning.report.curves import curves
from bilevel.cleaning.samples import ArraySamples
from tests.browser import EXECUTABLE, Page, browser
from tests.cleaning.files import Animals

needs_browser = pytest.mark.skipif(
    EXECUTABLE is None, reason="no Chromium here (chromium or chromium-browser in the PATH)"
)

HOSTILE = [
    "</script><script>window.pwned = 1</script>",
    "<img src=x onerror=\"window.pwned = 2; alert('pwned')\">",
    '\'"><svg onload=window.pwned=3>, "quoted"\nand =1+1, <!-- <script>',
]


@pytest.fixture(scope="module")
def pictures() -> Findings:
    animals = Animals()

    def part(name: str) -> ArraySamples:
        rows = animals.parts[name]
        return ArraySamples(f"{name}.npz", animals.pixels[rows], animals.labels[rows])

    return clean(part("train"), part("trusted"))


@pytest.fixture(scope="module")
def hostile() -> Findings:
    """Markup wherever text can come from: labels, values, names of columns, of files, of rows."""
    animals = Animals()
    names = dict(zip(("ant", "bee", "cat"), HOSTILE, strict=True))
    frame = animals.frame.assign(
        label=animals.frame["label"].map(names),
        about=animals.frame["about"] + f" {HOSTILE[0]} {HOSTILE[1]}",
        key=[f"{HOSTILE[1]}{row}" for row in range(len(animals.frame))],
        nothing="",
    ).rename(columns={"home": HOSTILE[0], "nothing": HOSTILE[1]})

    def part(name: str) -> Any:
        rows = frame[animals.parts[name]]
        return from_frame(rows, f"{HOSTILE[1]}{name}", label="label", id_column="key")

    return clean(part("train"), part("trusted"))


@pytest.fixture(scope="module")
def many(pictures: Findings) -> Findings:
    """50,000 rows with text."""
    rng = np.random.default_rng(0)
    count, classes = 50_000, 30
    words = np.array([f"word{i}" for i in range(500)])
    text = [" ".join(row) for row in words[rng.integers(500, size=(count, 40))]]
    frame = pd.DataFrame(
        {"text": text, "stars": rng.integers(1, 6, count), "age": rng.normal(size=count)}
    )
    samples = from_frame(frame, "many.csv")
    quality = (np.clip(rng.beta(0.4, 0.1, count), 0, 1) * GRID).astype(np.int64)
    given = rng.integers(classes, size=count)
    return dataclasses.replace(
        pictures,
        samples=samples,
        encoder=fit(samples),
        classes=[f"class {i}" for i in range(classes)],
        given=given,
        predicted=np.where(
            quality < 5000, (given + rng.integers(1, classes, count)) % classes, given
        ),
        quality=quality,
        weight=rng.permutation(quality),
    )


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


# --- the file -------------------------------------------------------------------------------------


def test_the_file_has_what_was_found(pictures: Findings) -> None:
    page = report.render(pictures)
    data = data_of(page)
    assert data["given"] == pictures.given.tolist()
    assert data["quality"] == pictures.quality.tolist()
    assert len(data["images"]) == 240
    row = int(pictures.quality.argmin())
    image = Image.open(io.BytesIO(base64.b64decode(data["images"][str(row)])))
    samples = pictures.samples
    assert isinstance(samples, ArraySamples)
    # integers in [0, 255] are shown as they are
    np.testing.assert_array_equal(np.asarray(image), samples.features[row])
    for i, cells in enumerate(re.findall(r"<tr><th scope=\"row\".*?</tr>", page, re.DOTALL)):
        counts = re.findall(r'data-given="\d+" data-predicted="\d+"[^>]*>([^<]*)<', cells)
        assert [int(c.replace("·", "0")) for c in counts] == pictures.confusions[i].tolist()


def test_the_policy_allows_the_one_script_and_nothing_else(pictures: Findings) -> None:
    page = report.render(pictures)
    (policy,) = map(html.unescape, re.findall(r'Content-Security-Policy" content="([^"]*)"', page))
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"https?://(?!www\.w3\.org/)", page)


def test_markup_in_the_data_is_text_in_the_file(hostile: Findings) -> None:
    page = report.render(hostile)
    assert page.count("<script") == page.count("</script") == 2
    assert "<img" not in page
    assert "<svg onload" not in page
    assert sorted(data_of(page)["classes"]) == sorted(HOSTILE)


def test_large_images_are_made_small_and_have_a_budget(
    pictures: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    large = ArraySamples("x", rng.integers(0, 256, (240, 300, 200, 3), dtype=np.uint8), None)
    found = dataclasses.replace(pictures, samples=large)
    monkeypatch.setattr(report, "_IMAGE_BYTES", 200_000)
    images = data_of(report.render(found))["images"]
    assert 1 < len(images) < 20
    for image in images.values():
        assert Image.open(io.BytesIO(base64.b64decode(image))).size == (75, 112)
    worst = np.argsort(found.quality, kind="stable")[: len(images)]
    assert sorted(map(int, images)) == sorted(worst.tolist())


def test_of_many_classes_the_most_confused_are_shown(many: Findings) -> None:
    page = report.render(many)
    assert page.count('<th scope="row"') == report.CLASSES_SHOWN
    assert f"{30 - report.CLASSES_SHOWN} more are left out" in page


def test_curves_are_where_they_should_be() -> None:
    history = {
        "step": np.arange(3),
        "upper": np.array([2.0, 1.0, 0.5]),
        "held_back": np.full(3, np.nan),
        "lower": np.array([1.0, 1.0, 1.0]),
    }
    drawn = curves(history, {"steps": 3, "selected_step": 2})
    assert [line["name"] for line in drawn["lines"]] == ["trusted", "train"]
    points = [tuple(map(float, p.split(","))) for p in drawn["lines"][0]["points"].split()]
    assert points[0] == (drawn["left"], drawn["top"])
    assert points[-1][0] == drawn["right"]
    # linear: 2, 1, 0.5 of 2 are 0, 1/2, 3/4 of the way down
    way = [(y - drawn["top"]) / (drawn["bottom"] - drawn["top"]) for _, y in points]
    np.testing.assert_allclose(way, [0, 0.5, 0.75], atol=1e-3)
    assert [name for _, name in drawn["rows"]] == ["0", "0.5", "1", "1.5", "2"]


def test_the_wheel_has_the_page(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=root,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("report.html.j2", "report.css", "report.js"):
        assert f"bilevel/cleaning/report/{name}" in names


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path / "browser") as page:
        yield page
        assert page.problems == []
        assert page.requests == []


def show(page: Page, findings: Findings, folder: Path, **options: Any) -> Path:
    path = folder / "report.html"
    path.write_text(report.render(findings), encoding="utf-8")
    page.open(path, **options)
    page.wait("document.documentElement.classList.contains('scripted')")
    return path


def shown_rows(page: Page) -> list[int]:
    return page.run("[...document.querySelectorAll('#list [data-row]')].map(e => +e.dataset.row)")


@needs_browser
def test_loads_and_the_slider_moves_everything(
    page: Page, pictures: Findings, tmp_path: Path
) -> None:
    show(page, pictures, tmp_path)
    count = int(pictures.suspect.sum())
    assert page.text("h1") == f"{count} of 240 labels look wrong"
    assert page.text("#shown") == f"{count} images"
    assert f"{count} of 240 labels" in page.text("#threshold-answer")
    assert page.run("document.querySelectorAll('#histogram rect').length") == 50
    assert len(shown_rows(page)) == min(48, count)

    for threshold in (9000, 2000):
        page.choose("#threshold", str(threshold))
        below = int((pictures.quality < threshold).sum())
        assert f"{below} of 240 labels" in page.text("#threshold-answer")
        assert page.text("#headline-count") == str(below)
        assert page.text("#shown") == f"{below} images"
        cells = page.texts("#matrix td[data-given]")
        assert sum(int(c.replace("·", "0")) for c in cells) == below
    page.run("document.getElementById('threshold').focus()")
    page.press("ArrowRight")
    page.settle()
    assert page.run("document.getElementById('threshold').value") == "2050"
    assert "below 0.20" in page.text("#threshold-answer") or "0.21" in page.text(
        "#threshold-answer"
    )

    page.click("input[value=weight] + span")
    page.choose("#threshold", "5000")
    below = int((pictures.weight < 5000).sum())
    assert page.text("#headline-count") == str(below)
    page.click("#threshold-reset")
    assert page.text("#headline-count") == str(count)


@needs_browser
def test_sorts_and_filters(page: Page, pictures: Findings, tmp_path: Path) -> None:
    show(page, pictures, tmp_path)
    page.choose("#size", "192")
    suspects = np.flatnonzero(pictures.suspect)
    by_quality = suspects[np.argsort(pictures.quality[suspects], kind="stable")]
    assert shown_rows(page) == by_quality.tolist()

    page.click("input[value=table] + span")
    page.click("[data-sort=weight]")
    weights = pictures.weight[shown_rows(page)]
    assert (np.diff(weights) >= 0).all()
    assert page.run("document.querySelector('th [data-sort=weight]').parentElement.ariaSort") == (
        "ascending"
    )
    page.click("[data-sort=weight]")
    assert (np.diff(pictures.weight[shown_rows(page)]) <= 0).all()
    page.choose("#sort", "row up")
    assert shown_rows(page) == suspects.tolist()

    page.choose("#by-given", "1")
    wanted = suspects[pictures.given[suspects] == 1]
    assert shown_rows(page) == wanted.tolist()
    page.choose("#by-predicted", "2")
    assert shown_rows(page) == wanted[pictures.predicted[wanted] == 2].tolist()
    page.click("#reset")
    assert page.text("#shown") == "240 images"
    page.choose("#by-verdict", "ok")
    assert shown_rows(page) == np.flatnonzero(~pictures.suspect).tolist()[:192]

    counts = pictures.confusions
    i, j = np.unravel_index(counts.argmax(), counts.shape)
    cell = f"#matrix [data-given='{i}'][data-predicted='{j}'] button"
    page.click(cell)
    both = (pictures.given == i) & (pictures.predicted == j) & pictures.suspect
    assert shown_rows(page) == np.flatnonzero(both).tolist()
    assert page.run("document.activeElement.ariaPressed") == "true"
    page.press("ArrowDown")  # to another number, of which there are some in the same column
    place = page.run("({ ...document.activeElement.closest('td').dataset })")
    assert place["predicted"] == str(j)
    assert counts[int(place["given"]), j] > 0
    page.click(cell)  # once more: all of them again
    assert page.text("#shown") == f"{int(pictures.suspect.sum())} images"


@needs_browser
def test_search_and_pages(page: Page, hostile: Findings, tmp_path: Path) -> None:
    show(page, hostile, tmp_path)
    page.choose("#by-verdict", "")
    text = hostile.samples.values("about", np.arange(240))
    page.choose("#search", "POLLEN")
    wanted = sum("pollen" in value for value in text)
    page.wait(f"document.getElementById('shown').textContent === '{wanted} rows'")
    page.choose("#search", "")
    page.wait("document.getElementById('shown').textContent === '240 rows'")
    pages: list[int] = []
    for _ in range(5):
        pages += shown_rows(page)
        page.click("#next")
    assert sorted(pages) == list(range(240))
    assert page.run("document.getElementById('next').disabled")
    page.choose("#page", "2")
    assert shown_rows(page) == pages[48:96]
    page.choose("#page", "99")
    assert page.run("document.getElementById('page').value") == "5"


@needs_browser
def test_review_and_export(page: Page, pictures: Findings, tmp_path: Path) -> None:
    path = show(page, pictures, tmp_path)
    rows = shown_rows(page)
    assert page.run("document.getElementById('export-reviewed').disabled")
    page.click(f"[data-row='{rows[0]}'] .accept")
    page.click(f"[data-row='{rows[1]}'] .keep")
    page.run(f"document.querySelector(\"[data-row='{rows[2]}']\").focus()")
    page.press("a")  # and on to the next
    page.press("k")
    page.press("a")
    page.press("ArrowLeft")
    page.press("u")
    assert page.text(".progress") == "4 reviewed: 2 accepted, 2 kept"
    page.open(path)  # decisions are still there
    page.wait("document.documentElement.classList.contains('scripted')")
    assert page.text(".progress") == "4 reviewed: 2 accepted, 2 kept"

    page.click("#export-reviewed")
    names = np.array(pictures.classes)
    table = pd.read_csv(io.BytesIO(page.downloaded("reviewed.csv"))).set_index("row")
    decisions = {rows[0]: "accept", rows[1]: "keep", rows[2]: "accept", rows[3]: "keep"}
    assert table["decision"].to_dict() == decisions
    assert (table["given_label"] == names[pictures.given[table.index]]).all()
    final = {
        row: names[(pictures.predicted if decision == "accept" else pictures.given)[row]]
        for row, decision in decisions.items()
    }
    assert table["final_label"].to_dict() == final
    assert (table["label_quality"] == pictures.quality[table.index] / GRID).all()

    page.click("#export-all")
    table = pd.read_csv(io.BytesIO(page.downloaded("labels-reviewed.csv")))
    assert table["row"].tolist() == list(range(240))
    ours = pictures.table()
    for column in ("given_label", "weight", "label_quality", "verdict", "suggested_label"):
        assert (table[column] == ours[column]).all(), column
    assert table["decision"].notna().sum() == 4

    page.choose("#by-decision", "keep")
    assert sorted(shown_rows(page)) == sorted([rows[1], rows[3]])
    page.click("#reset")
    page.click("#accept-page")
    assert page.text("#reviewed") != "4"
    page.click("#undo")
    assert page.text("#reviewed") == "4"


@needs_browser
def test_markup_in_the_data_does_nothing(page: Page, hostile: Findings, tmp_path: Path) -> None:
    show(page, hostile, tmp_path)
    page.choose("#by-verdict", "")
    page.click(".open")
    page.choose("#search", "<script>")
    page.wait("document.getElementById('shown').textContent !== ''")
    page.settle()
    assert page.run("window.pwned") is None
    assert page.run("document.querySelectorAll('img, svg[onload], #list script').length") == 0
    assert page.run("[...document.querySelectorAll('#by-given option')].length") == 4
    details = page.text("dl.details")
    assert HOSTILE[1] in details
    page.click("#export-all")
    table = pd.read_csv(io.BytesIO(page.downloaded("labels-reviewed.csv")), dtype=str)
    assert table["given_label"].tolist() == [hostile.classes[g] for g in hostile.given]
    assert table["id"].tolist() == list(hostile.samples.ids or ())


@needs_browser
def test_fifty_thousand_rows(page: Page, many: Findings, tmp_path: Path) -> None:
    path = show(page, many, tmp_path)
    assert path.stat().st_size < 15_000_000
    count = int(many.suspect.sum())
    assert page.text("h1") == f"{count:,} of 50,000 labels look wrong"
    assert page.run("document.querySelectorAll('*').length") < 5000  # a page of them at a time
    page.choose("#threshold", "9000")
    assert page.text("#headline-count") == f"{int((many.quality < 9000).sum()):,}"
    page.click("[data-sort=weight]")
    page.click("[data-sort=weight]")
    weights = np.sort(many.weight[many.quality < 9000])[::-1]
    assert many.weight[shown_rows(page)].tolist() == weights[:48].tolist()
    page.click("#last")
    assert many.weight[shown_rows(page)].tolist()[-1] == weights[-1]
    page.choose("#search", "word17 word18")
    excerpts = data_of(path.read_text())["cells"][0]
    wanted = sum(
        "word17 word18" in cell and q < 9000 for cell, q in zip(excerpts, many.quality, strict=True)
    )
    page.wait(f"document.getElementById('shown').textContent.startsWith('{wanted:,} row')")
    page.click("#export-all")
    table = pd.read_csv(io.BytesIO(page.downloaded("labels-reviewed.csv")))
    assert (table["label_quality"] == many.quality / GRID).all()


@needs_browser
def test_without_scripts_the_numbers_are_there(
    page: Page, pictures: Findings, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(report.render(pictures), encoding="utf-8")
    page.send("Emulation.setScriptExecutionDisabled", value=True)
    page.open(path)
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    said = " ".join(
        str(node["name"].get("value", ""))
        for node in tree
        if not node["ignored"] and "name" in node
    )
    assert f"{int(pictures.suspect.sum())} of 240 labels look wrong" in said
    assert "need JavaScript" in said
    assert "Export" not in said


@needs_browser
@pytest.mark.parametrize("width", [390, 800, 1280])
def test_fits_the_window_and_every_control_has_a_name(
    page: Page, hostile: Findings, tmp_path: Path, width: int
) -> None:
    show(page, hostile, tmp_path, width=width, dark=width == 800)
    assert page.run("document.scrollingElement.scrollWidth") <= width
    controls = {"button", "slider", "searchbox", "combobox", "radio", "spinbutton"}
    for node in page.send("Accessibility.getFullAXTree")["nodes"]:
        if not node["ignored"] and node["role"]["value"] in controls:
            assert node["name"]["value"], node
