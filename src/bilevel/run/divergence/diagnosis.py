"""What is wrong with a run that shows a sign of divergence, and what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from bilevel.problem import Level
from bilevel.run.advice import Choices, Source, choices_of, listed, source_of
from bilevel.run.divergence.signs import OUTGROWN, Sign, Symptom
from bilevel.run.history import History
from bilevel.run.solver import Solver
from bilevel.stepping import StepSizes, Update, slope_of, steepest_curvature
from bilevel.variables import flatten, length

BOTH_LEVELS = (Level.LOWER, Level.UPPER)
CURVATURE_MARGIN = 1.1
"""The curvature L is measured from below: a step this much beyond 2/L is certainly too long."""

RESTING = 1e-3
"""The part of its length by which x may move and be said to rest: too little to tell upon y."""


@dataclass(frozen=True)
class Diagnosis:
    """What was seen, what is wrong, and what to change.

    Attributes:
        seen: the sign, in words.
        cause: what is wrong, as far as it can be told.
        advice: what to change.
        levels: whose steps may be too long.
    """

    seen: str
    cause: str
    advice: str
    levels: tuple[Level, ...]

    def __str__(self) -> str:
        return f"{self.seen}. The likely cause: {self.cause}. What helps: {self.advice}"


@dataclass(frozen=True)
class Overlong:
    """A step of y beyond 2/L.

    Attributes:
        penalty: whether it is that of the penalised copy, which has a rate of its own.
        rate: the length of the step.
        curvature: L, of the function that the step descends on.
        choices: what the user set.
    """

    penalty: bool
    rate: float
    curvature: float
    choices: Choices

    def diagnosis(self, seen: str) -> Diagnosis:
        """The same in words."""
        longest = 1 / self.curvature
        if self.penalty:
            name, advice = "penalty_lr", [f"use penalty_lr={longest:.2g} or less", "leave it out"]
        else:
            name, advice = _step_of_y(self.choices), self.choices.shorter(Level.LOWER, longest)
        return Diagnosis(
            seen,
            f"{name} is {self.rate:.3g}, beyond 2/L = {2 * longest:.3g} for the curvature L = "
            f"{self.curvature:.3g} that the lower steps meet, so that each step overshoots by more "
            f"than it corrects",
            f"{listed(advice)} (1/L is {longest:.2g})",
            (Level.LOWER,),
        )


def x_rests(solver: Solver, block: History) -> bool:
    """Whether x hardly moved in the steps of a block of the history."""
    if not solver.state.x_update.plain:
        return False
    rates, norms = block["upper_lr"], block["direction_norm"]
    moved = rates > 0
    steps = int(block["step"][-1] - block["step"][0]) + 1
    way = float(np.sum(rates[moved] * norms[moved])) * steps / len(rates)
    x = flatten(solver.state.x.leaves).detach()
    return way <= RESTING * (length(x) or math.sqrt(x.numel()))


def _step_of_y(choices: Choices) -> str:
    """What gives the length of the lower step, in words."""
    if choices.lower is Source.OPTIMIZER:
        return "the lr of lower_optimizer"
    return "the step of y that was found" if choices.lower is Source.FOUND else "lower_lr"


class Probe:
    """The curvatures of g and f in y at the lower solution, on samples that come again.

    Attributes:
        steepest: the curvature of g that is largest in absolute value, with its sign.
    """

    def __init__(self, solver: Solver) -> None:
        problem, state, draw = solver.evaluator.problem, solver.state, solver.draw
        self._solver = solver
        self._y = state.solution
        self._g = slope_of(problem.g, state.x, [draw.lower.peek()])
        f = slope_of(problem.f, state.x, [draw.upper.peek()])
        self.steepest = steepest_curvature(self._g, self._y)
        self._of_f = abs(steepest_curvature(f, self._y))

    def longest_step(self, *, smallest: float) -> Overlong | None:
        """The longest step of y, if it is certainly beyond ``smallest`` times 2/L."""
        method, now = self._solver.method, step_sizes(self._solver)
        rate, choices = _lower_step(self._solver), choices_of(self._solver)
        if now is None or rate is None:
            return None
        g = abs(self.steepest)
        met = g
        if hasattr(method, "stiffness"):
            met = method.stiffness(g, self._of_f, float(now.multiplier))
        own = getattr(method, "penalty_lr", None) is not None
        found = max(
            Overlong(False, rate, g if own else met, choices),
            Overlong(True, float(now.penalty), met if own else 0.0, choices),
            key=lambda step: step.rate * step.curvature,
        )
        beyond = found.rate * found.curvature > 2 * smallest * CURVATURE_MARGIN
        return found if beyond and math.isfinite(found.curvature) else None

    def least(self) -> float:
        """The smallest curvature of g."""
        top = abs(self.steepest)
        return top - abs(steepest_curvature(self._g, self._y, shift=top))


@contextmanager
def probing(solver: Solver) -> Iterator[Probe | None]:
    """A probe; None where the data or the memory do not allow one."""
    if not _can_probe(solver):
        yield None
        return
    with solver.evaluating_aside():
        try:
            probe = Probe(solver)
        except torch.cuda.OutOfMemoryError:
            probe = None
        yield probe


def _can_probe(solver: Solver) -> bool:
    """Whether samples can be drawn again; those of several ranks would not agree."""
    return solver.ranks is None and solver.draw.lower.probed and solver.draw.upper.probed


def measured_cause(solver: Solver, seen: str) -> Diagnosis | None:
    """What the curvatures of the lower level say of a run in which so much was ``seen``."""
    with probing(solver) as probe:
        if probe is None:
            return None
        step = probe.longest_step(smallest=1 / CURVATURE_MARGIN)
        if step is not None and probe.steepest > 0:
            return step.diagnosis(seen)
        least = min(probe.steepest, probe.least())
        if not least < -1e-3 * abs(probe.steepest):
            return None
        return Diagnosis(
            seen,
            f"g is not convex in y here (it has the curvature {least:.3g} along a direction), so "
            f"that the lower level may have no minimum to follow",
            "add a term such as 0.5 * mu * ||y||^2 to g, or bound y by y_set",
            (Level.LOWER,),
        )


def diagnose(
    solver: Solver, sign: Sign, multiplier_growth: float, *, x_rests: bool = False
) -> Diagnosis:
    """Which of the steps is too long in a run that shows that sign."""
    found = measured_cause(solver, sign.text)
    if found is not None:
        return found
    now, choices = step_sizes(solver), choices_of(solver)
    if x_rests and choices.noisy:
        batches = ["use a larger batch_size"] if choices.has_batch_size else []
        return Diagnosis(
            sign.text,
            f"{_step_of_y(choices)} is too long for some minibatches, which are much steeper than "
            f"others: x hardly moves, so that it is y that runs away",
            listed([*batches, *choices.shorter(Level.LOWER)]),
            (Level.LOWER,),
        )
    if multiplier_growth >= OUTGROWN and now is not None:
        scheduled = callable(getattr(solver.method, "multiplier", None))
        slower = ["let it grow more slowly"] if scheduled else choices.bounds(Level.UPPER)
        if choices.upper is Source.GIVEN:
            slower += ["let upper_lr fall as it grows"]
        return Diagnosis(
            sign.text,
            f"the multiplier, {'now' if scheduled else 'which was raised to'} "
            f"{now.multiplier:.3g}, has grown {multiplier_growth:.3g}-fold over half of the run "
            f"and outgrows the steps, because it multiplies all that y and z lag behind by",
            listed([*slower, *choices.better_fitted, "start from another x0 or y0"]),
            (Level.UPPER,),
        )
    if sign.symptom is Symptom.LAGGING:
        longer = {
            Source.GIVEN: ["use a larger lower_lr"],
            Source.OPTIMIZER: ["give lower_optimizer a larger learning rate"],
        }.get(choices.lower, [])
        return Diagnosis(
            sign.text,
            "z, which is to solve the lower level, does not keep up, and the direction of x is "
            "mostly its error",
            listed(
                [
                    *longer,
                    *choices.better_fitted,
                    *choices.shorter(Level.UPPER)[:1],
                    "start from a y0 that is nearer to the lower solution of x0",
                ]
            ),
            (Level.UPPER,),
        )
    return _upper_too_long(solver, sign.text)


def _upper_too_long(solver: Solver, seen: str) -> Diagnosis:
    """What is left where the lower steps are not to blame, or cannot be judged."""
    now, choices = step_sizes(solver), choices_of(solver)
    rate = math.nan if now is None else float(now.upper)
    given = choices.upper is Source.GIVEN and not math.isnan(rate)
    named = f"upper_lr={rate:.3g}" if given else "the step of x"
    shorter = choices.shorter(Level.UPPER, rate / 4 if given else None)
    if _can_probe(solver) and _lower_step(solver) is not None:
        return Diagnosis(
            seen,
            f"{named} is too long for F (the lower steps are within 2/L, so it is x that goes too "
            f"far)",
            listed([*shorter, *choices.better_fitted] or ["start from another x0 or y0"]),
            (Level.UPPER,),
        )
    return Diagnosis(
        seen,
        f"{named} or that of y is too long (which of them cannot be told: the curvature cannot be "
        f"measured on this data, or an optimizer makes other steps of y than its rate says)",
        listed([*shorter, *choices.shorter(Level.LOWER)] or ["start from another x0 or y0"]),
        BOTH_LEVELS,
    )


def _lower_step(solver: Solver) -> float | None:
    """The length of the step of y; None: it is not a plain step."""
    optimizers = [update.optimizer for update in updates_of(solver, Level.LOWER)]
    now = step_sizes(solver)
    if now is None or source_of(solver.method, Level.LOWER) is Source.ABSENT:
        return None
    if not any(optimizers):
        return float(now.lower)
    (first, *_) = (optimizer for optimizer in optimizers if optimizer is not None)
    (group, *_) = first.param_groups
    if type(first) is torch.optim.SGD and not group["momentum"]:
        return float(group["lr"])
    return None


def step_sizes(solver: Solver) -> StepSizes | None:
    """The step sizes of the last step; None before the first."""
    return solver.state.policy.current


def updates_of(solver: Solver, level: Level) -> list[Update]:
    """How x moves (upper), or how the copies of y move (lower)."""
    x, upper = solver.state.x, level is Level.UPPER
    return [update for update in solver.state.updates() if (update.variable is x) == upper]


def slow_down(solver: Solver, level: Level) -> None:
    """Halve the steps of x, or all those of y."""
    solver.state.policy.slow_down(level)
    for update in updates_of(solver, level):
        update.slow_down()
