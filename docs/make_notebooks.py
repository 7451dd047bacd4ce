"""Make notebooks of the four starts: each page of docs/start as cells of text and of code.

Run ``python docs/make_notebooks.py``; a test holds the notebooks to the pages, whose code it runs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGES = sorted((Path(__file__).parent / "start").glob("*.md"))
FOLDER = Path(__file__).parent / "notebooks"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
INSTALLING = """\
# Where bilevel is not installed yet, as in Colab: put the folder of this repository beside the
# notebook, and remove the sign before the next line.
# %pip install --quiet './bilevel[all]'
"""


def cell(kind: str, text: str, number: int) -> dict[str, Any]:
    """One cell, in the form that Jupyter writes."""
    source = text.strip("\n").splitlines(keepends=True)
    made: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    if kind == "code":
        made |= {"execution_count": None, "outputs": []}
    return made | {"source": source}


def notebook(page: str) -> str:
    """The notebook of a page of Markdown."""
    cells: list[dict[str, Any]] = []

    def add(kind: str, text: str) -> None:
        if text.strip():
            cells.append(cell(kind, text, len(cells)))

    place = 0
    for block in FENCE.finditer(page):
        add("markdown", _standing_alone(page[place : block.start()]))
        language, code = block.groups()
        if language == "console":
            code = re.sub(r"^\$ ", "!", code, flags=re.MULTILINE)
        add("code", code)
        place = block.end()
        if len(cells) == 2:
            cells.insert(1, cell("code", INSTALLING, 100))
    add("markdown", _standing_alone(page[place:]))
    content = {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _standing_alone(text: str) -> str:
    """Text without links to other pages, which a notebook does not have beside it."""
    text = re.sub(r"\[([^\]]+)\]\((?!https?://)[^)]*\)", r"\1", text)
    return text.partition("## Where next")[0]


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for page in PAGES:
        (FOLDER / f"{page.stem}.ipynb").write_text(notebook(page.read_text()))


if __name__ == "__main__":
    main()
