"""Compiled steps: the same iterates, and the same run where something cannot be compiled.

Most tests trace the steps and then run the traced graphs as they are, because a compiler takes
seconds for each; that kernels made of them compute the same is tested in ``test_kernels.py``, and
of all with ``pytest --kernels``.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from bilevel import F2SA, Problem, Solver
from bilevel.engine.compiled import feed, gathering, pieces, tracing
from bilevel.errors import CompileWarning, NonFiniteError
from bilevel.problem import Level
from bilevel.sampling import TensorRows
from bilevel.stepping.schedules import Power
from tests.engine.compiled import common
from tests.engine.compiled.common import (
    LOWER_DATA,
    ROWS,
    SCHEMES,
    SETTINGS,
    TARGETS,
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
from tests.errors.common import BREAKS, Switch, tensors_in
from tests.marks import slow_except


@graphs
@gathered
@pytest.mark.parametrize("method", SCHEMES.values(), ids=list(SCHEMES))
def test_every_scheme_takes_the_same_steps(method: Any) -> None:
    eager, compiled = solver(method, compile=False), solver(method, compile=True)
    assert_same((eager, compiled), 6)
    evaluator(compiled)


DATA: dict[str, dict[str, Any]] = {
    "all rows": {"batch_size": None},
    "a sweep": {"direction_batch_size": "all"},
    "a sweep in uneven parts": {"direction_batch_size": "all", "chunk_size": 6},
    "larger batches": {"direction_batch_size": 7, "chunk_size": 3},
    "a dict of rows": {
        "lower_data": dict(zip("rti", LOWER_DATA, strict=True)),
    },
    "loaders": {
        "upper_data": DataLoader(TensorDataset(*UPPER_DATA), batch_size=7),
        "lower_data": DataLoader(TensorDataset(*LOWER_DATA), batch_size=5, shuffle=True),
        "batch_size": None,
    },
    "a loader beside rows": {"lower_data": [LOWER_DATA, tuple(t[:9] for t in LOWER_DATA)]},
}


@graphs
@gathered
@pytest.mark.parametrize(("name", "coupling"), [
    *((name, "shared") for name in DATA),
    ("a sweep in uneven parts", "independent"),
    ("loaders", "independent"),
])  # fmt: skip
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


@graphs
@gathered
def test_blocks_of_row_numbers_end_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bilevel.sampling.indexed._BLOCK", 30)
    runs = [solver(SCHEMES["independent"], compile=c) for c in (False, True)]
    assert_same(runs, 10)


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


@graphs
@pytest.mark.parametrize("name", slow_except(["forward"], ["forward", "single pass"]))
def test_modules_trees_and_buffers(name: str) -> None:
    assert_modules_and_numbers_move(SCHEMES[name])


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


@graphs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", ["x", "y"])
@pytest.mark.parametrize("unchanged", [False, True])
def test_what_looks_at_values_is_not_compiled(
    level: str, unchanged: bool, dtype: torch.dtype
) -> None:
    """In double precision torch knows the values when it traces; they move while nobody asks."""

    def g(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        number = x if level == "x" else y
        return (2 if number.item() < -1 else 1) * (y - x) ** 2

    x0, y0 = torch.tensor(-2.0, dtype=dtype), torch.tensor(-3.0, dtype=dtype)
    method = F2SA(inner_steps=3, lower_lr=0.05, upper_lr=0.1, multiplier=10.0)
    runs = [
        Solver(Problem(lambda x, y, batch: (y - 1) ** 2, g), x0, y0, method=method, compile=c)
        for c in (False, True)
    ]

    def take_steps(run: Solver) -> None:
        with run.assume_unchanged() if unchanged else nullcontext():
            for _ in range(8):
                run.step()

    take_steps(runs[0])
    with pytest.warns(CompileWarning, match="look at the value of a tensor"):
        take_steps(runs[1])
    assert float(runs[0].x) > -1
    assert float(runs[0].y) > -1
    assert torch.equal(runs[0].x, runs[1].x)
    assert torch.equal(runs[0].y, runs[1].y)


@graphs
def test_an_error_of_the_objectives_is_theirs_also_when_others_were_compiled() -> None:
    """The last minibatch is too small for what the objectives do; torch notices when it traces."""

    def g(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return (batch.view(2, -1).mean(0).mean() * (y - x) ** 2).sum() + (y**2).sum()

    run = Solver(
        Problem(lambda x, y, batch: ((y - 1) ** 2).sum(), g),
        torch.zeros(2), torch.zeros(2), method=F2SA(inner_steps=2, lower_lr=0.1, upper_lr=0.1),
        lower_data=DataLoader(torch.ones(5, 1), batch_size=4), compile=True,
    )  # fmt: skip
    with (
        pytest.warns(CompileWarning),
        pytest.raises(RuntimeError, match=r"^shape '\[2, -1\]' is invalid for input of size 1$"),
    ):
        run.step()


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


@graphs
def test_data_that_require_gradients_are_only_read() -> None:
    rows = ROWS.clone().requires_grad_()
    data = (rows, *LOWER_DATA[1:])
    assert_same([solver(SCHEMES["forward"], compile=c, lower_data=data) for c in (False, True)], 3)
    assert rows.grad is None


@graphs
@pytest.mark.parametrize("order", [(False, True), (True, False)])
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


@graphs
def test_steps_that_are_found_are_found_alike() -> None:
    runs = [solver(F2SA(inner_steps=3), compile=c) for c in (False, True)]
    assert_same(runs, 30, rtol=1e-8, atol=1e-10)
    evaluator(runs[1])


def test_a_table_runs_as_it_is_after_one_warning() -> None:
    def weighted(x: bilevel.Table, y: Tensor, batch: Any) -> Tensor:
        rows, targets, index = batch
        return (x[index].sigmoid() * (rows @ y - targets) ** 2).mean() + 0.1 * (y**2).sum()

    y0 = torch.zeros(3, dtype=torch.float64)
    with pytest.warns(CompileWarning, match="the rows of a table"):
        run = Solver(
            Problem(upper, weighted),
            bilevel.Table(torch.zeros(20, dtype=torch.float64)),
            y0,
            method=F2SA(**SETTINGS),
            upper_data=UPPER_DATA,
            lower_data=LOWER_DATA,
            batch_size=4,
            compile=True,
        )
    run.step()
    assert run.k == 1


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


@graphs
@pytest.mark.parametrize(
    ("breaks", "message", "single_pass"),
    [
        *(pytest.param(*broken, False, marks=pytest.mark.slow) for broken in BREAKS[:-1]),
        (*BREAKS[-1], False),
        (*BREAKS[-1], True),
    ],
)
def test_a_number_that_is_not_finite_stops_the_run(
    breaks: str, message: str, single_pass: bool
) -> None:
    switch = Switch()
    problem, method = switch.problem(breaks), F2SA(inner_steps=3, single_pass=single_pass)
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


# What cannot be compiled


def branches(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    value = lower(x, y, batch)
    return value if value.item() > 0 else 2 * value


def draws(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return lower(x, dropout(y, 0.3), batch)


class Remembers:
    """Keeps a tensor of its own from one call to the next."""

    def __init__(self) -> None:
        self.mean = torch.zeros((), dtype=torch.float64)

    def __call__(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        value = lower(x, y, batch)
        self.mean = 0.9 * self.mean + 0.1 * value.detach()
        return value + 0.01 * self.mean * (y**2).sum()


UNCOMPILABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "branches": (lambda: branches, "look at the value of a tensor"),
    "random": (lambda: draws, r"the objectives draw random numbers"),
    "remembers": (Remembers, r"the objectives keep tensors"),
}


@pytest.mark.parametrize(("make", "reason"), UNCOMPILABLE.values(), ids=list(UNCOMPILABLE))
@pytest.mark.parametrize("data", [{}, DATA["loaders"]], ids=["rows", "loaders"])
def test_what_cannot_be_compiled_runs_as_it_is_after_one_warning(
    make: Callable[[], Any], reason: str, data: dict[str, Any]
) -> None:
    eager, compiled = (
        solver(SCHEMES["forward"], compile=c, problem=Problem(upper, make()), **data)
        for c in (False, True)
    )
    with pytest.warns(CompileWarning, match=reason) as caught:
        compiled.step()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    for _ in range(3):
        compiled.step()
    for _ in range(4):
        eager.step()
    assert torch.equal(eager.x, compiled.x)
    assert torch.equal(eager.y, compiled.y)


@graphs
@pytest.mark.parametrize(
    "name", slow_except(["a sweep"], ["rows", "larger batches", "a sweep", "loaders"])
)
def test_an_x_direction_that_cannot_be_compiled_goes_on_from_the_inner_steps(name: str) -> None:
    def only_in_y(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        value = lower(x, y, batch)
        return branches(x, y, batch) if x.requires_grad else value

    problem = Problem(upper, only_in_y)
    data = DATA.get(name, {})
    runs = [solver(SCHEMES["forward"], compile=c, problem=problem, **data) for c in (False, True)]
    with pytest.warns(CompileWarning, match="look at the value of a tensor"):
        assert_same(runs, 1)
    assert_same(runs, 3)


UNSUPPORTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "f3sa": (bilevel.F3SA(), {}, "F3SA cannot run compiled steps"),
    "lower optimizer": (
        F2SA(lower_optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
        {},
        "lower_optimizer decides how y moves",
    ),
    "accumulate": (F2SA(), {"accumulate": True}, "accumulate takes the terms of Phi apart"),
    "loss scale": (F2SA(), {"loss_scale": bilevel.LossScale()}, "loss_scale decides after each"),
    "chunks": (F2SA(), {"chunk_size": 2}, "chunk_size takes minibatches apart"),
}


@pytest.mark.parametrize(
    ("method", "options", "reason"), UNSUPPORTED.values(), ids=list(UNSUPPORTED)
)
def test_what_has_no_compiled_form_says_so(
    method: Any, options: dict[str, Any], reason: str
) -> None:
    with pytest.warns(CompileWarning, match=reason) as caught:
        compiled = solver(method, compile=True, **options)
    assert len(caught) == 1
    assert caught[0].filename == common.__file__  # where the solver is made
    eager = solver(method, compile=False, **options)
    for _ in range(3):
        eager.step()
        compiled.step()
    assert torch.equal(eager.x, compiled.x)


class _Cliff:
    """g is not a number any more where x is beyond a point."""

    def __call__(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return lower(x, y, batch) + torch.sqrt(0.5 - x.abs().max()).clamp(max=0)


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
@pytest.mark.parametrize(
    "name", slow_except(["single pass"], ["forward", "independent", "single pass"])
)
def test_steps_that_are_not_waited_for_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bilevel.engine.compiled.evaluator.may_return_early", lambda state: True)
    runs = [solver(SCHEMES[name], compile=c) for c in (False, True)]
    assert_same(runs, 40)
    assert len(evaluator(runs[1])._begun) == 0  # the state was read


@graphs
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mistaken", [False, True])
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


def test_an_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.1")
    with pytest.warns(CompileWarning, match=r"torch is 2\.8\.1, and compiled steps need 2\.11"):
        solver(F2SA(), compile=True)


@pytest.mark.parametrize("compile", [1, "yes", None])
def test_compile_is_yes_or_no(compile: Any) -> None:
    with pytest.raises(bilevel.errors.ArgumentTypeError, match=r"compile must be True or False"):
        solver(F2SA(), compile=compile)


@graphs
def test_what_was_compiled_goes_with_its_solver() -> None:
    run = solver(SCHEMES["forward"], compile=True)
    run.step()
    gone = weakref.ref(evaluator(run)._pieces)
    del run
    gc.collect()
    assert gone() is None


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
    [(0, True, 2, True), (1 << 20, True, 2, False), (0, False, 2, False), (0, True, 1, False)],
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
