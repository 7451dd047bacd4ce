"""The two objectives, and the scalar Phi whose one backward pass gives every direction.

The problem is  min_x f(x, y*(x))  with  y*(x) = argmin_y g(x, y).  The first-order methods keep
several copies y_i of the lower variable and look at one scalar:

    Phi(x, {y_i}) = sum_i ( u_i * f(x, y_i) + lam * w_i * g(x, y_i) )

Everything is in its gradient. In x it is the direction of descent; in y_i, divided by w_i * lam,
it is  grad_y g + (j_i / lam) grad_y f  with  j_i = u_i / w_i, the direction of that copy. F2SA has
two copies, the paper's y and z, with u = (1, 0) and w = (1, -1):

    Phi = f(x, y) + lam * ( g(x, y) - g(x, z) ).

Other finite differences in the strength j / lam of f have other weights (:class:`Stencil`).
Nothing is ever differentiated twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bilevel.engine.watch import Watch
from bilevel.errors import ArgumentTypeError, ObjectiveError
from bilevel.problem.sets import Projection, projections
from bilevel.sampling import Rewind, Sample
from bilevel.theory import Constants
from bilevel.variables import (
    Variable,
    add_gradients,
    buffers_kept,
    cast_large_gradients,
    differentiate,
    frozen,
    is_sharded,
)

Objective: TypeAlias = Callable[[Any, Any, Any], Tensor]
"""``objective(x, y, batch) -> scalar tensor``; batch is None where there is no data."""


class Problem:
    """min_x f(x, y*(x)) with y*(x) = argmin_y g(x, y).

    Args:
        upper: f, called as ``upper(x, y, batch)``; returns a scalar tensor.
        lower: g, called as ``lower(x, y, batch)``; returns a scalar tensor. The theory wants it
            strongly convex in y.
        x_set: a convex set to which x is confined, see :mod:`bilevel.sets`; None: all of space.
        y_set: the same for y. It may not depend on x.

    x and y reach the objectives in the structure in which the user gave the starting point: a
    tensor, nested dicts, lists and tuples of tensors, an ``nn.Module``, or a :class:`bilevel.Table`
    of parameters per sample. An objective that is a mean over its batch has gradients that are
    right for any batch size.

    Example:
        >>> import torch, bilevel
        >>> problem = bilevel.Problem(
        ...     upper=lambda x, y, batch: 0.5 * ((y - 1) ** 2).sum(),
        ...     lower=lambda x, y, batch: 0.5 * ((y - x) ** 2).sum(),
        ... )
        >>> result = bilevel.minimize(problem, torch.zeros(2), torch.zeros(2), steps=300)
        >>> bool((result.x - 1).abs().max() < 1e-3)
        True
    """

    def __init__(
        self,
        upper: Objective,
        lower: Objective,
        x_set: Any = None,
        y_set: Any = None,
    ) -> None:
        for name, objective in (("upper", upper), ("lower", lower)):
            if not callable(objective):
                raise ArgumentTypeError(
                    f"{name} must be a function of (x, y, batch), not {objective!r}"
                )
        for name, wanted in (("x_set", x_set), ("y_set", y_set)):
            if wanted is not None and not (
                callable(wanted) or isinstance(wanted, dict | list | tuple)
            ):
                raise ArgumentTypeError(
                    f"{name} must be a callable that projects a tensor, or a tree of such in the "
                    f"shape of the variable, not {wanted!r}"
                )
        self.upper = upper
        self.lower = lower
        self.x_set = x_set
        self.y_set = y_set

    @property
    def constants(self) -> Constants | None:
        """The constants of the paper's assumptions, where they are known."""
        return None

    def f(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        """The upper objective, checked to be a scalar."""
        return _scalar("upper", self.upper(x.value, y.value, batch))

    def g(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        """The lower objective, checked to be a scalar."""
        return _scalar("lower", self.lower(x.value, y.value, batch))

    def values(
        self, x: Variable, terms: Sequence[Term], rewind: Callable[[], None] | None
    ) -> Iterable[Tensor]:
        """The objectives at several points, each evaluated when it is asked for.

        With ``rewind`` all of them draw the same at random.
        """
        for number, term in enumerate(terms):
            if number and rewind is not None:
                rewind()
            objective = self.f if term.level == "upper" else self.g
            yield objective(x, term.y, term.batch)

    def combine(
        self,
        x: Variable,
        parts: list[tuple[Term, Tensor]],
        leaves: list[Tensor],
        wrappers: Sequence[Any],
    ) -> Phi:
        """Phi, of what :meth:`values` gave."""
        return Phi(x, parts, leaves, wrappers)

    def watch(
        self,
        step: int,
        device: torch.device,
        before: Watch | None = None,
        *,
        at_once: bool = False,
    ) -> Watch:
        """What looks after the numbers of one outer step; ``before``: that of the step before.

        With ``at_once`` it waits for any device.
        """
        return Watch(step, at_once=at_once or device.type == "cpu", before=before)

    def mean(self, value: Tensor) -> Tensor:
        """What an objective or its gradient is, on several ranks: the mean."""
        return value

    def x_projections(self, x: Variable) -> list[Projection | None]:
        """For each leaf of x the projection onto its set."""
        return projections(x, "x_set", self.x_set)

    def y_projections(self, y: Variable) -> list[Projection | None]:
        """For each leaf of y the projection onto its set."""
        return projections(y, "y_set", self.y_set)

    def check(self, x: Variable, y: Variable, upper_batch: Any, lower_batch: Any) -> None:
        """Evaluate the objectives and raise unless they are scalar functions of x and y."""
        with torch.enable_grad(), buffers_kept(x, y):
            levels = (("upper", self.f, upper_batch), ("lower", self.g, lower_batch))
            with frozen(x):
                for name, objective, batch in levels:  # one graph at a time: they may be large
                    try:
                        value = objective(x, y, batch)
                    except (TypeError, AttributeError) as error:  # as None raises them
                        if batch is None and hasattr(error, "add_note"):  # from Python 3.11 on
                            error.add_note(
                                f"{name}(x, y, batch) was called with the batch None, as it always "
                                f"is without {name}_data"
                            )
                        raise
                    if not _depends(value, y):
                        raise ObjectiveError(
                            f"{name}(x, y, batch) returned {value.item():.6g}, which does not "
                            f"depend on y through differentiable operations; check for detach(), "
                            f"item(), no_grad() or an unused y"
                        )
                    del value
            with frozen(y):
                if not any(_depends(objective(x, y, batch), x) for _, objective, batch in levels):
                    raise ObjectiveError(
                        "neither upper(x, y, batch) nor lower(x, y, batch) depends on x through "
                        "differentiable operations, so there is nothing to optimize"
                    )


class Term(NamedTuple):
    """One term of Phi.

    Attributes:
        level: "upper" for f, "lower" for g.
        y: where it is evaluated.
        batch: on what.
        share: of the batch in a larger one.
        weight: u_i or w_i.
        last: whether the point has no further one.
    """

    level: Literal["upper", "lower"]
    y: Variable
    batch: Any
    share: float = 1.0
    weight: float = 1.0
    last: bool = True

    def name(self, x: Variable) -> str:
        """What messages call it."""
        return f"{self.level}({x.name}, {self.y.name})"


@dataclass(frozen=True)
class Stencil:
    """A finite difference in the strength of f: what Phi is made of.

    Attributes:
        upper: u_i, the weight of f at each point.
        lower: w_i, the weight of lam * g at each point. The points with one are the copies: each
            moves by its own direction.
        centre: the weights with which the copies add up to the lower solution. Where it is not one
            of the copies, it is held as a further point, after them; in the midpoint scheme that is
            where f is evaluated.
    """

    upper: tuple[float, ...]
    lower: tuple[float, ...]
    centre: tuple[float, ...]

    @property
    def nodes(self) -> list[tuple[bool, bool]]:
        """For each point whether f, and whether g, is evaluated there."""
        return [(bool(u), bool(w)) for u, w in zip_longest(self.upper, self.lower, fillvalue=0.0)]

    @property
    def f_at_centre(self) -> bool:
        """Whether f is evaluated at the centre instead of at the copies."""
        return len(self.upper) > len(self.lower)

    @property
    def solution(self) -> int:
        """The place of the lower solution among the points."""
        return self.centre.index(1.0) if 1.0 in self.centre else len(self.centre)

    @property
    def strengths(self) -> tuple[float, ...]:
        """j_i of each copy: it follows argmin_y g + (j_i / lam) f."""
        through_centre = self.upper[-1] if self.f_at_centre else 0.0
        return tuple(
            (u + through_centre * c) / w
            for u, w, c in zip(self.upper, self.lower, self.centre, strict=False)
        )

    def points(self, y: Variable) -> list[Variable]:
        """The copies, all at ``y``, and the centre where it is not one of them."""
        if self.solution < len(self.centre):
            return [y, *(y.clone("z") for _ in self.centre[1:])]
        names = [f"y({strength:+g})" for strength in self.strengths]
        y.name = names[0]
        return [y, *(y.clone(name) for name in names[1:]), y.clone("y")]

    def recentre(self, points: Sequence[Variable]) -> None:
        """Move the centre to where the copies say it is."""
        if self.solution < len(self.centre):
            return
        copies, centre = points[: len(self.centre)], points[-1]
        with torch.no_grad():
            for target, *parts in zip(centre.leaves, *(c.leaves for c in copies), strict=True):
                target.zero_()
                for part, share in zip(parts, self.centre, strict=True):
                    target.add_(part, alpha=share)
        centre.reshard()

    def spread(self, points: Sequence[Variable]) -> None:
        """Pass the gradient at the centre on to the copies that it is made of."""
        if not self.f_at_centre:
            return
        gradient = points[-1].take_grads()
        for copy, share in zip(points, self.centre, strict=False):
            copy.set_grads(add_gradients(copy.grads(), gradient, alpha=share))


FORWARD = Stencil(upper=(1.0, 0.0), lower=(1.0, -1.0), centre=(0.0, 1.0))
"""F2SA: the copies are the paper's y and z; z is the lower solution. Bias O(1 / lam)."""

MIDPOINT = Stencil(upper=(0.0, 0.0, 1.0), lower=(0.5, -0.5), centre=(0.5, 0.5))
"""Phi = f(x, ybar) + lam/2 (g(x, y+) - g(x, y-)) with ybar = (y+ + y-)/2. Bias O(1 / lam^2)."""


def central(order: int) -> Stencil:
    """The central difference of an even ``order`` p: nodes j = +-1, ..., +-p/2. Bias O(1 / lam^p).

    With m = p/2 the weight of g at node j is (-1)^(j+1) (m!)^2 / (j (m-j)! (m+j)!), and that of f
    is j times it; the centre is the polynomial through the copies, at 0.
    """
    m = order // 2
    nodes = [j for size in range(1, m + 1) for j in (size, -size)]

    def weight(j: int) -> float:
        size = abs(j)
        share = math.factorial(m) ** 2 / (math.factorial(m - size) * math.factorial(m + size))
        sign = 1.0 if size % 2 else -1.0
        return sign * share / j

    def value_at_zero(j: int) -> float:
        return float(math.prod(i / (i - j) for i in nodes if i != j))

    lower = tuple(weight(j) for j in nodes)
    return Stencil(
        upper=tuple(j * w for j, w in zip(nodes, lower, strict=True)),
        lower=lower,
        centre=tuple(value_at_zero(j) for j in nodes),
    )


@dataclass(frozen=True)
class Phi:
    """Phi = upper + lam * lower, on one sample per point.

    It is not added up to be differentiated: a backward pass begins at every term at once, each
    with its weight, which takes fewer operations and gives the same.

    Attributes:
        x: the upper variable.
        parts: the terms and their values, weighted by the share of the sample, so that those of
            several samples add up.
        leaves: what a backward pass leaves gradients on; nothing else that the objectives use is
            given one.
        wrappers: what has to know of a backward pass before it begins.
    """

    x: Variable
    parts: list[tuple[Term, Tensor]]
    leaves: list[Tensor]
    wrappers: Sequence[Any] = ()

    @property
    def terms(self) -> dict[str, Tensor]:
        """The values by name: ``{"upper(x, y)": ..., "lower(x, y)": ..., ...}``."""
        return {term.name(self.x): value for term, value in self.parts}

    @property
    def upper(self) -> Tensor | None:
        """sum_i u_i * f(x, y_i); None where the sample has no part for f."""
        return self._sum("upper")

    @property
    def lower(self) -> Tensor | None:
        """sum_i w_i * g(x, y_i); None where the sample has no part for g."""
        return self._sum("lower")

    def _sum(self, level: str) -> Tensor | None:
        total = None
        for term, value in self.parts:
            if term.level == level:
                total = _added(total, term.weight, value)
        return total

    def at(self, multiplier: Tensor) -> Tensor:
        """The scalar for one multiplier."""
        upper, lower = self.upper, self.lower
        if lower is None:
            assert upper is not None, "a sample without any term"
            return upper
        scaled = multiplier.to(lower.dtype) * lower
        return scaled if upper is None else upper + scaled

    def backward(self, weights: Weights, watch: Watch, scale: float = 1.0) -> None:
        """Leave ``scale`` times the gradient of the weighted sum of upper and lower on the leaves.

        A term that is not finite stops the run by its name, at the latest when ``watch`` is read.
        """
        weighted = [
            (term, value, weight)
            for term, value in self.parts
            if (weight := weights.of(term)) is not None
        ]
        if not weighted:
            return
        watch.scalars(
            [value for _, value, _ in weighted],
            lambda: [term.name(self.x) for term, *_ in weighted],
        )
        # a part of a larger batch may hold no term in which x occurs
        begun = [
            (value, self._seed(value, weight * scale))
            for _, value, weight in weighted
            if value.requires_grad
        ]
        if begun:
            values, seeds = zip(*begun, strict=True)
            differentiate(values, self.leaves, self.wrappers, seeds)

    def _seed(self, value: Tensor, weight: float) -> Tensor:
        return _seed(value, weight)


@dataclass(frozen=True)
class Weights:
    """How much the two parts of Phi count in what is differentiated; None: not at all."""

    upper: float | None
    lower: float | None

    def of(self, term: Term) -> float | None:
        """The weight of one term."""
        factor = self.upper if term.level == "upper" else self.lower
        return None if factor is None else factor * term.weight


def separately() -> tuple[Weights, Weights]:
    """The upper part alone, and the lower part alone."""
    return Weights(1.0, None), Weights(None, 1.0)


def evaluate(
    problem: Problem,
    stencil: Stencil,
    x: Variable,
    points: Sequence[Variable],
    samples: Sequence[Sample],
    rewind: Callable[[], None] | None = None,
) -> Phi:
    """Phi(x, {y_i}), where the terms of point i are evaluated on ``samples[i]``.

    Points that share their sample also share what the objectives draw at random. ``rewind`` makes
    the whole evaluation draw what an earlier one did.
    """
    parts = list(_terms(problem, stencil, x, points, samples, rewind))
    return problem.combine(x, parts, _leaves(x, points), _wrappers(x, points))


def accumulate(
    problem: Problem,
    stencil: Stencil,
    x: Variable,
    points: Sequence[Variable],
    samples: Sequence[Sample],
    weights: Weights,
    watch: Watch,
    done: Callable[[Variable], None] | None = None,
    kept_as: torch.dtype | None = None,
    scale: float = 1.0,
) -> dict[str, Tensor]:
    """What ``evaluate(...).backward(...)`` leaves on the leaves, from one term after another.

    The activations of only one term are alive at a time. Returned are the terms.

    Args:
        problem, stencil, x, points, samples, weights, watch: as there.
        done: called with each point when its gradient is complete; it may move the point.
        kept_as: how the gradient of a point's first term is kept while the next is differentiated.
        scale: so many times the gradient is left.
    """
    terms: dict[str, Tensor] = {}
    inputs = {id(point): _leaves(x, [point]) for point in points}
    kept: list[Tensor] | None = None
    for term, value in _terms(problem, stencil, x, points, samples, None):
        name = term.name(x)
        watch.scalars([value], lambda: [name])  # noqa: B023
        terms[name] = value.detach()
        if value.requires_grad:
            weight = weights.of(term)
            assert weight is not None, "all terms count"
            seeds = [_seed(value, weight * scale)]
            differentiate([value], inputs[id(term.y)], _wrappers(x, [term.y]), seeds)
        del value  # the last that holds on to the activations
        point = term.y
        if not term.last:
            # aside, not on the leaves: there every gradient of the next term is added by itself
            kept = _kept(point, kept_as)
        else:
            if kept is not None:
                with torch.no_grad():
                    point.set_grads(add_gradients(point.grads(), kept))
                kept = None
            if done is not None:
                done(point)
    return terms


def _kept(point: Variable, dtype: torch.dtype | None) -> list[Tensor] | None:
    """The gradients, taken off the leaves, large ones in the given type; None: there are none."""
    if not any(leaf.requires_grad for leaf in point.leaves):
        return None
    grads = point.take_grads()
    return grads if dtype is None else cast_large_gradients(grads, dtype)


def _terms(
    problem: Problem,
    stencil: Stencil,
    x: Variable,
    points: Sequence[Variable],
    samples: Sequence[Sample],
    rewind: Callable[[], None] | None,
) -> Iterator[tuple[Term, Tensor]]:
    """Each term of Phi, point by point, and its value, weighted by the share of its sample."""
    if rewind is None:
        rewind = Rewind(x.device)
    else:
        rewind()
    terms = []
    for u, w, y, sample in zip_longest(stencil.upper, stencil.lower, points, samples):
        if u and sample.upper_share:
            last = not (w and sample.lower_share)
            terms.append(Term("upper", y, sample.upper, sample.upper_share, u, last))
        if w and sample.lower_share:
            terms.append(Term("lower", y, sample.lower, sample.lower_share, w))
    shared = all(sample is samples[0] for sample in samples)
    values = iter(problem.values(x, terms, rewind if shared else None))
    for term in terms:  # nothing here holds on to a value: whoever is done with it needs the memory
        yield term, _scaled(term.share, next(values))


def _leaves(x: Variable, points: Sequence[Variable]) -> list[Tensor]:
    return [leaf for v in (x, *points) for leaf in v.leaves if leaf.requires_grad]


def _wrappers(x: Variable, points: Sequence[Variable]) -> list[Any]:
    return [wrapper for v in (x, *points) for wrapper in v.wrappers]


def _depends(value: Tensor, variable: Variable) -> bool:
    """Whether a gradient reaches any leaf; others that the objective uses may require one too."""
    if not value.requires_grad or any(map(is_sharded, variable.leaves)):
        return (
            value.requires_grad
        )  # the leaves are not in the graph, but what is put together of them
    grads = torch.autograd.grad(value, variable.leaves, allow_unused=True)
    return any(grad is not None for grad in grads)


def _added(total: Tensor | None, weight: float, value: Tensor) -> Tensor:
    """Total + weight * value in one operation."""
    return _scaled(weight, value) if total is None else torch.add(total, value, alpha=weight)


def _scaled(factor: float, value: Tensor) -> Tensor:
    return value if factor == 1 else factor * value


def _seed(value: Tensor, weight: float) -> Tensor:
    """Where the gradient of weight * value begins.

    It is a tensor of its own every time, because it may become the gradient of a leaf of one entry.
    """
    # half a precision may not hold it; torch converts what reaches the graph
    dtype = torch.promote_types(value.dtype, torch.float32)
    if abs(weight) > torch.finfo(dtype).max:
        weight = math.copysign(math.inf, weight)
    return torch.full((), weight, dtype=dtype, device=value.device)


def _scalar(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ObjectiveError(
            f"{name}(x, y, batch) must return a scalar tensor, but returned "
            f"{type(value).__name__} {value!r}"
        )
    if is_sharded(value):
        raise ObjectiveError(
            f"{name}(x, y, batch) returned a DTensor, because it uses parameters of a fully_shard "
            f"module outside of the module's forward pass; use them inside it, or regularise with "
            f"the weight decay of lower_optimizer"
        )
    if value.ndim != 0:
        raise ObjectiveError(
            f"{name}(x, y, batch) must return a scalar, but returned a tensor of shape "
            f"{tuple(value.shape)}; reduce it with .mean() or .sum()"
        )
    if not value.is_floating_point():
        raise ObjectiveError(
            f"{name}(x, y, batch) must return a floating point scalar, but returned {value.dtype}"
        )
    return value
