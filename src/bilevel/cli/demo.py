"""``bilevel demo``: label cleaning on handwritten digits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from bilevel.cli.clean import load_cleaning
from bilevel.cli.options import JsonFile, Seed
from bilevel.cli.output import check_files, say, stages, write_json
from bilevel.data import output as folder


def demo(
    seed: Seed = 0,
    steps: Annotated[int, typer.Option(min=1, help="The largest number of outer steps.")] = 40,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder for the report.")] = Path(
        "out/demo"
    ),
    json_file: JsonFile = None,
) -> None:
    """Find the wrong labels among 4,000 real handwritten digits, with 500 trusted labels."""
    files = load_cleaning()
    from bilevel.cli.experiments import digits

    check_files(json_file, apart=[out / name for name in files.FILES])
    folder.check(out, overwrite=True, files=files.FILES)
    say(
        "4,000 digits with 30% wrong labels, 500 trusted digits, 500 test digits.\n"
        "Learning one weight per digit, such that a model trained with these weights does well on "
        "the trusted digits ..."
    )
    with stages() as tell:
        outcome, found = digits.clean(seed=seed, steps=steps, tell=tell)
        tell("writing")
        files.write(found, out, overwrite=True)
    write_json(json_file, outcome.to_json())
    right = outcome.samples - outcome.wrong
    suspected = outcome.found + outcome.false_alarms
    say(
        f"Suspected {suspected} labels: {outcome.found} of the {outcome.wrong} wrong ones, and "
        f"{outcome.false_alarms} of the {right} correct ones.\n"
        f"A wrong label has a lower quality than a correct one in {outcome.auc:.1%} of pairs "
        f"(AUC).\n"
        f"Test accuracy of the model that learned the wrong labels: {outcome.accuracy_noisy:.1%}; "
        f"of the model that did not: {outcome.accuracy_cleaned:.1%}.\n"
        f"It took {outcome.seconds:.1f} s. Look at the labels in a browser: "
        f"{escape(str(out / 'report.html'))}"
    )
