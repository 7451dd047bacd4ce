"""Inner steps as functions of x, differentiated in reverse, as a whole or segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from bilevel.methods.evaluator import Evaluator
from bilevel.methods.implicit import Slope, gradient, pull_back
from bilevel.problem import Level, Number, Projection, ProximalMap, Term
from bilevel.sampling import Rewind
from bilevel.stepping import Carried, InnerRule
from bilevel.variables import Variable, buffers_copied, frozen, substituted, unflatten_like

FunctionOfX = Callable[[Any], Any]


@dataclass
class Unrolled:
    """y_T as a function of x.

    Attributes:
        evaluator: what evaluates g.
        x, y: the variables; y is where the first step starts, unless there is a ``start``.
        rule: how y moves.
        rate: the length of a step, or a factor of the learned ones.
        user: the method, for messages.
        start: from x to where y starts.
        learned: from x to rates in the structure of y.
        first_order: whether the gradients of g are taken for constants.
        check: whether to look for functions that cannot be differentiated twice.
        batches: those of the steps taken.
    """

    evaluator: Evaluator
    x: Variable
    y: Variable
    rule: InnerRule
    rate: Number
    user: str
    start: FunctionOfX | None = None
    learned: FunctionOfX | None = None
    first_order: bool = False
    check: bool = False
    batches: list[Any] = field(default_factory=list)

    def run(self, steps: int, keep_every: int) -> list[Tensor]:
        """Take all steps; the graph is kept of the last segment alone."""
        self._sets: list[Projection | None] = self.evaluator.problem.y_projections(self.y)
        self._segments: list[tuple[range, list[Carried], Rewind]] = []
        self._started = [leaf.detach().clone() for leaf in self.y.leaves]
        if self.start is not None:
            self._started = self.y.tensors_like(self.start(self.x.value), "the result of start")
        now = self.rule.begin([tensor.detach() for tensor in self._started])
        for first in range(0, steps, keep_every):
            segment = range(first, min(first + keep_every, steps))
            self._segments.append((segment, now, Rewind(self.x.device)))
            self.batches += [self.evaluator.draw.lower.next() for _ in segment]
            last = segment.stop == steps
            self._inputs, self._outputs = self._taken(segment, now, differentiable=last)
            now = [
                Carried(at.leaf.detach(), tuple(m.detach() for m in at.moments))
                for at in self._outputs
            ]
        return [at.leaf for at in now]

    def pull_back(self, cotangent: Sequence[Tensor]) -> None:
        """Add the product of the cotangent with the derivative of y_T to the gradient of x."""
        weights = [*cotangent, *(torch.zeros_like(t) for t in _moments(self._outputs))]
        inputs, outputs = self._inputs, self._outputs
        for index in reversed(range(len(self._segments))):
            if index < len(self._segments) - 1:
                segment, now, rewind = self._segments[index]
                present = Rewind(self.x.device)
                rewind()
                inputs, outputs = self._taken(segment, now, differentiable=True)
                present()
            weights = self._through(outputs, weights, inputs)
        started = [t for t in self._started if t.requires_grad]
        if self.start is not None and started:
            moving = [t.requires_grad for t in self._started]
            pull_back(started, list(compress(weights, moving)), self.x, user=self.user)

    def _through(
        self, outputs: Sequence[Carried], weights: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """The weights of the inputs of a segment from those of its outputs."""
        ends = [*(at.leaf for at in outputs), *_moments(outputs)]
        moving = [end.requires_grad for end in ends]
        pull_back(
            list(compress(ends, moving)),
            list(compress(weights, moving)),
            self.x,
            user=self.user,
            inputs=inputs,
        )
        found = [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs]
        for tensor in inputs:
            tensor.grad = None
        return found

    def _taken(
        self, segment: range, start: Sequence[Carried], *, differentiable: bool
    ) -> tuple[list[Tensor], list[Carried]]:
        """The steps of a segment from new leaves of the graph; these, and where it ends."""
        now = [
            Carried(_fresh(at.leaf), tuple(_fresh(moment) for moment in at.moments)) for at in start
        ]
        inputs = [*(at.leaf for at in now), *_moments(now)]
        with torch.enable_grad():
            rates = self._rates()
            for t in segment:
                slopes = self._slopes(t, [at.leaf for at in now], differentiable)
                if not differentiable:
                    now = [Carried(at.leaf.detach(), at.moments) for at in now]
                with torch.set_grad_enabled(differentiable):
                    now = self.rule.step(t, now, slopes, rates)
                    now = [
                        Carried(_followed(project, rate, at.leaf), at.moments)
                        for at, project, rate in zip(now, self._sets, rates, strict=True)
                    ]
                if not differentiable:
                    now = [Carried(_fresh(at.leaf), at.moments) for at in now]
        return inputs, now

    def _rates(self) -> list[Any]:
        if self.learned is None:
            if self.rule.groups is not None:
                return [group["lr"] for group in self.rule.groups]
            return [self.rate] * len(self.y.leaves)
        given = self.y.match(
            "the result of learned_lr",
            self.learned(self.x.value),
            lambda part: isinstance(part, Tensor),
            "a tensor",
        )
        return [0.0 if rate is None else self.rate * rate for rate in given]

    def _slopes(self, t: int, at: list[Tensor], differentiable: bool) -> list[Tensor]:
        """grad_y g in each leaf, as a function of these and of x, or as constants."""
        x, y, evaluator = self.x, self.y, self.evaluator
        constant = self.first_order or not differentiable
        with substituted(y, at), buffers_copied(x, y):
            if constant:
                with frozen(x):
                    value = evaluator.g(x, y, self.batches[t])
                    evaluator.require_finite([Term(Level.LOWER, y).name(x)], [value])
                    slopes = gradient(value, at)
            else:
                value = evaluator.g(x, y, self.batches[t])
                evaluator.require_finite([Term(Level.LOWER, y).name(x)], [value])
                slope = Slope.of(value, at, self.user, check=self.check and t == 0)
                slopes = unflatten_like(slope.vector, at)
        evaluator.require_finite(y.gradient_names, [slope.detach() for slope in slopes])
        return slopes


def _followed(project: Projection | None, rate: Any, leaf: Tensor) -> Tensor:
    """A leaf after a step of that rate, in its set or at the proximal map of the step."""
    if project is None:
        return leaf
    return project.after(rate, leaf) if isinstance(project, ProximalMap) else project(leaf)


def _fresh(tensor: Tensor) -> Tensor:
    """A leaf of a new graph, with the same numbers."""
    return tensor.detach().clone().requires_grad_()


def _moments(carried: Sequence[Carried]) -> list[Tensor]:
    return list(chain.from_iterable(at.moments for at in carried))
