"""The history of a run, or of many runs that are one computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bilevel.methods import Info
from bilevel.problem import Level
from bilevel.sampling import Draw
from bilevel.variables import Form
from bilevel.variables.forms import record, refuse, tensor

History: TypeAlias = dict[str, npt.NDArray[Any]]
"""Columns of one length, by their names."""

MEASURED = ("upper", "lower", "gap", "direction_norm")
"""The numbers of a step that its device computes."""

RATES = ("multiplier", "lower_lr", "upper_lr")
"""The numbers that are known before the step."""


WHEN = ("step", "seconds", "stands")

_FIRST_ROWS = 1 << 14


class Recorder:
    """Takes what steps report; what was measured stays on its device until it is asked for.

    Args:
        steps: how many steps the run takes at most.
        every: every that many steps are recorded, and the last.
        device: where the numbers are measured.
        runs: how many runs report together, one number each; None: there is only one run.
        metrics: the names of the metrics that the objectives return.

    Attributes:
        rows: how many steps were recorded.
    """

    def __init__(
        self,
        steps: int,
        every: int,
        device: torch.device,
        runs: int | None = None,
        metrics: Sequence[str] = (),
    ) -> None:
        self._steps = steps
        self._every = every
        self._metrics = tuple(metrics)
        self.rows = 0
        most = min(-(-steps // every) + 1, _FIRST_ROWS)  # more as they are needed
        dtype = torch.float32 if device.type == "mps" else torch.float64
        shape = () if runs is None else (runs,)
        measured = len(MEASURED) + len(self._metrics)
        # the step, the seconds since the start, and whether x has not gone back from there
        self._when = np.empty((most, len(WHEN)))
        self._measured = torch.empty((most, measured, *shape), dtype=dtype, device=device)
        # The rates of one run are floats, which a NumPy array takes much faster than a tensor.
        self._rates: Any = np.empty((most, len(RATES)))
        if runs is not None:
            self._rates = torch.empty((most, len(RATES), runs), dtype=dtype, device=device)

    def due(self, k: int) -> bool:
        """Whether step k is to be recorded."""
        return k % self._every == 0 or k == self._steps - 1

    def add(self, info: Info, seconds: float) -> None:
        """Record what a step reports."""
        self._make_room(self.rows + 1)
        self._when[self.rows] = info.step, seconds, True
        measured = [getattr(info, name).detach() for name in MEASURED]
        measured += [info.metrics[name].to(measured[0]) for name in self._metrics]
        self._measured[self.rows] = torch.stack(measured)
        for place, name in enumerate(RATES):
            self._rates[self.rows, place] = getattr(info, name)
        self.rows += 1

    def _make_room(self, rows: int) -> None:
        """Room for so many rows, twice as many as before if it has to be made."""
        more = max(rows - len(self._when), len(self._when))
        if rows > len(self._when):
            self._when = np.concatenate([self._when, np.empty((more, len(WHEN)))])
            self._measured = _longer(self._measured, more)
            self._rates = (
                _longer(self._rates, more)
                if isinstance(self._rates, Tensor)
                else np.concatenate([self._rates, np.empty((more, len(RATES)))])
            )

    def forget(self, rows: int) -> None:
        """Keep only the first ``rows`` recorded steps."""
        self.rows = rows

    def take_back(self, since: int) -> None:
        """Note that x went back to where it was in step ``since``."""
        when = self._when[: self.rows]
        when[when[:, 0] > since, 2] = False

    def standing(self, steps: int) -> History:
        """The columns of the steps below ``steps`` from which x did not go back."""
        found = self.history(steps)
        stands = self._when[: len(found["step"]), 2] > 0
        return {name: column[stands] for name, column in found.items()}

    def history(self, steps: int, first: int = 0) -> History:
        """The columns of one run, of steps below ``steps``, from the row ``first`` on.

        (A step that was recorded may turn out later to be broken; ``steps`` is how many are sound.)
        """
        end = first + self._before(steps, first)
        measured = self._measured[first:end].cpu().numpy()
        return self._columns(self._when[first:end], measured, self._rates[first:end])

    def histories(self, steps: Sequence[int]) -> list[History]:
        """The columns of each run, of its steps below ``steps[run]``."""
        measured = self._measured[: self.rows].cpu().numpy()
        rates = self._rates[: self.rows].cpu().numpy()
        ends = [self._before(sound) for sound in steps]
        return [
            self._columns(self._when[:end], measured[:end, :, run], rates[:end, :, run])
            for run, end in enumerate(ends)
        ]

    def _before(self, steps: int, first: int = 0) -> int:
        return int((self._when[first : self.rows, 0] < steps).sum())

    def state_dict(self) -> dict[str, Any]:
        """What was recorded of one run."""
        told = np.hstack([self._when[: self.rows], self._rates[: self.rows]])
        return {"measured": self._measured[: self.rows].clone(), "told": torch.from_numpy(told)}

    def state_form(self) -> Form:
        """As many rows of what was measured as of when, by rising steps."""
        declared = record(
            {
                "measured": tensor((-1, *self._measured.shape[1:])),
                "told": tensor((-1, len(WHEN) + len(RATES))),
            }
        )

        def check(value: Any, path: str) -> None:
            declared(value, path)
            steps = value["told"][:, 0]
            if len(steps) != len(value["measured"]):
                refuse(value["measured"], f"{path}/measured", f"{len(steps)} rows, as in told,")
            rising = bool((steps.diff() > 0).all()) and bool((steps == steps.round()).all())
            if not (rising and bool(((steps >= 0) & (steps < 2**53)).all())):
                refuse(value["told"], f"{path}/told", "a first column of rising step numbers")

        return check

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; the last step of a shorter run may be one that this run leaves out."""
        kept = [self.due(int(step)) for step in state["told"][:, 0]]
        self._make_room(sum(kept))
        self.rows = sum(kept)
        told = state["told"][kept].numpy()
        self._when[: self.rows], self._rates[: self.rows] = np.hsplit(told, [len(WHEN)])
        self._measured[: self.rows] = state["measured"][kept].to(self._measured)

    def _columns(
        self, when: npt.NDArray[Any], measured: npt.NDArray[Any], rates: npt.NDArray[Any]
    ) -> History:
        names = (*MEASURED, *self._metrics)
        return {
            "step": when[:, 0].astype(np.int64),
            "seconds": when[:, 1].copy(),
            **{name: measured[:, place].copy() for place, name in enumerate(names)},
            **{name: rates[:, place].copy() for place, name in enumerate(RATES)},
        }


def add_direction_samples(history: History, draw: Draw) -> None:
    """Add how many samples of f and of g were behind each x direction, where that was chosen."""
    for level, size in zip(Level, draw.direction_samples, strict=True):
        if size is not None:
            history[f"{level.value}_direction_samples"] = np.full(len(history["step"]), size)


def _longer(tensor: Tensor, more: int) -> Tensor:
    return torch.cat([tensor, tensor.new_empty((more, *tensor.shape[1:]))])
