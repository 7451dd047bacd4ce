"""The checkpoints of a run of minimize: its solver, and what else a run carries."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from bilevel.errors import CheckpointError
from bilevel.run.checkpoint import Folder
from bilevel.run.saving import MISFITS, refuse_other_settings
from bilevel.run.solver import Solver
from bilevel.variables import Stateful, check_alike


class Clock:
    """The seconds of a run, those before a checkpoint included."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """How long the run has taken so far."""
        return time.perf_counter() - self._start

    def state_dict(self) -> dict[str, Any]:
        """The seconds so far."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._start = time.perf_counter() - state["seconds"]


class SavedRun:
    """Saves a run to its folder, and brings it to where the newest file there was saved.

    Args:
        folder: the files.
        solver: the solver of the run.
        parts: what else is saved, by name.
        settings: what has to be the same in the run that goes on.
    """

    def __init__(
        self,
        folder: Folder,
        solver: Solver,
        parts: Mapping[str, Stateful],
        settings: dict[str, Any],
    ) -> None:
        self.folder = folder
        self._solver = solver
        self._parts = parts
        self._settings = settings

    def begin(self, steps: int) -> None:
        """Go on from the newest file; where there is none, write the first.

        Writing the first file before the first step shows at once whether the run can be saved.
        """
        newest = self.folder.newest()
        if newest is None:
            self.folder.save(0, self._content)
            return
        path, content = newest
        if "run" not in content:
            raise CheckpointError(path, "it was written by Solver.save, not by minimize")
        try:
            refuse_other_settings(path, content["run"]["settings"], self._settings)
            self._solver.restore(path, content)
            if self._solver.k > steps:
                raise CheckpointError(
                    path, f"{self._solver.k} steps were taken, which is more than steps={steps}"
                )
            for name, part in self._parts.items():
                check_alike(part.state_dict(), content["run"][name], name)
                part.load_state_dict(content["run"][name])
        except CheckpointError:
            raise
        except MISFITS as error:
            raise CheckpointError(
                path, f"its run does not fit this one ({type(error).__name__}: {error})"
            ) from error

    def save(self) -> None:
        """Write a file for the steps taken so far; where that fails, warn and go on."""
        self.folder.try_to_save(self._solver.k, self._content)

    def _content(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return {**self._solver.snapshot(), "run": {"settings": self._settings, **parts}}
