"""Compiled steps: the same iterates, and the same run where something cannot be compiled.

Most tests trace the steps and then run the traced graphs as they are, because a compiler takes
seconds for each; that kernels made of them compute the same is tested at the end, and of all with
``pytest --kernels``.
"""

from __future__ import annotations

import copy
import gc
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from bilevel import F2BA, F2SA, Nesterov, Problem, Solver
from bilevel.compiled import Program, feed, gathering, tracing
from bilevel.errors import CompileWarning, NonFiniteError
from bilevel.methods.reference import ReferenceF2SA
from bilevel.schedules import Power
from tests.test_errors import BREAKS, Switch, tensors_in

ROWS = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(20, 3)
TARGETS = torch.sin(7 * ROWS.sum(1))


def _run_graph(
    graph: Any, inputs: Any, options: Any
) -> Callable[[Sequence[Any]], tracing.Compiled]:
    def run(arguments: list[Any]) -> None:
        with torch.enable_grad():
            graph(*arguments)

    return lambda arguments: tracing.Compiled(run, alone=True)


@pytest.fixture
def graphs_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are traced, and the graphs are run as they are."""
    if not request.config.getoption("--kernels"):
        monkeypatch.setattr(tracing, "compile_graph", _run_graph)


graphs = pytest.mark.usefixtures("graphs_only")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads torch has, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(
    params=[
        "all together",
        "in groups",
        "one by one",
        "beside",
        "groups beside",
        "by compiled code",
    ]
)
def both_ways(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]
) -> None:
    """Minibatches are gathered ahead, as many together as fit into the caches, or not."""
    few = {"in groups": 700, "one by one": 0, "groups beside": 700}  # bytes; one has some 250
    if request.param.endswith("beside"):
        monkeypatch.setattr(feed, "LARGE", 0)
        threads(2)
    if request.param in few:
        monkeypatch.setattr(feed, "TOGETHER", few[request.param])
    if request.param == "by compiled code":
        prepared = feed.Feed.__init__

        def unprepared(self: Any, *arguments: Any, ahead: bool) -> None:
            prepared(self, *arguments, ahead=False)

        monkeypatch.setattr(feed.Feed, "__init__", unprepared)


gathered = pytest.mark.usefixtures("both_ways")


def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    rows, targets = batch
    return ((rows @ y - targets) ** 2).mean()


def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    rows, targets, index = batch
    return (x[index].sigmoid() * (rows @ y - targets) ** 2).mean() + 0.1 * (y**2).sum()


LOWER_DATA = (ROWS, TARGETS + 1, torch.arange(20))
UPPER_DATA = (ROWS[:7], TARGETS[:7])


def solver(method: Any, *, compile: bool, problem: Problem | None = None, **data: Any) -> Solver:
    data = {"upper_data": UPPER_DATA, "lower_data": LOWER_DATA, "batch_size": 4} | data
    x0, y0 = torch.zeros(20, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    return Solver(problem or Problem(upper, lower), method, x0, y0, compile=compile, **data)


def program(run: Solver) -> Program:
    assert run._program is not None
    assert run._program._works
    return run._program


def numbers(value: Any) -> list[Tensor]:
    """All that a state dict or an info holds."""
    if isinstance(value, bilevel.methods.Info):
        return tensors_in([vars(value)])
    return [t for t in tensors_in(value) if t.is_floating_point()]


def assert_same(runs: Iterable[Solver], steps: int, **tolerance: float) -> None:
    """Both take steps, and agree at each in all they report and at the end in all they carry."""
    eager, compiled = runs
    tolerance = {"rtol": 1e-12, "atol": 1e-14} | tolerance
    for k in range(steps):
        told, tell = eager.step(measure=k % 2 == 0), compiled.step(measure=k % 2 == 0)
        assert told.step == tell.step
        assert tell.multiplier == pytest.approx(told.multiplier, rel=tolerance["rtol"])
        for known, found in zip(numbers(told), numbers(tell), strict=True):
            assert found.ndim == 0
            torch.testing.assert_close(found, known, check_dtype=False, **tolerance)
    carried, carries = eager.state_dict(), compiled.state_dict()
    torch.testing.assert_close(carries["state"], carried["state"], **tolerance)
    torch.testing.assert_close(carries["draw"], carried["draw"], rtol=0, atol=0)


SETTINGS: dict[str, Any] = {"inner_steps": 3, "lower_lr": 0.2, "upper_lr": 2.0, "multiplier": 20.0}
SCHEMES = {
    "forward": F2SA(**SETTINGS, penalty_lr=0.05),
    "independent": F2SA(**SETTINGS, coupling="independent"),
    "single pass": F2SA(**SETTINGS, single_pass=True),
    "single pass of one step": F2SA(**{**SETTINGS, "inner_steps": 1}, single_pass=True),
    "midpoint": F2SA(**SETTINGS, scheme="midpoint"),
    "central": F2SA(**SETTINGS, scheme="central", order=4),
    "independent midpoint": F2SA(**SETTINGS, scheme="midpoint", coupling="independent"),
    "accelerated": F2BA(**SETTINGS, acceleration=Nesterov(0.5)),
    "upper optimizer": F2SA(
        **{k: v for k, v in SETTINGS.items() if k != "upper_lr"},
        upper_optimizer=lambda p: torch.optim.Adam(p, lr=0.1),
    ),
}


@graphs
@gathered
@pytest.mark.parametrize("method", SCHEMES.values(), ids=list(SCHEMES))
def test_every_scheme_takes_the_same_steps(method: Any) -> None:
    eager, compiled = solver(method, compile=False), solver(method, compile=True)
    assert_same((eager, compiled), 6)
    program(compiled)


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
    program(compiled)


@graphs
@gathered
def test_blocks_of_row_numbers_end_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bilevel.streams, "_BLOCK", 30)
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
    program(runs[1])
    assert runs[1].x.min() == -0.0005
    torch.testing.assert_close(runs[1].y.sum().item(), 0.3)


class Net(nn.Module):
    """Its buffers move with every forward pass in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.last = nn.Linear(4, 1, dtype=torch.float64)
        self.last.bias.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        out = self.last(self.norm(self.first(rows)).tanh()).squeeze(-1)
        assert isinstance(out, Tensor)
        return out


def assert_modules_and_numbers_move(method: Any) -> None:
    """A module with buffers, and numbers of no dimension, as they do without compile."""
    torch.manual_seed(0)
    x0 = {"weights": torch.zeros(20, dtype=torch.float64), "decay": [torch.tensor(-2.0).double()]}
    y0 = (Net(), torch.tensor(0.0).double())

    def f(x: Any, y: Any, batch: Any) -> Tensor:
        net, shift = y
        return ((net(batch[0]) + shift - batch[1]) ** 2).mean()

    def g(x: Any, y: Any, batch: Any) -> Tensor:
        net, shift = y
        errors = (net(batch[0]) + shift - batch[1]) ** 2
        decay = sum((p**2).sum() for p in net.parameters()) + shift**2
        return (x["weights"][batch[2]].sigmoid() * errors).mean() + x["decay"][0].exp() * decay

    runs = [
        Solver(
            Problem(f, g), method, x0, y0,
            upper_data=UPPER_DATA, lower_data=LOWER_DATA, batch_size=4, compile=c,
        )
        for c in (False, True)
    ]  # fmt: skip
    assert_same(runs, 6, rtol=1e-9)
    program(runs[1])
    assert runs[1].y[0].norm.num_batches_tracked == 6 * 3
    assert runs[1].x["decay"][0] != -2
    assert runs[1].y[1] != 0


@graphs
@pytest.mark.parametrize("name", ["forward", "single pass"])
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
    first = program(runs[1]).compilations
    assert_same(runs, 20)
    assert program(runs[1]).compilations == first


@graphs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", ["x", "y"])
@pytest.mark.parametrize("undisturbed", [False, True])
def test_what_looks_at_values_is_not_compiled(
    level: str, undisturbed: bool, dtype: torch.dtype
) -> None:
    """In double precision torch knows the values when it traces; they move while nobody asks."""

    def g(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        number = x if level == "x" else y
        return (2 if number.item() < -1 else 1) * (y - x) ** 2

    x0, y0 = torch.tensor(-2.0, dtype=dtype), torch.tensor(-3.0, dtype=dtype)
    method = F2SA(inner_steps=3, lower_lr=0.05, upper_lr=0.1, multiplier=10.0)
    runs = [
        Solver(Problem(lambda x, y, batch: (y - 1) ** 2, g), method, x0, y0, compile=c)
        for c in (False, True)
    ]

    def take_steps(run: Solver) -> None:
        with run.undisturbed() if undisturbed else nullcontext():
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
        F2SA(inner_steps=2, lower_lr=0.1, upper_lr=0.1),
        torch.zeros(2), torch.zeros(2),
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
    first = program(runs[1]).compilations
    weight[0] = 3.0
    assert_same(runs, 2)
    assert program(runs[1]).compilations > first


@graphs
def test_undisturbed_steps_ask_once_what_the_objectives_use() -> None:
    weight = [1.0]

    def weighted(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return weight[0] * lower(x, y, batch)

    problem = Problem(upper, weighted)
    eager, compiled = (
        solver(SCHEMES["forward"], compile=c, problem=problem) for c in (False, True)
    )
    with compiled.undisturbed():
        assert_same((eager, compiled), 3)
        weight[0] = 3.0  # which breaks the promise: it is not seen
        compiled.step()
    weight[0] = 1.0
    eager.step()
    weight[0] = 3.0
    assert_same((eager, compiled), 3)
    with compiled.undisturbed():
        weight[0] = 2.0  # before the first step: it is
        assert_same((eager, compiled), 2)
        with compiled.undisturbed():
            weight[0] = 4.0
            assert_same((eager, compiled), 2)
        weight[0] = 5.0
        assert_same((eager, compiled), 2)


@graphs
def test_what_breaks_in_an_undisturbed_step_is_told_as_ever() -> None:
    data = ROWS.clone()
    runs = [
        solver(F2SA(**SETTINGS), compile=c, lower_data=(data, *LOWER_DATA[1:]), batch_size=None)
        for c in (False, True)
    ]
    states = []
    for run in runs:
        data.copy_(ROWS)
        with run.undisturbed(), torch.no_grad():
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
    program(runs[1])


def test_a_table_runs_as_it_is_after_one_warning() -> None:
    def weighted(x: bilevel.Table, y: Tensor, batch: Any) -> Tensor:
        rows, targets, index = batch
        return (x[index].sigmoid() * (rows @ y - targets) ** 2).mean() + 0.1 * (y**2).sum()

    y0 = torch.zeros(3, dtype=torch.float64)
    with pytest.warns(CompileWarning, match="the rows of a table"):
        run = Solver(
            Problem(upper, weighted),
            F2SA(**SETTINGS),
            bilevel.Table(torch.zeros(20, dtype=torch.float64)),
            y0,
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
    [*((*broken, False) for broken in BREAKS), (*BREAKS[-1], True)],
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

    class InOrder(bilevel.streams.Rows):
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
    run = Solver(problem, F2SA(inner_steps=2, upper_lr=1e308), start, start, compile=True)
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
def test_an_x_direction_that_cannot_be_compiled_goes_on_from_the_inner_steps() -> None:
    def only_in_y(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        value = lower(x, y, batch)
        return branches(x, y, batch) if x.requires_grad else value

    problem = Problem(upper, only_in_y)
    for data in ({}, DATA["larger batches"], DATA["a sweep"], DATA["loaders"]):
        runs = [
            solver(SCHEMES["forward"], compile=c, problem=problem, **data) for c in (False, True)
        ]
        with pytest.warns(CompileWarning, match="look at the value of a tensor"):
            assert_same(runs, 1)
        assert_same(runs, 3)


UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "f3sa": (bilevel.F3SA(), "F3SA has no compiled form"),
    "reference": (ReferenceF2SA(**SETTINGS), "ReferenceF2SA has no compiled form"),
    "accumulate": (F2SA(accumulate=True), "accumulate=True takes the terms apart"),
    "lower optimizer": (
        F2SA(lower_optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
        "lower_optimizer decides how y moves",
    ),
}


@pytest.mark.parametrize(("method", "reason"), UNSUPPORTED.values(), ids=list(UNSUPPORTED))
def test_methods_without_a_compiled_form_say_so(method: Any, reason: str) -> None:
    with pytest.warns(CompileWarning, match=reason) as caught:
        compiled = solver(method, compile=True)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    eager = solver(method, compile=False)
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
    monkeypatch.setattr("bilevel.compiled.program.may_be_late", lambda state: late)
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
@pytest.mark.parametrize("name", ["forward", "independent", "single pass"])
def test_steps_that_are_not_waited_for_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bilevel.compiled.program.may_be_late", lambda state: True)
    runs = [solver(SCHEMES[name], compile=c) for c in (False, True)]
    assert_same(runs, 40)
    assert len(program(runs[1])._begun) == 0  # the state was read


@graphs
def test_history_ends_before_the_step_that_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    for late in (False, True):
        monkeypatch.setattr("bilevel.compiled.program.may_be_late", lambda state, is_=late: is_)
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
    with pytest.warns(CompileWarning, match=r"torch is 2\.8\.1, and 2\.11 is needed"):
        solver(F2SA(), compile=True)


@pytest.mark.parametrize("compile", [1, "yes", None])
def test_compile_is_yes_or_no(compile: Any) -> None:
    with pytest.raises(bilevel.errors.ArgumentTypeError, match=r"compile must be True or False"):
        solver(F2SA(), compile=compile)


@graphs
def test_what_was_compiled_goes_with_its_solver() -> None:
    run = solver(SCHEMES["forward"], compile=True)
    run.step()
    gone = weakref.ref(program(run)._pieces)
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


@graphs
@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_garbage_is_collected_as_before(collects: bool, fails: bool) -> None:
    seen: list[bool] = []

    def noting(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        if torch.compiler.is_compiling():
            note(fails)
        return lower(x, y, batch)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def note(fails: bool) -> bool:
        seen.append(gc.isenabled())
        if fails:
            raise ValueError("not while it is traced")
        return True

    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        run = solver(SCHEMES["forward"], compile=True, problem=Problem(upper, noting))
        with pytest.warns(CompileWarning) if fails else nullcontext():
            run.step()
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
    assert seen
    assert not any(seen)


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
    def run_graph(*arguments: Any) -> Callable[[Sequence[Any]], tracing.Compiled]:
        get = _run_graph(*arguments)
        return lambda inputs: get(inputs)._replace(alone=alone)

    asked: list[tuple[int, int]] = []

    class Noted(gathering.Block):
        def provide(self, group: int, part: int) -> None:
            asked.append((group, part))
            super().provide(group, part)

    monkeypatch.setattr(feed, "Block", Noted)
    monkeypatch.setattr(tracing, "compile_graph", run_graph)
    monkeypatch.setattr(feed, "LARGE", large)
    threads(count)
    run = solver(F2SA(**{**SETTINGS, "inner_steps": 4}), compile=True)
    run.step()
    program(run)
    # 4 inner evaluations and one for x: the first, the second, two, and the last
    assert asked == ([(0, 0), (0, 1), (0, 2), (0, 3)] if helped else [])


# Kernels

compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@compiler
@gathered
def test_kernels_take_the_steps_of_the_reference_path_in_double_precision() -> None:
    method = F2SA(**SETTINGS)
    known = solver(ReferenceF2SA(**SETTINGS), compile=False)
    found = solver(method, compile=True)
    for _ in range(100):
        known.step()
        found.step(measure=False)
    assert program(found).compilations == 2
    for variable in ("x", "y"):
        a, b = getattr(found, variable), getattr(known, variable)
        assert (a - b).norm() <= 1e-10 * b.norm()


@compiler
@gathered
def test_kernels_take_the_steps_of_eager_code_in_single_precision() -> None:
    """Softmax regression with a weight for each sample, as label cleaning has it."""
    rows, labels = ROWS.float(), torch.arange(20) % 3

    def f(x: Tensor, y: Any, batch: Any) -> Tensor:
        return cross_entropy(batch[0] @ y["w"] + y["b"], batch[1])

    def g(x: Tensor, y: Any, batch: Any) -> Tensor:
        losses = cross_entropy(batch[0] @ y["w"] + y["b"], batch[1], reduction="none")
        return (x[batch[2]] * losses).mean() + 0.05 * (y["w"] ** 2).sum()

    runs = [
        Solver(
            Problem(f, g, x_set=bilevel.sets.Box(0, 1)),
            F2SA(**SETTINGS),
            torch.full((20,), 0.5),
            {"w": torch.zeros(3, 3), "b": torch.zeros(3)},
            upper_data=(rows[:7], labels[:7]),
            lower_data=(rows, labels.flip(0), torch.arange(20)),
            batch_size=4,
            compile=c,
        )
        for c in (False, True)
    ]
    for _ in range(100):
        for run in runs:
            run.step(measure=False)
    program(runs[1])
    for a, b in zip(numbers([runs[1].x, runs[1].y]), numbers([runs[0].x, runs[0].y]), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


@compiler
def test_kernels_move_modules_with_buffers_and_numbers_of_no_dimension() -> None:
    """Of a second trace torch would leave out what is written to the latter."""
    assert_modules_and_numbers_move(SCHEMES["forward"])


@compiler
def test_the_list_of_another_trace_leaves_nothing_out() -> None:
    """Torch numbers what it keeps of tensors, in a range that all functions share."""
    from torch._dynamo.symbolic_convert import TensorifyState

    for number in range(1000):
        TensorifyState.specialize(f"zf{number}")
    x0, y0 = torch.tensor(-2.0).double(), torch.tensor(3.0).double()
    runs = [
        Solver(
            Problem(lambda x, y, batch: (y - 1) ** 2, lambda x, y, batch: (y - x) ** 2),
            F2SA(**SETTINGS), x0, y0, compile=c,
        )
        for c in (False, True)
    ]  # fmt: skip
    assert_same(runs, 6)
    assert program(runs[1])
    assert TensorifyState.empty()  # nor is anything left out of what others compile


@compiler
@pytest.mark.parametrize(("width", "alone"), [(10, True), (3000, False)])
def test_small_steps_run_on_one_thread_and_large_ones_on_all(
    width: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inner step on 500 rows has three products forward and three back, 8000 * width each."""
    rows = torch.ones(500, width)
    run = Solver(
        Problem(
            lambda x, y, batch: (batch @ y).square().mean(),
            lambda x, y, batch: (batch @ (y - x)).square().mean(),
        ),
        F2SA(inner_steps=1, lower_lr=1e-5, upper_lr=1e-5),
        torch.zeros(width, 8),
        torch.ones(width, 8),
        upper_data=rows,
        lower_data=rows,
        batch_size=500,
        compile=True,
    )
    from torch._inductor import compile_fx, config

    made_for: list[int] = []
    make = compile_fx.compile_fx_inner

    def noting(*arguments: Any, **options: Any) -> Any:
        made_for.append(config.cpp.threads)
        return make(*arguments, **options)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", noting)
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    run.step(measure=False)
    assert program(run).compilations == 2
    assert made_for == [1 if alone else 7] * 2
    assert seen[:1] == ([1] if alone else [])
    assert seen[-1:] == ([7] if alone else [])


@compiler
def test_kernels_stop_at_a_number_that_is_not_finite() -> None:
    problem = Problem(
        lambda x, y, b: ((y - x) ** 2).sum(),
        lambda x, y, b: (torch.sqrt(y) - x.exp()).square().sum(),
    )
    start = torch.ones(2, dtype=torch.float64)
    messages = []
    for compile in (False, True):
        run = Solver(
            problem, F2SA(inner_steps=4, lower_lr=3.0, upper_lr=0.1), start, start, compile=compile
        )
        with pytest.raises(NonFiniteError) as caught:  # noqa: PT012
            for _ in range(50):
                run.step(measure=False)
        messages.append(str(caught.value))
        assert bool(torch.isfinite(run.y).all())
    assert messages[0] == messages[1]


def test_work_is_products_and_entries_but_not_views() -> None:
    def product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b.T

    def entries(a: Tensor, b: Tensor) -> Tensor:
        return (a.T + 1).exp()[:2]

    a, b = torch.randn(5, 7), torch.randn(3, 7)
    works = [
        tracing.operations(make_fx(function, tracing_mode="fake")(a, b))
        for function in (product, entries)
    ]
    assert works == [2 * 5 * 7 * 3, 2 * tracing.ENTRY * 5 * 7]
