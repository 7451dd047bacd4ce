"""Pages that are made from the code are up to date."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def _script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_how_to_choose_is_made_from_the_table_of_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    page = _script("how_to_choose", monkeypatch).page()
    assert (DOCS / "how-to-choose.md").read_text() == page, "run docs/how_to_choose.py"


@pytest.mark.slow
def test_the_flat_valley_is_as_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = _script("flat_valley", monkeypatch)
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


def test_the_flat_valleys_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "flat-valley.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    exec(blocks[0], {})


def test_the_loop_for_large_models_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "large-models.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(block, namespace)


@pytest.mark.parametrize(
    "page", [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
