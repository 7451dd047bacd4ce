"""A run that stalls because its copies of y cannot be told apart in their floating point type.

f pulls the penalised copy away from the lower solution by about grad_y f / (lam * curvature of g).
Where g is in large units, or the multiplier large, that is less than the rounding of y. The copies
are then equal to the last bit, and the direction, lam times a difference of gradients of g, is 0.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel.errors import PrecisionWarning, warn
from bilevel.problem import Problem
from bilevel.run.history import History
from bilevel.run.solver import Solver
from bilevel.variables import Variable, buffers_kept, flatten, unflatten_like

_SMALL = 1e-3
"""A direction of less than this part of the longest is as good as 0."""


def warn_if_stalled(solver: Solver, history: History) -> None:
    """Warn where the direction is exactly 0, while differences over a longer way are not."""
    norms, gaps = history["direction_norm"], history["gap"]
    if solver.ranks is not None or len(norms) < 2 or norms[-1] != 0 or gaps[-1] != 0:
        return
    with solver.evaluating_aside(), torch.enable_grad():
        norm, curvature = _over_a_longer_way(solver)
    if not norm > _SMALL * np.nanmax(norms):
        return
    dtype = str(solver.state.solution.leaves[0].dtype).removeprefix("torch.")
    warn(
        PrecisionWarning(
            f"the run stalls: f pulls the copies of y apart by less than {dtype} can tell, so the "
            f"direction of x is 0 where it should be about {norm:.2g}. Divide lower by its "
            f"curvature, which is about {curvature:.2g} here (and multiply lower_lr by it), or use "
            f"a smaller multiplier, or float64"
        )
    )


def _over_a_longer_way(solver: Solver) -> tuple[float, float]:
    """About the norm of grad F, and the curvature of g, both along grad_y f.

    With v = grad_y f and H the Hessian of g, these are ||H_xy v|| / c and c = v H_yy v / ||v||^2,
    from differences of gradients at y + d v and y - d v, for a d that is not lost in rounding.
    """
    x, y = solver.state.x, solver.state.solution.clone()
    upper, lower = solver.draw.upper.peek(), solver.draw.lower.peek()
    if any(y.row_sparse) or any(x.row_sparse):
        return 0.0, math.nan  # a table may be too large for differences of all of it
    if _is_held(solver.evaluator.problem, x, y, lower):
        return 0.0, math.nan  # f does not move y, whatever the precision
    with buffers_kept(x, y):
        pull = _gradients(solver.evaluator.problem.f(x, y, upper), y)[0]
        middle = flatten([leaf.detach() for leaf in y.leaves])
        largest = pull.abs().max() if pull.numel() else pull.sum()
        if not largest > 0:
            return 0.0, math.nan
        eps = torch.finfo(middle.dtype).eps
        distance = eps**0.25 * middle.abs().max().clamp(min=1.0) / largest
        found = []
        for sign in (1, -1):
            _put(y, middle + sign * distance * pull)
            found.append(_gradients(solver.evaluator.problem.g(x, y, lower), y, x))
    (y_ahead, x_ahead), (y_behind, x_behind) = found
    curvature = float(pull @ (y_ahead - y_behind) / (2 * distance * (pull @ pull)))
    mixed = float((x_ahead - x_behind).norm() / (2 * distance))
    return (mixed / curvature if curvature > 0 else 0.0), curvature


def _is_held(problem: Problem, x: Variable, y: Variable, batch: Any) -> bool:
    """Whether the set of y is in the way of a descent of g, or a non-smooth term may be."""
    if problem.y_prox is not None:
        return True
    sets = problem.y_projections(y)
    if not any(sets):
        return False
    with buffers_kept(x, y):
        slope = _gradients(problem.g(x, y, batch), y)[0]
    middle = flatten([leaf.detach() for leaf in y.leaves])
    step = torch.finfo(middle.dtype).eps ** 0.5 * middle.abs().max().clamp(min=1.0)
    ahead = middle - step * slope / slope.abs().max().clamp(min=torch.finfo(slope.dtype).tiny)
    parts = unflatten_like(ahead.to(middle.dtype), y.leaves)
    pairs = zip(sets, parts, strict=True)
    return any(p is not None and not torch.equal(p(part.clone()), part) for p, part in pairs)


def _gradients(value: Tensor, *variables: Variable) -> list[Tensor]:
    """The gradient in each variable, as one vector."""
    leaves = [leaf for variable in variables for leaf in variable.leaves]
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    grads = [
        (torch.zeros_like(leaf) if grad is None else grad).double()
        for leaf, grad in zip(leaves, found, strict=True)
    ]
    sizes = [sum(leaf.numel() for leaf in variable.leaves) for variable in variables]
    return list(torch.split(flatten(grads), sizes))


@torch.no_grad()
def _put(variable: Variable, vector: Tensor) -> None:
    for leaf, part in zip(variable.leaves, unflatten_like(vector, variable.leaves), strict=True):
        leaf.copy_(part)
