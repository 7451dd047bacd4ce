"""What the second-order methods share: products with second derivatives, and solves with them.

By the implicit function theorem the gradient of F(x) = f(x, y*(x)) is

    grad F = grad_x f - grad^2_xy g v     with     grad^2_yy g v = grad_y f     at (x, y*(x)).

The methods differ in how they come by the adjoint v. No Hessian is ever formed: a product of it
with a vector is one more backward pass through grad_y g (:class:`Slope`). Vectors that belong to y
are flat here, all leaves one after the other.

The theorem is that of an unconstrained lower level. With a ``y_set`` the iterates stay in the set,
but the direction is right only where y*(x) lies in its interior.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from bilevel.errors import ObjectiveError
from bilevel.errors.checks import check_count
from bilevel.methods.base import Info, State, Tally
from bilevel.methods.descent import DescentMethod
from bilevel.problem import Problem
from bilevel.sampling import Draw, Sample
from bilevel.stepping.updates import Now, Update
from bilevel.variables import Variable, buffers_kept, flatten, frozen, require_finite, to_dense

_NO_DERIVATIVE = ("is not implemented", "once_differentiable", "ouble backward")
"""What torch says when a backward pass has no backward pass of its own."""


@dataclass(frozen=True)
class Slope:
    """grad_y g(x, y) as one vector that can be differentiated again.

    Attributes:
        vector: the gradient, flat.
        at: the tensors in which it was taken.
        user: what needs second derivatives, for messages.
    """

    vector: Tensor
    at: Sequence[Tensor]
    user: str

    @classmethod
    def of(cls, value: Tensor, at: Sequence[Tensor], user: str, *, check: bool = True) -> Slope:
        """The slope of ``value`` in the tensors ``at``.

        ``check`` looks through the graph for functions whose backward is marked as not to be
        differentiated, because torch leaves their part out of a product without a word. The tensors
        must be leaves for that.
        """
        if not value.requires_grad:
            raise ObjectiveError(
                "lower(x, y, batch) does not depend on y through differentiable operations"
            )
        # with a seed that requires a gradient every such function leaves its mark
        seed = torch.ones_like(value, requires_grad=check)
        with _refused(user):
            vector = flatten(gradient(value, at, weights=seed, create_graph=True))
        if not (_differentiable(vector, at) if check else vector.requires_grad):
            raise ObjectiveError(_refusal(user))
        return cls(vector, at, user)

    def hessian_product(self, v: Tensor) -> Tensor:
        """grad^2_yy g v; may be asked for again and again."""
        with _refused(self.user):
            return flatten(gradient(self.vector, self.at, weights=v, retain_graph=True))

    def mixed_product(self, v: Tensor, x: Variable) -> list[Tensor]:
        """grad^2_xy g v, for each leaf of x; the last product that is asked for."""
        with _refused(self.user):
            return gradient(self.vector, x.leaves, weights=v)

    def backward(self, v: Tensor, *variables: Variable) -> None:
        """Add the products of the second derivatives with v to the gradients of the variables."""
        pull_back([self.vector], [v], *variables, user=self.user)


def pull_back(
    values: Sequence[Tensor], weights: Sequence[Tensor], *variables: Variable, user: str
) -> None:
    """Add the gradients of the values' products with the weights to those of the variables."""
    leaves = [leaf for variable in variables for leaf in variable.leaves]
    with _refused(user):
        torch.autograd.backward(values, weights, inputs=leaves)


def gradient(
    value: Tensor,
    at: Sequence[Tensor],
    *,
    weights: Tensor | None = None,
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> list[Tensor]:
    """The gradient in each tensor of ``value``, or of its product with ``weights``; dense."""
    grads = torch.autograd.grad(
        value,
        at,
        grad_outputs=weights,
        create_graph=create_graph,
        retain_graph=retain_graph,
        allow_unused=True,
    )
    return to_dense(
        [torch.zeros_like(t) if g is None else g for g, t in zip(grads, at, strict=True)]
    )


@dataclass
class OneCopyState(State):
    """What a method carries that follows y*(x) alone.

    Attributes:
        y: the lower variable.
        x_update, y_update: how each variable moves.
    """

    y: Variable
    x_update: Update
    y_update: Update

    @property
    def solution(self) -> Variable:
        return self.y


S = TypeVar("S", bound=OneCopyState)


@dataclass(frozen=True)
class ImplicitMethod(DescentMethod[S]):
    """Steps on y, then the adjoint at the new y, then a step of x.

    Args:
        lower_lr: the step of y.
        upper_lr: the step of x.
        inner_steps: T, how many steps y takes.
    """

    _: KW_ONLY
    inner_steps: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("inner_steps", self.inner_steps)

    @abstractmethod
    def _adjoint(self, problem: Problem, state: S, draw: Draw, f_y: Tensor, now: Now) -> Tensor:
        """V with grad^2_yy g v = grad_y f, as well as the method knows it."""

    def step(self, problem: Problem, state: S, draw: Draw, *, measure: bool = True) -> Info:
        x, k = state.x, state.k
        now = state.pace.at(problem, state, draw)
        lower_lr = state.y_update.choose(now.lower)
        descend(problem, state, draw, self.inner_steps, lower_lr)

        tally = Tally(problem, state, measure)
        with buffers_kept(x, state.y):
            f_y = leave_upper_gradient(problem, state, draw, tally)
            with frozen(x):
                adjoint = self._adjoint(problem, state, draw, f_y, now)
            for slope in lower_slopes(problem, state, draw, tally, type(self).__name__):
                slope.backward(-adjoint, x)
        x.require_finite_grads(k)
        upper_lr = state.x_update.choose(now.upper)
        info = tally.info(x.grads(), lower_lr, upper_lr)
        state.x_update.apply(upper_lr)

        state.k = k + 1
        return info

    def _slope(self, problem: Problem, state: S, draw: Draw) -> Slope:
        """The slope of g on the next minibatch."""
        return _slope_on(problem, state, draw.lower.next(), 1.0, type(self).__name__)[0]


def descend(problem: Problem, state: OneCopyState, draw: Draw, steps: int, rate: float) -> None:
    """Move y down g, at fixed x."""
    x, y = state.x, state.y
    with frozen(x):
        for _ in range(steps):
            value = problem.g(x, y, draw.lower.next())
            require_finite(state.k, [f"lower({x.name}, {y.name})"], [value])
            value.backward(inputs=y.leaves)  # type: ignore[no-untyped-call]
            y.require_finite_grads(state.k)
            state.y_update.apply(rate)


def leave_upper_gradient(problem: Problem, state: OneCopyState, draw: Draw, tally: Tally) -> Tensor:
    """Leave grad_x f on x, over the samples behind the direction, and return grad_y f."""
    x, y = state.x, state.y
    name = f"upper({x.name}, {y.name})"
    for batch, share in draw.upper.parts(draw.direction_batch_size, draw.chunk_size):
        value = share * problem.f(x, y, batch)
        require_finite(state.k, [name], [value])
        if value.requires_grad:
            value.backward(inputs=[*x.leaves, *y.leaves])  # type: ignore[no-untyped-call]
        tally.add(Sample(batch, None, share, 0.0), {name: value.detach()})
    y.require_finite_grads(state.k)
    return flatten(y.take_grads())


def lower_slopes(
    problem: Problem, state: OneCopyState, draw: Draw, tally: Tally, user: str
) -> Iterator[Slope]:
    """The slope of g over the samples behind the direction, in parts that add up."""
    name = f"lower({state.x.name}, {state.y.name})"
    for batch, share in draw.lower.parts(draw.direction_batch_size, draw.chunk_size):
        slope, value = _slope_on(problem, state, batch, share, user)
        tally.add(Sample(None, batch, 0.0, share), {name: value})
        yield slope


def require_finite_adjoint(step: int, adjoint: Tensor) -> None:
    """Raise unless v is finite."""
    require_finite(step, ["the adjoint v"], [adjoint])


def _slope_on(
    problem: Problem, state: OneCopyState, batch: Any, share: float, user: str
) -> tuple[Slope, Tensor]:
    x, y, k = state.x, state.y, state.k
    value = share * problem.g(x, y, batch)
    require_finite(k, [f"lower({x.name}, {y.name})"], [value])
    return Slope.of(value, y.leaves, user, check=k == 0), value.detach()


def _differentiable(vector: Tensor, at: Sequence[Tensor]) -> bool:
    """Whether a product with the derivative of ``vector`` exists and is not zero or incomplete."""
    wanted = set(map(id, at))
    reached = False
    waiting = [vector.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":  # what @once_differentiable leaves behind
            return False
        reached = reached or id(getattr(node, "variable", None)) in wanted
        waiting.extend(following for following, _ in node.next_functions)
    return reached


@contextmanager
def _refused(user: str) -> Iterator[None]:
    """Say in the library's words that second derivatives are missing."""
    try:
        yield
    except RuntimeError as error:
        if any(phrase in str(error) for phrase in _NO_DERIVATIVE):
            raise ObjectiveError(f"{_refusal(user)} (torch says: {error})") from error
        raise


def _refusal(user: str) -> str:
    return (
        f"lower(x, y, batch) cannot be differentiated twice in y, or is linear in it; {user} needs "
        f"second derivatives, the first-order methods do not"
    )
