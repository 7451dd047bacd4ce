"""The record of a method's step: the verbs it consists of, to be run as compiled code."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

from bilevel.engine.execution import NotCompiledError
from bilevel.methods import Descent, Evaluator, Info, State
from bilevel.methods.evaluator import Step
from bilevel.problem import Number, Phi
from bilevel.stepping import StepSizes
from bilevel.variables import frozen


@dataclass(frozen=True)
class Plan:
    """An outer step: inner steps of one descent, the x direction, the step of x.

    Attributes:
        descent: how the copies move.
        inner_steps: evaluations that only move the copies.
        single_pass: whether one more evaluation moves the copies and gives the x direction.
        upper_lr, lower_lr, multiplier: as :meth:`~bilevel.methods.Evaluator.finish` takes them.
    """

    descent: Descent
    inner_steps: int
    single_pass: bool
    upper_lr: Number
    lower_lr: Number
    multiplier: Number

    @property
    def evaluations(self) -> int:
        """How many evaluations move the copies."""
        return self.inner_steps + self.single_pass

    def run(self, evaluator: Evaluator, state: State, done: int) -> Info:
        """Take the step, of which ``done`` inner steps were taken already, verb by verb."""
        with frozen(state.x):
            for _ in range(done, self.inner_steps):
                evaluator.descend(self.descent)
        last = self.descent if self.single_pass else None
        return evaluator.finish(
            state,
            upper_lr=self.upper_lr,
            lower_lr=self.lower_lr,
            multiplier=self.multiplier,
            also=evaluator.direction(self.descent.phi, last),
            phi=self.descent.phi,
        )


def record(evaluator: Evaluator, step: Step, state: State, sizes: StepSizes) -> Plan:
    """The plan of a step; raises :class:`NotCompiledError` if it consists of other verbs."""
    recorder = _Recorder(evaluator)
    step(recorder, state, sizes)
    return recorder.plan()


def _no_compiled_form(*_: Any, **__: Any) -> NoReturn:
    raise NotCompiledError("the method's step consists of more than descents on Phi")


class _Recorder(Evaluator):
    """Notes the verbs of a step, and does nothing."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.problem = evaluator.problem
        self.draw = evaluator.draw
        self._descents: list[Descent] = []
        self._last: Descent | None = None
        self._finish: dict[str, Number] | None = None

    def plan(self) -> Plan:
        """The record, if it is of the known form."""
        descents = [*self._descents, *([] if self._last is None else [self._last])]
        if self._finish is None or not descents or any(d is not descents[0] for d in descents):
            _no_compiled_form()
        single = self._last is not None
        return Plan(descents[0], len(self._descents), single, **self._finish)

    def descend(self, descent: Descent) -> None:
        self._descents.append(descent)

    def direction(self, phi: Phi, descent: Descent | None = None) -> Descent | None:
        if self._descents and self._descents[0].phi is not phi:
            _no_compiled_form()
        self._last = descent
        return descent

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
        if gain != 1.0 or also is not self._last or averaged:
            _no_compiled_form()
        self._finish = {"upper_lr": upper_lr, "lower_lr": lower_lr, "multiplier": multiplier}
        return Info(state.k, multiplier, lower_lr, upper_lr)

    outer_step = f = g = mean = evaluate = backward = _no_compiled_form
    move = average = require_finite = report = _no_compiled_form
