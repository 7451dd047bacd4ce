"""A real browser for tests: the system's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PATIENCE_MS = 60_000  # Playwright's own 30 seconds are too few on a machine with other work.
FLAGS = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium without a window; tests that need it are skipped where it or Playwright is missing.

    With ``executable_path`` Playwright never looks for a browser of its own.
    """
    api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("neither chromium nor chromium-browser is in the PATH")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, chromium_sandbox=False, args=FLAGS, timeout=PATIENCE_MS
        )
        yield browser
        browser.close()
