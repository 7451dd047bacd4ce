"""Accelerated steps with restarts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel.errors import ArgumentError, StateError
from bilevel.errors.checks import checked_number
from bilevel.problem import Number, Projection
from bilevel.stepping.updates import Update
from bilevel.variables import Form, Variable, form_of, saved
from bilevel.variables.forms import empty_or, real, record, whole


@dataclass(frozen=True)
class Nesterov:
    """Accelerated steps of x that start afresh after they have travelled far.

    With d_k the x direction at the point w_k where everything is evaluated,

        x_{k+1} = w_k - eta_k * d_k
        w_{k+1} = x_{k+1} + momentum * ( x_{k+1} - x_k )

    and after n steps since the last restart, at which x_k = w_k,

        n * sum ||x_{i+1} - x_i||^2 > max(radius, least_radius)^2

    is the sign to restart: w_{k+1} = x_{k+1}, the count and the sum are 0 again, and the radius is
    multiplied by ``decay``. Far travel is where F is not convex and momentum can do harm.

    Args:
        momentum: of the extrapolation, at least 0 and below 1.
        radius: B, in the units of x. The smaller, the more often momentum is lost.
        least_radius: B0, below which the radius has no effect.
        decay: of the radius at each restart, above 0 and at most 1.

    Example:
        >>> import bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> method = bilevel.F2BA(lower_lr=0.5, upper_lr=0.1, acceleration=bilevel.Nesterov())
        >>> bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=50).steps
        50
    """

    momentum: float = 0.9
    radius: float = 10.0
    least_radius: float = 0.1
    decay: float = 0.99

    def __post_init__(self) -> None:
        if checked_number("momentum", self.momentum) >= 1:
            raise ArgumentError(f"momentum must be below 1, not {self.momentum!r}")
        checked_number("radius", self.radius, above=True)
        checked_number("least_radius", self.least_radius)
        if checked_number("decay", self.decay, above=True) > 1:
            raise ArgumentError(f"decay must be at most 1, not {self.decay!r}")


class NesterovUpdate(Update):
    """How x moves with :class:`Nesterov`; its leaves hold w, the point of evaluation."""

    def __init__(
        self, variable: Variable, projections: Sequence[Projection | None], choices: Nesterov
    ) -> None:
        super().__init__(variable, projections)
        self._choices = choices
        self._before = _copies(variable.leaves)
        self._count = 0
        self._travel = 0.0
        self._radius = choices.radius

    @torch.no_grad()
    def apply(self, rate: Number, gain: Number = 1.0, *, bad: Tensor | None = None) -> None:
        super().apply(rate, gain, bad=bad)
        leaves = self._variable.leaves
        stepped = _copies(leaves)
        moved = torch._foreach_sub(stepped, self._before)
        self._count += 1
        self._travel += sum(float((m * m).sum()) for m in moved)
        if self._count * self._travel > max(self._radius, self._choices.least_radius) ** 2:
            self._count, self._travel = 0, 0.0
            self._radius *= self._choices.decay
        else:
            torch._foreach_add_(leaves, moved, alpha=self._choices.momentum)
            self.project()  # the point of evaluation stays in the set as well
        self._before = stepped

    def restart(self, start: Variable) -> None:
        super().restart(start)
        self._before = _copies(self._variable.leaves)
        self._count, self._travel = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """The last x, and how far it has come since the last restart."""
        return {
            "before": saved(self._before),
            "count": self._count,
            "travel": self._travel,
            "radius": self._radius,
        }

    def state_form(self) -> Form:
        """The last x in its shapes; counts and lengths that are not negative."""
        return empty_or(
            record(
                {
                    "before": form_of(self._before),
                    "count": whole(),
                    "travel": real(0.0),
                    "radius": real(0.0),
                }
            )
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if not state:
            raise StateError(
                f"the state of {self._variable.name} was saved without acceleration, but here it "
                f"is accelerated"
            )
        with torch.no_grad():
            torch._foreach_copy_(self._before, state["before"])
        self._count, self._travel = state["count"], state["travel"]
        self._radius = state["radius"]


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]
