"""Step sizes: what the user gives as rates, and their values at one outer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from bilevel.errors import ArgumentError, ArgumentTypeError, MultiplierWarning, warn
from bilevel.errors.checks import check_function
from bilevel.problem import Number
from bilevel.stepping.schedules import Constant, Rate, Schedule, as_schedule, positive_at

OptimizerFactory: TypeAlias = Callable[[Iterable[Tensor]], torch.optim.Optimizer | LRScheduler]
"""``params -> torch.optim.Optimizer``, such as ``lambda p: torch.optim.Adam(p, lr=1e-3)``.

Or a learning-rate scheduler of one, which steps after each of its steps:
``lambda p: CosineAnnealingLR(torch.optim.Adam(p, lr=1e-3), T_max=1000)``.
"""

FoundRate: TypeAlias = Rate | Literal["auto"]
"""A rate, or "auto": it is found while the run goes on."""


@dataclass(frozen=True)
class StepSizes:
    """The step sizes of one outer step; with stacked runs each may be a tensor, one per run.

    Attributes:
        lower: gamma_k, the step of the copy that solves the lower level; NaN: not known yet.
        penalty: beta_k, the step of a penalised copy; NaN: as lower.
        upper: the step of x; NaN where its update finds it.
        multiplier: lam_k; NaN where the method has none.
    """

    lower: Number
    penalty: Number
    upper: Number
    multiplier: Number


@dataclass(frozen=True)
class Rates:
    """The two step sizes as functions of k, and their checked values at one k.

    Attributes:
        lower: gamma_k, the step of the copy that solves the lower level; None: to be found.
        upper: the step of x; None: to be found.
    """

    lower: Schedule | None
    upper: Schedule | None

    @property
    def constant(self) -> bool:
        """Whether they are the same at every k."""
        return all(isinstance(schedule, Constant | None) for schedule in vars(self).values())

    def at(self, k: int, before: float) -> StepSizes:
        """All of them at k; ``before`` is the multiplier of the step before."""
        lower = _at("lower_lr", self.lower, k)
        return StepSizes(lower, lower, _at("upper_lr", self.upper, k), math.nan)


@dataclass(frozen=True)
class PenaltyRates(Rates):
    """With those of a penalised copy.

    Attributes:
        penalty: beta_k, the step of the penalised copies; None: as lower.
        multiplier: lam_k.
    """

    penalty: Schedule | None
    multiplier: Schedule

    def at(self, k: int, before: float) -> StepSizes:
        lower = _at("lower_lr", self.lower, k)
        penalty = lower if self.penalty is None else _at("penalty_lr", self.penalty, k)
        upper = _at("upper_lr", self.upper, k)
        return StepSizes(lower, penalty, upper, self._multiplier_at(k, before))

    def _multiplier_at(self, k: int, before: float) -> float:
        """lam_k; a warning when it is below lam_{k-1} (``before``)."""
        multiplier = positive_at("multiplier", self.multiplier, k)
        falling = k >= 2 and self.multiplier(k - 1) < self.multiplier(k - 2)
        if multiplier < before and not falling:  # one warning each time the schedule turns down
            warn(
                MultiplierWarning(
                    f"multiplier({k}) = {multiplier!r} is below its value of {before!r} one step "
                    f"earlier; it must not decrease, or the bias of the direction grows again"
                )
            )
        return multiplier


def _at(name: str, schedule: Schedule | None, k: int) -> float:
    return math.nan if schedule is None else positive_at(name, schedule, k)


def rate_or_optimizer(
    name: str,
    rate: FoundRate | None,
    optimizer_name: str,
    optimizer: OptimizerFactory | None,
) -> Schedule | None:
    """The schedule of one rate, None where it is to be found or follows another.

    A rate beside an optimizer that would ignore it is refused; with an optimizer the rate is 1.
    """
    if optimizer is not None:
        factory = "a function of the parameters that returns a torch.optim.Optimizer"
        check_function(optimizer_name, optimizer, "params", expected=factory)
    if rate is None or (isinstance(rate, str) and rate == "auto"):
        return None if optimizer is None else Constant(1.0)
    if optimizer is not None:
        raise ArgumentError(
            f"{name}={rate!r} would be ignored, because {optimizer_name} brings its own "
            f"learning rate; give one of the two"
        )
    if isinstance(rate, str):
        raise ArgumentTypeError(
            f"{name} must be 'auto', a positive number or a function of the step k, not {rate!r}"
        )
    return as_schedule(name, rate)
