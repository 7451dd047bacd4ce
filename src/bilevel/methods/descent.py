"""What every method has that descends in x and in y: two step sizes, or two optimizers."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property

from bilevel.methods.base import Method, S
from bilevel.methods.updates import DEFAULT_RATE, OptimizerFactory, Rates, rate_or_optimizer
from bilevel.schedules import Rate, Schedule


@dataclass(frozen=True)
class DescentMethod(Method[S]):
    """A method with a step size for each level.

    Args:
        lower_lr: the step of y. None: 0.1.
        upper_lr: the step of x. None: 0.1.
        lower_optimizer: a factory ``params -> torch.optim.Optimizer`` for y instead of plain steps;
            replaces lower_lr.
        upper_optimizer: the same for x; replaces upper_lr.
    """

    lower_lr: Rate | None = None
    upper_lr: Rate | None = None
    _: KW_ONLY
    lower_optimizer: OptimizerFactory | None = None
    upper_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        _ = self.rates  # a bad rate is refused at construction

    @cached_property
    def rates(self) -> Rates:
        """The step sizes as functions of k."""
        return Rates(self._lower_schedule(), self._upper_schedule())

    def _lower_schedule(self) -> Schedule:
        return rate_or_optimizer(
            "lower_lr", self.lower_lr, "lower_optimizer", self.lower_optimizer, DEFAULT_RATE
        )

    def _upper_schedule(self) -> Schedule:
        return rate_or_optimizer(
            "upper_lr", self.upper_lr, "upper_optimizer", self.upper_optimizer, DEFAULT_RATE
        )
