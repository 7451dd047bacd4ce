"""What a method asks of the engine: the verbs in which a step is written.

A method's step says what is computed; an :class:`Evaluator` of the engine says how: eagerly, as
compiled code, for many stacked runs at once, or on several ranks. The step of F2SA, for example, is

    evaluator.descend(descent)       T times: grad Phi on a fresh sample, and a step of each copy
    evaluator.direction(phi)         grad_x Phi on the samples behind the x direction
    evaluator.finish(...)            the step of x, and the report

Because a step is a sequence of such verbs and holds no tensors of its own, the engine can record
it, and run the record without calling the method again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from bilevel.methods.state import Info, State
from bilevel.problem import Evaluation, Number, Phi, Problem, Term
from bilevel.sampling import Draw, Sample
from bilevel.stepping import AcceleratedSteps, StepSizes, Update
from bilevel.variables import Variable


@dataclass(frozen=True)
class Move:
    """One step: ``update`` moves its variable by ``rate`` against ``gain`` times its gradient."""

    update: Update
    rate: Number
    gain: Number = 1.0

    @property
    def variable(self) -> Variable:
        """What moves."""
        return self.update.variable

    @property
    def length(self) -> Number:
        """How far the variable goes per unit of its gradient."""
        return self.rate * self.gain


@dataclass(frozen=True)
class Descent:
    """How the copies of Phi move along its gradient.

    Attributes:
        phi: the function.
        moves: the step of each copy that moves.
        centre: the update of a lower solution that is held apart from the copies; None: it is one
            of them.
        accelerated: finds the steps from their own path; None: they have the lengths of ``moves``.
    """

    phi: Phi
    moves: Sequence[Move]
    centre: Update | None = None
    accelerated: AcceleratedSteps | None = None

    @property
    def settled(self) -> bool:
        """Whether no further step is worth its cost."""
        return self.accelerated is None or self.accelerated.done

    def spread(self) -> None:
        """Pass the gradient at the centre on to the copies that it is made of."""
        self.phi.stencil.spread(self.phi.points)

    def recentre(self) -> None:
        """Move the centre to where the copies say it is, and into its set."""
        if self.centre is not None:
            self.phi.stencil.recentre(self.phi.points)
            self.centre.project()

    def step_again(self) -> bool:
        """Go back after a step that met a number that is not finite; False: none is known."""
        for point in self.phi.points:
            point.clear_grads()
        if self.accelerated is None or not self.accelerated.step_again(self.moves):
            return False
        self.recentre()
        return True


Step: TypeAlias = "Callable[[Evaluator, Any, StepSizes], Info]"
"""The step of a method: its algorithm in the verbs of an :class:`Evaluator`."""


class Evaluator(ABC):
    """Evaluates and differentiates the objectives of one run, and moves its variables.

    Gradients arrive on the leaves of the variables, by the route on which the hooks of
    ``DistributedDataParallel`` and ``fully_shard`` fire. Every number is checked to be finite
    before it moves anything; on several ranks gradients become their means over the ranks.

    Attributes:
        problem: the objectives and their sets.
        draw: the samples.
    """

    problem: Problem
    draw: Draw

    @abstractmethod
    def outer_step(self, step: Step, state: State, *, measure: bool) -> Info:
        """One outer step, in place; without ``measure`` nothing is evaluated for a report."""

    # The verbs of a step on Phi

    @abstractmethod
    def descend(self, descent: Descent) -> None:
        """Differentiate Phi on the next sample, and move the copies by one step."""

    @abstractmethod
    def direction(self, phi: Phi, descent: Descent | None = None) -> Descent | None:
        """Leave grad_x Phi on x, from the samples behind the x direction, and report f and g.

        Without a ``descent`` the copies are constants, and their buffers stay as they are. With
        one, the last inner step and the x direction share one evaluation (a single pass); returned
        is what remains to be moved, for :meth:`finish`.
        """

    @abstractmethod
    def finish(
        self,
        state: State,
        *,
        upper_lr: Number,
        lower_lr: Number,
        multiplier: Number = math.nan,
        gain: Number = 1.0,
        also: Descent | None = None,
        averaged: bool = False,
        phi: Phi | None = None,
    ) -> Info:
        """Move x, with ``gain`` times the direction on its leaves, and count the outer step.

        Args:
            state: the run.
            upper_lr: the step of x, unless the policy or its update finds it.
            lower_lr, multiplier: what is reported.
            gain: a factor on the direction.
            also: copies that move together with x.
            averaged: whether the gradients on the leaves are means over the ranks already.
            phi: the function whose x gradient the direction is, by which an "auto" step of x is
                tested; None: f at the lower solution.
        """

    # The parts that other methods are made of

    @abstractmethod
    def f(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        """The upper objective; on several ranks that of this rank."""

    @abstractmethod
    def g(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        """The lower objective; on several ranks that of this rank."""

    @abstractmethod
    def mean(self, value: Tensor) -> Tensor:
        """The mean over the ranks."""

    @abstractmethod
    def evaluate(
        self, phi: Phi, samples: Sequence[Sample], rewind: Callable[[], None] | None = None
    ) -> Evaluation:
        """The terms of Phi, those of point i on ``samples[i]``.

        Points that share their sample also share what the objectives draw at random; ``rewind``
        makes the whole evaluation draw what an earlier one did.
        """

    @abstractmethod
    def backward(
        self, evaluation: Evaluation, upper: Number | None, lower: Number | None, scale: float = 1.0
    ) -> None:
        """Leave the gradient of a weighted sum of the terms of f and of g on the leaves.

        ``upper`` weighs those of f and ``lower`` those of g; None leaves them out.
        """

    @abstractmethod
    def move(self, moves: Sequence[Move], *, averaged: bool = False) -> None:
        """Check the gradients on the leaves, and take the steps."""

    @abstractmethod
    def average(self, parts: Sequence[tuple[Variable, list[Tensor]]]) -> None:
        """Check sums of gradients that are not on the leaves; on ranks, replace them by means."""

    @abstractmethod
    def require_finite(self, names: list[str], tensors: list[Tensor]) -> None:
        """Raise :class:`~bilevel.errors.NonFiniteError` for the first that is not finite."""

    @abstractmethod
    def report(self, sample: Sample, known: Sequence[tuple[Term, Tensor]] = ()) -> None:
        """Report f and g at the lower solution on a part of the x direction's samples.

        What is not among the ``known`` terms is evaluated for the report alone.
        """
