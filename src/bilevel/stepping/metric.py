"""A unit of length for each entry of x, where nothing is sampled: how large its gradient has been.

What a gradient means may differ from entry to entry by many orders. For a strength exp(x) it is
proportional to exp(x), so that along the gradient small strengths hardly move while large ones
swing from side to side. Along d_i / m_i, where m_i is the largest |d_i| of the last steps, all
entries move by about as much. That leads downhill as d does, also within bounds on each entry, but
not within other sets. Under noise the sizes would be those of the noise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bilevel.variables import Variable, flatten, length, saved, unflatten_like

KEPT = 0.9
"""Of a size from one step of x to the next: it is forgotten within some tens of steps."""

LEAST = 0.01
"""Of the largest entry of the same tensor: what is smaller may be an error, as y is not exact."""


class Metric:
    """The units of the entries of x, flat.

    Attributes:
        active: whether they differ.
        units: those in which the last direction was measured; None: all are 1.
    """

    def __init__(self) -> None:
        self.active = False
        self.units: Tensor | None = None
        self._sizes: Tensor | None = None

    @torch.no_grad()
    def turned(self, direction: Tensor, x: Variable) -> Tensor:
        """The direction in units that it brings up to date, of the same length."""
        if not (self.active and len(direction)):
            return direction
        sizes = direction.abs()
        if self._sizes is not None:
            sizes = torch.maximum(sizes, KEPT * self._sizes)
        parts = torch.split(sizes, [leaf.numel() for leaf in x.leaves])
        self._sizes = torch.cat([p.clamp(min=LEAST * float(p.max())) for p in parts if len(p)])
        sizes = self._sizes.masked_fill(self._sizes == 0, 1.0)
        towards = direction / sizes
        share = length(direction) / (length(towards) or 1.0)
        self.units = sizes / share
        return share * towards

    @torch.no_grad()
    def turn_grads(self, x: Variable, towards: Tensor) -> None:
        """Turn the gradients on the leaves to point there; they keep their norm."""
        if self.active:
            share = length(flatten(x.grads())) / length(towards)
            x.set_grads(unflatten_like(share * towards, x.leaves))

    def state_dict(self) -> dict[str, Any]:
        """The sizes and the units."""
        return {"sizes": saved(self._sizes), "units": saved(self.units)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._sizes, self.units = saved(state["sizes"]), saved(state["units"])
