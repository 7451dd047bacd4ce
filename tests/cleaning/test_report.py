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
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from tests.cleaning.files import Animals
from tests.marks import slow_except

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

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


def with_rows(count: int, pictures: Findings) -> Findings:
    """Findings about rows with text, in 30 classes."""
    rng = np.random.default_rng(0)
    classes = 30
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_of_many_classes_the_most_confused_are_shown(pictures: Findings) -> None:
    page = report.render(with_rows(2_000, pictures))
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
    for name in ("report.html.j2", "report.css", "rows.js", "controls.js"):
        assert f"bilevel/cleaning/report/{name}" in names


# --- in a browser ---------------------------------------------------------------------------------


def show(page: Page, findings: Findings, folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(report.render(findings), encoding="utf-8")
    page.goto(path.as_uri())
    page.wait_for_selector("html.scripted")
    return path


def shown_rows(page: Page) -> list[int]:
    page.evaluate("new Promise(requestAnimationFrame)")  # in which a moved slider is answered
    rows: list[int] = page.eval_on_selector_all(
        "#list [data-row]", "all => all.map(e => +e.dataset.row)"
    )
    return rows


def says(page: Page, selector: str, text: str | re.Pattern[str]) -> None:
    """Wait until an element says this, a pattern anywhere in it; fail if it never does."""
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_have_text(text)


def fill(page: Page, selector: str, value: str) -> None:
    """Type a value and leave the field."""
    page.fill(selector, value)
    page.locator(selector).blur()


def downloaded(page: Page, button: str, name: str, **options: Any) -> pd.DataFrame:
    """The table that a button hands out."""
    with page.expect_download() as download:
        page.click(button)
    assert download.value.suggested_filename == name
    return pd.read_csv(download.value.path(), **options)


def accessible(page: Page) -> list[dict[str, Any]]:
    """What the browser tells a screen reader."""
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    return [node for node in tree if not node["ignored"] and "name" in node]


def test_loads_and_the_slider_moves_everything(
    page: Page, pictures: Findings, tmp_path: Path
) -> None:
    show(page, pictures, tmp_path)
    count = int(pictures.suspect.sum())
    says(page, "h1", f"{count} of 240 labels look wrong")
    says(page, "#shown", f"{count} images")
    says(page, "#threshold-answer", re.compile(f"{count} of 240 labels"))
    assert page.locator("#histogram rect").count() == 50
    assert len(shown_rows(page)) == min(48, count)

    for threshold in (9000, 2000):
        fill(page, "#threshold", str(threshold))
        below = int((pictures.quality < threshold).sum())
        says(page, "#threshold-answer", re.compile(f"{below} of 240 labels"))
        says(page, "#headline-count", str(below))
        says(page, "#shown", f"{below} images")
        cells = page.locator("#matrix td[data-given]").all_text_contents()
        assert sum(int(c.replace("·", "0")) for c in cells) == below
    page.focus("#threshold")
    page.keyboard.press("ArrowRight")
    assert page.input_value("#threshold") == "2050"
    says(page, "#threshold-answer", re.compile("below 0.20|0.21"))

    page.click("input[value=weight] + span")
    fill(page, "#threshold", "5000")
    below = int((pictures.weight < 5000).sum())
    says(page, "#headline-count", str(below))
    page.click("#threshold-reset")
    says(page, "#headline-count", str(count))


@pytest.mark.slow
def test_sorts_and_filters(page: Page, pictures: Findings, tmp_path: Path) -> None:
    show(page, pictures, tmp_path)
    page.select_option("#size", "192")
    suspects = np.flatnonzero(pictures.suspect)
    by_quality = suspects[np.argsort(pictures.quality[suspects], kind="stable")]
    assert shown_rows(page) == by_quality.tolist()

    page.click("input[value=table] + span")
    page.click("[data-sort=weight]")
    weights = pictures.weight[shown_rows(page)]
    assert (np.diff(weights) >= 0).all()
    sorted_by = page.locator("th:has([data-sort=weight])")
    assert sorted_by.get_attribute("aria-sort") == "ascending"
    page.click("[data-sort=weight]")
    assert (np.diff(pictures.weight[shown_rows(page)]) <= 0).all()
    page.select_option("#sort", "row up")
    assert shown_rows(page) == suspects.tolist()

    page.select_option("#by-given", "1")
    wanted = suspects[pictures.given[suspects] == 1]
    assert shown_rows(page) == wanted.tolist()
    page.select_option("#by-predicted", "2")
    assert shown_rows(page) == wanted[pictures.predicted[wanted] == 2].tolist()
    page.click("#reset")
    says(page, "#shown", "240 images")
    page.select_option("#by-verdict", "ok")
    assert shown_rows(page) == np.flatnonzero(~pictures.suspect).tolist()[:192]

    counts = pictures.confusions
    i, j = np.unravel_index(counts.argmax(), counts.shape)
    cell = f"#matrix [data-given='{i}'][data-predicted='{j}'] button"
    page.click(cell)
    both = (pictures.given == i) & (pictures.predicted == j) & pictures.suspect
    assert shown_rows(page) == np.flatnonzero(both).tolist()
    assert page.evaluate("document.activeElement.ariaPressed") == "true"
    page.keyboard.press("ArrowDown")  # to another number in the same column, above 0
    place = page.evaluate("({ ...document.activeElement.closest('td').dataset })")
    assert place["predicted"] == str(j)
    assert counts[int(place["given"]), j] > 0
    page.click(cell)  # once more: all of them again
    says(page, "#shown", f"{int(pictures.suspect.sum())} images")


@pytest.mark.slow
def test_search_and_pages(page: Page, hostile: Findings, tmp_path: Path) -> None:
    show(page, hostile, tmp_path)
    page.select_option("#by-verdict", "")
    text = hostile.samples.values("about", np.arange(240))
    fill(page, "#search", "POLLEN")
    wanted = sum("pollen" in value for value in text)
    says(page, "#shown", f"{wanted} rows")
    fill(page, "#search", "")
    says(page, "#shown", "240 rows")
    pages = shown_rows(page)
    for _ in range(4):
        page.click("#next")
        pages += shown_rows(page)
    assert sorted(pages) == list(range(240))
    assert page.is_disabled("#next")
    fill(page, "#page", "2")
    assert shown_rows(page) == pages[48:96]
    fill(page, "#page", "99")
    assert page.input_value("#page") == "5"


@pytest.mark.slow
def test_review_and_export(page: Page, pictures: Findings, tmp_path: Path) -> None:
    show(page, pictures, tmp_path)
    rows = shown_rows(page)
    assert page.is_disabled("#export-reviewed")
    page.click(f"[data-row='{rows[0]}'] .accept")
    page.click(f"[data-row='{rows[1]}'] .keep")
    page.focus(f"[data-row='{rows[2]}']")
    page.keyboard.press("a")  # and on to the next
    page.keyboard.press("k")
    page.keyboard.press("a")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("u")
    says(page, ".progress", "4 reviewed: 2 accepted, 2 kept")
    page.reload()  # decisions are still there
    says(page, ".progress", "4 reviewed: 2 accepted, 2 kept")

    names = np.array(pictures.classes)
    table = downloaded(page, "#export-reviewed", "reviewed.csv").set_index("row")
    decisions = {rows[0]: "accept", rows[1]: "keep", rows[2]: "accept", rows[3]: "keep"}
    assert table["decision"].to_dict() == decisions
    assert (table["given_label"] == names[pictures.given[table.index]]).all()
    final = {
        row: names[(pictures.predicted if decision == "accept" else pictures.given)[row]]
        for row, decision in decisions.items()
    }
    assert table["final_label"].to_dict() == final
    assert (table["label_quality"] == pictures.quality[table.index] / GRID).all()

    table = downloaded(page, "#export-all", "labels-reviewed.csv")
    assert table["row"].tolist() == list(range(240))
    ours = pictures.table()
    for column in ("given_label", "weight", "label_quality", "verdict", "suggested_label"):
        assert (table[column] == ours[column]).all(), column
    assert table["decision"].notna().sum() == 4

    page.select_option("#by-decision", "keep")
    assert sorted(shown_rows(page)) == sorted([rows[1], rows[3]])
    page.click("#reset")
    page.click("#accept-page")
    says(page, "#reviewed", re.compile("^(?!4$)"))
    page.click("#undo")
    says(page, "#reviewed", "4")


@pytest.mark.slow
def test_markup_in_the_data_does_nothing(page: Page, hostile: Findings, tmp_path: Path) -> None:
    show(page, hostile, tmp_path)
    page.select_option("#by-verdict", "")
    page.click(".open >> nth=0")
    says(page, "dl.details", re.compile(re.escape(HOSTILE[1])))
    assert page.locator("#by-given option").count() == 4
    fill(page, "#search", "in no row")
    says(page, "#shown", "0 rows")
    fill(page, "#search", "<script>")
    says(page, "#shown", "240 rows")
    assert page.evaluate("window.pwned") is None
    assert page.locator("img, svg[onload], #list script").count() == 0
    table = downloaded(page, "#export-all", "labels-reviewed.csv", dtype=str)
    assert table["given_label"].tolist() == [hostile.classes[g] for g in hostile.given]
    assert table["id"].tolist() == list(hostile.samples.ids or ())


@pytest.mark.slow
def test_fifty_thousand_rows(page: Page, pictures: Findings, tmp_path: Path) -> None:
    many = with_rows(50_000, pictures)
    path = show(page, many, tmp_path)
    assert path.stat().st_size < 15_000_000
    count = int(many.suspect.sum())
    says(page, "h1", f"{count:,} of 50,000 labels look wrong")
    assert page.evaluate("document.querySelectorAll('*').length") < 5000  # a page of them at a time
    fill(page, "#threshold", "9000")
    says(page, "#headline-count", f"{int((many.quality < 9000).sum()):,}")
    page.click("[data-sort=weight]")
    page.click("[data-sort=weight]")
    weights = np.sort(many.weight[many.quality < 9000])[::-1]
    assert many.weight[shown_rows(page)].tolist() == weights[:48].tolist()
    page.click("#last")
    assert many.weight[shown_rows(page)].tolist()[-1] == weights[-1]
    fill(page, "#search", "word17 word18")
    excerpts = data_of(path.read_text())["cells"][0]
    wanted = sum(
        "word17 word18" in cell and q < 9000 for cell, q in zip(excerpts, many.quality, strict=True)
    )
    says(page, "#shown", re.compile(f"^{wanted:,} row"))
    table = downloaded(page, "#export-all", "labels-reviewed.csv")
    assert (table["label_quality"] == many.quality / GRID).all()


@pytest.mark.slow
def test_without_scripts_the_numbers_are_there(
    browser: Browser, pictures: Findings, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(report.render(pictures), encoding="utf-8")
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(path.as_uri())
        said = " ".join(str(node["name"].get("value", "")) for node in accessible(page))
    assert f"{int(pictures.suspect.sum())} of 240 labels look wrong" in said
    assert "need JavaScript" in said
    assert "Export" not in said


@pytest.mark.slow
@pytest.mark.parametrize("width", slow_except(["390"], [390, 800, 1280]))
def test_fits_the_window_and_every_control_has_a_name(
    page: Page, hostile: Findings, tmp_path: Path, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme="dark" if width == 800 else "light")
    show(page, hostile, tmp_path)
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    controls = {"button", "slider", "searchbox", "combobox", "radio", "spinbutton"}
    found = [node for node in accessible(page) if node["role"]["value"] in controls]
    assert found
    for node in found:
        assert node["name"]["value"], node
