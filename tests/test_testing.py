"""The contract suite judges methods of others: a right one passes, and each wrong one fails."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import KW_ONLY, dataclass, replace
from itertools import count, islice
from typing import Any

import pytest
import torch
from torch import Tensor

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.methods import (
    Descent,
    DescentMethod,
    Evaluator,
    Info,
    Iterates,
    Method,
    Move,
    Properties,
)
from bilevel.methods.capabilities import SECOND_ORDER
from bilevel.methods.implicit import Slope, gradient, one_copy
from bilevel.methods.reference import gradient_x, gradient_y, hessian_y, mixed_product
from bilevel.methods.state import OneCopyState
from bilevel.problem import LOWER, Level, Objective, Phi, Problem, Term
from bilevel.sampling import Draw, Sample
from bilevel.stepping import StepSizes
from bilevel.testing import check_method
from bilevel.variables import Variable, buffers_kept, flatten, unflatten_like

Directions = tuple[Tensor, Tensor, Tensor]


@dataclass
class SPABAState(OneCopyState):
    """What SPABA carries beside its copy of y.

    Attributes:
        adjoint: v.
        before: x and y of the step before.
        adjoint_before: v of the step before.
        estimates: of the directions of x, y and v.
    """

    adjoint: Tensor
    before: list[Variable]
    adjoint_before: Tensor
    estimates: list[Tensor]


@dataclass(frozen=True)
class SPABA(DescentMethod[SPABAState]):
    """SPABA: the three directions of SOBA, each followed by an estimator with memory (STORM).

    With q_k(s) a direction at the point of step k on the sample s, and eta_0 = 1,

        h_k = q_k(s_k) + (1 - eta) * ( h_{k-1} - q_{k-1}(s_k) )
    """

    _: KW_ONLY
    eta: float = 0.3

    properties = Properties(
        order=2,
        gradients="f: 2, g: 2",
        copies=2,
        assumes="g strongly convex in y and twice differentiable",
        reference="Chu, Xu, Yao, Zhang 2024",
        abilities=SECOND_ORDER,
    )

    def init(self, problem: Problem, x: Variable, y: Variable) -> SPABAState:
        at_x, at_y = (flatten(variable.leaves).detach() for variable in (x, y))
        return SPABAState(
            **one_copy(self, problem, x, y),
            adjoint=torch.zeros_like(at_y),
            before=[x.clone(), y.clone()],
            adjoint_before=torch.zeros_like(at_y),
            estimates=[torch.zeros_like(at) for at in (at_x, at_y, at_y)],
        )

    def step(self, evaluator: Evaluator, state: SPABAState, sizes: StepSizes) -> Info:
        x, y = state.x, state.y
        gamma = state.y_update.choose(sizes.lower)
        sample = Sample(evaluator.draw.upper.next(), evaluator.draw.lower.next())
        now, values = self._directions(evaluator, x, y, state.adjoint, sample)
        evaluator.report(sample, values)
        if state.k > 0:
            with buffers_kept(*state.before):
                stale, _ = self._directions(evaluator, *self._point_before(state), sample)
            memory = zip(state.estimates, stale, strict=True)
            now = [q + (1 - self.eta) * (h - p) for q, (h, p) in zip(now, memory, strict=True)]
        for held, here in zip(state.before, (x, y), strict=True):
            held.assign(here)
        state.adjoint_before.copy_(state.adjoint)
        for h, estimate in zip(state.estimates, now, strict=True):
            h.copy_(estimate)
        x.set_grads(unflatten_like(now[0].clone(), x.leaves))
        y.set_grads(unflatten_like(now[1].clone(), y.leaves))
        state.adjoint.sub_(sizes.lower * now[2])
        step_of_y = Descent(Phi(LOWER, x, [y], 1.0), [Move(state.y_update, gamma)])
        return evaluator.finish(state, upper_lr=sizes.upper, lower_lr=gamma, also=step_of_y)

    def _point_before(self, state: SPABAState) -> tuple[Variable, Variable, Tensor]:
        x, y = state.before
        return x, y, state.adjoint_before

    def _directions(
        self, evaluator: Evaluator, x: Variable, y: Variable, v: Tensor, sample: Sample
    ) -> tuple[list[Tensor], list[tuple[Term, Tensor]]]:
        """Those of x, y and v at one point, flat, and the values of f and g there."""
        f, g = evaluator.f(x, y, sample.upper), evaluator.g(x, y, sample.lower)
        f_x, f_y = (flatten(gradient(f, at.leaves, retain_graph=True)) for at in (x, y))
        slope = Slope.of(g, y.leaves, "SPABA")
        d_v = slope.hessian_product(v) - f_y
        d_x = f_x - flatten(slope.mixed_product(v, x))
        values = [(Term(Level.UPPER, y), f.detach()), (Term(Level.LOWER, y), g.detach())]
        return [d_x, slope.vector.detach(), d_v], values

    def reference(self, f: Objective, g: Objective, x: Tensor, y: Tensor, draw: Draw) -> Iterates:
        def directions(point: Directions, zeta: Any, phi: Any) -> Directions:
            x, y, v = point
            return (
                gradient_x(f, x, y, zeta) - mixed_product(g, x, y, phi, v),
                gradient_y(g, x, y, phi),
                hessian_y(g, x, y, phi) @ v - gradient_y(f, x, y, zeta),
            )

        point = before = (x, y, torch.zeros_like(y))
        h: Directions = (x, y, y)  # without weight in the first step
        for k in count():
            zeta, phi = draw.upper.next(), draw.lower.next()
            keep = 0.0 if k == 0 else 1 - self.eta
            pairs = zip(h, directions(point, zeta, phi), directions(before, zeta, phi), strict=True)
            d_x, d_y, d_v = h = tuple(q + keep * (e - p) for e, q, p in pairs)  # type: ignore[assignment]
            sizes = self.rates.at(k, 0.0)
            before, (x, y, v) = point, point
            point = (x - sizes.upper * d_x, y - sizes.lower * d_y, v - sizes.lower * d_v)
            yield point[0], point[1]


class SameSampleTwiceAtOnePoint(SPABA):
    """A slip that still converges without noise: both directions at the present point."""

    def _point_before(self, state: SPABAState) -> tuple[Variable, Variable, Tensor]:
        return state.x, state.y, state.adjoint


class Unproved(SPABA):
    reference = Method.reference


class ShortReference(SPABA):
    def reference(self, *given: Any) -> Iterates:
        return islice(super().reference(*given), 3)


class Forgetful(SPABAState):
    """Does not save its estimates."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "estimates": [torch.zeros_like(h) for h in self.estimates]}


class NotResumable(SPABA):
    def init(self, problem: Problem, x: Variable, y: Variable) -> SPABAState:
        return Forgetful(**vars(super().init(problem, x, y)))


class ReportsTwice(SPABA):
    def _directions(
        self, evaluator: Evaluator, x: Variable, y: Variable, v: Tensor, sample: Sample
    ) -> tuple[list[Tensor], list[tuple[Term, Tensor]]]:
        found, values = super()._directions(evaluator, x, y, v, sample)
        evaluator.report(sample, values)
        return found, values


class NeedsOneLeaf(SPABA):
    def step(self, evaluator: Evaluator, state: SPABAState, sizes: StepSizes) -> Info:
        if len(state.x.leaves) > 1:
            raise NotImplementedError("one leaf only")
        return super().step(evaluator, state, sizes)


class Stumbles(SPABA):
    def _point_before(self, state: SPABAState) -> tuple[Variable, Variable, Tensor]:
        raise IndexError("no such point")


class ReportsAnotherRate(SPABA):
    def step(self, evaluator: Evaluator, state: SPABAState, sizes: StepSizes) -> Info:
        return replace(super().step(evaluator, state, sizes), lower_lr=77.0)


class ReportsTextForARate(SPABA):
    def step(self, evaluator: Evaluator, state: SPABAState, sizes: StepSizes) -> Info:
        return replace(super().step(evaluator, state, sizes), upper_lr="0.1")  # type: ignore[arg-type]


class CarriesAGenerator(SPABA):
    def init(self, problem: Problem, x: Variable, y: Variable) -> SPABAState:
        return WithGenerator(**vars(super().init(problem, x, y)), generator=torch.Generator())


@dataclass
class WithGenerator(SPABAState):
    """Carries what no checkpoint can hold."""

    generator: torch.Generator


class ClaimsFirstOrder(SPABA):
    properties = Properties(1, "f: 2, g: 2", 2, "nothing", "nobody", SECOND_ORDER)


@pytest.mark.slow
@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_a_method_that_keeps_the_contract_passes(eta: float) -> None:
    check_method(SPABA(0.3, 0.1, eta=eta))


@pytest.mark.parametrize(
    ("wrong", "property_that_fails"),
    [
        (Unproved, "equals its reference: there is no independent recursion"),
        (SameSampleTwiceAtOnePoint, "equals its reference: x_2 is not that of reference"),
        (ShortReference, "equals its reference: reference.* ended before the run"),
        (NotResumable, "resumes bit for bit"),
        (ReportsTwice, "reports: info.upper = .* are not f and g at x_0"),
        (ReportsAnotherRate, "reports: info.lower_lr is 77.0 where 0.3 was given"),
        (ReportsTextForARate, "reports: info.upper_lr is '0.1'"),
        (CarriesAGenerator, "resumes bit for bit: StateError: state/state/generator is Generator"),
        (NeedsOneLeaf, "takes tensors, trees and modules: a tree gives NotImplementedError: one"),
        (Stumbles, "equals its reference: IndexError: no such point"),
        (ClaimsFirstOrder, "uses derivatives of its order: it differentiates twice"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_method_that_does_not_is_refused(wrong: type[SPABA], property_that_fails: str) -> None:
    with pytest.raises(AssertionError, match=f"{wrong.__name__}: {property_that_fails}"):
        check_method(wrong(0.3, 0.1))


def test_what_is_no_method_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"must be a bilevel\.Method, not 'f2sa'"):
        check_method("f2sa")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rates", [{}, {"lower_lr": 0.1}, {"upper_lr": 0.1, "lower_optimizer": torch.optim.SGD}]
)
def test_rates_that_no_reference_knows_are_refused(rates: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"rates .* neither 'auto' nor an optimizer"):
        check_method(SPABA(**rates))


@pytest.mark.slow
def test_wrong_methods_fail_where_python_drops_asserts() -> None:
    script = (
        "from bilevel.testing import check_method\n"
        "from tests.test_testing import SameSampleTwiceAtOnePoint\n"
        "check_method(SameSampleTwiceAtOnePoint(0.3, 0.1))"
    )
    ended = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True)
    assert "x_2 is not that of reference" in ended.stderr
