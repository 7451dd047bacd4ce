"""The command ``bilevel``, put together from its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from bilevel import __version__
from bilevel.cli.clean import clean
from bilevel.cli.demo import demo
from bilevel.cli.mix import mix
from bilevel.cli.output import console, reports_errors
from bilevel.cli.reproduce import cleaning, rates

app = typer.Typer(
    name="bilevel",
    help="Bilevel optimization with gradients alone.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
reproduce_app = typer.Typer(help="Reproduce the paper's experiments.", no_args_is_help=True)
app.add_typer(reproduce_app, name="reproduce")

for command in (clean, demo, mix):
    app.command()(reports_errors(command))
for experiment in (rates, cleaning):
    reproduce_app.command()(reports_errors(experiment))


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"bilevel {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass
