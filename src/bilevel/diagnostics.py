"""Exact hypergradients, and the quantities against which a run is measured.

This file answers two questions: is the problem set up right, and how far is a method from the
truth? Nothing in it is meant for the inside of a training loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel.engine import EagerEvaluator
from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import check_flag, check_tensor, checked_number
from bilevel.methods import Method, PenaltyMethod, method_of
from bilevel.problem import Phi, Problem, Stencil
from bilevel.problems.exact import implicit_gradient, solve_lower, upper_slope
from bilevel.problems.known import KnownProblem
from bilevel.problems.quadratic import Quadratic
from bilevel.sampling import Draw, NoData, Sample
from bilevel.variables import (
    Variable,
    first_not_finite,
    flatten,
    frozen,
    inner,
    length,
    to_dense,
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
        problem: the problem, with an unconstrained lower level.
        x: the point; a tensor, tree or module.
        y: a starting guess for y*(x).
        upper_batch, lower_batch: the batches on which the objectives are evaluated.
        solve: True: find y*(x) from ``y`` first, by Newton's method; False: use ``y`` unchanged.

    Returns:
        The gradient in the structure of x. For a module it is a dict that maps parameter names to
        tensors, for a table a tensor.

    Example:
        >>> import torch, bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> exact = bilevel.hypergradient(problem, problem.x0, problem.y0)
        >>> torch.allclose(exact, problem.gradient(problem.x0))
        True
    """
    _check_problem(problem)
    check_flag("solve", solve)
    at_x, at_y = _finite_copy(x, "x"), _finite_copy(y, "y")
    sample = Sample(upper_batch, lower_batch)
    with torch.enable_grad():
        if solve:
            solve_lower(problem, at_x, at_y, sample)
        return at_x.structured(implicit_gradient(problem, at_x, at_y, sample))


@dataclass(frozen=True)
class HypergradientCheck:
    """How far a method's direction is from the exact hypergradient.

    Attributes:
        exact: the exact hypergradient, in the structure of x.
        direction: the method's x direction when its lower problems are solved exactly.
        relative_error: ||direction - exact|| / ||exact||; 0 where both are 0.
        cosine: the cosine of the angle between direction and exact; where one of them is 0, 0.
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

    The lower problems of the method are solved exactly first, so the result is the bias of the
    method itself: O(1/lam) for F2SA and F3SA.

    Args:
        problem: the problem, with an unconstrained lower level.
        x: the point; a tensor, tree or module.
        y: a starting guess for y*(x).
        method: a name in :data:`bilevel.METHODS` or a method object.
        multiplier: lam; None: the method's own multiplier at k = 0.
        upper_batch, lower_batch: the batches on which the objectives are evaluated.

    Example:
        >>> import bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> check = bilevel.check_hypergradient(problem, problem.x0, problem.y0, multiplier=1e4)
        >>> check.relative_error < 1e-2
        True
    """
    _check_problem(problem)
    stencil, lam = _stencil_and_multiplier(method_of(method), multiplier)
    sample = Sample(upper_batch, lower_batch)
    at_x, at_y = _finite_copy(x, "x"), _finite_copy(y, "y")
    with torch.enable_grad():
        solve_lower(problem, at_x, at_y, sample)
        exact = implicit_gradient(problem, at_x, at_y, sample)
        points = _solved_points(problem, stencil, lam, at_x, at_y, sample)
        direction = _stencil_direction(problem, stencil, lam, at_x, points, sample)
    truth, found = flatten(exact), flatten(direction)
    error, sizes = length(found - truth), (length(found), length(truth))
    return HypergradientCheck(
        exact=at_x.structured(exact),
        direction=at_x.structured(direction),
        relative_error=error / sizes[1] if sizes[1] else (math.inf if error else 0.0),
        cosine=inner(found / sizes[0], truth / sizes[1]) if all(sizes) else 0.0,
        multiplier=lam,
    )


@dataclass(frozen=True)
class TrackingErrors:
    """The distances of the two copies of y from their solutions, one number per run.

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
        >>> method = bilevel.F2SA(lower_lr=1.0, inner_steps=500)
        >>> solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method)
        >>> x_0 = solver.x
        >>> info = solver.step()
        >>> errors = bilevel.diagnostics.tracking_errors(
        ...     problem, x_0, solver.state.penalised.value, solver.y, info.multiplier)
        >>> bool(errors.y < 1e-6), bool(errors.z < 1e-6)
        (True, True)
    """
    if not isinstance(problem, KnownProblem):
        raise ArgumentTypeError(
            f"problem must be one of bilevel.problems, whose answers are known, not {problem!r}"
        )
    for name, copy in (("y", y), ("z", z)):
        check_tensor(name, copy)
    with torch.no_grad():
        solved_y, solved_z = problem.penalised_solution(x, multiplier), problem.lower_solution(x)
        for name, copy, solved in (("y", y, solved_y), ("z", z, solved_z)):
            of_one_run = copy.shape == solved.shape[-1:]
            if copy.shape != solved.shape and not (of_one_run or copy.shape[1:] == solved.shape):
                raise ArgumentError(
                    f"{name} has the shape {tuple(copy.shape)}, but y*(x) of this problem and this "
                    f"x has the shape {tuple(solved.shape)}"
                )
        return TrackingErrors(y=(y - solved_y).norm(dim=-1), z=(z - solved_z).norm(dim=-1))


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


def _finite_copy(value: Any, name: str) -> Variable:
    """The variable at a point, all of whose numbers are finite."""
    copy = Variable.copy_of(value, name)
    bad = first_not_finite(copy.names, copy.leaves)
    if bad is not None:
        raise ArgumentError(f"{bad} holds a number that is not finite")
    return copy


def _check_problem(problem: Problem) -> None:
    if not isinstance(problem, Problem):
        raise ArgumentTypeError(f"problem must be a bilevel.Problem, not {problem!r}")
    if torch.is_inference_mode_enabled():
        raise ArgumentError(
            "the exact hypergradient needs derivatives, which torch.inference_mode() does not "
            "allow; ask for it outside (torch.no_grad() does no harm)"
        )
    if problem.y_prox is not None:
        raise ArgumentError(
            f"the problem has y_prox={problem.y_prox!r}, but the exact hypergradient is available "
            f"only for a smooth lower level"
        )
    if problem.y_set is not None:
        raise ArgumentError(
            f"the problem has y_set={problem.y_set!r}, but the exact hypergradient is available "
            f"only for an unconstrained lower level"
        )


def _stencil_and_multiplier(method: Method[Any], multiplier: float | None) -> tuple[Stencil, float]:
    stencil = method.stencil if isinstance(method, PenaltyMethod) else None
    if not isinstance(method, PenaltyMethod) or stencil is None:
        raise ArgumentTypeError(
            f"method must be one whose x direction is a finite difference, such as F2SA, "
            f"not {method!r}"
        )
    lam = method.rates.multiplier(0) if multiplier is None else multiplier
    return stencil, checked_number("multiplier", lam, above=True)


def _solved_points(
    problem: Problem, stencil: Stencil, lam: float, x: Variable, y: Variable, sample: Sample
) -> list[Variable]:
    """The points of a stencil, each at the minimum that it follows, found from y = y*(x)."""
    points = stencil.points(y.clone())
    for _ in range(100 if stencil.f_at_centre else 1):
        tilt = upper_slope(problem, x, points[-1], sample) if stencil.f_at_centre else None
        before = flatten(points[0].leaves).detach().clone()
        for copy, strength in zip(points, stencil.strengths, strict=False):
            solve_lower(problem, x, copy, sample, strength / lam, tilt)
        stencil.recentre(points)
        moved = (flatten(points[0].leaves).detach() - before).norm()
        if moved <= 100 * torch.finfo(before.dtype).eps * before.norm():
            break
    return points


def _stencil_direction(
    problem: Problem,
    stencil: Stencil,
    lam: float,
    x: Variable,
    points: list[Variable],
    sample: Sample,
) -> list[Tensor]:
    """The x direction that a method with this stencil takes at these points."""
    evaluator = EagerEvaluator(problem, Draw(NoData(), NoData()))
    with frozen(*points):
        found = evaluator.evaluate(Phi(stencil, x, points, lam), [sample] * len(points))
        evaluator.backward(found, 1.0, lam)
    return to_dense(x.take_grads())
