"""A real browser for the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser import PATIENCE_MS, browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

__all__ = ["browser"]


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page with storage of its own, which must log no problem and ask the network for nothing."""
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE_MS)
    # Without animations the page has stopped scrolling when the next click is aimed.
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, color_scheme="light", reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    problems: list[str] = []
    requests: list[str] = []

    def dismiss(dialog: Dialog) -> None:
        problems.append(dialog.message)
        dialog.dismiss()

    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda said: problems.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.on("dialog", dismiss)
    page.on("request", lambda request: requests.append(request.url))
    yield page
    own = page.url.partition("#")[0]
    page.evaluate("null")  # Events that came before this answer have been noticed.
    context.close()
    assert problems == []
    local = ("data:", "blob:")
    assert [
        url for url in requests if url.partition("#")[0] != own and not url.startswith(local)
    ] == []
