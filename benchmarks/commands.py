"""The commands of ``python -m benchmarks``, one function per benchmark."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.measure import Measurement
from rich.progress import Progress

from benchmarks import report
from bilevel.cli.experiments import Machine, torch_threads
from bilevel.cli.options import DataDir, JsonFile, Seed
from bilevel.cli.output import check_files, console, reports_errors, say, write_json

app = typer.Typer(
    help="Measure on this machine.", no_args_is_help=True, pretty_exceptions_show_locals=False
)

Repeats = Annotated[int, typer.Option(min=1, help="The number of repeats; times are medians.")]
Device = Annotated[str, typer.Option(help="The device, such as cpu or cuda.")]
Compiled = Annotated[bool, typer.Option(help="Also measure compiled steps.")]


@reports_errors
def measure(
    module: str, json_file: Path | None, *, threads: int | None = None, **options: Any
) -> None:
    """Run a benchmark with its options, print its table and write its figures.

    Only the benchmark that runs is imported: what the others import costs seconds and memory,
    which are what some of them measure.

    Args:
        module: the benchmark's module in this package.
        json_file: the file for the figures; None: they are not written.
        threads: the number of torch's threads; None leaves its default.
        options: the keywords of the benchmark's ``run``.
    """
    benchmark: report.Benchmark = import_module(f"benchmarks.{module}")
    check_files(json_file)
    with torch_threads(threads), Progress(console=console, transient=True) as progress:
        machine = Machine.here()
        rows = benchmark.run(track=progress.track, **options)
    table = benchmark.table(rows)
    if not console.is_terminal:  # a file has room for all columns
        wanted = Measurement.get(console, console.options.update(max_width=1000), table)
        console.width = max(console.width, wanted.maximum)
    console.print(table)
    say(str(machine))
    write_json(json_file, report.figures(machine, options, rows))


@app.command("methods")
def _methods(
    seed: Annotated[
        int,
        typer.Option(min=0, help="The seed of the quadratic; the settings were chosen for 0."),
    ] = 0,
    repeats: Repeats = 3,
    json_file: JsonFile = None,
) -> None:
    """Steps, evaluations and seconds of every method to the same target on a quadratic."""
    measure("methods", json_file, threads=1, seed=seed, repeats=repeats)


@app.command("auto")
def _auto(
    family: Annotated[
        list[str] | None, typer.Option(help="A family of problems; may be repeated.")
    ] = None,
    problem: Annotated[list[str] | None, typer.Option(help="A problem; may be repeated.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="The number of seeds, from 0.")] = 5,
    jobs: Annotated[
        int, typer.Option(min=1, help="The number of processes, each with one thread.")
    ] = 1,
    tuned: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="The --json file of an earlier run, whose settings are not searched again.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw performance profiles.")
    ] = None,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """F2SA with nothing set against the best of a search, on problems in families."""
    chosen: dict[str, Any] = {"family": family or [], "problem": problem or [], "seeds": seeds}
    files: dict[str, Any] = {"data_dir": data_dir, "tuned": tuned, "plot": plot}
    measure("auto", json_file, threads=1, jobs=jobs, **chosen, **files)


@app.command("table")
def _table(
    largest: Annotated[
        int,
        typer.Option(min=10_000, help="The largest number of samples; 10^8 need 1 GB of memory."),
    ] = 10**8,
    repeats: Repeats = 31,
    device: Device = "cpu",
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Time and memory of a step with one weight per sample, from 10^4 samples up."""
    options: dict[str, Any] = {"largest": largest, "repeats": repeats, "device": device}
    measure("table", json_file, threads=1, seed=seed, **options)


@app.command("many")
def _many(
    runs: Annotated[int, typer.Option(min=1, help="The largest number of runs.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="The outer steps of each run.")] = 10,
    repeats: Repeats = 5,
    device: Device = "cpu",
    threads: Annotated[
        int | None, typer.Option(min=1, help="The threads of torch; its own default if not given.")
    ] = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Many seeds at once against one after another."""
    options: dict[str, Any] = {"runs": runs, "steps": steps, "repeats": repeats, "device": device}
    measure("many", json_file, threads=threads, seed=seed, **options)


@app.command("episodes")
def _episodes(
    tasks: Annotated[int, typer.Option(min=1, help="The tasks of the larger steps.")] = 8,
    repeats: Repeats = 9,
    device: Device = "cpu",
    small: Annotated[bool, typer.Option(help="Measure the smallest network alone.")] = False,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """A step with eight tasks over a step with one, for small networks (five minutes)."""
    options: dict[str, Any] = {"tasks": tasks, "repeats": repeats, "small": small}
    measure("episodes", json_file, seed=seed, device=device, **options)


@app.command("overhead")
def _overhead(
    auto: Annotated[
        bool,
        typer.Option(
            "--auto", help='F2SA with "auto" beside the same rates given, in place of all that.'
        ),
    ] = False,
    steps: Annotated[
        int, typer.Option(min=1, help="With --auto: the outer steps from the start of a run.")
    ] = 800,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="The number of repeats; 21 if not given, with --auto 5."),
    ] = None,
    device: Device = "cpu",
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """The cost of an inner step beside the same step written by hand, and in JAX if installed."""
    if auto:
        options = {"steps": steps, "repeats": repeats or 5, "device": device, "seed": seed}
        measure("overhead.auto", json_file, threads=1, **options)
        return
    measure("overhead", json_file, repeats=repeats or 21, device=device, seed=seed)


@app.command("scale")
def _scale(
    compiled: Compiled = True,
    repeats: Repeats = 15,
    device: Device = "cpu",
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """The cost of steps against d, n, T and the batch (ten minutes, mostly of compilation)."""
    options: dict[str, Any] = {"compiled": compiled, "repeats": repeats, "device": device}
    measure("scale", json_file, threads=1, seed=seed, **options)


@app.command("lm")
def _lm(
    device: Device = "cuda",
    compiled: Annotated[bool, typer.Option(help="Compile the model.")] = True,
    repeats: Repeats = 7,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """An F2SA step of a 124M language model beside a plain training step (needs a GPU)."""
    measure("lm", json_file, seed=seed, device=device, compiled=compiled, repeats=repeats)


@app.command("peers")
def _peers(
    corruption: Annotated[
        float, typer.Option(help="The fraction of labels that are wrong, 0.1 or 0.3.")
    ] = 0.3,
    seconds: Annotated[float, typer.Option(help="The processor time of each run.")] = 12.0,
    repeats: Annotated[
        int, typer.Option(min=1, help="The number of runs of the best settings.")
    ] = 5,
    seed: Seed = 0,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """Seconds to clean the labels of MNIST, against other libraries (installs them first)."""
    options: dict[str, Any] = {"corruption": corruption, "seconds": seconds, "repeats": repeats}
    measure("peers.race", json_file, threads=1, seed=seed, data_dir=data_dir, **options)


@app.command("kill-resume")
def _kill_resume(
    runs: Annotated[int, typer.Option(min=1, help="The number of runs to kill and resume.")] = 200,
    damaged: Annotated[
        int, typer.Option(min=0, help="The number of checkpoints to damage.")
    ] = 1000,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Kill runs at random moments, resume them and compare the bits (15 minutes)."""
    measure("kill_resume", json_file, threads=1, seed=seed, runs=runs, damaged=damaged)


@app.command("soak")
def _soak(
    steps: Annotated[int, typer.Option(min=4000, help="The number of compiled steps.")] = 10**6,
    compiled: Compiled = True,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """A million small steps: memory, live tensors, and agreement of history and state."""
    measure("soak", json_file, threads=1, seed=seed, steps=steps, compiled=compiled)


@app.command("cleaning")
def _cleaning(
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option(min=1, help="The number of seeds, from --seed.")] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="DATA", help="A data set, such as mnist or a9a; may be repeated."),
    ] = None,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """What LabelCleaner finds and how long it takes, beside cleanlab if that is installed."""
    options: dict[str, Any] = {"seed": seed, "seeds": seeds, "only": only or []}
    measure("cleaning", json_file, threads=1, data_dir=data_dir, **options)
