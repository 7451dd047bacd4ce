"""Compiled steps stop at the number at which they would stop without compiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel import F2SA, Problem, Solver
from bilevel.engine.compiled import pieces
from bilevel.errors import NonFiniteError
from bilevel.problem import Level
from bilevel.sampling import TensorRows
from tests.engine.compiled.common import (
    LOWER_DATA,
    ROWS,
    SCHEMES,
    SETTINGS,
    TARGETS,
    UPPER_DATA,
    assert_same,
    evaluator,
    gathered,
    graphs,
    lower,
    solver,
    upper,
)
from tests.errors.common import BREAKS, Switch, tensors_in


@pytest.mark.slow
@graphs
def test_what_breaks_in_a_step_that_assumes_nothing_changed_is_reported_as_ever() -> None:
    data = ROWS.clone()
    runs = [
        solver(F2SA(**SETTINGS), compile=c, lower_data=(data, *LOWER_DATA[1:]), batch_size=None)
        for c in (False, True)
    ]
    states = []
    for run in runs:
        data.copy_(ROWS)
        with run.assume_unchanged(), torch.no_grad():
            run.step()
            run.step()
            data[3] = float("nan")
            with pytest.raises(NonFiniteError, match="at step 2") as caught:
                run.step()
        assert caught.value.state is not None
        states.append(caught.value.state["state"])
        assert run.state.x.leaves[0].grad is None
    torch.testing.assert_close(states[1], states[0], rtol=1e-12, atol=1e-14)
    data.copy_(ROWS)
    assert_same(runs, 3)  # and it goes on from there


@pytest.mark.slow
@graphs
@pytest.mark.parametrize(
    ("breaks", "message", "single_pass"),
    [
        *(pytest.param(*broken, False, marks=pytest.mark.slow) for broken in BREAKS),
        (*BREAKS[-1], True),
    ],
)
def test_a_number_that_is_not_finite_stops_the_run(
    breaks: str, message: str, single_pass: bool
) -> None:
    switch = Switch()
    problem = switch.problem(breaks)
    method = F2SA(0.1, 0.1, inner_steps=3, single_pass=single_pass)
    x0, y0 = torch.ones(2), torch.zeros(2)
    with pytest.raises(NonFiniteError, match=message) as caught:
        bilevel.minimize(
            problem, x0, y0, method=method, steps=9, callback=switch.at(3), compile=True
        )
    good = bilevel.minimize(switch.problem("nothing"), x0, y0, method=method, steps=3)
    result = caught.value.result
    assert result is not None
    torch.testing.assert_close(result.x, good.x)
    floats = [t for t in tensors_in(caught.value.state) if t.is_floating_point()]
    assert all(bool(torch.isfinite(t).all()) for t in floats)


@pytest.mark.slow
@graphs
@gathered
@pytest.mark.parametrize("bad", [2, 3])
def test_a_bad_row_stops_the_run_where_it_stops_without_compiling(bad: int) -> None:
    """Each evaluation reads another row; the bad one is that of an inner step or of x."""
    rows = torch.arange(1.0, 9.0)[:, None].expand(8, 3).double().contiguous()

    class InOrder(TensorRows):
        def _refill(self, size: int) -> None:
            super()._refill(8)
            self._block, self._drawn = torch.arange(8), 8

    def states(compile: bool) -> dict[str, Any]:
        data = rows.clone()
        run = solver(
            SCHEMES["forward"],
            compile=compile,
            lower_data=(data, TARGETS[:8], torch.arange(8)),
            batch_size=1,
        )
        run.draw.lower.__class__ = InOrder
        run.step()
        data[4 + bad] = float("inf")
        with pytest.raises(
            NonFiniteError, match=r"^lower\(x, y\) is not finite at step 1"
        ) as caught:
            run.step()
        assert caught.value.state is not None
        return caught.value.state

    known, found = states(False), states(True)
    torch.testing.assert_close(found["state"], known["state"], rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@graphs
def test_a_set_that_stops_giving_numbers_leaves_the_variables_finite() -> None:
    broken = [False]
    problem = Problem(upper, lower, y_set=lambda v: v * float("nan") if broken[0] else v)
    run = solver(SCHEMES["forward"], compile=True, problem=problem)
    run.step()
    broken[0] = True
    with pytest.raises(bilevel.errors.ArgumentError, match=r"the set of y .*not finite"):
        run.step()
    assert bool(torch.isfinite(run.y).all())


@pytest.mark.slow
@graphs
def test_a_step_that_would_overflow_is_not_taken() -> None:
    problem = Problem(
        lambda x, y, b: ((y - 1) ** 2).sum() + 5 * x.sum(), lambda x, y, b: ((y - x) ** 2).sum()
    )
    start = torch.ones(2, dtype=torch.float64)
    run = Solver(problem, start, start, method=F2SA(inner_steps=2, upper_lr=1e308), compile=True)
    with pytest.raises(NonFiniteError, match=r"^the step of x is not finite at step 0"):
        run.step()
    assert torch.equal(run.x, start)


class _Cliff:
    """g is not a number any more where x is beyond a point."""

    def __call__(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return lower(x, y, batch) + torch.sqrt(0.5 - x.abs().max()).clamp(max=0)


@pytest.mark.slow
@graphs
@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_is_not_waited_for_breaks_later_and_nothing_has_moved(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bilevel.engine.compiled.evaluator.may_return_early", lambda state: late)
    eager, compiled = (
        solver(SCHEMES["forward"], compile=c, problem=Problem(upper, _Cliff()))
        for c in (False, True)
    )
    with pytest.raises(NonFiniteError) as known:  # noqa: PT012
        for _ in range(50):
            eager.step()
    with pytest.raises(NonFiniteError) as found:  # noqa: PT012
        for _ in range(eager.k + 3):
            compiled.step()
        assert late
        assert compiled.k == eager.k + 3  # as far as is known
        compiled.settle()
    assert str(found.value) == str(known.value)
    assert 1 < compiled.k == eager.k
    torch.testing.assert_close(
        compiled.state_dict()["state"], eager.state_dict()["state"], rtol=1e-12, atol=1e-14
    )
    assert torch.equal(compiled.x, compiled.state.x.detached())


@graphs
@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("mistaken", [pytest.param(False, marks=pytest.mark.slow), True])
def test_terms_may_be_finite_where_their_sum_is_not(
    mistaken: bool, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or compiled code may be mistaken about them: what it did not do is done without it."""
    monkeypatch.setattr("bilevel.engine.compiled.evaluator.may_return_early", lambda state: late)
    if mistaken:
        monkeypatch.setattr(
            pieces, "finite", lambda found: torch.isfinite(10 * found.sum(Level.UPPER))
        )
    rows = torch.arange(16.0)[:, None]

    def f(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return ((y - 1) ** 2).sum() + 1e38 * (batch.mean() > 5)

    runs = [
        Solver(
            Problem(f, lambda x, y, batch: ((y - x) ** 2).sum()),
            torch.zeros(2), torch.zeros(2),
            method=F2SA(
                inner_steps=3, lower_lr=0.1, upper_lr=0.1, multiplier=40.0, scheme="central"
            ),
            upper_data=rows, lower_data=rows, batch_size=2, compile=compile,
        )
        for compile in (False, True)
    ]  # fmt: skip
    for _ in range(20):
        for run in runs:
            run.step(measure=False)
    for run in runs:
        run.settle()
    evaluator(runs[1])
    assert runs[0].k == runs[1].k == 20
    torch.testing.assert_close(runs[1].x, runs[0].x)
    torch.testing.assert_close(runs[1].y, runs[0].y)


@pytest.mark.slow
@graphs
def test_history_ends_before_the_step_that_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    for late in (False, True):
        monkeypatch.setattr(
            "bilevel.engine.compiled.evaluator.may_return_early", lambda state, is_=late: is_
        )
        with pytest.raises(NonFiniteError) as caught:
            bilevel.minimize(
                Problem(upper, _Cliff()),
                torch.zeros(20, dtype=torch.float64),
                torch.zeros(3, dtype=torch.float64),
                method=SCHEMES["forward"],
                upper_data=UPPER_DATA,
                lower_data=LOWER_DATA,
                batch_size=4,
                steps=50,
                compile=True,
            )
        result = caught.value.result
        steps.append(result.steps)
        assert result.history["step"].tolist() == list(range(result.steps))
    assert steps[0] == steps[1] > 1
