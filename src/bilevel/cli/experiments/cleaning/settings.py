"""The settings of every contender, and how they were found."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bilevel.cli.experiments.cleaning.contenders import Settings
from bilevel.errors import ArgumentError

PACKAGED = Path(__file__).with_name("settings.json")


@dataclass(frozen=True)
class Trial:
    """One combination of a grid and its gap, rounded to 0.1%; None: the run failed."""

    settings: Settings
    gap: float | None


@dataclass(frozen=True)
class Choice:
    """The settings chosen for one contender, corruption and batch size.

    Attributes:
        contender: the name of the contender.
        corruption, batch: those of the trials.
        settings: the settings of the trial with the lowest gap.
        trials: all trials.
    """

    contender: str
    corruption: float
    batch: int
    settings: Settings
    trials: list[Trial]

    def __str__(self) -> str:
        gaps = ", ".join("failed" if t.gap is None else f"{t.gap:.1%}" for t in self.trials)
        return (
            f"p {self.corruption}, batch {self.batch}, {self.contender}: {self.settings}; "
            f"the gaps of all trials: {gaps}"
        )

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Choice:
        """The inverse of :func:`dataclasses.asdict`."""
        return cls(**{**found, "trials": [Trial(**trial) for trial in found["trials"]]})


@dataclass(frozen=True)
class Tuned:
    """Settings for the whole experiment.

    Attributes:
        how: how they were found, in words.
        seconds: the processor time of each trial.
        seed: the seed of the minibatches of the trials.
        choices: one for each contender, corruption and batch size.
    """

    how: str
    seconds: float
    seed: int
    choices: list[Choice]

    def of(self, contender: str, corruption: float, batch: int) -> Settings:
        """The settings of a contender for one corruption and batch size."""
        wanted = (contender, corruption, batch)
        for choice in self.choices:
            if (choice.contender, choice.corruption, choice.batch) == wanted:
                return choice.settings
        raise ArgumentError(
            f"there are no settings of {contender!r} for corruption {corruption} and "
            f"minibatches of {batch}; `bilevel reproduce cleaning --tune FILE` finds them"
        )

    def to_json(self) -> dict[str, Any]:
        """The settings as a JSON object."""
        return asdict(self)

    @classmethod
    def load(cls, path: Path) -> Tuned:
        """Read settings from a file that holds the result of :meth:`to_json`."""
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
        """The settings with which the published figures of this project were made."""
        return cls.load(PACKAGED)
