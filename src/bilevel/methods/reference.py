"""Tools for references: gradients of plain tensors, one evaluation each.

A reference spells an algorithm out line by line, in the order and with the symbols of its paper. It
is slow and plain, and what the fast :meth:`~bilevel.methods.base.Method.step` must equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bilevel.problem import Objective
from bilevel.stepping import StepSizes


def gradient_x(objective: Objective, x: Tensor, y: Tensor, batch: Any) -> Tensor:
    """The gradient of one objective in x, alone."""
    return _gradient(lambda at: objective(at, y, batch), x)


def gradient_y(objective: Objective, x: Tensor, y: Tensor, batch: Any) -> Tensor:
    """The gradient of one objective in y, alone."""
    return _gradient(lambda at: objective(x, at, batch), y)


def hessian_y(objective: Objective, x: Tensor, y: Tensor, batch: Any) -> Tensor:
    """The matrix of second derivatives in y."""
    hessian: Any = torch.autograd.functional.hessian
    matrix: Tensor = hessian(lambda at: objective(x, at, batch), y)
    return matrix


def mixed_product(objective: Objective, x: Tensor, y: Tensor, batch: Any, v: Tensor) -> Tensor:
    """grad^2_xy of the objective times v, from the derivative in x of <grad_y, v>."""
    at_x, at_y = x.detach().requires_grad_(), y.detach().requires_grad_()
    (slope,) = torch.autograd.grad(objective(at_x, at_y, batch), at_y, create_graph=True)
    (product,) = torch.autograd.grad((slope * v).sum(), at_x, allow_unused=True)
    return torch.zeros_like(x) if product is None else product


def given(sizes: StepSizes) -> tuple[float, float, float, float]:
    """gamma_k, beta_k, the step of x and lam_k as plain numbers."""
    return float(sizes.lower), float(sizes.penalty), float(sizes.upper), float(sizes.multiplier)


def _gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        value = function(leaf)
        if not value.requires_grad:  # the objective does not depend on it
            return torch.zeros_like(at)
        (found,) = torch.autograd.grad(value, leaf, allow_unused=True)
    return torch.zeros_like(at) if found is None else found
