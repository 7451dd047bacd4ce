"""Pages that are made from the code are up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_how_to_choose_is_made_from_the_table_of_methods() -> None:
    spec = importlib.util.spec_from_file_location("how_to_choose", DOCS / "how_to_choose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "how-to-choose.md").read_text() == module.page(), "run docs/how_to_choose.py"
