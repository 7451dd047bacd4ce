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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from bilevel.errors import ObjectiveError
from bilevel.errors.checks import check_count
from bilevel.methods.descent import DescentMethod
from bilevel.methods.evaluator import Evaluator
from bilevel.methods.no_bilevel import train
from bilevel.methods.state import Info, OneCopyState
from bilevel.problem import Level, Problem, Term
from bilevel.sampling import Sample
from bilevel.stepping import StepSizes, Update
from bilevel.variables import Variable, buffers_kept, flatten, frozen, graph_nodes, to_dense

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


@dataclass(frozen=True)
class Point:
    """A point at which f and g are differentiated, on any sample in parts that add up.

    Attributes:
        evaluator: what evaluates them.
        x, y: the point.
        user: what needs second derivatives, for messages.
        check: that of :meth:`Slope.of`, needed once in a run.
        report: whether the evaluator reports the values; only those of the present point.
    """

    evaluator: Evaluator
    x: Variable
    y: Variable
    user: str
    check: bool = False
    report: bool = True

    def leave_upper_gradient(self, parts: Iterable[Sample]) -> Tensor:
        """Leave grad_x f on x, and return grad_y f."""
        evaluator, x, y, term = self.evaluator, self.x, self.y, Term(Level.UPPER, self.y)
        for part in parts:
            value = part.upper_share * evaluator.f(x, y, part.upper)
            evaluator.require_finite([term.name(x)], [value])
            if value.requires_grad:
                value.backward(inputs=[*x.leaves, *y.leaves])  # type: ignore[no-untyped-call]
            if self.report:
                part = replace(part, lower=None, lower_share=0.0)
                evaluator.report(part, [(term, value.detach())])
        f_y = y.take_grads()
        evaluator.require_finite(y.gradient_names, to_dense(f_y))
        return flatten(f_y)

    def lower_slopes(self, parts: Iterable[Sample]) -> Iterator[Slope]:
        """The slope of g."""
        evaluator, x, y, term = self.evaluator, self.x, self.y, Term(Level.LOWER, self.y)
        for part in parts:
            value = part.lower_share * evaluator.g(x, y, part.lower)
            evaluator.require_finite([term.name(x)], [value])
            slope = Slope.of(value, y.leaves, self.user, check=self.check)
            if self.report:
                part = replace(part, upper=None, upper_share=0.0)
                evaluator.report(part, [(term, value.detach())])
            yield slope

    def next_slope(self) -> Slope:
        """The slope of g on the next minibatch, which is not reported."""
        sample = Sample(None, self.evaluator.draw.lower.next())
        return next(replace(self, report=False).lower_slopes([sample]))


def pull_back(
    values: Sequence[Tensor],
    weights: Sequence[Tensor],
    *variables: Variable,
    user: str,
    inputs: Sequence[Tensor] = (),
) -> None:
    """Add the gradients of the values' products with the weights to those of the variables.

    And to those of the ``inputs``, other leaves of the graph.
    """
    leaves = [*(leaf for variable in variables for leaf in variable.leaves), *inputs]
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
    def _adjoint(self, point: Point, state: S, f_y: Tensor, sizes: StepSizes) -> Tensor:
        """The v with grad^2_yy g v = grad_y f, as well as the method knows it."""

    def step(self, evaluator: Evaluator, state: S, sizes: StepSizes) -> Info:
        x, y, draw = state.x, state.y, evaluator.draw
        gamma = state.y_update.choose(sizes.lower)
        train(evaluator, x, state.y_update, gamma, self.inner_steps)
        point = Point(evaluator, x, y, type(self).__name__, check=state.k == 0)
        with buffers_kept(x, y):
            f_y = point.leave_upper_gradient(draw.parts(upper=True))
            with frozen(x):
                adjoint = self._adjoint(point, state, f_y, sizes)
                evaluator.require_finite(["the adjoint v"], [adjoint])
            for slope in point.lower_slopes(draw.parts(lower=True)):
                slope.backward(-adjoint, x)
        return evaluator.finish(state, upper_lr=sizes.upper, lower_lr=gamma)


def one_copy(method: DescentMethod[Any], problem: Problem, x: Variable, y: Variable) -> Any:
    """The fields of a :class:`OneCopyState` at the start of a run."""
    y_update = Update(y, problem.y_projections(y), method.lower_optimizer)
    return {**method.carried(problem, x, y), "y": y, "y_update": y_update}


def _differentiable(vector: Tensor, at: Sequence[Tensor]) -> bool:
    """Whether a product with the derivative of ``vector`` exists and is not zero or incomplete."""
    wanted = set(map(id, at))
    reached = False
    for node in graph_nodes(vector):
        if node.name() == "torch::autograd::Error":  # what @once_differentiable leaves behind
            return False
        reached = reached or id(getattr(node, "variable", None)) in wanted
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
