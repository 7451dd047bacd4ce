"""Loss scaling: gradients of half precision, kept away from underflow and overflow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from bilevel.errors import ArgumentError, StateError
from bilevel.errors.checks import check_count, checked_number
from bilevel.sampling import Rewind
from bilevel.variables import Form, Variable, add_gradients, largest_entries, stored_values
from bilevel.variables.forms import empty_or, real, record, whole

T = TypeVar("T")

LEAST = 1.0
"""A gradient that overflows at this scale overflows without scaling too."""


@dataclass(frozen=True)
class LossScale:
    """How Phi is scaled before it is differentiated, as ``torch.amp.GradScaler`` scales a loss.

    In float16 a gradient below 6e-8 is zero, and one above 65504 infinite. So s * Phi is
    differentiated and its gradient divided by s, in the precision of the variables, before anything
    looks at it. Where it has overflowed, s is made smaller and the same samples are evaluated once
    more, with the same dropout masks: no step is lost, y and z stay in lockstep, and because s is a
    power of two the iterates are those without scaling, were there no overflow. What is not finite
    at s = 1 either ends the run, as ever.

    bfloat16 has the range of float32 and needs none of this.

    Args:
        init_scale: s at the start.
        growth_factor, growth_interval: s is multiplied by the one after so many evaluations without
            an overflow.
        backoff_factor: and by this after one with it.

    Example:
        >>> import bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> run = dict(method=bilevel.F2SA(lower_lr=0.5, upper_lr=0.2), steps=9)
        >>> scaled = bilevel.minimize(
        ...     problem, problem.x0, problem.y0, loss_scale=bilevel.LossScale(), **run)
        >>> plain = bilevel.minimize(problem, problem.x0, problem.y0, **run)
        >>> bool((scaled.x == plain.x).all())
        True
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        checked_number("init_scale", self.init_scale, least=LEAST)
        checked_number("growth_factor", self.growth_factor, least=1.0, above=True)
        if checked_number("backoff_factor", self.backoff_factor, above=True) >= 1:
            raise ArgumentError(f"backoff_factor must be below 1, not {self.backoff_factor!r}")
        check_count("growth_interval", self.growth_interval)


class Scaling:
    """The scale of one run; without settings it is 1 for ever.

    Attributes:
        scale: s.
    """

    def __init__(self, settings: LossScale | None = None) -> None:
        self._settings = settings
        self.scale = 1.0 if settings is None else float(settings.init_scale)
        self._good = 0

    def differentiate(self, attempt: Callable[[float], T], variables: Sequence[Variable]) -> T:
        """What ``attempt(s)`` returns; it leaves s times a gradient, here it is the gradient.

        It is added to what was on the leaves before. An attempt whose gradient overflowed is
        repeated with a smaller s and with everything else as it was.
        """
        if self._settings is None:
            return attempt(1.0)
        moved = [v for v in variables if any(leaf.requires_grad for leaf in v.leaves)]
        before = [v.take_grads() if v.has_grads else None for v in moved]
        kept = [buffer.clone() for v in variables for buffer in v.buffers]
        rewind = Rewind(variables[0].device)
        while True:
            result = attempt(self.scale)
            grads = [grad for v in moved for grad in stored_values(v.grads())]
            torch._foreach_mul_(grads, 1 / self.scale)
            if self._accepted(grads):
                break
            for v in moved:
                v.clear_grads()
            rewind()
            with torch.no_grad():
                now = [buffer for v in variables for buffer in v.buffers]
                for buffer, was in zip(now, kept, strict=True):
                    buffer.copy_(was)
        with torch.no_grad():
            for v, others in zip(moved, before, strict=True):
                if others is not None:
                    v.set_grads(add_gradients(v.grads(), others))
        return result

    def _accepted(self, grads: list[torch.Tensor]) -> bool:
        """Whether they are finite, or the scale is not to blame; s is set for what comes next."""
        assert self._settings is not None
        peaks = torch.stack([peak.double() for peak in largest_entries(grads)])
        if bool(torch.isfinite(peaks).all()):
            self._good += 1
            if self._good == self._settings.growth_interval:
                self.scale, self._good = self.scale * self._settings.growth_factor, 0
            return True
        if self.scale <= LEAST:
            return True
        self.scale, self._good = max(LEAST, self.scale * self._settings.backoff_factor), 0
        return False

    def state_dict(self) -> dict[str, Any]:
        """The scale and how long it has been good for; nothing where it is fixed."""
        return {} if self._settings is None else {"scale": self.scale, "good": self._good}

    def state_form(self) -> Form:
        """A scale that is not less than the least; nothing where it is fixed."""
        return empty_or(record({"scale": real(LEAST), "good": whole()}))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved scale."""
        if bool(state) != (self._settings is not None):
            raise StateError(
                f"the state was saved {'with' if state else 'without'} loss_scale, but here it is "
                f"the other way round"
            )
        if state:
            self.scale, self._good = float(state["scale"]), int(state["good"])
