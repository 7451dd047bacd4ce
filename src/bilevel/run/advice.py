"""What to advise to the user of a run, which depends on what that user has set.

A rate that was given can be made smaller, and "auto" can take its place. One that "auto" found was
set by nobody: there is no argument to lower, but a number can take its place, or a set can keep the
variable from where its steps go wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from bilevel.problem import Level
from bilevel.run.solver import Solver
from bilevel.sampling import EpisodicDraw


class Source(Enum):
    """Where the steps of one level come from."""

    FOUND = auto()  # by "auto"
    GIVEN = auto()  # as a number or as a function of k
    OPTIMIZER = auto()  # of the user's own
    ABSENT = auto()  # the method takes none


def source_of(method: Any, level: Level) -> Source:
    """Where the steps of x (upper) or of y (lower) come from."""
    if level is Level.LOWER and getattr(method, "learned_lr", None) is not None:
        return Source.ABSENT  # x holds the steps
    if getattr(method, f"{level.value}_optimizer", None) is not None:
        return Source.OPTIMIZER
    if not hasattr(method, f"{level.value}_lr"):
        return Source.ABSENT
    rates = getattr(method, "rates", None)
    found = rates is not None and getattr(rates, level.value) is None
    return Source.FOUND if found else Source.GIVEN


def finds_a_rate(method: Any) -> bool:
    """Whether "auto" finds the steps of x or of y."""
    return any(source_of(method, level) is Source.FOUND for level in Level)


@dataclass(frozen=True)
class Choices:
    """What the user of a run chose, as far as advice depends on it.

    Attributes:
        upper, lower: where the steps of x and of y come from.
        can_find: whether "auto" would be accepted in place of a given rate of x.
        has_inner_steps: whether the method takes ``inner_steps``.
        has_multiplier: whether it takes a ``multiplier``, which is a number.
        x_bounded, y_bounded: whether x and y have a set.
        noisy: whether f or g is evaluated on minibatches.
        has_batch_size: whether the lower level's minibatches are sampled here, so that they may be
            larger.
        episodic: whether the batches are those of tasks, whose source decides their size.
    """

    upper: Source
    lower: Source
    can_find: bool
    has_inner_steps: bool
    has_multiplier: bool
    x_bounded: bool
    y_bounded: bool
    noisy: bool
    has_batch_size: bool
    episodic: bool = False

    def source(self, level: Level) -> Source:
        """Where the steps of that level come from."""
        return self.upper if level is Level.UPPER else self.lower

    def shorter(self, level: Level, longest: float | None = None) -> list[str]:
        """How to make the steps of a level shorter, if possible not longer than that."""
        name, source = f"{level.value}_lr", self.source(level)
        limit = "" if longest is None else f"={longest:.2g}"
        if source is Source.GIVEN:
            smaller = f"use {name}{limit} or less" if limit else f"use a smaller {name}"
            return [smaller, f"use {name}='auto'"] if self.can_find else [smaller]
        if source is Source.OPTIMIZER:
            rate = f"lr{limit} or less" if limit else "a smaller learning rate"
            return [f"give {level.value}_optimizer {rate}"]
        if source is Source.ABSENT:
            return []
        number = f"{name}{limit}" if limit else f"a number as {name}"
        tried = "" if limit else f" (history[{name!r}] has what was found)"
        return [*self.bounds(level), f"give {number} in place of 'auto'{tried}"]

    def bounds(self, *levels: Level) -> list[str]:
        """Sets that are not there yet."""
        missing = {
            Level.UPPER: [] if self.x_bounded else ["bound x by x_set"],
            Level.LOWER: [] if self.y_bounded else ["bound y by y_set"],
        }
        return [advice for level in levels for advice in missing[level]]

    @property
    def better_fitted(self) -> list[str]:
        """How to have y nearer to the lower solution when x moves."""
        return ["take more inner_steps"] if self.has_inner_steps else []

    @property
    def against_resting(self) -> str:
        """What may help where y does not come near the lower solution."""
        parts = ["take more steps", *self.better_fitted, "start from a y0 that is nearer"]
        return listed([*parts, "scale the features behind g, so that it is curved alike in y"])

    @property
    def larger_multiplier(self) -> list[str]:
        """How to have less bias."""
        return ["use a larger multiplier"] if self.has_multiplier else []

    @property
    def against_overflow(self) -> str:
        """What helps where numbers are not finite and nothing is known of the cause."""
        parts: list[str] = []
        for level in (Level.LOWER, Level.UPPER):
            if self.source(level) is not Source.FOUND:
                parts += self.shorter(level)
        if self.lower is Source.GIVEN:
            parts += self.larger_multiplier
        if Source.FOUND in (self.upper, self.lower) or not parts:
            parts += self.bounds(Level.UPPER, Level.LOWER)
            parts += ["start from another x0 or y0"]
        return listed(parts)

    @property
    def against_rising(self) -> str:
        """What may help where f rose."""
        parts = self.shorter(Level.UPPER) if self.upper is not Source.FOUND else []
        parts += self.better_fitted + self.larger_multiplier
        if self.episodic:
            parts += ["have more tasks in a step, Episodes(source, tasks=...)"]
        elif self.noisy:
            parts += ["use a larger batch_size or direction_batch_size"]
        return listed([*parts, "start from another x0 or y0"])


def choices_of(solver: Solver) -> Choices:
    """What the user of that run chose."""
    method, problem, draw = solver.method, solver.problem, solver.draw
    multiplier = getattr(method, "multiplier", None)
    return Choices(
        upper=source_of(method, Level.UPPER),
        lower=source_of(method, Level.LOWER),
        can_find=solver.ranks is None and (draw.sweeps or not any(solver.state.x.row_sparse)),
        has_inner_steps=hasattr(method, "inner_steps"),
        has_multiplier=multiplier is not None and not callable(multiplier),
        x_bounded=problem.x_set is not None,
        y_bounded=problem.y_set is not None,
        noisy=not (draw.upper.deterministic and draw.lower.deterministic),
        has_batch_size=draw.lower.sampled_here and not draw.lower.deterministic,
        episodic=isinstance(draw, EpisodicDraw),
    )


def listed(parts: Sequence[str]) -> str:
    """Several pieces of advice, of which any one may help."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])}, or {parts[-1]}"
