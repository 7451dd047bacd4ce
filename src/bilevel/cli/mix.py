"""``bilevel mix``: learn how much of each source of text to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bilevel import data
from bilevel.cli.options import CheckpointFolder, DataDir, JsonFile, Overwrite, Resume, Seed
from bilevel.cli.output import check_files, open_ledger, say_found, stages, write_json
from bilevel.data import output as folder
from bilevel.errors.extras import needed


def mix(
    source: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="A text file or a folder of .txt files; give this option two or more times.",
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A text file or a folder of .txt files to do well on."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder for the results.")] = Path(
        "mixed"
    ),
    demo: Annotated[
        bool,
        typer.Option(
            "--demo",
            help="Weigh Shakespeare as written against copies with characters shuffled and "
            "reversed.",
        ),
    ] = False,
    steps: Annotated[
        int, typer.Option(min=1, help="The number of steps of the weights and the model.")
    ] = 400,
    overwrite: Overwrite = False,
    checkpoint: CheckpointFolder = None,
    resume: Resume = False,
    seed: Seed = 0,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """Learn how much of each source of text to train on, so that a model does well on a target.

    A small model of characters is trained on all sources at once, with weights that are learned
    during the training. Writes weights.json and weights.csv (the weights over time), weights.png (a
    plot of them), model.safetensors and model.json (the model). To use a model and tokens of your
    own, see bilevel.DataMixer.
    """
    files = _load_files()
    if demo and (source or target is not None):
        raise typer.BadParameter(
            "brings its own texts; omit --source and --target", param_hint="--demo"
        )
    results = [out / name for name in files.FILES]
    if demo:
        check_files(json_file, apart=results)
        folder.check(out, overwrite, apart=[checkpoint], files=files.FILES)
        work: Any = files.mix_texts
        sources, wanted = files.spoiled(data.shakespeare(data_dir=data_dir), seed)
    else:
        if target is None:
            raise typer.BadParameter("is needed unless --demo is given", param_hint="--target")
        sources, wanted = files.named_paths(given=source or []), target
        inputs = [*sources.values(), target]
        check_files(json_file, apart=[*inputs, *results])
        folder.check(out, overwrite, inputs=inputs, apart=[checkpoint], files=files.FILES)
        work = files.mix_files
    ledger = open_ledger("mix", checkpoint, resume, seed=seed, sources=list(sources))
    with stages() as tell:
        found = work(
            sources=sources,
            target=wanted,
            steps=steps,
            seed=seed,
            tell=tell,
            checkpoint=ledger.inside("run"),
        )
        tell("writing")
        found.write(folder=out, overwrite=overwrite)
    write_json(json_file, found.to_json())
    say_found(found, f"Written to {out}: {', '.join(found.to_json()['files'])}")


def _load_files() -> Any:
    """Import the module that mixes files, or say which extra is missing before any work."""
    with needed("mix", "safetensors", "matplotlib"):
        import matplotlib  # noqa: F401  # used only at the end
        import safetensors  # noqa: F401

        from bilevel.mixing import files
    return files
