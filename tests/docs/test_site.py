"""The site that `make docs` built, file by file and in a real browser."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pytest

import bilevel
from tests.browser import PATIENCE_MS
from tests.docs.pages import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SITE = ROOT / "out" / "docs" / "html"
PAGES = {
    "home": "index.html",
    "a guide with wide tables": "how-to-choose.html",
    "a guide with code": "large-models.html",
    "the gallery": "gallery/pages/index.html",
    "another library": "coming-from/betty.html",
    "a class": "api/generated/bilevel.F2SA.html",
    "a function": "api/generated/bilevel.minimize.html",
}
pytestmark = pytest.mark.skipif(
    not (SITE / "index.html").exists(), reason="`make docs` has not built the site"
)


class Links(HTMLParser):
    """Where a page leads to, and the places in it that others may lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.places: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.places |= {value for name in ("id", "name") if (value := values.get(name))}
        self.targets |= {value for name in ("href", "src") if (value := values.get(name))}


def test_no_link_within_the_site_is_broken() -> None:
    pages = {path: Links(path) for path in SITE.rglob("*.html")}
    assert len(pages) >= 80
    broken = []
    for path, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not file.exists() or (file in pages and parts.fragment not in pages[file].places):
                broken.append(f"{path.relative_to(SITE)}: {target}")
    assert broken == []


def test_every_public_name_is_in_the_index() -> None:
    text = (SITE / "genindex.html").read_text(encoding="utf-8")
    for name in bilevel.__all__:
        if name != "__version__":
            assert f"bilevel.{name}" in text or f">{name}<" in text, name


def test_what_is_asked_for_is_on_the_site() -> None:
    for name in ("llms.txt", "search.html", "searchindex.js", "changelog.html"):
        assert (SITE / name).exists(), name


# --- in a browser ---------------------------------------------------------------------------------


class Quiet(SimpleHTTPRequestHandler):
    """Serves the site without a word."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


class Visit:
    """A page of the browser that must say nothing in its console and ask only the site."""

    def __init__(self, browser: Browser, address: str, width: int, scheme: Any) -> None:
        self.address = address
        self.problems: list[str] = []
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.context.set_default_timeout(PATIENCE_MS)
        self.page: Page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._heard)
        self.page.on("request", self._asked)

    def _heard(self, said: Any) -> None:
        if said.type in ("error", "warning"):
            self.problems.append(said.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:")):
            self.problems.append(f"asks for {request.url}")

    def to(self, path: str) -> Page:
        self.page.goto(self.address + path)
        return self.page

    def assert_fits(self) -> None:
        wide = self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0, f"{self.page.url} scrolls sideways by {wide} pixels"

    def assert_readable(self) -> None:
        """Code in a table must not be broken letter by letter, because its column is narrow."""
        broken = self.page.evaluate(
            """() => [...document.querySelectorAll("td code.literal")]
                .filter(code => code.getClientRects().length > 1 + code.textContent.length / 5)
                .map(code => code.textContent)"""
        )
        assert broken == [], self.page.url

    def end(self) -> None:
        self.page.evaluate("null")  # Events that came before this answer have been noticed.
        self.context.close()
        assert self.problems == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_in_both_schemes(browser: Browser, address: str, width: int, scheme: str) -> None:
    visit = Visit(browser, address, width, scheme)
    for path in PAGES.values():
        page = visit.to(path)
        assert page.locator("h1").first.is_visible()
        visit.assert_fits()
        visit.assert_readable()
        shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
        lightness = sum(map(int, shade[shade.index("(") + 1 : -1].split(",")[:3])) / (3 * 255)
        assert (lightness > 0.5) == (scheme == "light"), f"{path}: {shade} in the {scheme} scheme"
    visit.end()


@pytest.mark.slow
def test_every_page_fits_a_telephone(browser: Browser, address: str) -> None:
    visit = Visit(browser, address, 390, "light")
    for path in sorted(SITE.rglob("*.html")):
        visit.to(path.relative_to(SITE).as_posix())
        visit.assert_fits()
        visit.assert_readable()
    visit.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "found"),
    [("diverges", "When a run goes wrong"), ("minimize_many", "minimize_many")],
)
def test_search_finds(browser: Browser, address: str, query: str, found: str) -> None:
    visit = Visit(browser, address, 1280, "light")
    page = visit.to("index.html")
    page.fill("input[name=q]", query)
    page.press("input[name=q]", "Enter")
    page.wait_for_selector("#search-results ul.search li a")
    page.get_by_role("link", name=found).first.wait_for()
    visit.assert_fits()
    visit.end()
