"""Exact lower solutions by Newton's method, and exact hypergradients from them.

Both use second derivatives, as the second-order methods do, and neither is meant for the inside of
a training loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bilevel.errors import NotConvergedError, ObjectiveError
from bilevel.methods.implicit import Slope, gradient
from bilevel.problem import Problem
from bilevel.sampling import Sample
from bilevel.variables import Variable, conjugate_gradients, flatten, frozen, unflatten_like

NEWTON_STEPS = 100


def implicit_gradient(problem: Problem, x: Variable, y: Variable, sample: Sample) -> list[Tensor]:
    """grad_x f - grad^2_xy g [grad^2_yy g]^-1 grad_y f at (x, y), one tensor for each leaf of x."""
    f = problem.f(x, y, sample.upper)
    if not f.requires_grad:
        raise ObjectiveError(
            f"upper(x, y, batch) returned {f.item():.6g}, which depends on neither x nor y through "
            f"differentiable operations; check for detach(), item() or no_grad()"
        )
    f_x = gradient(f, x.leaves, retain_graph=True)
    f_y = flatten(gradient(f, y.leaves))
    if not torch.isfinite(flatten([*f_x, f_y])).all():
        raise NotConvergedError(
            f"upper(x, y, batch) is {f.item():.6g} at the lower solution, and its gradient there "
            f"is not finite; is its batch, and is it smooth there?"
        )
    g_y = _twice_differentiable(problem.g(x, y, sample.lower), y.leaves)
    adjoint = conjugate_gradients(g_y.hessian_product, f_y)
    if f_y.any():
        left = float((f_y - g_y.hessian_product(adjoint)).norm() / f_y.norm())
        if not left <= torch.finfo(f_y.dtype).eps ** 0.5:
            raise NotConvergedError(
                f"conjugate gradients left a relative residual of {left:.2e}; the lower level is "
                f"not strongly convex here, or too badly conditioned for {f_y.dtype}"
            )
    mixed = g_y.mixed_product(adjoint, x)
    return [a - b for a, b in zip(f_x, mixed, strict=True)]


def upper_slope(problem: Problem, x: Variable, y: Variable, sample: Sample) -> Tensor:
    """grad_y f(x, y) as one vector."""
    with frozen(x):
        f = problem.f(x, y, sample.upper)
        slope = gradient(f, y.leaves) if f.requires_grad else map(torch.zeros_like, y.leaves)
        return flatten([*slope]).detach()


def solve_lower(
    problem: Problem,
    x: Variable,
    y: Variable,
    sample: Sample,
    strength: float = 0.0,
    tilt: Tensor | None = None,
) -> None:
    """Move y to argmin_y g(x, y) + strength * f(x, y), by Newton's method.

    If ``tilt`` is given, the linear function with that slope replaces f.
    """

    def objective() -> Tensor:
        value = problem.g(x, y, sample.lower)
        if tilt is not None:
            return value + strength * (tilt @ flatten(y.leaves))
        return value + strength * problem.f(x, y, sample.upper) if strength else value

    with frozen(x):
        _newton(objective, y)


def _newton(objective: Callable[[], Tensor], y: Variable) -> None:
    """Move y to the minimum of ``objective``, or raise :class:`NotConvergedError`."""
    eps = torch.finfo(y.leaves[0].dtype).eps
    first = before = None
    for _ in range(NEWTON_STEPS):
        value = objective()
        slope = _twice_differentiable(value, y.leaves)
        descent = slope.vector.detach()
        size = float(descent.norm())
        if not math.isfinite(size):
            raise NotConvergedError(
                f"lower(x, y, batch) is {float(value.detach()):.6g} and its gradient in y is not "
                f"finite; is its batch, and is y a reasonable start?"
            )
        first = size if first is None else first
        if size <= 100 * eps * min(first, 1.0):
            return
        # Rounding ends the descent once the gradient is tiny and no longer decreases.
        tiny = size <= max(eps**0.5 * first, 100 * eps)
        if tiny and before is not None and size > 0.5 * before:
            return
        before = size
        step = conjugate_gradients(slope.hessian_product, descent)
        if not _line_search(objective, y, step, float(value.detach()), float(descent @ step)):
            if tiny:
                return
            break
    raise NotConvergedError(
        f"the lower level could not be solved to machine precision (gradient norm {size:.2e}); is "
        f"g strongly convex in y and twice differentiable, and is y a reasonable start?"
    )


@torch.no_grad()
def _line_search(
    objective: Callable[[], Tensor], y: Variable, step: Tensor, value: float, decrease: float
) -> bool:
    """Move y against ``step``, halved until the objective decreases; False if it does not."""
    start = flatten(y.leaves).clone()
    slack = 4 * torch.finfo(start.dtype).eps * abs(value)
    for halvings in range(40):
        length = 0.5**halvings
        _write(y, start - length * step)
        if float(objective()) <= value - 1e-4 * length * decrease + slack:
            return halvings < 30
    _write(y, start)
    return False


def _write(variable: Variable, vector: Tensor) -> None:
    for leaf, part in zip(variable.leaves, unflatten_like(vector, variable.leaves), strict=True):
        leaf.copy_(part)


def _twice_differentiable(value: Tensor, at: Sequence[Tensor]) -> Slope:
    """The gradient of ``value`` in the tensors ``at``, with products of its derivatives."""
    return Slope.of(value, at, "the exact hypergradient")
