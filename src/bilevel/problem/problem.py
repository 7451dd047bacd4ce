"""The problem: two objectives, the sets of their variables, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from bilevel.errors import ArgumentTypeError, ObjectiveError
from bilevel.errors.checks import as_float, check_function
from bilevel.problem.prox import Term, terms_of
from bilevel.problem.sets import Projection, projections
from bilevel.sampling import Draw
from bilevel.variables import Variable, is_sharded

Metrics: TypeAlias = dict[str, Any]
"""Numbers beside a loss, by their names: scalar tensors, or plain numbers."""

Objective: TypeAlias = Callable[[Any, Any, Any], Any]
"""``objective(x, y, batch) -> scalar tensor``, or a pair of it and a dict of metrics.

The batch is None where there is no data.
"""


class Problem:
    """min_x f(x, y*(x)) with y*(x) = argmin_y g(x, y).

    Args:
        upper: f, called as ``upper(x, y, batch)``; returns a scalar tensor.
        lower: g, called as ``lower(x, y, batch)``; returns a scalar tensor. The theory wants it
            strongly convex in y. Where y* is the fixed point of a map, a
            :class:`bilevel.FixedPoint`.
        x_set: a convex set to which x is confined, see :mod:`bilevel.sets`; None: all of space.
        y_set: the same for y. It may not depend on x.
        y_prox: a non-smooth term that is added to g, see :mod:`bilevel.prox`, such as
            ``bilevel.prox.L1(lambda x: x.exp())``; steps of y are then proximal ones.

    x and y reach the objectives in the structure in which the user gave the starting point: a
    tensor, nested dicts, lists and tuples of tensors, an ``nn.Module``, or a :class:`bilevel.Table`
    of parameters per sample. An objective that is a mean over its batch has gradients that are
    right for any batch size.

    An objective may also return ``(loss, metrics)`` with a dict of scalars, such as accuracies.
    They are recorded and logged where f and g are, at the same point, as ``"upper/accuracy"``.

    Example:
        >>> import torch, bilevel
        >>> problem = bilevel.Problem(
        ...     upper=lambda x, y, batch: 0.5 * ((y - 1) ** 2).sum(),
        ...     lower=lambda x, y, batch: 0.5 * ((y - x) ** 2).sum(),
        ... )
        >>> result = bilevel.minimize(problem, torch.zeros(2), torch.zeros(2), steps=30)
        >>> bool((result.x - 1).abs().max() < 1e-3)
        True
    """

    def __init__(
        self,
        upper: Objective,
        lower: Objective,
        x_set: Any = None,
        y_set: Any = None,
        y_prox: Any = None,
    ) -> None:
        for name, objective in (("upper", upper), ("lower", lower)):
            check_function(name, objective, "x", "y", "batch")
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
        if y_prox is not None and not isinstance(y_prox, Term | dict | list | tuple):
            raise ArgumentTypeError(
                f"y_prox must be a term such as bilevel.prox.L1(0.1), or a tree of such in the "
                f"shape of y, not {y_prox!r}"
            )
        self.y_prox = y_prox

    def f(self, x: Variable, y: Variable, batch: Any, metrics: Metrics | None = None) -> Tensor:
        """The upper objective, checked to be a scalar; its metrics are put into ``metrics``."""
        _forget_casts()
        return _scalar("upper", self.upper(x.value, y.value, batch), metrics)

    def g(self, x: Variable, y: Variable, batch: Any, metrics: Metrics | None = None) -> Tensor:
        """The lower objective, checked to be a scalar; its metrics are put into ``metrics``.

        A non-smooth term is a constant in y here, because steps follow it by its proximal map.
        """
        _forget_casts()
        value = _scalar("lower", self.lower(x.value, y.value, batch), metrics)
        if self.y_prox is not None:
            for leaf, term in zip(y.leaves, self.y_terms(y), strict=True):
                if term is not None:
                    value = value + term.value(leaf.detach(), term.at(x.value).to(leaf))
        return value

    def y_terms(self, y: Variable) -> list[Term | None]:
        """For each leaf of y its non-smooth term."""
        return terms_of(y, self.y_prox)

    def x_projections(self, x: Variable) -> list[Projection | None]:
        """For each leaf of x the projection onto its set."""
        return projections(x, "x_set", self.x_set)

    def y_projections(self, y: Variable) -> list[Projection | None]:
        """For each leaf of y the projection onto its set."""
        return projections(y, "y_set", self.y_set)


class Objectives(Protocol):
    """The objectives as a run evaluates them: where only their values and gradients are needed.

    Attributes:
        draw: the samples of the run.
    """

    draw: Draw

    def f(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        """The upper objective, on several ranks that of this rank."""

    def g(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        """The lower objective, on several ranks that of this rank."""

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the ranks of an objective or of its gradient."""


def _forget_casts() -> None:
    """Make autocast cast the parameters anew.

    It keeps their casts until its context is left. Around a whole run these would be the parameters
    as they were before the first step, whatever steps have made of them since.
    """
    if not torch.compiler.is_compiling():  # a graph holds its casts itself
        torch.clear_autocast_cache()


def _scalar(name: str, value: Any, metrics: Metrics | None) -> Tensor:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, told = value
        if metrics is not None:
            metrics.update(_checked_metrics(name, told))
    if not isinstance(value, Tensor):
        raise ObjectiveError(
            f"{name}(x, y, batch) must return a scalar tensor, or a pair of it and a dict of "
            f"metrics, but returned {type(value).__name__} {value!r}"
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


def _checked_metrics(name: str, metrics: Mapping[Any, Any]) -> Metrics:
    """The metrics of an objective under the names that they have in a history."""
    for key, value in metrics.items():
        scalar, shown = isinstance(value, Real), value
        if isinstance(value, Tensor):
            scalar = value.numel() == 1 and not value.is_complex()
            kind = "a complex tensor" if value.is_complex() else "a tensor"
            shown = f"{kind} of shape {tuple(value.shape)}"
        if not isinstance(key, str) or not scalar:
            raise ObjectiveError(
                f"{name}(x, y, batch) returned the metric {key!r}: {shown!r}; metrics are scalars "
                f"with names of text"
            )
    return {
        f"{name}/{key}": value.detach().reshape(())
        if isinstance(value, Tensor)
        else as_float(value)
        for key, value in metrics.items()
    }
