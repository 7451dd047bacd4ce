"""Makes ``report.png``, the picture of a report in docs/clean-labels.md, from the demo's digits.

Needs Playwright, the system's Chromium, and everything that ``bilevel demo`` needs.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import ViewportSize, sync_playwright

from bilevel.cleaning.files import write
from bilevel.cli.experiments import digits

PICTURE = Path(__file__).parent / "report.png"
SIZE: ViewportSize = {"width": 1280, "height": 1750}


def draw(picture: Path = PICTURE) -> None:
    """Clean the labels, write the report and take its picture."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit(
            "this needs Chromium: neither chromium nor chromium-browser is in the PATH"
        )
    torch.set_num_threads(1)  # as the demo does
    _, found = digits.clean()
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        write(found, Path(name) / "demo")
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=["--disable-gpu", "--disable-background-networking", "--no-first-run"],
        )
        page = browser.new_page(viewport=SIZE)
        page.goto((Path(name) / "demo" / "report.html").as_uri())
        page.wait_for_selector("html.scripted")
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    draw()
