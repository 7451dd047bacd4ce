"""The checkpoints of one run: when they are written, which are kept, which is the newest."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from bilevel.engine.ranks import Ranks
from bilevel.errors import (
    ArgumentTypeError,
    CheckpointError,
    CheckpointWarning,
    OutputError,
    warn,
)
from bilevel.errors.checks import check_count, checked_number
from bilevel.run.checkpoint.file import PART
from bilevel.run.checkpoint.lock import locked
from bilevel.run.checkpoint.shared import on_every_rank, read_any, remove, write_any

_NAME = re.compile(r"step-(\d{12,})(\.safetensors)?")


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often :func:`bilevel.minimize` saves a run.

    The run is saved every minute, at its start and at its end (needs ``bilevel[checkpoint]``).
    Called again with the same arguments, the run goes on from the newest file that is there and
    sound, and ends with the same bits as one that was never stopped; a run that is complete returns
    at once, and with more ``steps`` goes on, as does one that its callback ended. Files of another
    run are refused, see :meth:`bilevel.Solver.load`. If a file cannot be written later on (the disk
    is full, say), the run goes on after a :class:`bilevel.errors.CheckpointWarning`.

    Ctrl-C or SIGTERM ends the run after the step that is being taken, with everything saved and the
    outcome INTERRUPTED; a second one ends it at once. (This is so in the main thread, where the
    program has no handlers of its own.)

    Args:
        folder: the folder of this run alone; it is made if it is not there, and locked while the
            run is in it. On several ranks, one that all of them can see.
        every_steps: save whenever so many steps were taken. None: not by steps.
        every_seconds: save when so many seconds have passed. None: not by time. A run is saved at
            its start and at its end in any case.
        keep: how many of the newest files to keep.

    Example:
        >>> import tempfile, bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     often = bilevel.Checkpoint(folder, every_steps=10, keep=2)
        ...     for steps in (20, 30):  # the second call goes on where the first ended
        ...         result = bilevel.minimize(
        ...             problem, problem.x0, problem.y0, steps=steps, checkpoint=often
        ...         )
        >>> whole = bilevel.minimize(problem, problem.x0, problem.y0, steps=30)
        >>> result.steps, bool((result.x == whole.x).all()), len(result.history["upper"])
        (30, True, 30)
    """

    folder: str | os.PathLike[str]
    every_steps: int | None = None
    every_seconds: float | None = 60.0
    keep: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike):
            raise ArgumentTypeError(f"folder must be a path, not {self.folder!r}")
        if self.every_steps is not None:
            check_count("every_steps", self.every_steps)
        if self.every_seconds is not None:
            checked_number("every_seconds", self.every_seconds)
        check_count("keep", self.keep)


CheckpointLike: TypeAlias = str | os.PathLike[str] | Checkpoint


def checkpoint_of(given: CheckpointLike) -> Checkpoint:
    """The checkpoint choices: those given, or the defaults for a folder."""
    if isinstance(given, Checkpoint):
        return given
    if isinstance(given, str | os.PathLike):
        return Checkpoint(given)
    raise ArgumentTypeError(
        f"checkpoint must be a folder or a bilevel.Checkpoint(folder, ...), not {given!r}"
    )


class Folder:
    """The files of one run.

    Args:
        choices: where and how often to save.
        clock: returns seconds; tests replace it.
        ranks: the ranks that save together, all of which call every method; None: one process.
    """

    def __init__(
        self,
        choices: Checkpoint,
        clock: Callable[[], float] = time.monotonic,
        ranks: Ranks | None = None,
    ) -> None:
        self.path = Path(choices.folder)
        self._ranks = ranks
        self._choices = choices
        self._clock = clock
        self._saved_at = clock()
        self._saved_step = -1

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other run may use the folder, which is made if it is not there.

        Raises:
            CheckpointError: another run uses it; on every rank.
            OutputError: the folder cannot be one.
        """
        with ExitStack() as held:

            def lock() -> None:
                if self._ranks is None or self._ranks.rank == 0:
                    self._make()
                    held.enter_context(locked(self.path))

            on_every_rank(self._ranks, lock)
            yield

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest file that can be read, and what is in it; None: there are no files.

        Files that cannot be read are passed over with a warning, and stay. What a run that was
        killed left half-written is removed.

        Raises:
            CheckpointError: there are files, but none can be read.
            OutputError: the folder cannot be one.
        """
        files = self._tidied_on_the_first_rank()
        refused = []
        for step, path in sorted(files.items(), reverse=True):
            try:
                content = read_any(path, self._ranks)
            except CheckpointError as error:
                refused.append(error)
                continue
            for reason in refused:
                warn(CheckpointWarning(f"{reason}; the run goes on from {path.name}"))
            self._saved_step = step
            return path, content
        if refused:
            raise CheckpointError(
                self.path,
                f"none of its {len(refused)} checkpoints can be read, the newest because: "
                f"{refused[0]}. To begin anew, name another folder",
            )
        return None

    def _tidied_on_the_first_rank(self) -> dict[int, Path]:
        """The checkpoints as the first rank sees them, so that all ranks read the same one."""
        ranks = self._ranks
        if ranks is None:
            return self._tidied()
        return ranks.from_first(ranks.all_or_none(lambda: {} if ranks.rank else self._tidied()))

    def _tidied(self) -> dict[int, Path]:
        """The checkpoints by their steps; what a run that was killed left is removed."""
        files = self._make()
        for part in self.path.glob(f".step-*{PART}"):
            with suppress(OSError):  # the folder may be read-only
                remove(part)
        return files

    def _make(self) -> dict[int, Path]:
        """The checkpoints by their steps, in a folder that is there from now on."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return self._files()
        except OSError as error:
            raise OutputError(
                f"checkpoint={str(self.path)!r} cannot be used as a folder: "
                f"{error.strerror or error}"
            ) from error

    def due(self, step: int) -> bool:
        """Whether to save now, after so many steps."""
        steps, seconds = self._choices.every_steps, self._choices.every_seconds
        by_steps = steps is not None and step % steps == 0
        return by_steps or (seconds is not None and self._clock() - self._saved_at >= seconds)

    def save(self, step: int, content: Callable[[], Mapping[str, Any]]) -> None:
        """Write the file of a step, unless it is there, and remove those that are too old.

        Raises:
            OutputError: it cannot be written.
        """
        if step == self._saved_step:
            return
        self._saved_at = self._clock()  # also if it fails: the next attempt waits as long
        write_any(self._file(step), content(), self._ranks)
        self._saved_step = step
        if self._ranks is not None and self._ranks.rank:
            return
        # Files of later steps exist only where they could not be read, and are not counted.
        files = self._files()
        older = sorted(number for number in files if number <= step)
        for number in older[: -self._choices.keep]:
            with suppress(OSError):  # one file too many does no harm
                remove(files[number])

    def try_to_save(self, step: int, content: Callable[[], Mapping[str, Any]]) -> None:
        """As :meth:`save`, but a file that cannot be written gives a warning, not an error."""
        try:
            self.save(step, content)
        except OutputError as error:
            kept = "none" if self._saved_step < 0 else f"that of step {self._saved_step}"
            warn(CheckpointWarning(f"{error}; the run goes on, the newest checkpoint is {kept}"))

    def _file(self, step: int) -> Path:
        ending = ".safetensors" if self._ranks is None else ""
        return self.path / f"step-{step:012d}{ending}"

    def _files(self) -> dict[int, Path]:
        """The checkpoints in the folder by their steps."""
        matches = ((_NAME.fullmatch(path.name), path) for path in self.path.iterdir())
        return {int(match[1]): path for match, path in matches if match is not None}
