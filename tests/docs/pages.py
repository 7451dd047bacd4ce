"""The pages of the site, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TEXTS = [
    *sorted(path for path in DOCS.rglob("*.md") if not path.name.endswith(".in.md")),
    ROOT / "README.md",
]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str = "python") -> list[str]:
    """The blocks of a language in a page, in order."""
    found = re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    return [str(block) for block in found]
