"""What all benchmarks share: progress, a table, the machine's name."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from rich.table import Table

T = TypeVar("T")
Row = TypeVar("Row")
_STATM = Path("/proc/self/statm")
_CPUINFO = Path("/proc/cpuinfo")


class Track(Protocol):
    """Gives the things one by one and shows how many are left; ``iter`` shows nothing."""

    def __call__(self, things: Sequence[T], /) -> Iterable[T]: ...


class Benchmark(Protocol):
    """The two functions of a benchmark's module."""

    @property
    def run(self) -> Callable[..., Sequence[Any]]:
        """Measure; takes ``track`` and the benchmark's own options by name."""

    @property
    def table(self) -> Callable[[Sequence[Any]], Table]:
        """The rows to read."""


@dataclass(frozen=True)
class Machine:
    """Where figures were taken.

    Attributes:
        platform: the system and the architecture.
        processor: its name, and the widest instructions of it that torch uses.
        cores: of the processor, as the system counts them.
        threads: that torch used.
        gpu: the first one's name, if torch sees one.
        python, torch: the versions.
    """

    platform: str
    processor: str
    cores: int
    threads: int
    gpu: str | None
    python: str
    torch: str

    @classmethod
    def here(cls) -> Machine:
        """This machine, with torch's threads as they are now."""
        return cls(
            platform=f"{platform.system()} {platform.machine()}",
            processor=f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
            cores=os.cpu_count() or 1,
            threads=torch.get_num_threads(),
            gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            python=platform.python_version(),
            torch=torch.__version__,
        )

    def __str__(self) -> str:
        gpu = "no GPU" if self.gpu is None else self.gpu
        return (
            f"{self.platform}, {self.processor}, {self.cores} cores, {self.threads} used, {gpu}, "
            f"Python {self.python}, torch {self.torch}"
        )


def _processor() -> str:
    """As Linux names it, or else as Python does, which there says only the architecture."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return " ".join(names[0].split()) if names else platform.processor() or "unknown processor"


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch use that many threads within; None: as many as it does anyway."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def resident() -> int | None:
    """Bytes of memory that the process holds; None where the system does not tell."""
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def figures(machine: Machine, options: Mapping[str, Any], rows: Sequence[Any]) -> dict[str, Any]:
    """What goes to the file: on what, how, and what was measured; folders are left out."""
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
    title: str, rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str | float]]
) -> Table:
    """One line per row; ``columns`` gives to each heading what is read off a row.

    Numbers go to the right, those that are not whole with three digits; text goes to the left.
    """
    shown = Table(title=title)
    cells = {heading: [read(row) for row in rows] for heading, read in columns.items()}
    for heading, column in cells.items():
        text = all(isinstance(cell, str) for cell in column)
        shown.add_column(heading, justify="left" if text else "right")
    for line in zip(*cells.values(), strict=True):
        shown.add_row(*map(_shown, line))
    return shown


def _shown(cell: str | float) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.3g}"
