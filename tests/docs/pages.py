"""The pages of the site, and the blocks of code in them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

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


def load_script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script of the site as a module, for the time of a test."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module
