"""What all benchmarks share: the interface, memory, the table and the file of figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.table import Table

from bilevel.cli.experiments import Machine

T = TypeVar("T")
RowT = TypeVar("RowT")
_STATM = Path("/proc/self/statm")


class Track(Protocol):
    """Yields the things one by one and shows how many remain; ``iter`` shows nothing."""

    def __call__(self, things: Sequence[T], /) -> Iterable[T]: ...


class Benchmark(Protocol):
    """The two functions of a benchmark's module."""

    @property
    def run(self) -> Callable[..., Sequence[Any]]:
        """Measures; takes ``track`` and the benchmark's own options as keywords."""

    @property
    def table(self) -> Callable[[Sequence[Any]], Table]:
        """Shows the rows that ``run`` returned."""


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None where the system does not report it."""
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def figures(machine: Machine, options: Mapping[str, Any], rows: Sequence[Any]) -> dict[str, Any]:
    """Return the content of the file of figures; options that are paths are left out."""
    return {
        "machine": asdict(machine),
        "options": {
            name: value
            for name, value in options.items()
            if not (value is None or isinstance(value, Path))
        },
        "rows": [asdict(row) for row in rows],
    }


def table(
    title: str, rows: Sequence[RowT], columns: Mapping[str, Callable[[RowT], str | float]]
) -> Table:
    """Lay out one line per row; ``columns`` maps each heading to a function of a row.

    Text is aligned left and numbers right; floats are shown with three significant digits.
    """
    laid_out = Table(title=title)
    cells = {heading: [read(row) for row in rows] for heading, read in columns.items()}
    for heading, column in cells.items():
        text = all(isinstance(cell, str) for cell in column)
        laid_out.add_column(heading, justify="left" if text else "right")
    for line in zip(*cells.values(), strict=True):
        laid_out.add_row(*map(_formatted, line))
    return laid_out


def _formatted(cell: str | float) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.3g}"
