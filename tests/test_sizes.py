"""The sizes that keep the package readable: of its root, its files and its functions."""

from __future__ import annotations

import ast
from pathlib import Path

import bilevel

ROOT = Path(bilevel.__file__).parent
FILES = {path.relative_to(ROOT): path.read_text() for path in ROOT.rglob("*.py")}


def test_the_root_has_few_entries() -> None:
    entries = [path.name for path in ROOT.iterdir() if not path.name.startswith("__")]
    assert len([name for name in entries if name != "py.typed"]) <= 16


def test_few_files_are_long() -> None:
    lengths = {path: text.count("\n") for path, text in FILES.items()}
    assert {path: length for path, length in lengths.items() if length > 500} == {}
    assert len([length for length in lengths.values() if length > 350]) <= 10


def test_functions_fit_on_a_screen() -> None:
    long = {
        f"{path}:{node.name}": node.end_lineno - node.lineno + 1
        for path, text in FILES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= 80
    }
    assert long == {}
