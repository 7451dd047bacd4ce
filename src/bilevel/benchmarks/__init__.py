"""What ``bilevel bench`` runs, one module each.

A benchmark is a module with two functions,

    run(*, track, **options) -> list of dataclasses     one row each, measured one after the other
    table(rows) -> rich.table.Table                     the same to read

and a command of a few lines in :mod:`bilevel.cli`, whose ``_bench`` shows the progress, prints the
table and writes the rows to a file, with the machine named.
"""
