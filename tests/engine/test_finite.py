"""Numbers that are not finite on a device: noticed at the end of the step, and moved by nowhere."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.engine import eager
from bilevel.engine.finite import FiniteCheck
from bilevel.errors import NonFiniteError
from bilevel.stepping.updates import Update
from bilevel.variables import Variable
from tests.errors.common import BREAKS, Switch, tensors_in

METHODS = {
    "f2sa": bilevel.F2SA(0.1, 0.1, inner_steps=3),
    "single pass": bilevel.F2SA(0.1, 0.1, inner_steps=3, single_pass=True),
    "optimizer": bilevel.F2SA(
        upper_lr=0.1,
        inner_steps=3,
        lower_optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
    ),
}


class Late(FiniteCheck):
    """As on a device that should not be waited for, and counting how often it is."""

    reads = 0

    def __init__(self, step: int, *, at_once: bool, before: FiniteCheck | None = None) -> None:
        super().__init__(step, at_once=False, before=before)

    def read(self) -> None:
        Late.reads += 1
        super().read()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[Late]:
    monkeypatch.setattr(eager, "FiniteCheck", Late)
    monkeypatch.setattr(Late, "reads", 0)
    return Late


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
@pytest.mark.parametrize(("breaks", "message"), BREAKS)
def test_the_first_bad_number_is_named_and_nothing_moved_by_it(
    late: type[Late], method: Any, breaks: str, message: str
) -> None:
    switch = Switch()
    problem = switch.problem(breaks)
    x0, y0 = torch.ones(2), torch.zeros(2)
    with pytest.raises(NonFiniteError, match=message) as caught:
        bilevel.minimize(problem, x0, y0, method=method, steps=9, callback=switch.at(3))
    assert late.reads == 4  # once in each step, the one that broke included
    good = bilevel.minimize(switch.problem("nothing"), x0, y0, method=method, steps=3)
    result = caught.value.result
    assert result is not None
    assert torch.equal(result.x, good.x)
    floats = [t for t in tensors_in(caught.value.state) if t.is_floating_point()]
    assert all(bool(torch.isfinite(t).all()) for t in floats)


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_a_good_run_is_the_same(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = bilevel.problems.Quadratic(sigma_g=0.1, seed=2)

    def end() -> Tensor:
        result = bilevel.minimize(
            problem, problem.x0, problem.y0, method=method, steps=9, lower_data=problem.lower_noise
        )
        x = result.x
        assert isinstance(x, Tensor)
        return x

    at_once = end()
    monkeypatch.setattr(eager, "FiniteCheck", Late)
    assert torch.equal(end(), at_once)


SKIPPING = {
    "plain": bilevel.F2SA(inner_steps=2, lower_lr=0.1, upper_lr=0.1),
    "single pass": bilevel.F2SA(inner_steps=2, lower_lr=0.1, upper_lr=0.1, single_pass=True),
    "fused": bilevel.F2SA(
        inner_steps=2,
        single_pass=True,
        lower_optimizer=lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
        upper_optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    ),
}
ACCUMULATED = bilevel.F2SA(
    inner_steps=2,
    single_pass=True,
    upper_lr=0.1,
    lower_optimizer=lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
)
RUNS = [
    *(pytest.param(method, False, id=name) for name, method in SKIPPING.items()),
    pytest.param(ACCUMULATED, True, id="terms one after another"),
]


@pytest.mark.parametrize(("method", "accumulate"), RUNS)
@pytest.mark.parametrize(("breaks", "message"), BREAKS)
def test_a_step_that_nobody_waited_for_is_told_by_the_next(
    late: type[Late],
    method: Any,
    accumulate: bool,
    breaks: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eager, "can_defer", lambda state: True)
    switch = Switch()
    solver = bilevel.Solver(
        switch.problem(breaks),
        torch.ones(2),
        torch.zeros(2),
        method=method,
        accumulate=accumulate,
    )
    for _ in range(3):
        solver.step(measure=False)
    x = solver.x
    switch.on = True
    solver.step(measure=False)
    assert solver.k == 4  # as far as is known
    with pytest.raises(NonFiniteError, match=message):
        solver.step(measure=False)
    assert solver.k == 3
    assert torch.equal(solver.x, x)
    floats = [t for t in tensors_in(solver.state_dict()) if t.is_floating_point()]
    assert all(bool(torch.isfinite(t).all()) for t in floats)
    switch.on = False
    solver.step()
    solver.settle()
    assert solver.k == 4


@pytest.mark.parametrize(("method", "accumulate"), RUNS)
def test_a_good_run_that_nobody_waits_for_is_the_same(
    method: Any, accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = bilevel.problems.Quadratic(sigma_g=0.1, seed=2)

    def run() -> dict[str, Any]:
        solver = bilevel.Solver(
            problem,
            problem.x0,
            problem.y0,
            method=method,
            lower_data=problem.lower_noise,
            accumulate=accumulate,
        )
        for _ in range(9):
            solver.step()
        state: dict[str, Any] = solver.state_dict()["state"]
        return state

    at_once = run()
    monkeypatch.setattr(eager, "FiniteCheck", Late)
    monkeypatch.setattr(eager, "can_defer", lambda state: True)
    torch.testing.assert_close(run(), at_once, rtol=0, atol=0)


def test_a_fused_optimizer_skips_what_is_bad_and_scales_the_rest() -> None:
    start = torch.tensor([1.0, -2.0])
    ends = []
    for make in (
        lambda p: torch.optim.AdamW(p, lr=0.1, eps=0.1, weight_decay=0.1, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, eps=0.1, weight_decay=0.1, fused=False),
    ):
        variable = Variable.copy_of(start, "y")
        update = Update(variable, [None], make)
        for _ in range(3):
            variable.set_grads([torch.tensor([1.0, 2.0])])
            update.apply(1.0, gain=0.25)
        ends.append(variable.leaves[0].detach().clone())
        if update.can_skip_without_sync:
            before = update.state_dict()
            variable.set_grads([torch.tensor([1.0, math.inf])])
            update.apply(1.0, gain=0.25, bad=torch.tensor(True))
            assert torch.equal(variable.leaves[0], ends[0])
            torch.testing.assert_close(update.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=0)


def _variable(*values: float) -> Variable:
    variable = Variable.copy_of(torch.zeros(len(values)), "y")
    variable.set_grads([torch.tensor(values)])
    return variable


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("values", "rate", "quantity"),
    [
        ((1.0, -2.0), 1e38, "the step of y"),
        ((1.0, math.inf), 0.1, "the gradient of y"),
        ((math.nan, 1.0), 0.1, "the gradient of y"),
        ((1e30, -1e30), 1.0, None),  # their squares overflow, they do not
        ((1.0, -2.0), -1.0, None),
    ],
)
def test_gradients_and_steps(
    at_once: bool, values: tuple[float, ...], rate: float, quantity: str | None
) -> None:
    check = FiniteCheck(7, at_once=at_once)
    variable = _variable(*values)
    if quantity is None:
        check.gradients([(variable, rate)])
        check.read()
        assert torch.equal(variable.grads()[0], torch.tensor(values))
        return
    with pytest.raises(NonFiniteError, match=rf"^{quantity}.*step 7"):  # noqa: PT012
        check.gradients([(variable, rate)])
        assert check.bad is not None
        assert bool(check.bad)
        check.read()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("values", "quantity"),
    [
        ((1.0, -2.0), None),
        ((3e38, 3e38), None),  # their sum overflows, they do not
        ((1.0, math.nan), "lower"),
        ((math.inf, -math.inf), "upper"),
    ],
)
def test_scalars(at_once: bool, values: tuple[float, ...], quantity: str | None) -> None:
    def look() -> None:
        check = FiniteCheck(3, at_once=at_once)
        check.scalars([torch.tensor(value) for value in values], lambda: ["upper", "lower"])
        check.read()

    if quantity is None:
        look()
        return
    with pytest.raises(NonFiniteError, match=rf"^{quantity}.*step 3"):
        look()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("first", "second", "third", "rates", "quantity"),
    [
        (1.0, 2.0, 3.0, (0.1, 0.1), None),
        (1.0, math.nan, math.inf, (0.1, 0.1), "the gradient of y[1]"),
        (1.0, 2.0, -math.inf, (0.1, 0.1), "the gradient of z"),
        (1.0, 2.0, 3.0, (0.1, 1e38), "the step of z"),
        (1.0, -2.0, math.nan, (1e38, 0.1), "the step of y"),
    ],
)
def test_of_several_variables_the_first_that_is_bad_is_named(
    at_once: bool,
    first: float,
    second: float,
    third: float,
    rates: tuple[float, float],
    quantity: str | None,
) -> None:
    y, z = Variable.copy_of([torch.zeros(1), torch.zeros(2)], "y"), _variable(0.0, third)
    y.set_grads([torch.tensor([first]), torch.tensor([0.0, second])])
    z.name, z.gradient_names = "z", ["the gradient of z"]
    check = FiniteCheck(7, at_once=at_once)
    moves = list(zip((y, z), rates, strict=True))
    if quantity is None:
        check.gradients(moves)
        check.read()
        return
    message = re.escape(f"{quantity} is not finite at step 7")
    with pytest.raises(NonFiniteError, match=f"^{message}"):  # noqa: PT012
        check.gradients(moves)
        check.read()


def test_gradients_of_several_types_are_looked_at_together() -> None:
    """1e5 is a number of the one type, but not of the other."""
    for rate, fine in ((1e3, True), (1e5, False)):
        y = Variable.copy_of([torch.zeros(1), torch.zeros(1, dtype=torch.float16)], "y")
        y.set_grads([torch.ones(1), torch.ones(1, dtype=torch.float16)])
        check = FiniteCheck(0, at_once=False)
        check.gradients([(y, rate)])
        assert check.bad is not None
        assert bool(check.bad) is not fine


def test_what_was_noted_may_be_written_over_before_it_is_read() -> None:
    """As a captured graph does with the values that it returned the last time."""
    value, gradient = torch.tensor(math.nan), torch.tensor([1.0, math.inf])
    y = Variable.copy_of(torch.zeros(2), "y")
    y.set_grads([gradient])
    for quantity, note in (
        ("upper", lambda check: check.scalars([value], lambda: ["upper"])),
        ("lower", lambda check: check.numbers(["lower"], [value])),
        ("the gradient of y", lambda check: check.gradients([(y, 0.1)])),
    ):
        check = FiniteCheck(0, at_once=False)
        value.fill_(math.nan)
        gradient.fill_(math.inf)
        note(check)
        value.fill_(1.0)
        gradient.fill_(1.0)
        with pytest.raises(NonFiniteError, match=f"^{quantity} is not finite"):
            check.read()
