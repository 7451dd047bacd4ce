"""How variables move: rates, plain steps or the user's optimizer, projection."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bilevel.errors import ArgumentError, ArgumentTypeError, MultiplierWarning, StateError
from bilevel.methods.base import saved
from bilevel.schedules import Constant, Rate, Schedule, as_schedule, positive_at
from bilevel.sets import Projection
from bilevel.variables import Variable

OptimizerFactory: TypeAlias = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
"""``params -> torch.optim.Optimizer``, such as ``lambda p: torch.optim.Adam(p, lr=1e-3)``."""

DEFAULT_RATE = Constant(0.1)
"""The step size where none is given: a plain number, right only for well-scaled objectives."""


@dataclass(frozen=True)
class Rates:
    """The two step sizes as functions of k, and their checked values at one k.

    Attributes:
        lower: gamma_k, the step of the copy that solves the lower level.
        upper: the step of x.
    """

    lower: Schedule
    upper: Schedule

    def lower_at(self, k: int) -> float:
        """gamma_k."""
        return positive_at("lower_lr", self.lower, k)

    def upper_at(self, k: int) -> float:
        """The step of x at k."""
        return positive_at("upper_lr", self.upper, k)


@dataclass(frozen=True)
class PenaltyRates(Rates):
    """With those of a penalised copy.

    Attributes:
        penalty: beta_k, the step of the penalised copies.
        multiplier: lam_k.
    """

    penalty: Schedule
    multiplier: Schedule

    def penalty_at(self, k: int) -> float:
        """beta_k."""
        return positive_at("penalty_lr", self.penalty, k)

    def multiplier_at(self, k: int, before: float) -> float:
        """lam_k; a warning when it is below lam_{k-1} (``before``)."""
        multiplier = positive_at("multiplier", self.multiplier, k)
        falling = k >= 2 and self.multiplier(k - 1) < self.multiplier(k - 2)
        if multiplier < before and not falling:  # one warning for each time that it turns down
            warnings.warn(
                f"multiplier({k}) = {multiplier!r} is below its value of {before!r} one step "
                f"earlier; it must not decrease, or the bias of the direction grows again",
                MultiplierWarning,
                stacklevel=3,
            )
        return multiplier


def rate_or_optimizer(
    name: str,
    rate: Rate | None,
    optimizer_name: str,
    optimizer: OptimizerFactory | None,
    default: Schedule,
) -> Schedule:
    """The schedule of one rate; a rate beside an optimizer that would ignore it is refused."""
    if optimizer is not None and not callable(optimizer):
        raise ArgumentTypeError(
            f"{optimizer_name} must be a function of the parameters that returns a "
            f"torch.optim.Optimizer, not {optimizer!r}"
        )
    if rate is None:
        return default
    if optimizer is not None:
        raise ArgumentError(
            f"{name}={rate!r} would be ignored, because {optimizer_name} brings its own "
            f"learning rate; give one of the two"
        )
    return as_schedule(name, rate)


class Update:
    """How one variable moves: by plain steps or by the user's optimizer, then back into its set."""

    def __init__(
        self,
        variable: Variable,
        projections: Sequence[Projection | None],
        factory: OptimizerFactory | None = None,
    ) -> None:
        self._variable = variable
        self._projections = [
            (leaf, project)
            for leaf, project in zip(variable.leaves, projections, strict=True)
            if project is not None
        ]
        self._optimizer = None if factory is None else _built(factory, variable)
        self.project()

    @property
    def plain(self) -> bool:
        """Whether it is a step of the given length and a projection, and nothing else."""
        return type(self) is Update and self._optimizer is None

    def apply(self, rate: float, gain: float = 1.0) -> None:
        """Move against ``gain`` times the gradients on the leaves, and clear these.

        A plain step has length ``rate``; an optimizer decides for itself.
        """
        grads = self._variable.grads()
        if self._optimizer is None:
            with torch.no_grad():
                torch._foreach_add_(self._variable.leaves, grads, alpha=-rate * gain)
        else:
            if gain != 1.0:
                torch._foreach_mul_(grads, gain)
            with torch.no_grad():
                self._optimizer.step()
        self._variable.clear_grads()
        if self._projections:
            self.project()

    @torch.no_grad()
    def project(self) -> None:
        """Move back into the set."""
        for leaf, project in self._projections:
            inside = project(leaf)
            if not isinstance(inside, Tensor) or inside.shape != leaf.shape:
                raise ArgumentTypeError(
                    f"the set of {self._variable.name} must project a tensor of shape "
                    f"{tuple(leaf.shape)} to one of the same shape, not to {inside!r}"
                )
            if not bool(torch.isfinite(inside).all()):
                raise ArgumentError(
                    f"the set of {self._variable.name} projected a finite tensor to one that is "
                    f"not finite"
                )
            leaf.copy_(inside)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, where there is one."""
        return {} if self._optimizer is None else saved(self._optimizer.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved optimizer's state."""
        if bool(state) != (self._optimizer is not None):
            raise StateError(
                f"the state of {self._variable.name} was saved "
                f"{'with' if state else 'without'} an optimizer, but here it is the other way round"
            )
        if self._optimizer is not None:
            self._optimizer.load_state_dict(saved(state))


def _built(factory: OptimizerFactory, variable: Variable) -> torch.optim.Optimizer:
    optimizer = factory(variable.leaves)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(
            f"the optimizer factory of {variable.name} must return a torch.optim.Optimizer, "
            f"not {optimizer!r}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentTypeError(
            f"the optimizer of {variable.name} is LBFGS, which evaluates the objective itself; "
            f"choose one whose step() needs only gradients"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != {id(leaf) for leaf in variable.leaves}:
        raise ArgumentError(
            f"the optimizer of {variable.name} was not built from the parameters that its factory "
            f"was given; return for example torch.optim.Adam(params, lr=1e-3)"
        )
    return optimizer
