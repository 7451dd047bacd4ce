"""Races against other libraries and against floors, run from a checkout; not part of the wheel.

    python -m benchmarks NAME [options]

A benchmark is a module or package with two functions,

    run(*, track, **options) -> list of dataclasses     measures, and returns one instance per row
    table(rows) -> rich.table.Table                     shows the rows

and a command of a few lines in :mod:`benchmarks.commands`, which shows progress, prints the table
and writes the rows to a file together with a description of the machine.
"""
