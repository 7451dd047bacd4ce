"""Phi is differentiated from its terms; that must be the gradient of the scalar it stands for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.engine import EagerEvaluator
from bilevel.problem import FORWARD, MIDPOINT, Evaluation, Phi, Stencil, central
from bilevel.sampling import Draw, NoData, Sample
from bilevel.variables import Variable, gradients

STENCILS = {"forward": FORWARD, "midpoint": MIDPOINT, "central": central(4)}


@pytest.fixture(params=["torch's engine", "its public function"])
def either_route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a torch that has what is called here, and with one that has not."""
    assert gradients._engine is not None
    if request.param == "its public function":
        monkeypatch.setattr(gradients, "_engine", None)


def _evaluator(problem: bilevel.Problem) -> EagerEvaluator:
    return EagerEvaluator(problem, Draw(NoData(), NoData()))


PROBLEM = bilevel.Problem(
    lambda x, y, batch: (x * y).sin().sum() * batch,
    lambda x, y, batch: (y - x).pow(4).mean() * batch,
)


EVALUATOR = _evaluator(PROBLEM)


def _evaluated(
    stencil: Stencil, shares: tuple[float, float] = (1.0, 1.0)
) -> tuple[Evaluation, list[Variable]]:
    """Phi at some point, and all its variables, those of x first."""
    generator = torch.Generator().manual_seed(0)

    def some() -> Tensor:
        return torch.randn(3, dtype=torch.float64, generator=generator)

    x, y = Variable.copy_of(some(), "x"), Variable.copy_of(some(), "y")
    points = stencil.points(y)
    with torch.no_grad():
        for point in points:
            point.leaves[0].copy_(some())
    sample = Sample(2.0, 3.0, *shares)
    evaluation = EVALUATOR.evaluate(Phi(stencil, x, points, 1.0), [sample] * len(points))
    return evaluation, [x, *points]


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("upper_lower", [(1.0, 7.0), (1.0, None), (None, 1.0)], ids=str)
@pytest.mark.parametrize("scheme", STENCILS)
def test_the_gradient_is_that_of_the_scalar(
    scheme: str, upper_lower: tuple[float | None, float | None]
) -> None:
    stencil, scale, share = STENCILS[scheme], 4.0, (0.5, 0.25)
    evaluation, found = _evaluated(stencil, share)
    EVALUATOR.backward(evaluation, *upper_lower, scale)
    _, others = _evaluated(stencil)
    x, *points = (variable.leaves[0] for variable in others)
    upper, lower = (factor or 0.0 for factor in upper_lower)
    scalar = torch.zeros((), dtype=torch.float64)
    for u, y in zip(stencil.upper, points, strict=False):
        scalar = scalar + upper * u * share[0] * (x * y).sin().sum() * 2
    for w, y in zip(stencil.lower, points, strict=False):
        scalar = scalar + lower * w * share[1] * (y - x).pow(4).mean() * 3
    truth = torch.autograd.grad(scale * scalar, [x, *points], allow_unused=True)
    for variable, true in zip(found, truth, strict=True):
        expected = torch.zeros(3, dtype=torch.float64) if true is None else true
        torch.testing.assert_close(variable.grads()[0], expected, rtol=1e-12, atol=1e-14)


def test_a_level_without_a_part_in_the_sample_leaves_nothing() -> None:
    evaluation, found = _evaluated(FORWARD, (0.0, 1.0))
    EVALUATOR.backward(evaluation, 1.0, None)
    assert not any(variable.has_grads for variable in found)


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize(
    ("start", "through"),
    [
        (torch.tensor(1.0), lambda y: y),
        (torch.tensor(1.0), torch.sum),
        (torch.ones(1), torch.squeeze),
        (torch.ones(1, 1), lambda y: y.view(())),
    ],
    ids=["itself", "sum", "squeeze", "view"],
)
def test_a_gradient_is_the_users_and_no_longer_where_a_pass_begins(
    start: Tensor, through: Callable[[Tensor], Tensor]
) -> None:
    """What begins a pass reaches these leaves as it is; whoever changes it changes no other."""
    problem = bilevel.Problem(lambda x, y, batch: through(y), lambda x, y, batch: through(y - x))
    x, y = (Variable.copy_of(start, name) for name in ("x", "y"))
    stencil = central(2)  # in which both copies have the same weight on f
    points = stencil.points(y)
    phi, evaluator = Phi(stencil, x, points, 1.0), _evaluator(problem)
    for _ in range(2):
        evaluator.backward(evaluator.evaluate(phi, [Sample(None, None)] * 3), 1.0, None)
        for copy, weight in zip(points, stencil.upper, strict=False):
            (gradient,) = copy.take_grads()
            assert gradient.item() == weight
            gradient.mul_(5)


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize(
    ("dtype", "lam"), [(torch.float16, 1e5), (torch.float32, 1e39), (torch.float32, 1e30)], ids=str
)
def test_weights_that_the_type_of_the_terms_does_not_hold(dtype: torch.dtype, lam: float) -> None:
    """They are infinite in it, and the gradients say so; terms in a larger type are fine."""
    problem = bilevel.Problem(lambda x, y, batch: y, lambda x, y, batch: y + x)
    x, y = (Variable.copy_of(torch.tensor(1.0, dtype=dtype), name) for name in ("x", "y"))
    phi, evaluator = Phi(FORWARD, x, FORWARD.points(y), lam), _evaluator(problem)
    evaluator.backward(evaluator.evaluate(phi, [Sample(None, None)] * 2), 1.0, lam)
    assert y.grads()[0].dtype == dtype
    assert y.grads()[0].item() == torch.tensor(lam).to(dtype).item()
