"""A progress bar that shows the losses and the multiplier; needs ``rich``."""

from __future__ import annotations

import io
import sys
import time
from contextlib import suppress
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
)

from bilevel.methods import Info


class _Terminal:
    """A stream that may be closed, or hang up, in the course of a long run, which goes on."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # hung up, or closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        with suppress(OSError, ValueError):
            return self._stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Meter:
    """Shows each :class:`~bilevel.methods.Info` that it is given, on one line."""

    def __init__(self, steps: int) -> None:
        self._progress = Progress(
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[losses]}"),
            console=Console(file=cast("IO[str]", _Terminal(sys.stderr or io.StringIO()))),
            # else what the user's functions print would go to stderr, and not to where stdout goes
            redirect_stdout=_Terminal(sys.stdout or io.StringIO()).isatty(),
        )
        self._task = self._progress.add_task("", total=steps, losses="")
        self._steps = steps
        self._due = 0.0

    def __enter__(self) -> Meter:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show(self, info: Info) -> None:
        """Move the bar to the step of ``info`` and, now and then, show its numbers."""
        fields: dict[str, Any] = {}
        if time.monotonic() > self._due or info.step + 1 == self._steps:
            self._due = time.monotonic() + 0.1  # because reading the numbers waits for the device
            fields["losses"] = describe(info)
        self._progress.update(self._task, completed=info.step + 1, **fields)


def describe(info: Info) -> str:
    """The numbers of one step in one short line."""
    rates = f"lam {info.multiplier:.4g} steps {info.lower_lr:.2g} {info.upper_lr:.2g}"
    if info.upper is None or info.lower is None or info.gap is None:
        return rates
    return (
        f"upper {float(info.upper):.4g} lower {float(info.lower):.3g} "
        f"gap {float(info.gap):.0e} {rates}"
    )
