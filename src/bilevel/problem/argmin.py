"""Differentiable layers: the minimum of a function, and the fixed point of a map.

The backward pass of :func:`argmin` needs no second derivative. With a cotangent c it solves two
more problems, warm-started, whose objective is tilted by c,

    y+- = argmin_y g(x, y) +- nu <c, y>,    dx = ( grad_x g(x, y+) - grad_x g(x, y-) ) / (2 nu),

whose error is O(nu^2): by Danskin's theorem the two gradients are those of the minimal values, and
the derivative of the minimal value in nu is <c, y*(x)>.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bilevel.errors import (
    ArgumentError,
    NotConvergedWarning,
    ObjectiveError,
    UnrepeatableWarning,
    warn,
)
from bilevel.errors.checks import check_count, check_function, checked_number
from bilevel.problem.prox import Term, check_terms, refuse_both, terms_of
from bilevel.problem.sets import projections
from bilevel.sampling import Rewind
from bilevel.variables import (
    FixedPointResult,
    GivenMap,
    ProximalStep,
    Variable,
    fixed_point_of,
    flatten,
    length,
    substituted,
    unflatten_like,
)

try:  # seen in torch 2.4 to 2.13
    from torch._C._functorch import maybe_current_level
except ImportError:  # another version of torch, whose own message has to do

    def maybe_current_level() -> int | None:
        """How deep inside torch.func and torch.vmap this is; None: it is not."""
        return None


Objective = Callable[[Any, Any], Any]
"""``g(x, y) -> scalar tensor``, or ``phi(x, y) -> y``."""


def argmin(
    g: Objective,
    x: Any,
    y0: Any,
    *,
    y_set: Any = None,
    y_prox: Any = None,
    nu: float | None = None,
    tolerance: float = 0.0,
    steps: int = 1000,
) -> Any:
    """y*(x) = argmin_y g(x, y) as a differentiable function of x, by gradients of g alone.

    The minimum is found by proximal gradient steps with Anderson acceleration, whose length follows
    from the curvature that they meet. Backward, with the cotangent c, two more minima are found,

        y+- = argmin_y g(x, y) +- nu <c, y>,   dx = ( grad_x g(x, y+) - grad_x g(x, y-) ) / (2 nu),

    with an error of O(nu^2). g is differentiated once only, so that it may be made of operations
    whose backward pass has no backward pass; and it may itself hold an ``argmin``, for three levels
    and more. The result cannot be differentiated twice.

    Args:
        g: called as ``g(x, y)``; a scalar, strongly convex in y, the same at every call. What
            it uses beside x and y is a constant.
        x: a tensor, nested dicts, lists and tuples of tensors, or modules, in all of which y* is
            differentiated.
        y0: where to start, and the structure of y. y* does not depend on it, and starting near y*
            saves steps.
        y_set: a convex set to which y is confined, as in :class:`bilevel.Problem`; it may not
            depend on x.
        y_prox: a non-smooth term that is added to g, see :mod:`bilevel.prox`.
        nu: the difference, in units of ||y*|| L / ||c||, where L is the curvature of g. None: the
            cube root of the machine precision, where the error of the difference meets rounding.
        tolerance: of the steps of y, relative to y; 0: down to rounding.
        steps: the most gradients of g for each of the three minima.

    Returns:
        y*, in the structure of y0; of a module, a dict of its parameters. A
        :class:`bilevel.errors.NotConvergedWarning` tells of a minimum that was not found.

    Example:
        >>> import torch, bilevel
        >>> A = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))
        >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        >>> y = bilevel.argmin(lambda x, y: 0.5 * y @ A @ y - x @ y, x, torch.zeros_like(x))
        >>> y.sum().backward()  # y* is the solution of A y = x
        >>> [round(v, 6) for v in (*y.tolist(), *x.grad.tolist())]
        [1.0, 0.5, 1.0, 0.25]

    Reference:
        Kwon, Kwon, Wright, Nowak 2023 for the difference; the tilted problems: Zhao and others,
        "FFOLayer", arXiv 2512.02494.
    """
    if nu is not None:
        checked_number("nu", nu, above=True)
    made = _layer(_Minimum, g, x, y0, tolerance, steps)
    made.projections = projections(made.y, "y_set", y_set)
    made.terms = terms_of(made.y, y_prox)
    refuse_both(made.y, made.projections, made.terms)
    check_terms(made.x, made.y, made.terms)
    made.nu = nu
    return made.result()


def fixed_point(
    phi: Objective, x: Any, y0: Any, *, tolerance: float = 0.0, steps: int = 1000
) -> Any:
    """The y*(x) with y* = phi(x, y*) as a differentiable function of x.

    It is found by Anderson acceleration. Backward, with the cotangent c, so is u = c + phi_y' u,
    and the result is phi_x' u; phi is differentiated once only.

    Args:
        phi: called as ``phi(x, y)``; returns another y, in the same structure, and is a contraction
            in y. What it uses beside x and y is a constant.
        x, y0, tolerance, steps: as in :func:`argmin`.

    Returns:
        y*, in the structure of y0.

    Example:
        >>> import torch, bilevel
        >>> x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        >>> y = bilevel.fixed_point(lambda x, y: x * y.cos(), x, torch.zeros_like(x))
        >>> y.backward()
        >>> exact = y.cos() / (1 + x * y.sin())  # by the implicit function theorem
        >>> bool((x.grad - exact).abs() < 1e-12)
        True
    """
    return _layer(_FixedPoint, phi, x, y0, tolerance, steps).result()


def _layer(
    kind: type[Any], function: Objective, x: Any, y0: Any, tolerance: float, steps: int
) -> Any:
    check_function(kind.name, function, "x", "y")
    if torch.is_inference_mode_enabled():
        raise ArgumentError(
            f"the solution is found by gradients of {kind.name}, which torch.inference_mode() does "
            f"not allow; use torch.no_grad()"
        )
    checked_number("tolerance", tolerance)
    check_count("steps", steps)
    if maybe_current_level() is not None:
        raise ArgumentError(
            f"the solution is found by steps whose number depends on the values of {kind.name}, "
            f"which torch.func and torch.vmap do not allow; differentiate with backward() or "
            f"torch.autograd.grad, and give a batch as one y, whose terms are added up in "
            f"{kind.name}"
        )
    return kind(function, Variable(x, "x"), Variable.copy_of(y0, "y"), tolerance, steps)


@dataclass
class _Layer(ABC):
    """A y*(x) that is found by iteration.

    Attributes:
        function: of x and y.
        x: what it is differentiated in; its tensors may be the results of other layers.
        y: the structure of the solution, at the starting point.
        tolerance, steps: when the iteration ends.
        seen: whether the function was called before.
    """

    name: ClassVar[str]

    function: Objective
    x: Variable
    y: Variable
    tolerance: float
    steps: int
    seen: bool = False

    @abstractmethod
    def solve(self, x: Sequence[Tensor]) -> Tensor:
        """y*, flat."""

    @abstractmethod
    def pull_back(self, x: Sequence[Tensor], y: Tensor, cotangent: Tensor) -> list[Tensor]:
        """The product of the cotangent with the derivative of y* in each of the ``x``."""

    def result(self) -> Any:
        """y* in the structure of y."""
        return self.y.structured(_Solution.apply(self, *self.x.leaves))  # type: ignore[no-untyped-call]

    def at(self, x: Sequence[Tensor], y: Sequence[Tensor]) -> Any:
        """The function of these tensors; at its first call, checked to be one."""
        with substituted(self.x, x), substituted(self.y, y):
            if self.seen:
                return self.function(self.x.value, self.y.value)
            with _pure(self.name, *x, *y):
                value, again = (self.function(self.x.value, self.y.value) for _ in range(2))
            if _differ(value, again):
                # not an error: kernels that add up in any order leave little of a value near zero
                warn(
                    UnrepeatableWarning(
                        f"{self.name}(x, y) has another value when it is called again: it draws "
                        f"random numbers that torch knows nothing of, or changes with every call, "
                        f"and has no solution to be found; draw before"
                    )
                )
            self.seen = True
            return value

    def checked(self, found: FixedPointResult, what: str) -> Tensor:
        """Where an iteration ended, with a warning if that is not the solution."""
        if not bool(torch.isfinite(found.point).all()):
            raise ObjectiveError(f"{what} led to a number that is not finite")
        if not found.converged:
            warn(
                NotConvergedWarning(
                    f"{what} was not found in steps={self.steps}: the last step was still "
                    f"{found.residual:.1e} of the size of y; give more steps, a y0 that is nearer, "
                    f"or a larger tolerance={self.tolerance!r}"
                )
            )
        return found.point


class _Minimum(_Layer):
    name = "g"
    projections: list[Any]
    terms: list[Term | None]
    nu: float | None
    curvature = math.nan
    local = math.nan

    def solve(self, x: Sequence[Tensor]) -> Tensor:
        step = self._step(x)
        found = fixed_point_of(step, flatten(self.y.leaves), **self._end)
        self.curvature, self.local = step.curvature, step.local
        minimum = self.checked(found, "the minimum of g")
        if found.converged and not any(self.terms):
            self._compare(x, minimum)
        return minimum

    def _compare(self, x: Sequence[Tensor], y: Tensor) -> None:
        """Warn where g is larger at its minimum than at the start."""
        start = [leaf.detach() for leaf in self.y.leaves]
        if any(self.projections):  # the start may lie outside of the set, where g may be less
            pairs = zip(start, self.projections, strict=True)
            start = [leaf if p is None else p(leaf.clone()) for leaf, p in pairs]
        before = float(self._scalar(self.at(x, start)))
        after = float(self._scalar(self.at(x, self._parts(y))))
        rounding = 1e3 * float(torch.finfo(y.dtype).eps) * max(abs(before), abs(after))
        if after > before + rounding:
            warn(
                NotConvergedWarning(
                    f"g is larger where its gradient is 0, {after:.6g}, than at y0, {before:.6g}: "
                    f"that is no minimum, and g is not convex in y; give a y0 near the minimum"
                )
            )

    def pull_back(self, x: Sequence[Tensor], y: Tensor, cotangent: Tensor) -> list[Tensor]:
        # rounding is that of the coarsest numbers from which the difference is taken
        eps = max(torch.finfo(tensor.dtype).eps for tensor in (*self.y.leaves, *x))
        way = length(y) or length(y - flatten(self.y.leaves)) or 1.0
        size = length(cotangent)
        if not size > 0:
            return [torch.zeros_like(tensor) for tensor in x]
        share = eps ** (1 / 3) if self.nu is None else self.nu
        # what was met on the way to y may be larger by far, and the tilt then too strong
        curvature = self.local if self.local < math.inf else self.curvature
        nu = share * way * curvature / size
        slopes, other = [], y
        for sign in (1.0, -1.0):
            step = self._step(x, tilt=sign * nu * cotangent)
            # the second minimum lies opposite to the first
            found = fixed_point_of(step, 2 * y - other if sign < 0 else y, **self._end)
            other = self.checked(found, "a tilted minimum of g")
            slopes.append(self._upper_slope(x, other))
        return [(plus - minus) / (2 * nu) for plus, minus in zip(*slopes, strict=True)]

    @property
    def _end(self) -> dict[str, Any]:
        return {"tolerance": self.tolerance, "steps": self.steps, "confirmed": True}

    def _step(self, x: Sequence[Tensor], tilt: Tensor | float = 0.0) -> ProximalStep:
        x = [tensor.detach() for tensor in x]
        with torch.no_grad(), substituted(self.x, x):
            shrinks = [
                None if term is None else (term, term.at(self.x.value)) for term in self.terms
            ]

        def gradient(y: Tensor) -> Tensor:
            with torch.enable_grad():
                leaves = [leaf.requires_grad_() for leaf in self._parts(y)]
                value = self._scalar(self.at(x, leaves))
                if not value.requires_grad:
                    raise ObjectiveError("g(x, y) does not depend on y")
                slopes = torch.autograd.grad(
                    value, leaves, allow_unused=True, materialize_grads=True
                )
            # outside of where g is defined, as that of a logarithm, a slope may still be finite
            return (flatten(slopes) + tilt).masked_fill_(value.detach().isnan(), math.nan)

        def prox(y: Tensor, step: float) -> Tensor:
            pairs = zip(self._parts(y), shrinks, strict=True)
            parts = [v if s is None else s[0].prox(v, step * s[1]) for v, s in pairs]
            return project(flatten(parts))

        def project(y: Tensor) -> Tensor:
            if not any(self.projections):
                return y
            pairs = zip(self._parts(y), self.projections, strict=True)
            return flatten([leaf if p is None else p(leaf) for leaf, p in pairs])

        return ProximalStep(gradient, prox, project, self.curvature, self.local)

    def _upper_slope(self, x: Sequence[Tensor], y: Tensor) -> list[Tensor]:
        """grad_x of g and of the non-smooth terms."""
        with torch.enable_grad():
            at = [tensor.detach().requires_grad_() for tensor in x]
            leaves = self._parts(y)
            value = self._scalar(self.at(at, leaves))
            with substituted(self.x, at):
                for leaf, term in zip(leaves, self.terms, strict=True):
                    if term is not None:
                        value = value + term.value(leaf, term.at(self.x.value))
            if not value.requires_grad:
                return [torch.zeros_like(tensor) for tensor in at]
            return list(torch.autograd.grad(value, at, allow_unused=True, materialize_grads=True))

    def _parts(self, y: Tensor) -> list[Tensor]:
        return [part.detach() for part in unflatten_like(y, self.y.leaves)]

    def _scalar(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
            shown = tuple(value.shape) if isinstance(value, Tensor) else value
            raise ObjectiveError(f"g(x, y) must return a scalar tensor, but returned {shown!r}")
        return value


class _FixedPoint(_Layer):
    name = "phi"

    def solve(self, x: Sequence[Tensor]) -> Tensor:
        def image(y: Tensor) -> Tensor:
            return flatten(self._image(x, unflatten_like(y, self.y.leaves)))

        start = flatten([leaf.detach() for leaf in self.y.leaves])
        return self.checked(
            fixed_point_of(GivenMap(image), start, tolerance=self.tolerance, steps=self.steps),
            "the fixed point of phi",
        )

    def pull_back(self, x: Sequence[Tensor], y: Tensor, cotangent: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            at = [tensor.detach().requires_grad_() for tensor in x]
            leaves = [part.detach().requires_grad_() for part in unflatten_like(y, self.y.leaves)]
            image = flatten(self._image(at, leaves))

        def product(u: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return torch.autograd.grad(
                image, inputs, u, retain_graph=True, allow_unused=True, materialize_grads=True
            )

        adjoint = self.checked(
            fixed_point_of(
                GivenMap(lambda u: cotangent + flatten(product(u, leaves))),
                cotangent,
                tolerance=self.tolerance,
                steps=self.steps,
            ),
            "the adjoint of phi",
        )
        return list(product(adjoint, at))

    def _image(self, x: Sequence[Tensor], y: Sequence[Tensor]) -> list[Tensor]:
        return self.y.tensors_like(self.at(x, y), "the result of phi(x, y)")


@contextmanager
def _pure(name: str, *tensors: Tensor) -> Iterator[None]:
    """Raise unless what is computed inside leaves the tensors and the generators as they are."""
    device = tensors[0].device if tensors else torch.device("cpu")
    rewind, versions = Rewind(device), [tensor._version for tensor in tensors]
    yield
    if versions != [tensor._version for tensor in tensors]:
        raise ObjectiveError(f"{name}(x, y) writes into x or y in place; let it return new tensors")
    if rewind.moved():
        raise ObjectiveError(
            f"{name}(x, y) draws at random, so that it is another function at every call; draw "
            f"before, or use .eval() for modules with dropout"
        )


def _differ(one: Any, other: Any) -> bool:
    """Whether two values at the same point have less than half of their digits in common."""
    if isinstance(one, Mapping):
        return any(_differ(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list):
        return any(map(_differ, one, other))
    if not (isinstance(one, Tensor) and one.is_floating_point() and one.numel()):
        return False  # which is refused by others, or holds nothing
    largest, away = (float(part.detach().abs().max()) for part in (one, one - other))
    rounding: float = torch.finfo(one.dtype).eps ** 0.5
    return away > rounding * largest


class _Solution(torch.autograd.Function):
    """The one node of a layer in the graph."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, *x: Tensor) -> tuple[Tensor, ...]:
        y = layer.solve(x)
        ctx.layer = layer
        ctx.save_for_backward(y, *x)
        return tuple(part.clone() for part in unflatten_like(y, layer.y.leaves))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        y, *x = ctx.saved_tensors
        cotangent = flatten([part.detach() for part in cotangents]).to(y.dtype)
        if not bool(torch.isfinite(cotangent).all()):  # as through any other operation
            return None, *(torch.full_like(tensor, math.nan) for tensor in x)
        # The squares of very small or large entries would be 0 or infinite.
        unit = float(cotangent.abs().max()) if cotangent.numel() else 0.0
        if not 0 < unit < math.inf:
            unit = 1.0
        with torch.no_grad():
            gradients = [unit * slope for slope in ctx.layer.pull_back(x, y, cotangent / unit)]
        if torch.is_grad_enabled():  # create_graph=True
            gradients = [_Once.apply(slope, *x, *cotangents) for slope in gradients]  # type: ignore[no-untyped-call]
        return None, *gradients

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ObjectiveError(
            "argmin and fixed_point have no derivatives in forward mode; use backward() or "
            "torch.autograd.grad"
        )


class _Once(torch.autograd.Function):
    """A first derivative, connected to what it depends on.

    torch's ``once_differentiable`` leaves it without a connection to x, so that a second derivative
    of a sum in which a layer is one term would silently be that of the other terms.
    """

    @staticmethod
    def forward(ctx: Any, slope: Tensor, *inputs: Tensor) -> Tensor:
        return slope.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        raise ObjectiveError(
            "the gradient of argmin or fixed_point was differentiated again, but these layers have "
            "first derivatives only; detach the gradient, or use create_graph=False"
        )
