"""The state of many runs: that of one run, with every variable stacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from bilevel.engine.stacked.stack import StackedVariable, each
from bilevel.methods import State
from bilevel.methods.descent import DescentMethod
from bilevel.problem import Number, Objectives, Problem, Projection
from bilevel.stepping import GivenSizes, StepSizes, Update
from bilevel.stepping.policy import Iterate
from bilevel.variables import Variable


class StackedSizes(GivenSizes):
    """The given rates of every run: tensors, or numbers where all runs have the same."""

    def __init__(self, methods: Sequence[DescentMethod[Any]], device: torch.device) -> None:
        super().__init__(methods[0].rates)
        distinct = {id(method): method for method in methods}
        self._all = [method.rates for method in distinct.values()]
        places = {key: place for place, key in enumerate(distinct)}
        self._place = torch.tensor([places[id(method)] for method in methods], device=device)
        self._before: list[Any] = [0.0] * len(self._all)
        self._given: list[StepSizes] = []

    def at(self, objectives: Objectives, state: Iterate) -> StepSizes:
        pairs = zip(self._all, self._before, strict=True)
        given = [rates.at(state.k, before) for rates, before in pairs]
        self._before = [now.multiplier for now in given]
        if self.current is None or given != self._given:  # else nothing is sent to the device
            self._given, self.current = given, self._stacked(given)
        return self.current

    def _stacked(self, given: Sequence[StepSizes]) -> StepSizes:
        device = self._place.device
        dtype = torch.float32 if device.type == "mps" else torch.float64

        def of_all(name: str) -> Number:
            numbers: list[float] = [getattr(now, name) for now in given]
            if len(set(numbers)) == 1:
                return numbers[0]
            return torch.tensor(numbers, dtype=dtype, device=device)[self._place]

        return StepSizes(*(of_all(name) for name in ("lower", "penalty", "upper", "multiplier")))


def stacked_state(
    methods: Sequence[DescentMethod[Any]],
    problem: Problem,
    x: StackedVariable,
    y: StackedVariable,
) -> State:
    """The state of all runs at their start, where ``methods[r]`` is that of run r.

    The methods differ only in their rates and multipliers. The state is the one that the first
    method makes for a single run, with its variables and updates replaced by stacked ones.
    """
    state: State = methods[0].init(problem, x.template.clone(), y.template.clone())
    stacks: dict[int, StackedVariable] = {id(state.x): x}

    def stacked(node: Any) -> Any:
        if isinstance(node, Variable):
            if id(node) not in stacks:  # every other variable is a copy of y
                stacks[id(node)] = y.clone(node.name)
            return stacks[id(node)]
        if isinstance(node, Update):
            return node.stacked(stacked(node.variable), lift)
        if isinstance(node, list | tuple):
            return type(node)(map(stacked, node))
        return node

    def lift(project: Projection) -> Projection:
        mapped = each(lambda: " ".join(f"the set {project!r}".split()), project)

        def of_all(leaf: Tensor) -> Tensor:
            return x.runs.only_going(mapped(leaf), leaf)

        return of_all

    for field in fields(state):
        setattr(state, field.name, stacked(getattr(state, field.name)))
    state.policy = StackedSizes(methods, x.device)
    return state
