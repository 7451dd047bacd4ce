"""What the methods that follow a penalised copy have in common: their arguments and their rates."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from bilevel.errors.checks import check_choice
from bilevel.methods.base import S
from bilevel.methods.descent import DescentMethod
from bilevel.problem import Stencil
from bilevel.stepping import PenaltyRates, Rate, as_schedule, rate_or_optimizer

if TYPE_CHECKING:
    from bilevel import theory

P = TypeVar("P", bound="PaperMethod[Any]")

COUPLINGS = ("shared", "independent")

DEFAULT_MULTIPLIER = 10.0
"""Where a step is given; where "auto" finds both, it finds a multiplier in the units of f and g."""


@dataclass(frozen=True)
class PenaltyMethod(DescentMethod[S]):
    """A method on Phi(x, {y_j}), see :mod:`bilevel.problem`.

    The arguments are described where a user meets them, in :class:`~bilevel.F2SA`.
    """

    multiplier: Rate = DEFAULT_MULTIPLIER
    _: KW_ONLY
    penalty_lr: Rate | None = None
    coupling: Literal["shared", "independent"] = "shared"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("coupling", self.coupling, COUPLINGS)

    @cached_property
    def stencil(self) -> Stencil | None:
        """The finite difference that the x direction is, if it is one."""
        return None

    @property
    def shared(self) -> bool:
        """Whether all copies are evaluated on the same samples."""
        return self.coupling == "shared"

    @cached_property
    def rates(self) -> PenaltyRates:
        """The step sizes and the multiplier as functions of k."""
        penalty = rate_or_optimizer(
            "penalty_lr", self.penalty_lr, "lower_optimizer", self.lower_optimizer
        )
        multiplier = as_schedule("multiplier", self.multiplier)
        return PenaltyRates(self._lower_schedule(), self._upper_schedule(), penalty, multiplier)

    def stiffness(self, lower: float, upper: float, multiplier: float) -> float:
        return lower + upper / multiplier

    @property
    def _raises_multiplier(self) -> bool:
        # with samples of their own the copies' noise grows with the multiplier
        return self._needs_lower and self.shared and not callable(self.multiplier)

    @property
    def _least_multiplier(self) -> float:
        given, finds_both = self.multiplier, self.rates.upper is None
        # beside given steps of x nothing tests the multiplier, nor raises it
        if callable(given) or (given == DEFAULT_MULTIPLIER and finds_both):
            return 0.0
        return float(given)


@dataclass(frozen=True)
class PaperMethod(PenaltyMethod[S]):
    """One of the two algorithms of the paper, for which it gives step sizes."""

    algorithm: ClassVar[Literal["f2sa", "f3sa"]]

    @classmethod
    def from_theory(
        cls: type[P], constants: theory.Constants, regime: str = "stochastic", **choices: Any
    ) -> P:
        """The method with the paper's step sizes for a problem with these constants.

        ``regime`` is "stochastic", "upper-noise" or "deterministic", and ``choices`` go to
        :func:`bilevel.theory.design`. Sampling is the paper's: independent.
        """
        from bilevel import theory  # few programs need it

        design = theory.design(constants, algorithm=cls.algorithm, regime=regime, **choices)
        return cls(
            lower_lr=design.gamma,
            upper_lr=design.upper_lr,
            multiplier=design.multiplier,
            penalty_lr=design.beta,
            coupling="independent",
            **cls._own_choices(design),
        )

    @classmethod
    def _own_choices(cls, design: theory.Design) -> dict[str, Any]:
        """What of a design only this method has an argument for."""
        raise NotImplementedError
