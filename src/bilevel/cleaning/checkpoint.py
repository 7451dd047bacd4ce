"""The search for weights in a folder, so that it can be resumed.

The run itself is in checkpoints, see :class:`bilevel.Checkpoint`. Beside them is what decides when
to stop: the losses on held-back samples, and the state with the lowest of them. Both are written
before the checkpoint of the same step, so they are never behind it. Where they are ahead of it, the
steps in between are taken again and give the same numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bilevel.data.output import file_written
from bilevel.errors import CheckpointError, OutputError
from bilevel.run.checkpoint import Checkpoint
from bilevel.run.solver import Solver


class SearchCheckpoint:
    """The saved state of a search for weights.

    Attributes:
        run: where and how often the run itself is saved.
        losses: the losses on held-back samples, one for each step that was taken.
        stopped: whether the search had ended.
    """

    def __init__(self, folder: Path) -> None:
        self.run = Checkpoint(folder / "run", every_seconds=10.0)
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

    def best(self, options: dict[str, Any]) -> Solver | None:
        """A solver with these options in the best state so far, if one was saved."""
        if not self._best.exists():
            return None
        solver = Solver(**options)
        solver.load(self._best)
        return solver

    def save(self, best: Solver | None, losses: list[float], stopped: bool) -> None:
        """Save the losses, and the solver if its state is the best so far."""
        if best is not None:
            best.save(self._best)
        with file_written(self._file) as part:
            part.write_text(json.dumps({"losses": losses, "stopped": stopped}))
