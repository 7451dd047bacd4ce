"""Exact hypergradients and what a run is measured against.

Second derivatives are used here and in the second-order methods only. Nothing in this file is meant
for the inside of a training loop: it answers "is my problem set up right?" and "how far is the
method from the truth?".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel.engine.watch import Watch
from bilevel.errors import ArgumentError, ArgumentTypeError, NotConvergedError
from bilevel.errors.checks import check_flag, check_tensor, checked_number
from bilevel.methods import Method, PenaltyMethod, method_of
from bilevel.methods.implicit import Slope, gradient
from bilevel.problem import Problem, Stencil, Weights, evaluate
from bilevel.problems.known import KnownProblem
from bilevel.problems.quadratic import Quadratic
from bilevel.sampling import Sample
from bilevel.variables import (
    Variable,
    conjugate_gradients,
    flatten,
    frozen,
    to_dense,
    unflatten_like,
)


def hypergradient(
    problem: Problem,
    x: Any,
    y: Any,
    *,
    upper_batch: Any = None,
    lower_batch: Any = None,
    solve: bool = True,
) -> Any:
    """The exact gradient of F(x) = f(x, y*(x)), by the implicit function theorem.

        grad F = grad_x f - grad^2_xy g [grad^2_yy g]^-1 grad_y f     at (x, y*(x))

    The linear system is solved by conjugate gradients on Hessian-vector products.

    Args:
        x: where; a tensor, tree or module.
        y: a starting guess for y*(x).
        upper_batch, lower_batch: what the objectives are evaluated on.
        solve: find y*(x) from ``y`` first, by Newton's method; False: take ``y`` as it is.

    Returns:
        The gradient in the structure of x (a module becomes a dict of its parameters' names, a
        table a tensor).

    Example:
        >>> import torch, bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> exact = bilevel.hypergradient(problem, problem.x0, problem.y0)
        >>> torch.allclose(exact, problem.gradient(problem.x0))
        True
    """
    _check_problem(problem)
    check_flag("solve", solve)
    at_x, at_y = Variable.copy_of(x, "x"), Variable.copy_of(y, "y")
    sample = Sample(upper_batch, lower_batch)
    with torch.enable_grad():
        if solve:
            _minimise(problem, at_x, at_y, sample, strength=0.0)
        return at_x.structured(_implicit_gradient(problem, at_x, at_y, sample))


@dataclass(frozen=True)
class HypergradientCheck:
    """How far a method's direction is from the exact hypergradient.

    Attributes:
        exact: the exact hypergradient, in the structure of x.
        direction: the method's x direction when its lower problems are solved exactly.
        relative_error: ||direction - exact|| / ||exact||.
        cosine: of the angle between the two.
        multiplier: the multiplier at which the direction was taken.
    """

    exact: Any
    direction: Any
    relative_error: float
    cosine: float
    multiplier: float

    def __str__(self) -> str:
        return (
            f"relative error {self.relative_error:.2e}, cosine {self.cosine:.6f} "
            f"at multiplier {self.multiplier:g}"
        )


def check_hypergradient(
    problem: Problem,
    x: Any,
    y: Any,
    *,
    method: str | Method[Any] = "f2sa",
    multiplier: float | None = None,
    upper_batch: Any = None,
    lower_batch: Any = None,
) -> HypergradientCheck:
    """How far a method's direction is from the exact hypergradient at x.

    The lower problems of the method are solved exactly first, so what is measured is the bias of
    the method itself: O(1/lam) for F2SA and F3SA.

    Args:
        x: where; a tensor, tree or module.
        y: a starting guess for y*(x).
        method: a name in :data:`bilevel.METHODS` or a method object.
        multiplier: lam; None: the method's own at k = 0.
        upper_batch, lower_batch: what the objectives are evaluated on.

    Example:
        >>> import bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> check = bilevel.check_hypergradient(problem, problem.x0, problem.y0, multiplier=1e4)
        >>> check.relative_error < 1e-2
        True
    """
    _check_problem(problem)
    chosen = method_of(method)
    stencil = chosen.stencil if isinstance(chosen, PenaltyMethod) else None
    if not isinstance(chosen, PenaltyMethod) or stencil is None:
        raise ArgumentTypeError(
            f"method must be one whose x direction is a finite difference, such as F2SA, "
            f"not {chosen!r}"
        )
    lam = chosen.rates.multiplier(0) if multiplier is None else multiplier
    lam = checked_number("multiplier", lam, above=True)
    sample = Sample(upper_batch, lower_batch)
    at_x, at_y = Variable.copy_of(x, "x"), Variable.copy_of(y, "y")
    with torch.enable_grad():
        _minimise(problem, at_x, at_y, sample, strength=0.0)
        exact = _implicit_gradient(problem, at_x, at_y, sample)
        points = _solved_points(problem, stencil, lam, at_x, at_y, sample)
        with frozen(*points):
            phi = evaluate(problem, stencil, at_x, points, [sample] * len(points))
            phi.backward(Weights(1.0, lam), Watch(0, at_once=True))
    direction = to_dense(at_x.take_grads())
    truth, found = flatten(exact), flatten(direction)
    return HypergradientCheck(
        exact=at_x.structured(exact),
        direction=at_x.structured(direction),
        relative_error=float((found - truth).norm() / truth.norm()),
        cosine=float(found @ truth / (found.norm() * truth.norm())),
        multiplier=lam,
    )


@dataclass(frozen=True)
class TrackingErrors:
    """How far the two copies are from what they follow, one number per run.

    Attributes:
        y: ||y - y*_lam(x)||.
        z: ||z - y*(x)||.
    """

    y: Tensor
    z: Tensor


def tracking_errors(
    problem: KnownProblem, x: Tensor, y: Tensor, z: Tensor, multiplier: float
) -> TrackingErrors:
    """||y - y*_lam(x)|| and ||z - y*(x)|| on a problem with known answers.

    Example:
        >>> import bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> solver = bilevel.Solver(problem, bilevel.F2SA(lower_lr=1.0, inner_steps=500),
        ...                         problem.x0, problem.y0)
        >>> x_0 = solver.x
        >>> info = solver.step()
        >>> errors = bilevel.diagnostics.tracking_errors(
        ...     problem, x_0, solver.state.penalised.value, solver.y, info.multiplier)
        >>> bool(errors.y < 1e-6), bool(errors.z < 1e-6)
        (True, True)
    """
    if not isinstance(problem, KnownProblem):
        raise ArgumentTypeError(
            f"problem must be one with known answers, of bilevel.problems, not {problem!r}"
        )
    for name, copy in (("y", y), ("z", z)):
        check_tensor(name, copy)
        if copy.shape[-1:] != problem.y0.shape[-1:]:
            raise ArgumentError(
                f"{name} has the shape {tuple(copy.shape)}, but that of the problem is "
                f"{tuple(problem.y0.shape)}"
            )
    with torch.no_grad():
        return TrackingErrors(
            y=(y - problem.penalised_solution(x, multiplier)).norm(dim=-1),
            z=(z - problem.lower_solution(x)).norm(dim=-1),
        )


def potential(problem: Quadratic, x: Tensor, y: Tensor, z: Tensor, multiplier: float) -> Tensor:
    """The paper's potential function, which its proof shows to decrease.

    V = F(x) - F* + l_g1 lam ||y - y*_lam(x)||^2 + (l_g1 lam / 2) ||z - y*(x)||^2
    """
    if not isinstance(problem, Quadratic):
        raise ArgumentTypeError(f"problem must be a Quadratic, not {problem!r}")
    errors = tracking_errors(problem, x, y, z, multiplier)
    l_g1 = problem.constants.l_g1
    with torch.no_grad():
        above = problem.value(x) - problem.value(problem.solution)
        return above + l_g1 * multiplier * (errors.y**2 + 0.5 * errors.z**2)


def _check_problem(problem: Problem) -> None:
    if not isinstance(problem, Problem):
        raise ArgumentTypeError(f"problem must be a bilevel.Problem, not {problem!r}")
    if problem.y_set is not None:
        raise ArgumentError(
            f"the problem has y_set={problem.y_set!r}, but the implicit function theorem as used "
            f"here is for an unconstrained lower level"
        )


def _solved_points(
    problem: Problem, stencil: Stencil, lam: float, x: Variable, y: Variable, sample: Sample
) -> list[Variable]:
    """The points of a stencil with every copy at the minimum that it follows, from y = y*(x)."""
    points = stencil.points(y.clone())
    for _ in range(100 if stencil.f_at_centre else 1):
        tilt = None
        if stencil.f_at_centre:
            with frozen(x):
                f = problem.f(x, points[-1], sample.upper)
                tilt = [g.detach() for g in gradient(f, points[-1].leaves)]
        before = flatten(points[0].leaves).detach().clone()
        for copy, strength in zip(points, stencil.strengths, strict=False):
            _minimise(problem, x, copy, sample, strength / lam, tilt)
        stencil.recentre(points)
        moved = (flatten(points[0].leaves).detach() - before).norm()
        if moved <= 100 * torch.finfo(before.dtype).eps * before.norm():
            break
    return points


def _implicit_gradient(problem: Problem, x: Variable, y: Variable, sample: Sample) -> list[Tensor]:
    f = problem.f(x, y, sample.upper)
    f_x = gradient(f, x.leaves, retain_graph=True)
    f_y = flatten(gradient(f, y.leaves))
    slope = Slope.of(problem.g(x, y, sample.lower), y.leaves, "the exact hypergradient")
    adjoint = conjugate_gradients(slope.hessian_product, f_y)
    left = float((f_y - slope.hessian_product(adjoint)).norm() / f_y.norm()) if f_y.any() else 0.0
    if not left <= torch.finfo(f_y.dtype).eps ** 0.5:
        raise NotConvergedError(
            f"conjugate gradients left a relative residual of {left:.2e}; the lower level is not "
            f"strongly convex here, or too badly conditioned for {f_y.dtype}"
        )
    mixed = slope.mixed_product(adjoint, x)
    return [a - b for a, b in zip(f_x, mixed, strict=True)]


def _minimise(
    problem: Problem,
    x: Variable,
    y: Variable,
    sample: Sample,
    strength: float,
    tilt: list[Tensor] | None = None,
) -> None:
    """Move y to argmin_y g(x, y) + strength * f(x, y), by Newton's method.

    With ``tilt`` the linear function of that slope stands in for f.
    """

    def objective() -> Tensor:
        value = problem.g(x, y, sample.lower)
        if tilt is not None:
            return value + strength * (flatten(tilt) @ flatten(y.leaves))
        return value + strength * problem.f(x, y, sample.upper) if strength else value

    eps = torch.finfo(y.leaves[0].dtype).eps
    with frozen(x):
        first = before = None
        for _ in range(100):
            value = objective()
            slope = Slope.of(value, y.leaves, "the exact hypergradient")
            descent = slope.vector.detach()
            size = float(descent.norm())
            first = size if first is None else first
            if size <= 100 * eps * min(first, 1.0):
                return
            # Rounding ends the descent where the gradient is tiny and falls no more.
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
        f"g strongly convex in y, twice differentiable, and y a reasonable start?"
    )


@torch.no_grad()
def _line_search(
    objective: Callable[[], Tensor], y: Variable, step: Tensor, value: float, decrease: float
) -> bool:
    """Move y against ``step``, halved until the objective falls; False: it does not."""
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
