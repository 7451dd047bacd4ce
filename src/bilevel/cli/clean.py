"""``bilevel clean``: find the wrong labels of a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bilevel.cli.options import CheckpointFolder, JsonFile, Overwrite, Resume, Seed
from bilevel.cli.output import check_files, open_ledger, say_found, stages, write_json
from bilevel.data import output as folder
from bilevel.errors.extras import needed


def some_columns(use: str) -> Any:
    """An option that names a column of the table, and may be repeated."""
    return typer.Option(metavar="COLUMN", help=f"A column {use}; may be repeated.")


def clean(
    train: Annotated[
        Path,
        typer.Argument(
            metavar="SAMPLES",
            help="A .csv, .tsv, .parquet or .npz file (arrays X and y), or a folder of images, "
            "class/name.png.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder for the results.")],
    trusted: Annotated[
        Path | None,
        typer.Option(
            metavar="SAMPLES",
            help="Samples in the same form whose labels are correct; without them only labels are "
            "found that differ from those of similar samples.",
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="The column of labels; in an NPZ file the array, by default y."
        ),
    ] = None,
    id_column: Annotated[
        str | None, typer.Option("--id", metavar="COLUMN", help="The column that identifies rows.")
    ] = None,
    text: Annotated[list[str] | None, some_columns("to read as text (TF-IDF)")] = None,
    category: Annotated[list[str] | None, some_columns("to read as categories")] = None,
    ignore: Annotated[list[str] | None, some_columns("to leave out")] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Suspect labels of a quality below this; by default it is chosen so that few "
            "wrong labels are missed and few right ones suspected.",
        ),
    ] = None,
    overwrite: Overwrite = False,
    checkpoint: CheckpointFolder = None,
    resume: Resume = False,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Find the wrong labels of a data set, with the help of a few samples labelled correctly.

    Writes labels.csv (every row with its weight, the quality of its label, a verdict and a
    suggestion), corrected.csv (the table with the suggested labels), model.safetensors and
    model.json (a model that did not learn the wrong labels) and report.html (to look at in a
    browser). Whether a column holds numbers, categories or text is inferred from its values;
    --text, --category and --ignore override that.
    """
    files = load_cleaning()
    inputs = [train] if trusted is None else [train, trusted]
    check_files(json_file, apart=[*inputs, *(out / name for name in files.FILES)])
    folder.check(out, overwrite, inputs=inputs, apart=[checkpoint], files=files.FILES)
    columns = {"text": text or [], "category": category or [], "ignore": ignore or []}
    ledger = open_ledger("clean", checkpoint, resume, seed=seed, label=label, **columns)
    with stages() as tell:
        found = files.clean_files(
            train=train,
            trusted=trusted,
            label=label,
            id_column=id_column,
            choices=files.ColumnChoices(**columns),
            threshold=threshold,
            seed=seed,
            checkpoint=ledger.inside("weights"),
            tell=tell,
        )
        tell("writing")
        files.write(found, out, overwrite=overwrite)
    corrected = "" if found.corrected() is None else " corrected.csv,"
    names = f"labels.csv,{corrected} model.safetensors, model.json; to look at: report.html"
    write_json(json_file, found.to_json())
    say_found(found, f"Written to {out}: {names}")


def load_cleaning() -> Any:
    """Import the module that cleans files, or say which extra is missing before any work."""
    with needed("clean", "sklearn", "scipy", "pandas", "safetensors", "jinja2", "PIL"):
        from bilevel.cleaning import files
    return files
