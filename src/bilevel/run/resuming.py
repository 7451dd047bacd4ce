"""The checkpoints of a run of minimize: its solver, and what else a run carries."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from bilevel.errors import CheckpointError, DistributedError
from bilevel.run.checkpoint import Folder
from bilevel.run.checkpoint.shared import OWN, on_every_rank
from bilevel.run.saving import MISFITS, RUN, refuse_other_settings
from bilevel.run.solver import Solver
from bilevel.variables import Form, Stateful, check_alike
from bilevel.variables.forms import Declared, real, record, refuse


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

    def state_form(self) -> Form:
        """Seconds are not negative."""
        return record({"seconds": real(0.0)})

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
        if RUN not in content:
            raise CheckpointError(path, "it was written by Solver.save, not by minimize")
        ranks = self._solver.ranks
        try:
            settings = content[RUN].get("settings") if isinstance(content[RUN], dict) else None
            if not isinstance(settings, dict):
                refuse(content[RUN], RUN, "a dict with the settings of a run")
            refuse_other_settings(path, settings, self._settings)
            self._solver.restore(path, content)
            if self._solver.k > steps:
                raise CheckpointError(
                    path, f"{self._solver.k} steps were taken, which is more than steps={steps}"
                )
            run = on_every_rank(ranks, partial(self._checked_parts, content))
            on_every_rank(ranks, partial(self._load_parts, run))
        except CheckpointError:
            raise
        except MISFITS as error:
            if isinstance(error, DistributedError):
                raise
            raise CheckpointError(
                path, f"its run does not fit this one ({type(error).__name__}: {error})"
            ) from error

    def _checked_parts(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """The saved parts, those of this rank included; refused before any of them is loaded."""
        run = self._with_own_parts(content)
        for name, part in self._parts.items():
            if isinstance(part, Declared):
                part.state_form()(run[name], name)
            else:  # of the user's own
                check_alike(part.state_dict(), run[name], name)
        return run

    def _load_parts(self, run: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(run[name])

    def save(self) -> None:
        """Write a file for the steps taken so far; where that fails, warn and go on."""
        self.folder.try_to_save(self._solver.k, self._content)

    def _content(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        content = {**self._solver.snapshot(), RUN: {"settings": self._settings, **parts}}
        if OWN in content:
            content[OWN][RUN] = self._own_parts(parts)
        return content

    def _own_parts(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """What differs between the ranks in what is saved beside the solver.

        The state that the guard goes back to is a state of the solver, so it differs as that does.
        """
        good = parts["guard"]["good"]
        own = {"good": None if good is None else self._solver.own_parts(good["solver"])}
        if self._solver.has_own_y:
            own["selector"] = parts["selector"]
            own["others"] = None if good is None else good["others"]
        return own

    def _with_own_parts(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """What was saved beside the solver, with the parts of this rank in their places.

        Where there are other ranks than then, the samples are those that were drawn anew.
        """
        run: dict[str, Any] = content[RUN]
        ranks = 1 if self._solver.ranks is None else self._solver.ranks.size
        as_many_ranks = content.get("ranks", 1) == ranks
        if as_many_ranks and OWN not in content:  # of one process
            return run
        own = content[OWN][RUN] if as_many_ranks else {"good": self._solver.sampling_state()}
        guard = run["guard"]
        if guard["good"] is not None:
            good = {**guard["good"], "solver": {**guard["good"]["solver"], **own["good"]}}
            if "others" in own:
                good["others"] = own["others"]
            guard = {**guard, "good": good}
        return {**run, "guard": guard, "selector": own.get("selector", run["selector"])}
