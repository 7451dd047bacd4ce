"""Makes ``report.png``, the picture of a report in the README, from the demo's digits.

Needs Chromium, and everything that ``bilevel demo`` needs.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from bilevel.cleaning.files import write
from bilevel.experiments import digits

PICTURE = Path(__file__).parent / "report.png"
SIZE = 1280, 1750


def draw(picture: Path = PICTURE) -> None:
    """Clean the labels, write the report and take its picture."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        raise SystemExit("this needs Chromium")
    torch.set_num_threads(1)  # as the demo does
    _, found = digits.clean()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(found, folder / "demo")
        subprocess.run(
            [
                *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--disable-background-networking", f"--user-data-dir={folder / 'profile'}"),
                f"--window-size={SIZE[0]},{SIZE[1]}",
                f"--screenshot={picture.absolute()}",
                (folder / "demo" / "report.html").as_uri(),
            ],
            check=True,
            capture_output=True,
        )


if __name__ == "__main__":
    draw()
