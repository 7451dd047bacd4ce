"""What an outer step reports: f and g at the lower solution, added up over parts of samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from bilevel.engine.finite import FiniteCheck
from bilevel.methods import Info, State
from bilevel.problem import Level, Metrics, Number, Objectives, Term
from bilevel.problem.phi import batch_of, objective_of
from bilevel.sampling import Sample
from bilevel.variables import values_only

T = TypeVar("T")

Key: TypeAlias = tuple[Level, int]
"""Which objective at which copy: :attr:`bilevel.problem.Term.key`."""


def wanted(state: State) -> list[Term]:
    """The terms that a step reports: f and g at the solution, and g at the penalised copy."""
    terms = [Term(Level.UPPER, state.solution), Term(Level.LOWER, state.solution)]
    if state.penalised is not None:
        terms.append(Term(Level.LOWER, state.penalised))
    return terms


def info_of(
    state: State,
    values: Mapping[Key, Tensor],
    direction_norm: Tensor,
    *,
    lower_lr: Number,
    upper_lr: Number,
    multiplier: Number,
    metrics: Mapping[str, Tensor] | None = None,
) -> Info:
    """The report of the state's current step, from the values of the :func:`wanted` terms."""
    upper, lower, *penalised = (values[term.key] for term in wanted(state))
    gap = penalised[0] - lower if penalised else torch.full_like(lower, math.nan)
    return Info(
        state.k,
        multiplier,
        lower_lr,
        upper_lr,
        upper=upper,
        lower=lower,
        gap=gap,
        direction_norm=direction_norm,
        metrics=metrics or {},
    )


def rested(state: State, metric_names: Sequence[str], *, measure: bool) -> Info:
    """The report of a step that was taken back: nothing was measured, and x did not move.

    The metrics are NaN like the losses, so that who reads them by name finds them in every step.
    """
    sizes = state.policy.current
    lower_lr = math.nan if sizes is None else sizes.lower
    info = Info(state.k, state.multiplier, lower_lr, 0.0)
    if not measure:
        return info
    unknown = torch.full((), math.nan, device=state.x.device)
    metrics = dict.fromkeys(metric_names, unknown)
    return replace(
        info, upper=unknown, lower=unknown, gap=unknown, direction_norm=unknown, metrics=metrics
    )


class Report:
    """Adds up what a step reports; what is evaluated only for the report must be finite too.

    Args:
        objectives: evaluates f and g.
        state: the run.
        check: the checks of the step.
        metrics: for each objective and copy the metrics of its last evaluation.
    """

    def __init__(
        self,
        objectives: Objectives,
        state: State,
        check: FiniteCheck,
        metrics: Mapping[Key, Metrics],
    ) -> None:
        self._objectives = objectives
        self._state = state
        self._check = check
        self._metrics = metrics
        self._values: dict[Key, Tensor] = {}
        self._of_metrics: dict[str, Tensor] = {}

    def add(self, sample: Sample, known: Sequence[tuple[Term, Tensor]]) -> None:
        """One part of the samples; what is not among the ``known`` terms is evaluated."""
        self.evaluate(sample, {term.key for term, _ in known})
        self.take(known)

    def take(self, known: Sequence[tuple[Term, Tensor]]) -> None:
        """Count those of the terms that are reported."""
        reported = {term.key for term in wanted(self._state)}
        for term, value in known:
            if term.key in reported:
                self._count(term, value.detach())

    def evaluate(self, sample: Sample, known: Collection[Key]) -> None:
        """Evaluate the reported terms that are not ``known``, without a trace in the run."""
        x = self._state.x
        for term in wanted(self._state):
            batch, share = batch_of(term.level, sample)
            if term.key in known or not share:
                continue
            objective = objective_of(term.level, self._objectives)
            # neither the buffers nor the random state of the run may move with a report
            cuda = [x.device] if x.device.type == "cuda" else []
            with values_only(x, term.y), torch.random.fork_rng(cuda):
                value = share * objective(x, term.y, batch).detach()
            self._check.numbers([term.name(x)], [value])
            self._count(term._replace(share=share), value)

    def _count(self, term: Term, value: Tensor) -> None:
        _add(self._values, term.key, value)
        if term.y is self._state.solution:  # where upper and lower are reported
            for name, metric in self._metrics.get(term.key, {}).items():
                found = torch.as_tensor(metric, device=value.device).to(value)
                _add(self._of_metrics, name, term.share * found)

    def info(self, direction: list[Tensor], **sizes: Any) -> Info:
        """The report of the state's current step."""
        totals = [*self._values.values(), *self._of_metrics.values()]
        tasks = self._objectives.draw.tasks
        if tasks > 1:  # of which everything here is the sum
            totals = [total / tasks for total in totals]
        means = iter(self._check.means(totals))  # on several ranks, all in one message
        values = {key: next(means) for key in self._values}
        metrics = {name: next(means) for name in self._of_metrics}
        norm = self._check.norm(self._state.x, direction)
        norm = norm / tasks if tasks > 1 else norm
        return info_of(self._state, values, norm, metrics=metrics, **sizes)


def _add(totals: dict[T, Tensor], key: T, value: Tensor) -> None:
    before = totals.get(key)
    totals[key] = value if before is None else before + value
