"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file.")
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar="BILEVEL_DATA",
        metavar="FOLDER",
        help="The folder that holds the data sets; they are downloaded if it is not given.",
    ),
]
LARGEST_SEED = 2**32 - 1
"""Of NumPy's generators; those of torch take more."""

Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="The seed of all random numbers.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the results that the output folder holds.")
]
CheckpointFolder = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", metavar="FOLDER", help="Save the finished parts in this folder on the way."
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from what the --checkpoint folder holds.")
]
