"""What every method has that descends in x and in y: two step sizes, or two optimizers."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, ClassVar

from bilevel.errors import ArgumentError
from bilevel.methods.base import Method, S
from bilevel.methods.capabilities import Ability, Limit
from bilevel.problem import Number, Problem
from bilevel.sampling import Draw
from bilevel.stepping import (
    FoundRate,
    FoundSizes,
    GivenSizes,
    OptimizerFactory,
    PenaltyRates,
    Rates,
    Schedule,
    StepSizePolicy,
    Traits,
    Update,
    as_schedule,
    positive_at,
    rate_or_optimizer,
)
from bilevel.variables import Variable


def _finds_a_rate(method: Any) -> bool:
    return method.rates.lower is None or method.rates.upper is None


@dataclass(frozen=True)
class DescentMethod(Method[S]):
    """A method with a step size for each level.

    Args:
        lower_lr: the step of y. "auto": found, see :mod:`bilevel.stepping.found`.
        upper_lr: the step of x. "auto": found and tested, see there.
        lower_optimizer: a factory ``params -> torch.optim.Optimizer``, or learning-rate scheduler
            of one, for y instead of plain steps; replaces lower_lr.
        upper_optimizer: the same for x; replaces upper_lr.
    """

    lower_lr: FoundRate = "auto"
    upper_lr: FoundRate = "auto"
    _: KW_ONLY
    lower_optimizer: OptimizerFactory | None = None
    upper_optimizer: OptimizerFactory | None = None

    limits: ClassVar[tuple[Limit, ...]] = (
        Limit(
            Ability.COMPILE,
            lambda method: method.lower_optimizer is not None,
            "lower_optimizer decides how y moves",
        ),
        Limit(
            Ability.STACK,
            lambda method: method.lower_optimizer is not None or method.upper_optimizer is not None,
            "an optimizer keeps a state of its own for each run",
        ),
        Limit(
            Ability.STACK,
            _finds_a_rate,
            "each run finds its rates for itself ('auto'); give numbers, such as the last in "
            "history['lower_lr'] and a part of that in history['upper_lr'] of one run",
        ),
        Limit(
            Ability.SHARDS,
            _finds_a_rate,
            "lower_lr='auto' and upper_lr='auto' look at whole vectors, but each rank holds a "
            "part; give both as numbers, or lower_optimizer and upper_optimizer",
        ),
    )

    auxiliary_rate: ClassVar[str] = ""
    """The argument for one more rate of the lower level, which is lower_lr where it is None."""

    def __post_init__(self) -> None:
        _ = self.rates, self._auxiliary  # a bad rate is refused at construction

    @cached_property
    def rates(self) -> Rates:
        """The step sizes as functions of k."""
        return Rates(self._lower_schedule(), self._upper_schedule())

    @cached_property
    def _auxiliary(self) -> Schedule | None:
        """The auxiliary rate as a function of k; None: as lower_lr."""
        rate = getattr(self, self.auxiliary_rate) if self.auxiliary_rate else None
        return None if rate is None else as_schedule(self.auxiliary_rate, rate)

    def auxiliary_at(self, k: int, lower: Number) -> Number:
        """The auxiliary rate at step k, at which that of y is ``lower``."""
        if self._auxiliary is None:
            return lower
        return positive_at(self.auxiliary_rate, self._auxiliary, k)

    def _lower_schedule(self) -> Schedule | None:
        return rate_or_optimizer("lower_lr", self.lower_lr, "lower_optimizer", self.lower_optimizer)

    def _upper_schedule(self) -> Schedule | None:
        return rate_or_optimizer("upper_lr", self.upper_lr, "upper_optimizer", self.upper_optimizer)

    def stiffness(self, lower: float, upper: float, multiplier: float) -> float:
        """The curvature that the steps of y meet, from those of g and f in y and the multiplier."""
        return lower

    def steady_share(self, k: int) -> float:
        """The share of the longest stable lower step that the method can take under noise."""
        return 1.0

    @property
    def _needs_lower(self) -> bool:
        """Whether the lower step has to be found."""
        follows = bool(self.auxiliary_rate) and self._auxiliary is None
        return self.rates.lower is None or (follows and self.lower_optimizer is not None)

    @property
    def _raises_multiplier(self) -> bool:
        """Whether the multiplier may be chosen, and raised where it is found to be too small."""
        return False

    @property
    def _least_multiplier(self) -> float:
        """What the multiplier is at least, where it may be chosen."""
        return 0.0

    @property
    def approaches(self) -> bool:
        """Whether y comes nearer to y*(x) from step to step."""
        return True

    follows_path: ClassVar[bool] = False
    """Whether lower steps may be longer or shorter than the rate says, and more than T."""

    settles: ClassVar[bool] = True
    """Whether F is f at y*(x), towards which y may be moved on, and not f after T steps."""

    def check(self, problem: Problem, draw: Draw, x: Variable) -> None:
        tables = [name for name, by_rows in zip(x.names, x.row_sparse, strict=True) if by_rows]
        if tables and self.rates.upper is None and not draw.sweeps:
            raise ArgumentError(
                f"upper_lr='auto' compares each direction of x with the one before, but of "
                f"{tables[0]} every minibatch moves other rows; give upper_lr as a number, or "
                f"upper_optimizer=lambda params: torch.optim.SparseAdam(params, lr=0.01), or "
                f"direction_batch_size='all'"
            )

    def x_update(self, problem: Problem, x: Variable) -> Update:
        """How x moves."""
        return Update(x, problem.x_projections(x), self.upper_optimizer)

    def carried(self, problem: Problem, x: Variable, y: Variable) -> dict[str, Any]:
        """The fields that every state starts with, for a run from x and y."""
        start = 0.0 if isinstance(self.rates, PenaltyRates) else math.nan
        return {
            "x": x,
            "k": 0,
            "multiplier": start,
            "policy": self._policy(y),
            "x_update": self.x_update(problem, x),
        }

    def two_copies(
        self, problem: Problem, x: Variable, y: Variable, name: str, *, plain_z: bool = False
    ) -> dict[str, Any]:
        """The fields of a :class:`~bilevel.methods.state.TwoCopyState`; ``name`` is that of z."""
        z = y.clone(name)
        z_optimizer = None if plain_z else self.lower_optimizer
        return {
            **self.carried(problem, x, y),
            "y": y,
            "z": z,
            "y_update": Update(y, problem.y_projections(y), self.lower_optimizer),
            "z_update": Update(z, problem.y_projections(z), z_optimizer),
        }

    def _policy(self, y: Variable) -> StepSizePolicy:
        if not (self._needs_lower or self.rates.upper is None):
            return GivenSizes(self.rates)
        traits = Traits(
            self.stiffness if self._needs_lower else None,
            raises=self._raises_multiplier,
            least_multiplier=self._least_multiplier,
            inner_steps=getattr(self, "inner_steps", 1),
            follows_path=self.follows_path and self.rates.lower is None,
            settles=self.settles,
            approaches=self.approaches,
            steady=self.steady_share,
        )
        return FoundSizes(self.rates, y, traits)
