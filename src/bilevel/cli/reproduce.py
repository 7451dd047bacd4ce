"""``bilevel reproduce``: the paper's experiments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from bilevel.cli.experiments import Machine, torch_threads
from bilevel.cli.experiments import cleaning as cleaning_experiment
from bilevel.cli.experiments import rates as rates_experiment
from bilevel.cli.experiments.rates import Curve, Rate
from bilevel.cli.options import LARGEST_SEED, CheckpointFolder, DataDir, JsonFile, Resume, Seed
from bilevel.cli.output import check_files, console, open_ledger, parts_done, say, write_json


def _plot_format(path: Path) -> Path:
    if path.suffix.lower() not in {".png", ".pdf", ".svg"}:
        raise typer.BadParameter(f"{path} must end in .png, .pdf or .svg", param_hint="--plot")
    return path


Plot = Annotated[Path, typer.Option(callback=_plot_format, help="The file for the plot.")]


def rates(
    seed: Seed = 0,
    steps: Annotated[int, typer.Option(min=100, help="The number of outer steps per run.")] = 6000,
    runs: Annotated[int, typer.Option(min=1, help="The number of runs to average.")] = 64,
    workers: Annotated[int, typer.Option(min=1, help="The number of parallel processes.")] = 2,
    plot: Plot = Path("rates.png"),
    checkpoint: CheckpointFolder = None,
    resume: Resume = False,
    json_file: JsonFile = None,
) -> None:
    """Measure the six rates of convergence of F2SA and F3SA on a quadratic."""
    check_files(json_file, plot)
    ledger = open_ledger("rates", checkpoint, resume, steps=steps, runs=runs, seed=seed)
    with parts_done(rates_experiment.CURVES) as done:

        def report(algorithm: str, regime: str, instance: str, curve: Curve) -> None:
            done(f"{algorithm} {regime} ({instance}): slope {curve.slope:.3f}")

        reproduction = rates_experiment.reproduce(
            steps=steps, runs=runs, seed=seed, workers=workers, on_curve=report, ledger=ledger
        )
    write_json(json_file, reproduction.to_json())
    rates_experiment.plot(reproduction, plot)
    console.print(_rates_table(reproduction.rates))
    say(f"plot: {escape(str(plot))}")


def _rates_table(rates: Sequence[Rate]) -> Table:
    table = Table(title="slope of E ||grad F(x_k)||^2 against k, in logarithms")
    for heading in ("algorithm", "regime"):
        table.add_column(heading)
    for heading in ("a", "c", "theory", "measured,\nnoise", "measured,\nbias"):
        table.add_column(heading, justify="right")
    for rate in rates:
        numbers = (rate.a, rate.c, rate.theory, rate.slope, rate.bias_slope)
        table.add_row(rate.algorithm, rate.regime, *(f"{number:.3f}" for number in numbers))
    return table


def cleaning(
    seconds: Annotated[float, typer.Option(help="The processor time of each run.")] = 15.0,
    seeds: Annotated[
        int, typer.Option(min=1, help="The number of runs of each method, each with its own seed.")
    ] = 3,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="The seed of the first run's batches.")
    ] = 0,
    settings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The settings of the methods, as written by --tune; by default those that come "
            "with the package.",
        ),
    ] = None,
    tune: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Search for the settings instead, each trial with a quarter of the seconds, and "
            "write them to this file.",
        ),
    ] = None,
    plot: Plot = Path("cleaning.png"),
    checkpoint: CheckpointFolder = None,
    resume: Resume = False,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """Clean the labels of MNIST with F2SA, SOBO and SOBA as in the paper (half an hour)."""
    if tune is not None:
        _tune(tune, seconds, checkpoint, resume, data_dir)
        return
    experiment = cleaning_experiment
    check_files(json_file, plot)
    chosen = experiment.Tuned.packaged() if settings is None else experiment.Tuned.load(settings)
    ledger = open_ledger("cleaning", checkpoint, resume, seconds=seconds, settings=chosen.to_json())
    with torch_threads(1), parts_done(experiment.PLACES * seeds) as done:
        machine = Machine.here()
        reproduction = experiment.reproduce(
            seconds=seconds,
            seeds=seeds,
            seed=seed,
            settings=chosen,
            data_dir=data_dir,
            on_run=lambda run: done(str(run)),
            ledger=ledger,
        )
    used = {"seconds": seconds, "seeds": seeds, "seed": seed}
    figures = {"machine": asdict(machine), "options": used, **reproduction.to_json()}
    write_json(json_file, figures)
    experiment.plot(reproduction, plot)
    for table in experiment.tables(reproduction):
        console.print(table)
    for line in (*experiment.leads(reproduction), str(machine)):
        say(line)
    say(f"plot: {escape(str(plot))}")


def _tune(
    file: Path, seconds: float, checkpoint: Path | None, resume: bool, data_dir: Path | None
) -> None:
    """Search for the settings of every method and write them to the file."""
    check_files(file)
    ledger = open_ledger("tune", checkpoint, resume, seconds=seconds)
    with torch_threads(1), parts_done(cleaning_experiment.PLACES) as done:
        found = cleaning_experiment.tune(
            seconds=seconds / 4,
            data_dir=data_dir,
            on_choice=lambda choice: done(str(choice)),
            ledger=ledger,
        )
    write_json(file, found.to_json())
