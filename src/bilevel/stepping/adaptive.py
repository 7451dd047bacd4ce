"""``upper_lr="auto"``: steps of x that follow from its own path.

With d_k the direction at x_k, eta_k the step and s_k = x_k - x_{k-1} the way that x went,

    rho_k = - eta_{k-1} <s_k, d_k> / ||s_k||^2

is the part of the last direction that is left in this one: 1 - eta_{k-1} H in a bowl of curvature
H along s_k. The secant step is therefore eta_{k-1} / (1 - rho_k), with rho averaged over five
steps; it grows by at most half at a time. Noise that is fresh in each direction lowers rho and so
shrinks the step as 1/k, as stochastic approximation wants it, but it also hides how far there is to
go; so where rho is small and yet positive again and again, the step grows by how sure that is, its
mean divided by its root mean square over ten steps.

Safeguards: no step is more than twice as long as the longest so far, the first being 0.2%
of ||x||; where the direction turns round and grows, the step is halved at once; where the gain that
a step promises, eta ||d||^2, is nothing beside those before it, the step grows no more; and a step
after which the direction turned round and was four times as long, or with which F was found to rise
(:class:`bilevel.stepping.merit.MeritCheck`), is not soon taken again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bilevel.problem import Number, Projection
from bilevel.stepping.updates import Update
from bilevel.variables import Variable, saved, to_dense

GROWTH = 1.5
SURE_GROWTH = 0.35
SURE = 0.3
FIRST_STEP = 2e-3
LONGEST_REST = 16
NOTHING = 1e-6
OVERSHOT = 4.0


class AdaptiveUpdate(Update):
    """How x moves with ``upper_lr="auto"``.

    Args:
        variable: x.
        projections: onto its set.
        unit: how many outer steps count as one; more where an outer step has few inner ones,
            because then the copies of y need more of them to follow.
    """

    def __init__(
        self, variable: Variable, projections: Sequence[Projection | None], unit: int
    ) -> None:
        super().__init__(variable, projections)
        self._unit = unit
        self._before = [leaf.detach().clone() for leaf in variable.leaves]
        self._numbers = {
            "rate": math.inf,  # eta, before the safeguards
            "last": 0.0,  # the rate of the last step taken
            "norm": 0.0,  # of the last direction
            "longest": 0.0,  # step so far
            "gained": 0.0,  # by all steps, to first order
            "ceiling": math.inf,  # of the rate
            "left": 0.0,  # mean of 1 - rho
            "left_weight": 0.0,
            "mean": 0.0,  # of rho
            "square": 0.0,
            "weight": 0.0,
            "rest": 0.0,  # steps that x still rests
            "next_rest": 1.0,
        }

    @property
    def resting(self) -> bool:
        """Whether x waits for the copies of y."""
        return self._numbers["rest"] > 0

    @torch.no_grad()
    def choose(self, rate: Number, gain: Number = 1.0) -> Number:
        """The step, from the gradients on the leaves."""
        n = self._numbers
        if n["rest"] > 0:
            return 0.0
        grads = to_dense(self._variable.grads())
        moved = torch._foreach_sub(self._variable.leaves, self._before)
        norms = torch.stack(torch._foreach_norm([*grads, *moved, *self._variable.leaves])).double()
        count = len(grads)
        along = torch.stack(
            [(a.double() * b.double()).sum() for a, b in zip(moved, grads, strict=True)]
        ).sum()
        totals = [norms[i : i + count].norm() for i in (0, count, 2 * count)]
        norm, way, size, inner = map(float, torch.stack([*totals, along]).tolist())
        norm, inner = float(gain) * norm, float(gain) * inner
        if not (norm > 0 and math.isfinite(norm)):
            return 0.0
        if way > 0 and n["last"] > 0:
            # not way**2, which may be 0 where way is not
            self._learn(-n["last"] * inner / way / way, growth=norm / n["norm"])
        if n["longest"] == 0:
            entries = sum(leaf.numel() for leaf in self._variable.leaves)
            n["longest"] = FIRST_STEP / 2 * (size or math.sqrt(entries)) / self._unit
        n["rate"] = min(n["rate"], n["ceiling"])
        length = min(n["rate"] * norm, 2 ** (1 / self._unit) * n["longest"])
        n["rate"] = min(n["rate"], 2 * length / norm)
        n["longest"] = max(n["longest"], length)
        n["norm"] = norm
        n["gained"] += length * norm
        return length / norm

    def _learn(self, rho: float, growth: float) -> None:
        """Change the rate by what is left of the last direction, which became so much longer."""
        n, unit = self._numbers, self._unit
        keep = 0.8 ** (1 / unit)
        n["left"] = keep * n["left"] + (1 - keep) * min(max(1 - rho, -2.0), 4.0)
        n["left_weight"] = keep * n["left_weight"] + 1 - keep
        left = n["left"] / n["left_weight"]
        keep = 0.9 ** (1 / unit)
        bounded = min(max(rho, -1.0), 1.0)
        n["mean"] = keep * n["mean"] + (1 - keep) * bounded
        n["square"] = keep * n["square"] + (1 - keep) * bounded**2
        n["weight"] = keep * n["weight"] + 1 - keep
        factor = min(GROWTH, 1 / max(abs(left), 1e-3))
        if left < 1 and n["square"] > 0:
            sure = n["mean"] / math.sqrt(n["square"] * n["weight"])
            factor = max(factor, math.exp(SURE_GROWTH * max(0.0, sure - SURE)))
        if rho < -0.5 and growth > 1:
            factor = 0.5
            if growth > OVERSHOT:
                n["ceiling"] = min(n["ceiling"], n["last"] / 2)
        if n["last"] * n["norm"] ** 2 < NOTHING * n["gained"]:
            factor = min(factor, 1.0)
        factor = max(factor, 0.5)
        n["rate"] *= factor ** (1 / unit)

    @torch.no_grad()
    def apply(self, rate: Number, gain: Number = 1.0, *, bad: Tensor | None = None) -> None:
        self._numbers["rest"] = max(0.0, self._numbers["rest"] - 1)
        self._numbers["last"] = float(rate)
        torch._foreach_copy_(self._before, self._variable.leaves)
        super().apply(rate, gain, bad=bad)

    def back_off(self) -> None:
        """X was taken back: rest, each time longer, then go on with half the step."""
        n = self._numbers
        n["rate"] = n["ceiling"] = min(n["rate"], n["ceiling"]) / 2
        n["last"] = 0.0
        n["next_rest"] = min(2 * n["next_rest"], LONGEST_REST)
        n["rest"] = n["next_rest"] * self._unit

    def slow_down(self) -> None:
        """Halve the step, and let it grow again only where F is found to fall."""
        n = self._numbers
        n["rate"] = n["ceiling"] = min(n["rate"], n["ceiling"]) / 2

    def confirmed(self) -> None:
        """F has fallen: the next rest may be shorter, and the step a little longer."""
        self._numbers["next_rest"] = max(1.0, self._numbers["next_rest"] // 2)
        self._numbers["ceiling"] *= 1.2

    def state_dict(self) -> dict[str, Any]:
        """The last point, and what was learned from the path."""
        return {"before": saved(self._before), "numbers": dict(self._numbers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        with torch.no_grad():
            torch._foreach_copy_(self._before, state["before"])
        self._numbers = dict(state["numbers"])
