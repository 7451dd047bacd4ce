"""Steps of an optimizer as functions that can be differentiated.

They follow the formulas of ``torch.optim.SGD``, ``Adam`` and ``AdamW`` with the options of an
optimizer that a user's factory has made; its own ``step()`` changes tensors in place and cannot be
differentiated. Moments start from zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bilevel.errors import ArgumentTypeError
from bilevel.problem import Number
from bilevel.stepping.updates import Update

_UNKNOWN = {"amsgrad": "without amsgrad", "maximize": "which minimises"}
"""Options that change the formulas, and what to give instead."""


class Carried(NamedTuple):
    """What one leaf carries from one inner step to the next.

    Attributes:
        leaf: the tensor.
        moments: of its gradients, none for plain steps.
    """

    leaf: Tensor
    moments: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class InnerRule:
    """How the leaves of a variable move in inner steps.

    Attributes:
        groups: for each leaf the options of its optimizer; None: plain steps.
        adam: whether these are of Adam or AdamW; else of SGD.
    """

    groups: Sequence[dict[str, Any]] | None = None
    adam: bool = False

    @classmethod
    def of(cls, update: Update) -> InnerRule:
        """The rule of an update: plain steps, or those of its optimizer."""
        optimizer, variable = update.optimizer, update.variable
        if optimizer is None:
            return cls()
        kinds = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
        if type(optimizer) not in kinds or update.scheduler is not None:
            raise ArgumentTypeError(
                f"lower_optimizer makes {type(update.scheduler or optimizer).__name__}, whose "
                f"steps cannot be differentiated; use torch.optim.SGD, Adam or AdamW, without a "
                f"scheduler"
            )
        by_leaf = {id(leaf): group for group in optimizer.param_groups for leaf in group["params"]}
        # In older versions of PyTorch the options of AdamW do not tell it from Adam.
        decoupled = {"decoupled_weight_decay": isinstance(optimizer, torch.optim.AdamW)}
        groups = [decoupled | by_leaf[id(leaf)] for leaf in variable.leaves]
        for option, instead in _UNKNOWN.items():
            if any(group.get(option) for group in groups):
                raise ArgumentTypeError(
                    f"lower_optimizer makes {type(optimizer).__name__}({option}=True), whose steps "
                    f"are not known here as differentiable ones; use one {instead}"
                )
        return cls(groups, adam=not isinstance(optimizer, torch.optim.SGD))

    def begin(self, leaves: Sequence[Tensor]) -> list[Carried]:
        """The leaves before the first step."""
        count = 0
        if self.groups is not None:
            count = 2 if self.adam else int(any(g["momentum"] for g in self.groups))
        return [Carried(t, tuple(torch.zeros_like(t) for _ in range(count))) for t in leaves]

    def step(
        self, t: int, now: Sequence[Carried], slopes: Sequence[Tensor], rates: Sequence[Number]
    ) -> list[Carried]:
        """Inner step t = 0, 1, ... of all leaves, with a rate for each."""
        if self.groups is None:
            parts = zip(now, slopes, rates, strict=True)
            return [Carried(at.leaf - rate * slope) for at, slope, rate in parts]
        rule = _adam if self.adam else _sgd
        parts_of = zip(now, slopes, rates, self.groups, strict=True)
        return [rule(t, at, slope, rate, group) for at, slope, rate, group in parts_of]


def _sgd(t: int, at: Carried, slope: Tensor, rate: Number, group: dict[str, Any]) -> Carried:
    if group["weight_decay"]:
        slope = slope + group["weight_decay"] * at.leaf
    if not group["momentum"]:
        return Carried(at.leaf - rate * slope, at.moments)
    dampening = group["dampening"] if t else 0.0  # the first gradient is taken whole
    moment = group["momentum"] * at.moments[0] + (1 - dampening) * slope
    direction = slope + group["momentum"] * moment if group["nesterov"] else moment
    return Carried(at.leaf - rate * direction, (moment,))


def _adam(t: int, at: Carried, slope: Tensor, rate: Number, group: dict[str, Any]) -> Carried:
    (first, second), leaf, decay = group["betas"], at.leaf, group["weight_decay"]
    if decay and group.get("decoupled_weight_decay"):
        leaf = leaf - rate * decay * leaf
    elif decay:
        slope = slope + decay * leaf
    m, v = at.moments
    m = first * m + (1 - first) * slope
    v = second * v + (1 - second) * slope**2
    # of an entry whose gradients were all zero the root has no derivative, and none is needed
    some = v > 0
    root = torch.where(some, torch.where(some, v, 1.0).sqrt(), 0.0)
    scaled = root / (1 - second ** (t + 1)) ** 0.5 + group["eps"]
    return Carried(leaf - rate / (1 - first ** (t + 1)) * m / scaled, (m, v))
