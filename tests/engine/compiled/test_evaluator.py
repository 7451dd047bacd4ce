"""Compiled steps: the same iterates.

Most tests trace the steps and then run the traced graphs as they are, because a compiler takes
seconds for each; that kernels made of them compute the same is tested in ``test_kernels.py``, and
of all with ``pytest --kernels``.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel import F2SA, Problem
from bilevel.engine.compiled import feed, gathering, tracing
from bilevel.stepping.schedules import Power
from tests.engine.compiled import common
from tests.engine.compiled.common import (
    DATA,
    LOWER_DATA,
    ROWS,
    SCHEMES,
    SETTINGS,
    UPPER_DATA,
    assert_modules_and_numbers_move,
    assert_same,
    evaluator,
    gathered,
    graphs,
    lower,
    solver,
    upper,
)
from tests.marks import slow_except


@graphs
@gathered
@pytest.mark.parametrize("name", slow_except(["independent"], SCHEMES))
def test_every_scheme_takes_the_same_steps(name: str) -> None:
    eager, compiled = (solver(SCHEMES[name], compile=c) for c in (False, True))
    assert_same((eager, compiled), 6)
    evaluator(compiled)


COUPLED = [
    *((name, "shared") for name in DATA),
    ("a sweep in uneven parts", "independent"),
    ("loaders", "independent"),
]
QUICK = {("a loader beside rows", "shared")}


@graphs
@gathered
@pytest.mark.parametrize(
    ("name", "coupling"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in COUPLED],
)
def test_every_kind_of_data_gives_the_same_samples(name: str, coupling: Any) -> None:
    def of_any(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return lower(x, y, tuple(batch.values()) if isinstance(batch, dict) else batch)

    method = F2SA(**SETTINGS, coupling=coupling)
    eager, compiled = (
        solver(method, compile=c, problem=Problem(upper, of_any), **DATA[name])
        for c in (False, True)
    )
    assert_same((eager, compiled), 6)
    evaluator(compiled)


@pytest.mark.slow
@graphs
@gathered
def test_blocks_of_row_numbers_end_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bilevel.sampling.indexed._BLOCK", 30)
    runs = [solver(SCHEMES["independent"], compile=c) for c in (False, True)]
    assert_same(runs, 10)


@pytest.mark.slow
@graphs
@pytest.mark.parametrize("name", ["single pass", "midpoint"])
def test_iterates_stay_in_their_sets(name: str) -> None:
    problem = Problem(
        upper, lower, x_set=bilevel.sets.Box(-0.0005, 0.03), y_set=bilevel.sets.Simplex(0.3)
    )
    runs = [solver(SCHEMES[name], compile=c, problem=problem) for c in (False, True)]
    assert_same(runs, 8)
    evaluator(runs[1])
    assert runs[1].x.min() == -0.0005
    torch.testing.assert_close(runs[1].y.sum().item(), 0.3)


@pytest.mark.slow
@graphs
@pytest.mark.parametrize("name", slow_except(["forward"], ["forward", "single pass"]))
def test_modules_trees_and_buffers(name: str) -> None:
    assert_modules_and_numbers_move(SCHEMES[name])


@pytest.mark.slow
@graphs
def test_rates_and_multiplier_change_without_compiling_again() -> None:
    method = F2SA(
        lower_lr=Power(0.2, 5, -0.5),
        upper_lr=Power(2.0, 5, -1.0),
        multiplier=Power(3.0, 5, 0.5),
        penalty_lr=Power(0.1, 3, -0.3),
        inner_steps=2,
    )
    runs = [solver(method, compile=c) for c in (False, True)]
    assert_same(runs, 2)
    first = evaluator(runs[1]).compilations
    assert_same(runs, 20)
    assert evaluator(runs[1]).compilations == first


@pytest.mark.slow
@graphs
def test_a_number_that_the_objectives_use_may_change_between_steps() -> None:
    weight = [1.0]

    def weighted(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return weight[0] * lower(x, y, batch)

    problem = Problem(upper, weighted)
    runs = [solver(SCHEMES["forward"], compile=c, problem=problem) for c in (False, True)]
    assert_same(runs, 2)
    first = evaluator(runs[1]).compilations
    weight[0] = 3.0
    assert_same(runs, 2)
    assert evaluator(runs[1]).compilations > first


@pytest.mark.slow
@graphs
def test_steps_that_assume_nothing_changed_ask_once_what_the_objectives_use() -> None:
    weight = [1.0]

    def weighted(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return weight[0] * lower(x, y, batch)

    problem = Problem(upper, weighted)
    eager, compiled = (
        solver(SCHEMES["forward"], compile=c, problem=problem) for c in (False, True)
    )
    with compiled.assume_unchanged():
        assert_same((eager, compiled), 3)
        weight[0] = 3.0  # which breaks the promise: it is not seen
        compiled.step()
    weight[0] = 1.0
    eager.step()
    weight[0] = 3.0
    assert_same((eager, compiled), 3)
    with compiled.assume_unchanged():
        weight[0] = 2.0  # before the first step: it is
        assert_same((eager, compiled), 2)
        with compiled.assume_unchanged():
            weight[0] = 4.0
            assert_same((eager, compiled), 2)
        weight[0] = 5.0
        assert_same((eager, compiled), 2)


@pytest.mark.slow
@graphs
def test_data_that_require_gradients_are_only_read() -> None:
    rows = ROWS.clone().requires_grad_()
    data = (rows, *LOWER_DATA[1:])
    assert_same([solver(SCHEMES["forward"], compile=c, lower_data=data) for c in (False, True)], 3)
    assert rows.grad is None


@graphs
@pytest.mark.parametrize(
    "order", [pytest.param((False, True), marks=pytest.mark.slow), (True, False)]
)
def test_a_run_may_change_over_in_either_direction(order: tuple[bool, bool]) -> None:
    whole = solver(SCHEMES["independent"], compile=False)
    for _ in range(9):
        whole.step()
    before = solver(SCHEMES["independent"], compile=order[0])
    for _ in range(4):
        before.step()
    after = solver(SCHEMES["independent"], compile=order[1], seed=1)
    after.step()
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    for _ in range(5):
        after.step()
    torch.testing.assert_close(after.x, whole.x, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(after.y, whole.y, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@graphs
def test_steps_that_are_found_are_tested_in_compiled_runs_too() -> None:
    """Rounding may decide a test of "auto" otherwise, so the iterates need not be the same."""
    run = solver(F2SA(inner_steps=3), compile=True)
    infos = [run.step() for _ in range(60)]
    assert any(info.upper_lr > 0 for info in infos)
    assert bool(torch.isfinite(run.x).all())
    evaluator(run)


@graphs
@pytest.mark.parametrize(
    "method",
    [F2SA(), pytest.param(F2SA(0.2, scheme="midpoint"), marks=pytest.mark.slow)],
    ids=["everything found", "upper_lr found"],
)
def test_steps_that_are_found_on_minibatches_are_the_same(method: F2SA) -> None:
    """The tests of "auto" weigh g by the multiplier of the step, and so decide the same."""
    runs = [solver(method, compile=c) for c in (False, True)]
    assert_same(runs, 24, rtol=1e-8, atol=1e-10)
    evaluator(runs[1])


@graphs
def test_minimize_gives_the_same_result() -> None:
    results = [
        bilevel.minimize(
            Problem(upper, lower), torch.zeros(20).double(), torch.zeros(3).double(),
            method=SCHEMES["forward"], steps=7, record_every=3, select="random", compile=c,
            upper_data=UPPER_DATA, lower_data=LOWER_DATA, batch_size=4,
        )
        for c in (False, True)
    ]  # fmt: skip
    known, found = results
    assert known.selected_step == found.selected_step
    torch.testing.assert_close(found.x, known.x)
    torch.testing.assert_close(found.y, known.y)
    for name in known.history.keys() - {"seconds"}:
        torch.testing.assert_close(
            torch.as_tensor(found.history[name]), torch.as_tensor(known.history[name])
        )


@pytest.mark.slow
@graphs
@pytest.mark.parametrize("name", ["forward", "independent", "single pass"])
def test_steps_that_are_not_waited_for_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bilevel.engine.compiled.evaluator.may_return_early", lambda state: True)
    runs = [solver(SCHEMES[name], compile=c) for c in (False, True)]
    assert_same(runs, 40)
    assert len(evaluator(runs[1])._begun) == 0  # the state was read


@pytest.mark.slow
@graphs
def test_what_was_compiled_goes_with_its_solver() -> None:
    run = solver(SCHEMES["forward"], compile=True)
    run.step()
    gone = weakref.ref(evaluator(run)._pieces)
    del run
    gc.collect()
    assert gone() is None


@pytest.mark.slow
@graphs
def test_the_settings_of_torch_are_as_before(threads: Callable[[int], None]) -> None:
    import torch._dynamo

    names = ("trace_autograd_ops", "specialize_float")
    before = [getattr(torch._dynamo.config, name) for name in names]
    threads(2)
    run = solver(SCHEMES["forward"], compile=True)
    run.step()
    assert torch.get_num_threads() == 2
    assert torch.is_grad_enabled()
    assert [getattr(torch._dynamo.config, name) for name in names] == before


@pytest.mark.parametrize(
    ("large", "alone", "count", "helped"),
    [
        (0, True, 2, True),
        pytest.param(1 << 20, True, 2, False, marks=pytest.mark.slow),
        pytest.param(0, False, 2, False, marks=pytest.mark.slow),
        pytest.param(0, True, 1, False, marks=pytest.mark.slow),
    ],
    ids=["small evaluations", "few bytes", "evaluations by all threads", "one thread"],
)
def test_a_second_thread_gathers_only_where_it_has_the_time(
    monkeypatch: pytest.MonkeyPatch,
    threads: Callable[[int], None],
    large: int,
    alone: bool,
    count: int,
    helped: bool,
) -> None:
    def run_on(*arguments: Any) -> Callable[[Sequence[Any]], tracing.Compiled]:
        get = common.run_graph(*arguments)
        return lambda inputs: get(inputs)._replace(alone=alone)

    asked: list[tuple[int, int]] = []

    class Noted(gathering.Block):
        def provide(self, group: int, part: int) -> None:
            asked.append((group, part))
            super().provide(group, part)

    monkeypatch.setattr(feed, "Block", Noted)
    monkeypatch.setattr(tracing, "compile_graph", run_on)
    monkeypatch.setattr(feed, "LARGE", large)
    threads(count)
    run = solver(F2SA(**{**SETTINGS, "inner_steps": 4}), compile=True)
    run.step()
    evaluator(run)
    # 4 inner evaluations and one for x: the first, the second, two, and the last
    assert asked == ([(0, 0), (0, 1), (0, 2), (0, 3)] if helped else [])
