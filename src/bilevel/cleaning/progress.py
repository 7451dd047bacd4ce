"""How far the search for weights came, in a folder.

The run itself is in checkpoints, see :class:`bilevel.Checkpoint`. Beside them is what decides when
to stop: the losses on held-back samples, and the state with which that was lowest. Both are written
before the checkpoint of a step is, so that they are never behind it; where they are ahead, the
steps in between are taken again and come to the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bilevel
from bilevel.errors import CheckpointError, OutputError


class Progress:
    """What a search leaves in its folder, and finds there.

    Attributes:
        run: where and how often the run itself is saved.
        losses: on held-back samples, of each step.
        stopped: whether the search was over.
    """

    def __init__(self, folder: Path) -> None:
        self.run = bilevel.Checkpoint(folder / "run", every_seconds=10.0)
        self._best = folder / "best.safetensors"
        self._file = folder / "losses.json"
        self.losses: list[float] = []
        self.stopped = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._file.exists():
                found = json.loads(self._file.read_text())
                self.losses = [float(loss) for loss in found["losses"]]
                self.stopped = bool(found["stopped"])
        except OSError as error:
            raise OutputError(
                f"checkpoint={str(folder)!r} cannot be used: {error.strerror or error}"
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointError(self._file, f"it does not hold losses ({error})") from error

    def best(self, options: dict[str, Any]) -> bilevel.Solver | None:
        """A solver of these options in the best state so far."""
        if not self._best.exists():
            return None
        solver = bilevel.Solver(**options)
        solver.load(self._best)
        return solver

    def save(self, best: bilevel.Solver | None, losses: list[float], stopped: bool) -> None:
        """Keep the losses, and the solver if it is the best so far."""
        if best is not None:
            best.save(self._best)
        part = self._file.with_suffix(".part")
        try:
            part.write_text(json.dumps({"losses": losses, "stopped": stopped}))
            part.replace(self._file)
        except OSError as error:
            raise OutputError(
                f"{str(self._file)!r} could not be written: {error.strerror or error}"
            ) from error
