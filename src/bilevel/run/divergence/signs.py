"""The signs of divergence that the history of a run shows."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from bilevel.run.history import History
from bilevel.variables import Form
from bilevel.variables.forms import each, many, maybe, real, record, refuse, whole

Series = npt.NDArray[Any]

BLOCK = 64
"""How many recorded steps are inspected at a time."""

RUNAWAY = 100.0
OUTGROWN = 10.0
RISING = 3.0
"""Factors by which levels grow: in a run that runs away, that the multiplier outgrows, or in which
something begins to rise."""

LEVELS = {
    "upper": "f at the lower solution",
    "lower": "g at the lower solution",
    "direction": "the norm of the direction",
    "spread": "multiplier * ||y - z||",
}
"""What is followed, and what messages call it."""


class Symptom(Enum):
    """What kind of sign was seen."""

    RUNNING_AWAY = auto()
    OUTGROWN = auto()
    LAGGING = auto()


@dataclass(frozen=True)
class Sign:
    """A sign of divergence.

    Attributes:
        symptom: its kind.
        text: what was seen, in words.
    """

    symptom: Symptom
    text: str


class Signs:
    """Looks for signs in blocks of the history, and remembers only a few numbers of each block.

    Args:
        scheduled: whether the multiplier is a function of k.
        patience: before so many recorded steps nothing is a sign.

    Attributes:
        rows: how many recorded steps were inspected.
        calm: whether nothing rises, neither within the last block nor compared with those before.
    """

    def __init__(self, *, scheduled: bool, patience: int) -> None:
        self._scheduled = scheduled
        self._patience = patience
        self.rows = 0
        self.calm = True
        self._ends: list[int] = []
        self._levels: dict[str, list[float]] = {name: [] for name in (*LEVELS, "multiplier")}
        self._peaks: dict[str, list[float]] = {name: [] for name in LEVELS}
        self._lagging: tuple[int, float] | None = None  # since which row, and by how much at first
        self._lower_when_probed = math.inf
        self._noticed: int | None = None  # how many blocks there were when a sign was first seen

    def inspect(self, block: History, rows: int) -> Sign | None:
        """Take the block of the history that ends at that row; the sign in it, if there is one."""
        first, self.rows = self.rows, rows
        lam = np.where(np.isnan(block["multiplier"]), 0.0, block["multiplier"])
        gap = np.where(np.isnan(block["gap"]), 0.0, block["gap"])
        series = {
            "upper": np.abs(block["upper"]),
            "lower": np.abs(block["lower"]),
            "direction": block["direction_norm"],
            "spread": lam * np.sqrt(2 * np.abs(gap)),
            "multiplier": lam,
        }
        for name, values in series.items():
            self._levels[name].append(float(np.median(values)))
        self._ends.append(rows)
        self.calm = all(self._is_calm(name, series[name]) for name in LEVELS)
        sign = (
            self._running_away()
            or self._outgrown()
            or self._lags(first, lam * gap, series["upper"])
        )
        sign = sign if rows >= self._patience else None
        if sign is None:
            self._noticed = None
        elif self._noticed is None:
            self._noticed = len(self._ends) - 1
        for name, peaks in self._peaks.items():
            peaks.append(max(self._levels[name][-1], peaks[-1] if peaks else 0.0))
        return sign

    def lower_fell(self) -> bool:
        """Whether g fell since this was last asked."""
        before, self._lower_when_probed = self._lower_when_probed, self._levels["lower"][-1]
        return self._lower_when_probed < 0.95 * before

    @property
    def multiplier_growth(self) -> float:
        """By which factor the multiplier grew over the second half of the run."""
        multipliers = self._levels["multiplier"]
        before = multipliers[self._block_before(0.5)] if len(multipliers) > 1 else 0.0
        return multipliers[-1] / before if before > 0 else 1.0

    def _block_before(self, share: float) -> int:
        """The last block that ended in that share of the run, or before a sign was first seen."""
        index = max(0, bisect.bisect_right(self._ends, share * self._ends[-1]) - 1)
        return index if self._noticed is None else max(0, min(index, self._noticed - 1))

    def _is_calm(self, name: str, values: Series) -> bool:
        half = len(values) // 2
        early = float(np.median(values[:half])) if half else math.inf
        known = self._peaks[name][self._block_before(0.75)] if len(self._ends) > 1 else 0.0
        return float(np.median(values[half:])) <= RISING * max(early, known)

    def _running_away(self) -> Sign | None:
        if len(self._ends) < 2:
            return None
        reference = self._block_before(0.75)
        rises = {name: (self._peaks[name][reference], self._levels[name][-1]) for name in LEVELS}
        large = {name: (a, b) for name, (a, b) in rises.items() if b > RUNAWAY * a > 0}
        if len(large) < 2:
            return None
        told = " and ".join(
            f"{LEVELS[name]} from {a:.3g} to {b:.3g}" for name, (a, b) in large.items()
        )
        return Sign(Symptom.RUNNING_AWAY, f"over {self.rows} recorded steps there rose {told}")

    def _outgrown(self) -> Sign | None:
        if not self._scheduled or self.rows < BLOCK or len(self._ends) < 2:
            return None
        before = self._peaks["spread"][self._block_before(0.5)]
        now = self._levels["spread"][-1]
        if self.multiplier_growth < OUTGROWN or not now > OUTGROWN * before > 0:
            return None
        return Sign(
            Symptom.OUTGROWN,
            f"over {self.rows} recorded steps {LEVELS['spread']} rose from {before:.3g} to "
            f"{now:.3g}",
        )

    def _lags(self, first: int, excess: Series, upper: Series) -> Sign | None:
        """Whether g(x, y) < g(x, z) for long; ``excess`` is lam times the gap."""
        amount = -float(np.median(excess))
        if not (np.mean(excess < 0) >= 0.95 and amount > float(np.median(upper))):
            self._lagging = None
            return None
        if self._lagging is None:
            self._lagging = first, amount
        since, at_first = self._lagging
        long = self.rows - since
        if long < max(BLOCK, self.rows / 2) or amount < 0.5 * at_first:
            return None
        return Sign(
            Symptom.LAGGING,
            f"for {long} recorded steps g(x, y) has been below g(x, z), now by {amount:.3g} / "
            f"multiplier",
        )

    def state_dict(self) -> dict[str, Any]:
        """All of it, as lists of numbers."""
        return {
            "rows": self.rows,
            "ends": list(self._ends),
            "levels": {name: list(values) for name, values in self._levels.items()},
            "lagging": None if self._lagging is None else list(self._lagging),
            "probed_lower": self._lower_when_probed,
            "noticed": self._noticed,
        }

    def state_form(self) -> Form:
        """One level of each kind for each block that was inspected."""
        level = many(real(0.0, nan=True, infinite=True))
        declared = record(
            {
                "rows": whole(),
                "ends": many(whole(1)),
                "levels": record(dict.fromkeys((*LEVELS, "multiplier"), level)),
                "lagging": maybe(each([whole(), real(0.0, infinite=True)])),
                "probed_lower": real(0.0, nan=True, infinite=True),
                "noticed": maybe(whole()),
            }
        )

        def check(value: Any, path: str) -> None:
            declared(value, path)
            ends, levels = value["ends"], value["levels"]
            if any(len(column) != len(ends) for column in levels.values()):
                refuse(levels, f"{path}/levels", f"for each kind one level for each of {ends}")
            if list(ends) != sorted(set(ends)) or value["rows"] < max(ends, default=0):
                refuse(ends, f"{path}/ends", f"a list of rising numbers up to {value['rows']}")

        return check

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.rows, self._ends = state["rows"], list(state["ends"])
        self._levels = {name: list(values) for name, values in state["levels"].items()}
        self._peaks = {
            name: np.maximum.accumulate([0.0, *self._levels[name]])[1:].tolist() for name in LEVELS
        }
        self._lagging = None if state["lagging"] is None else (*state["lagging"],)
        self._lower_when_probed, self._noticed = state["probed_lower"], state["noticed"]
