"""Write docs/how-to-choose.md: the table of methods comes from ``bilevel.METHODS`` itself.

Run ``python docs/how_to_choose.py``; a test holds the page to what this prints.
"""

from __future__ import annotations

from pathlib import Path

from bilevel import METHODS

PAGE = Path(__file__).parent / "how-to-choose.md"
TEMPLATE = Path(__file__).parent / "how-to-choose.in.md"


def table() -> str:
    """One row per method."""
    rows = [
        "| `method=` | class | derivatives | gradients per outer step (T inner steps) "
        "| copies of y | assumes | reference |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, method in METHODS.items():
        p = method.properties
        order = {1: "first", 2: "second"}[p.order]
        rows.append(
            f'| `"{name}"` | `{method.__name__}` | {order} | {p.gradients} | {p.copies} '
            f"| {p.assumes} | {p.reference} |"
        )
    return "\n".join(rows)


def page() -> str:
    """The whole page."""
    return TEMPLATE.read_text().replace("TABLE", table())


if __name__ == "__main__":
    PAGE.write_text(page())
