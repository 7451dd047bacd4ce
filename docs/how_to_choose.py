"""Write docs/how-to-choose.md: the table of methods comes from ``bilevel.METHODS`` itself.

Run ``python docs/how_to_choose.py``; a test holds the page to what this prints.
"""

from __future__ import annotations

from pathlib import Path

from bilevel import METHODS
from bilevel.methods import Ability

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


ABILITIES = {
    Ability.LOWER_OPTIMIZER: "`lower_optimizer`",
    Ability.UPPER_OPTIMIZER: "`upper_optimizer`",
    Ability.CONSTRAINED_LOWER: "solutions on the boundary of `y_set`",
    Ability.PROXIMAL: "non-smooth terms (`y_prox`)",
    Ability.SPARSE_STEPS: "steps of a `Table` that cost its rows",
    Ability.COMPILE: "`compile`",
    Ability.STACK: "`minimize_many` at once",
    Ability.TASKS: "several tasks in `Episodes`",
    Ability.RANKS: "several ranks",
    Ability.CHUNKS: "`chunk_size`",
    Ability.ACCUMULATE: "`accumulate`, `loss_scale`",
}


def abilities() -> str:
    """What each method can do, one row per method."""
    rows = [
        f"| | {' | '.join(ABILITIES.values())} |",
        f"|---|{'---|' * len(ABILITIES)}",
    ]
    for method in METHODS.values():
        can = ("yes" if ability in method.properties.abilities else "" for ability in ABILITIES)
        rows.append(f"| `{method.__name__}` | {' | '.join(can)} |")
    return "\n".join(rows)


def page() -> str:
    """The whole page."""
    text = TEMPLATE.read_text()
    return text.replace("TABLE", table()).replace("ABILITIES", abilities())


if __name__ == "__main__":
    PAGE.write_text(page())
