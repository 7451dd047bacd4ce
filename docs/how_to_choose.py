"""Write docs/how-to-choose.md: the table of methods comes from ``bilevel.METHODS`` itself.

Run ``python docs/how_to_choose.py``; a test holds the page to what this prints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bilevel
from bilevel import METHODS, Method
from bilevel.methods import Ability

PAGE = Path(__file__).parent / "how-to-choose.md"
TEMPLATE = Path(__file__).parent / "how-to-choose.in.md"


def table() -> str:
    """One row per method."""
    rows = [
        "| `method=` | class | derivatives | gradients per outer step (T inner steps) "
        "| copies of y | assumes |",
        "|---|---|---|---|---|---|",
    ]
    for name, method in METHODS.items():
        p = method.properties
        order = {1: "first", 2: "second"}[p.order]
        cells = f'`"{name}"`', linked(method), order, p.gradients, str(p.copies), p.assumes
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def linked(method: type[Method[Any]]) -> str:
    """The name of a class, with a link to its page, which has the reference, if it is public."""
    name = f"`{method.__name__}`"
    public = method.__name__ in bilevel.__all__
    return f"[{name}](api/generated/bilevel.{method.__name__}.rst)" if public else name


ABILITIES = {
    Ability.LOWER_OPTIMIZER: "your optimizer for y: `lower_optimizer`",
    Ability.UPPER_OPTIMIZER: "your optimizer for x: `upper_optimizer`",
    Ability.CONSTRAINED_LOWER: "a `y_set` with the solution on its boundary",
    Ability.PROXIMAL: "a lower level that is not smooth: `y_prox`",
    Ability.SPARSE_STEPS: "a `Table` of which a step touches only the rows of the batch",
    Ability.FRESH_STARTS: "`Episodes` whose y starts anew in each step",
    Ability.TASKS: "several tasks in `Episodes`",
    Ability.COMPILE: "`compile=True`",
    Ability.STACK: "`minimize_many` as one computation",
    Ability.RANKS: "several processes",
    Ability.CHUNKS: "minibatches in parts: `chunk_size`",
    Ability.ACCUMULATE: "`accumulate`, `loss_scale`",
}


def abilities() -> str:
    """Which methods can do what, one row per ability."""
    rows = ["| what | which methods |", "|---|---|"]
    for ability, what in ABILITIES.items():
        able: list[str] = []
        unable: list[str] = []
        for method in METHODS.values():
            can = ability in method.properties.abilities
            (able if can else unable).append(f"`{method.__name__}`")
        if len(unable) <= 3:
            which = f"all but {', '.join(unable)}" if unable else "all"
        else:
            which = ", ".join(able)
        rows.append(f"| {what} | {which} |")
    return "\n".join(rows)


def page() -> str:
    """The whole page."""
    text = TEMPLATE.read_text()
    return text.replace("TABLE", table()).replace("ABILITIES", abilities())


if __name__ == "__main__":
    PAGE.write_text(page())
