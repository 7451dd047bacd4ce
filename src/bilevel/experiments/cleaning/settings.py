"""The settings of every contender, and how they were found."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bilevel.errors import ArgumentError
from bilevel.experiments.cleaning.contenders import Settings

PACKAGED = Path(__file__).with_name("settings.json")


@dataclass(frozen=True)
class Trial:
    """One combination of a grid, and the gap that it left, to 0.1%; None: it broke."""

    settings: Settings
    gap: float | None


@dataclass(frozen=True)
class Choice:
    """What was chosen for a contender in one place of the experiment.

    Attributes:
        contender: its name.
        corruption, batch: where.
        settings: the trial with the lowest gap.
        trials: all of them.
    """

    contender: str
    corruption: float
    batch: int
    settings: Settings
    trials: list[Trial]

    def __str__(self) -> str:
        gaps = ", ".join("broke" if t.gap is None else f"{t.gap:.1%}" for t in self.trials)
        return (
            f"p {self.corruption}, batch {self.batch}, {self.contender}: {self.settings}; "
            f"the gaps of all: {gaps}"
        )

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Choice:
        """What :func:`dataclasses.asdict` gave."""
        return cls(**{**found, "trials": [Trial(**trial) for trial in found["trials"]]})


@dataclass(frozen=True)
class Tuned:
    """Settings for the whole experiment.

    Attributes:
        how: they were found, in words.
        seconds: of the processor that each trial had.
        seed: of its minibatches.
        choices: one for each contender and place.
    """

    how: str
    seconds: float
    seed: int
    choices: list[Choice]

    def of(self, contender: str, corruption: float, batch: int) -> Settings:
        """The settings of a contender in one place."""
        for choice in self.choices:
            if (choice.contender, choice.corruption, choice.batch) == (
                contender,
                corruption,
                batch,
            ):
                return choice.settings
        raise ArgumentError(
            f"there are no settings of {contender!r} for corruption {corruption} and "
            f"minibatches of {batch}; `bilevel reproduce cleaning --tune FILE` finds them"
        )

    def to_json(self) -> dict[str, Any]:
        """As it goes to a file."""
        return asdict(self)

    @classmethod
    def load(cls, path: Path) -> Tuned:
        """What :meth:`to_json` gave."""
        try:
            found = json.loads(path.read_text())
            choices = [Choice.from_json(choice) for choice in found["choices"]]
            return cls(**{**found, "choices": choices})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                f"{path} does not hold settings as `bilevel reproduce cleaning --tune FILE` "
                f"writes them ({type(error).__name__}: {error})"
            ) from error

    @classmethod
    def packaged(cls) -> Tuned:
        """Those with which the figures of the project were made."""
        return cls.load(PACKAGED)
