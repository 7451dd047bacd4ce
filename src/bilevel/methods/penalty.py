"""What the methods that follow a penalised copy have in common: their arguments and their rates."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

from bilevel import theory
from bilevel.checks import check_choice
from bilevel.methods.base import S
from bilevel.methods.descent import DescentMethod
from bilevel.methods.updates import PenaltyRates, rate_or_optimizer
from bilevel.problem import Stencil
from bilevel.schedules import Rate, as_schedule

P = TypeVar("P", bound="PenaltyMethod[Any]")

COUPLINGS = ("shared", "independent")


@dataclass(frozen=True)
class PenaltyMethod(DescentMethod[S]):
    """A method on Phi(x, {y_j}), see :mod:`bilevel.problem`.

    Args:
        lower_lr: gamma_k, the step of z, the copy that solves the lower level; it must stay below
            2 / L_g, where L_g is the curvature of g in y. None: 0.1.
        upper_lr: the step of x. None: 0.1.
        multiplier: lam_k, which must not decrease. The bias of the x direction is O(1 / lam).
        penalty_lr: beta_k, the step of y, the penalised copy; beta_k * (L_g + L_f / lam_k) must
            stay below 2. None: as lower_lr, which keeps y and z in lockstep.
        coupling: "shared" evaluates y and z on the same samples, so that the noise of their
            difference cancels; "independent" draws afresh for every term, as the paper's analysis
            has it, and pays with noise that grows with lam^2.
        lower_optimizer: a factory ``params -> torch.optim.Optimizer`` for y and z instead of plain
            steps; it is given directions in the scale of g, and replaces lower_lr and penalty_lr.
        upper_optimizer: the same for x; replaces upper_lr.
    """

    multiplier: Rate = 10.0
    _: KW_ONLY
    penalty_lr: Rate | None = None
    coupling: Literal["shared", "independent"] = "shared"

    algorithm: ClassVar[Literal["f2sa", "f3sa"]]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("coupling", self.coupling, COUPLINGS)

    @cached_property
    def stencil(self) -> Stencil:
        """The finite difference behind the x direction."""
        raise NotImplementedError

    @property
    def shared(self) -> bool:
        """Whether all copies are evaluated on the same samples."""
        return self.coupling == "shared"

    @cached_property
    def rates(self) -> PenaltyRates:
        """The step sizes and the multiplier as functions of k."""
        lower = self._lower_schedule()
        penalty = rate_or_optimizer(
            "penalty_lr", self.penalty_lr, "lower_optimizer", self.lower_optimizer, default=lower
        )
        multiplier = as_schedule("multiplier", self.multiplier)
        return PenaltyRates(lower, self._upper_schedule(), penalty, multiplier)

    @classmethod
    def from_theory(
        cls: type[P], constants: theory.Constants, regime: str = "stochastic", **choices: Any
    ) -> P:
        """The method with the paper's step sizes for a problem with these constants.

        ``regime`` is "stochastic", "upper-noise" or "deterministic", and ``choices`` go to
        :func:`bilevel.theory.design`. Sampling is the paper's: independent.
        """
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
