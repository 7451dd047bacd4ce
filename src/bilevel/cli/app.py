"""The command ``bilevel``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bilevel.data import output as folder
from bilevel.errors import BilevelError
from bilevel.run._version import __version__

if TYPE_CHECKING:
    from bilevel.benchmarks.report import Benchmark

app = typer.Typer(
    name="bilevel",
    help="Bilevel optimization with gradients alone.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
reproduce_app = typer.Typer(help="Reproduce the paper's experiments.", no_args_is_help=True)
app.add_typer(reproduce_app, name="reproduce")
bench_app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
console = Console()

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file.")
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar="BILEVEL_DATA",
        metavar="FOLDER",
        help="Where data sets lie; else they are downloaded.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Of everything random.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace results that are there already.")
]
CheckpointFolder = Annotated[
    Path | None,
    typer.Option("--checkpoint", metavar="FOLDER", help="Keep there what is done, as it is done."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from what is in the folder of --checkpoint.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"bilevel {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show it and end."),
    ] = False,
) -> None:
    pass


@app.command()
def clean(
    train: Annotated[
        Path,
        typer.Argument(
            metavar="SAMPLES",
            help="A .csv, .tsv, .parquet or .npz file (arrays X and y), or a folder of images, "
            "class/name.png.",
        ),
    ],
    trusted: Annotated[
        Path, typer.Option(metavar="SAMPLES", help="The same, with labels that are right.")
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the results go.")],
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The labels; of NPZ an array, y if none.")
    ] = None,
    id_column: Annotated[
        str | None, typer.Option("--id", metavar="COLUMN", help="By which rows are known.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="To be read as text (TF-IDF).")
    ] = None,
    category: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="To be read as categories.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="To be left out.")
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Labels of a lower quality are suspect."),
    ] = 0.5,
    overwrite: Overwrite = False,
    checkpoint: CheckpointFolder = None,
    resume: Resume = False,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Find the wrong labels of a data set, with the help of a few samples labelled right.

    Writes labels.csv (every row with its weight, the quality of its label, a verdict and a
    suggestion), model.safetensors and model.json (a model that did not learn the wrong labels) and
    report.html (to look at in a browser). What a column is, number, category or text, is seen from
    its values; --text, --category and --ignore say otherwise.
    """
    files = _checked(_cleaning)
    _checked(folder.check, folder=out, overwrite=overwrite, inputs=[train, trusted])
    columns = {"text": text or [], "category": category or [], "ignore": ignore or []}
    choices = files.ColumnChoices(**columns)
    ledger = _ledger("clean", checkpoint, resume, seed=seed, label=label, **columns)
    with _stages() as tell:
        found = _checked(
            files.clean_files,
            train=train,
            trusted=trusted,
            label=label,
            id_column=id_column,
            choices=choices,
            threshold=threshold,
            seed=seed,
            checkpoint=ledger.inside("weights"),
            tell=tell,
        )
        tell("writing")
        _check_folders(json_file)
        _checked(files.write, findings=found, folder=out, overwrite=overwrite)
    written = (
        f"Written to {out}: labels.csv, model.safetensors, model.json; to look at: report.html"
    )
    _tell_found(found, written)
    _write_json(json_file, found.to_json())


@app.command()
def demo(
    seed: Seed = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the weights, at most.")] = 40,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the report goes.")] = Path(
        "out/demo"
    ),
    json_file: JsonFile = None,
) -> None:
    """Find wrong labels among 4,000 real handwritten digits, with 500 labels to trust."""
    from bilevel.experiments import digits

    files = _checked(_cleaning)
    _check_folders(json_file)
    _checked(folder.check, folder=out, overwrite=True)
    console.print(
        "4,000 digits, 30% of their labels wrong; 500 trusted, 500 to test.\n"
        "Learning one weight per digit, so that a model trained with them does well on the "
        "trusted ones ...",
        soft_wrap=True,
    )
    with _stages() as tell:
        outcome, found = _checked(digits.clean, seed=seed, steps=steps, tell=tell)
        tell("writing")
        _checked(files.write, findings=found, folder=out, overwrite=True)
    right = outcome.samples - outcome.wrong
    suspected = outcome.found + outcome.false_alarms
    console.print(
        f"Suspected {suspected} labels: {outcome.found} of the {outcome.wrong} wrong ones, and "
        f"{outcome.false_alarms} of the {right} right ones.\n"
        f"A wrong label has a lower quality than a right one in {outcome.auc:.1%} of pairs (AUC).\n"
        f"Test accuracy of the model that learned the noise: {outcome.accuracy_noisy:.1%}; "
        f"of the one that did not: {outcome.accuracy_cleaned:.1%}.\n"
        f"It took {outcome.seconds:.1f} s. Look at the labels in a browser: "
        f"{escape(str(out / 'report.html'))}",
        highlight=False,
        soft_wrap=True,
    )
    _write_json(json_file, outcome.to_json())


@app.command()
def mix(
    source: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="A text file, or a folder of .txt files; two or more, each with this option.",
        ),
    ] = None,
    target: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The same, of the text that is wanted.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the results go.")] = Path(
        "mixed"
    ),
    demo: Annotated[
        bool,
        typer.Option(
            "--demo", help="Weigh Shakespeare as it is, with characters shuffled, and reversed."
        ),
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Of the weights and the model.")] = 400,
    overwrite: Overwrite = False,
    checkpoint: CheckpointFolder = None,
    resume: Resume = False,
    seed: Seed = 0,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """Learn how much of each source of text to train on, so that a model does well on a target.

    A small model of characters is trained on all sources at once, with weights that are learned on
    the way. Writes weights.json and weights.csv (the weights, over time), weights.png (to look at),
    model.safetensors and model.json (the model). For models and tokens of your own there is
    bilevel.DataMixer.
    """
    files = _checked(_mixing)
    options: dict[str, Any] = {"steps": steps, "seed": seed}
    if demo:
        if source or target is not None:
            raise typer.BadParameter(
                "brings its own; leave --source and --target out", param_hint="--demo"
            )
        from bilevel import data

        _checked(folder.check, folder=out, overwrite=overwrite)
        sources, wanted = files.spoiled(_checked(data.shakespeare, data_dir=data_dir), seed)
        work, options = files.mix_texts, {**options, "sources": sources, "target": wanted}
    else:
        if target is None:
            raise typer.BadParameter("is needed, or --demo", param_hint="--target")
        paths = _checked(files.named_paths, given=source or [])
        inputs = [*paths.values(), target]
        _checked(folder.check, folder=out, overwrite=overwrite, inputs=inputs)
        work, options = files.mix_files, {**options, "sources": paths, "target": target}
    _check_folders(json_file)
    ledger = _ledger("mix", checkpoint, resume, seed=seed, sources=list(options["sources"]))
    with _stages() as tell:
        found = _checked(work, tell=tell, checkpoint=ledger.inside("run"), **options)
        tell("writing")
        _checked(found.write, folder=out, overwrite=overwrite)
    _tell_found(found, f"Written to {out}: {', '.join(found.to_json()['files'])}")
    _write_json(json_file, found.to_json())


@reproduce_app.command()
def rates(
    seed: Seed = 0,
    steps: Annotated[int, typer.Option(min=100, help="Outer steps per run.")] = 6000,
    runs: Annotated[int, typer.Option(min=1, help="Runs that are averaged.")] = 64,
    workers: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = 2,
    plot: Annotated[Path, typer.Option(help="Where the plot goes.")] = Path("rates.png"),
    checkpoint: CheckpointFolder = None,
    resume: Resume = False,
    json_file: JsonFile = None,
) -> None:
    """Measure the six rates of convergence of F2SA and F3SA on a quadratic."""
    from bilevel.experiments import rates as experiment

    _check_plot(plot)
    _check_folders(json_file, plot)
    ledger = _ledger("rates", checkpoint, resume, steps=steps, runs=runs, seed=seed)
    with _told(experiment.CURVES) as tell:

        def report(algorithm: str, regime: str, instance: str, curve: experiment.Curve) -> None:
            tell(f"{algorithm} {regime} ({instance}): slope {curve.slope:.3f}")

        reproduction = _checked(
            experiment.reproduce,
            steps=steps,
            runs=runs,
            seed=seed,
            workers=workers,
            on_curve=report,
            ledger=ledger,
        )
    console.print(_rates_table(reproduction.rates))
    _write_json(json_file, reproduction.to_json())
    experiment.plot(reproduction, plot)
    console.print(f"plot: {plot}", soft_wrap=True)


@reproduce_app.command("cleaning")
def reproduce_cleaning(
    seconds: Annotated[float, typer.Option(help="Of the processor, for each run.")] = 15.0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method, with others.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the first one's minibatches.")] = 0,
    settings: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of the methods, by --tune; else the package's."),
    ] = None,
    tune: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Find the settings instead, each trial with a quarter of the seconds, and "
            "write them to this file.",
        ),
    ] = None,
    plot: Annotated[Path, typer.Option(help="Where the plot goes.")] = Path("cleaning.png"),
    checkpoint: CheckpointFolder = None,
    resume: Resume = False,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """Clean labels of MNIST with F2SA, SOBO and SOBA as in the paper (half an hour)."""
    from bilevel.benchmarks import report
    from bilevel.experiments import cleaning as experiment

    _check_plot(plot)
    if tune is not None:
        _check_folders(tune)
        ledger = _ledger("tune", checkpoint, resume, seconds=seconds)
        with report.threads(1), _told(experiment.PLACES) as tell:
            found = _checked(
                experiment.tune,
                seconds=seconds / 4,
                data_dir=data_dir,
                on_choice=lambda choice: tell(str(choice)),
                ledger=ledger,
            )
        _write_json(tune, found.to_json())
        return
    _check_folders(json_file, plot)
    chosen = None if settings is None else _checked(experiment.Tuned.load, path=settings)
    options = {"seconds": seconds, "seeds": seeds, "seed": seed}
    used = (chosen or experiment.Tuned.packaged()).to_json()
    ledger = _ledger("cleaning", checkpoint, resume, seconds=seconds, settings=used)
    with report.threads(1), _told(experiment.PLACES * seeds) as tell:
        machine = report.Machine.here()
        reproduction = _checked(
            experiment.reproduce,
            seconds=seconds,
            seeds=seeds,
            seed=seed,
            settings=chosen,
            data_dir=data_dir,
            on_run=lambda run: tell(str(run)),
            ledger=ledger,
        )
    for table in experiment.tables(reproduction):
        console.print(table)
    for line in experiment.leads(reproduction):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(str(machine), highlight=False, soft_wrap=True)
    figures = {"machine": asdict(machine), "options": options, **reproduction.to_json()}
    _write_json(json_file, figures)
    experiment.plot(reproduction, plot)
    console.print(f"plot: {plot}", soft_wrap=True)


@bench_app.command("methods")
def bench_methods(
    seed: Annotated[
        int, typer.Option(min=0, help="Of the quadratic; the settings were chosen for 0.")
    ] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of which the time is a median.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Steps, evaluations and seconds of every method to the same target on a quadratic."""
    from bilevel.benchmarks import methods

    _bench(methods, json_file, threads=1, seed=seed, repeats=repeats)


@bench_app.command("auto")
def bench_auto(
    seed: Seed = 0,
    mnist: Annotated[bool, typer.Option(help="Also clean labels of MNIST.")] = True,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """Nothing set by hand against the best of a grid of settings."""
    from bilevel.benchmarks import auto

    _bench(auto, json_file, threads=1, seed=seed, mnist=mnist, data_dir=data_dir)


@bench_app.command("table")
def bench_table(
    largest: Annotated[
        int, typer.Option(min=10_000, help="Number of samples; 10^8 take 1 GB of memory.")
    ] = 10**8,
    repeats: Annotated[int, typer.Option(min=1, help="Of which the time is a median.")] = 31,
    device: Annotated[str, typer.Option(help="Where, such as cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of the data and the minibatches.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Time and memory of a step with a weight per sample, from 10^4 samples up."""
    from bilevel.benchmarks import table

    options: dict[str, Any] = {"largest": largest, "repeats": repeats, "device": device}
    _bench(table, json_file, threads=1, seed=seed, **options)


@bench_app.command("many")
def bench_many(
    runs: Annotated[int, typer.Option(min=1, help="The largest number of runs.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Outer steps of each run.")] = 10,
    repeats: Annotated[int, typer.Option(min=1, help="Of which the times are medians.")] = 5,
    device: Annotated[str, typer.Option(help="Where, such as cuda.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(min=1, help="For torch; else as many as it takes.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the data.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Many seeds at once against one after another."""
    from bilevel.benchmarks import many

    options: dict[str, Any] = {"runs": runs, "steps": steps, "repeats": repeats, "device": device}
    _bench(many, json_file, threads=threads, seed=seed, **options)


@bench_app.command("overhead")
def bench_overhead(
    repeats: Annotated[int, typer.Option(min=1, help="Of which the time is a median.")] = 21,
    device: Annotated[str, typer.Option(help="Where, such as cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of the data and the minibatches.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """What an inner step costs, beside the same written by hand, and in JAX if installed."""
    from bilevel.benchmarks import overhead

    _bench(overhead, json_file, repeats=repeats, device=device, seed=seed)


@bench_app.command("scale")
def bench_scale(
    compiled: Annotated[bool, typer.Option(help="Also compiled steps.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Of which the times are medians.")] = 15,
    device: Annotated[str, typer.Option(help="Where, such as cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of the data and the minibatches.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """What steps cost against d, n, T and the minibatch (ten minutes, mostly of compiling)."""
    from bilevel.benchmarks import scale

    options: dict[str, Any] = {"compiled": compiled, "repeats": repeats, "device": device}
    _bench(scale, json_file, threads=1, seed=seed, **options)


@bench_app.command("lm")
def bench_lm(
    device: Annotated[str, typer.Option(help="Where.")] = "cuda",
    compiled: Annotated[bool, typer.Option(help="Compile the model.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Of which the time is a median.")] = 7,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and the tokens.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """An F2SA step of a 124M language model beside a plain training step (needs a GPU)."""
    from bilevel.benchmarks import lm

    _bench(lm, json_file, seed=seed, device=device, compiled=compiled, repeats=repeats)


@bench_app.command("peers")
def bench_peers(
    corruption: Annotated[
        float, typer.Option(help="The part of labels that are wrong, 0.1 or 0.3.")
    ] = 0.3,
    seconds: Annotated[float, typer.Option(help="Of the processor, for each run.")] = 12.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of the best settings.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of the minibatches.")] = 0,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """Seconds to clean labels of MNIST, against other libraries (installs them first)."""
    from bilevel.benchmarks.peers import race

    options: dict[str, Any] = {"corruption": corruption, "seconds": seconds, "repeats": repeats}
    _bench(race, json_file, threads=1, seed=seed, data_dir=data_dir, **options)


@bench_app.command("kill-resume")
def bench_kill_resume(
    runs: Annotated[int, typer.Option(min=1, help="That are killed and go on.")] = 200,
    damaged: Annotated[int, typer.Option(min=0, help="Checkpoints to be refused.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of the moments and the damages.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Kill runs at random moments, go on from their checkpoints, compare the bits (15 minutes)."""
    from bilevel.benchmarks import kill_resume

    _bench(kill_resume, json_file, threads=1, seed=seed, runs=runs, damaged=damaged)


@bench_app.command("soak")
def bench_soak(
    steps: Annotated[int, typer.Option(min=4000, help="That are taken compiled.")] = 10**6,
    compiled: Annotated[bool, typer.Option(help="Also compiled steps.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """A million small steps: memory, live tensors, and whether history and state agree."""
    from bilevel.benchmarks import soak

    _bench(soak, json_file, threads=1, seed=seed, steps=steps, compiled=compiled)


@bench_app.command("cleaning")
def bench_cleaning(
    seed: Seed = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="DATA", help="mnist, newsgroups or covertype; may be repeated."),
    ] = None,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """What LabelCleaner finds and how long it takes, beside cleanlab if that is installed."""
    from bilevel.benchmarks import cleaning

    _bench(cleaning, json_file, threads=1, seed=seed, only=only or [], data_dir=data_dir)


def _bench(
    benchmark: Benchmark, json_file: Path | None, *, threads: int | None = None, **options: Any
) -> None:
    """Run a benchmark with its options, print its one table and write its one file.

    torch has ``threads`` to itself; None: all that it would take anyway.
    """
    from bilevel.benchmarks import report

    _check_folders(json_file)
    with report.threads(threads), Progress(console=console, transient=True) as progress:
        machine = report.Machine.here()
        rows = _checked(benchmark.run, track=progress.track, **options)
    console.print(benchmark.table(rows))
    console.print(str(machine), highlight=False, soft_wrap=True)
    _write_json(json_file, report.figures(machine, options, rows))


def _cleaning() -> Any:
    """The module that cleans files, which needs packages of an extra."""
    from bilevel.errors.extras import needed

    with needed("clean", "sklearn", "scipy", "pandas", "safetensors", "jinja2", "PIL"):
        from bilevel.cleaning import files
    return files


def _mixing() -> Any:
    """The module that mixes files, which needs packages of an extra."""
    from bilevel.errors.extras import needed

    with needed("mix", "safetensors", "matplotlib"):
        import matplotlib  # noqa: F401  # is needed only in the end, when it would be late to say so
        import safetensors  # noqa: F401

        from bilevel.mixing import files
    return files


@contextmanager
def _stages() -> Iterator[Callable[[str], None]]:
    """Shows what is being done, and for how long.

    torch has one thread: steps on minibatches are too small for two to help each other, and what
    is found is the same on every machine.
    """
    from bilevel.benchmarks.report import threads

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        threads(1),
        Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as progress,
    ):
        task = progress.add_task("", total=None)
        yield lambda stage: progress.update(task, description=stage)


def _tell_found(found: Any, written: str) -> None:
    """What was found, in a few lines; where it was written to in the last."""
    lines = [*found.summary(), f"{written} ({found.seconds:.1f} s)."]
    console.print("\n".join(map(escape, lines)), highlight=False, soft_wrap=True)


def _rates_table(rates: list[Any]) -> Table:
    table = Table(title="slope of E ||grad F(x_k)||^2 against k, in logarithms")
    for heading in ("algorithm", "regime"):
        table.add_column(heading)
    for heading in ("a", "c", "theory", "measured,\nnoise", "measured,\nbias"):
        table.add_column(heading, justify="right")
    for rate in rates:
        table.add_row(
            rate.algorithm,
            rate.regime,
            *(f"{v:.3f}" for v in (rate.a, rate.c, rate.theory, rate.slope, rate.bias_slope)),
        )
    return table


def _checked(function: Any, **arguments: Any) -> Any:
    """Call ``function``; an error of the library ends the command with its message alone."""
    try:
        return function(**arguments)
    except BilevelError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def _ledger(command: str, folder: Path | None, resume: bool, **options: Any) -> Any:
    """Where a long command keeps what is done; ``options`` are those on which its parts depend."""
    from bilevel.experiments.ledger import Ledger

    if resume and folder is not None and not folder.exists():
        console.print(
            f"There is nothing in {escape(str(folder))} to go on from; beginning.", soft_wrap=True
        )
    options = {"command": command, "version": __version__, **options}
    return _checked(Ledger, folder=folder, options=options, resume=resume)


def _check_folders(*paths: Path | None) -> None:
    """Make the folders of what will be written; fail before the work and not after it."""
    for path in paths:
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise typer.BadParameter(f"cannot write {path}: {error}") from error


def _check_plot(path: Path) -> None:
    if path.suffix.lower() not in {".png", ".pdf", ".svg"}:
        raise typer.BadParameter(f"{path} must end in .png, .pdf or .svg", param_hint="--plot")


@contextmanager
def _told(total: int) -> Iterator[Callable[[str], None]]:
    """Shows how many are left; takes a line of each that is done."""
    with Progress(console=console) as progress:
        task = progress.add_task("running", total=total)

        def tell(line: str) -> None:
            progress.console.print(line, highlight=False, soft_wrap=True)
            progress.advance(task)

        yield tell


def _write_json(path: Path | None, figures: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")
        console.print(f"figures: {path}", soft_wrap=True)
