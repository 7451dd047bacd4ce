"""Errors: what is wrong, where, and with which value; and what a run that breaks hands back."""

from __future__ import annotations

import dataclasses
import math
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from bilevel import F2SA, F3SA, Problem
from bilevel.errors import (
    ArgumentError,
    ArgumentTypeError,
    BilevelError,
    CompileWarning,
    DataExhaustedError,
    MissingDataError,
    MissingExtraError,
    MultiplierWarning,
    NonFiniteError,
    ObjectiveError,
    OutputError,
    RowError,
    StateError,
)

ELSEWHERE = torch.ones(2, requires_grad=True)


def f(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return ((y - 1) ** 2).sum()


def g(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return ((y - x) ** 2).sum() if batch is None else ((y - x - batch) ** 2).mean()


def construct(
    problem: Any = None, x0: Any = None, y0: Any = None, **options: Any
) -> bilevel.Solver:
    """A solver, good but for what is given; none of its steps is taken."""
    return bilevel.Solver(
        Problem(f, g) if problem is None else problem,
        torch.ones(2) if x0 is None else x0,
        torch.zeros(2) if y0 is None else y0,
        method=options.pop("method", "f2sa"),
        **options,
    )


def minimize(**options: Any) -> bilevel.Result:
    arguments = {"steps": 4, **options}
    return bilevel.minimize(Problem(f, g), torch.ones(2), torch.zeros(2), **arguments)


def run(method: Any = "f2sa", **options: Any) -> bilevel.Result:
    """What is only known at a step: run a few."""
    return minimize(method=method, **options)


def rows(count: int = 10) -> Tensor:
    return torch.zeros(count, 2)


def some(count: int) -> Iterator[Tensor]:
    return (torch.zeros(2) for _ in range(count))


def on_cuda(*shape: int) -> Tensor:
    """A tensor that says it is on a GPU, on a machine that has none."""
    with FakeTensorMode():
        return torch.zeros(*shape, device="cuda")


def wrong(value: Any) -> Any:
    return lambda x, y, batch: value


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


class Bad(NamedTuple):
    call: Callable[[], Any]
    error: type[Exception]
    message: str


OBJECTIVES = {
    "vector": Bad(
        lambda: construct(Problem(lambda x, y, b: (y - x) ** 2, g)),
        ObjectiveError,
        r"^upper\(x, y, batch\) must return a scalar, .* shape \(2,\)",
    ),
    "one-element vector": Bad(
        lambda: construct(Problem(f, lambda x, y, b: ((y - x) ** 2).sum(0, keepdim=True))),
        ObjectiveError,
        r"^lower\(x, y, batch\) must return a scalar, .* shape \(1,\)",
    ),
    "number": Bad(
        lambda: construct(Problem(wrong(2.0), g)),
        ObjectiveError,
        r"^upper\(x, y, batch\) must return a scalar tensor, but returned float 2\.0",
    ),
    "nothing": Bad(
        lambda: construct(Problem(f, wrong(None))),
        ObjectiveError,
        r"^lower\(x, y, batch\) must return a scalar tensor, but returned NoneType None",
    ),
    "integer": Bad(
        lambda: construct(Problem(wrong(torch.tensor(3)), g)),
        ObjectiveError,
        r"^upper\(x, y, batch\) must return a floating point scalar, but returned torch\.int64",
    ),
    "without y": Bad(
        lambda: construct(Problem(lambda x, y, b: (x**2).sum(), g)),
        ObjectiveError,
        r"^upper\(x, y, batch\) returned 2, which does not depend on y",
    ),
    "detached": Bad(
        lambda: construct(Problem(f, lambda x, y, b: ((y.detach() - x) ** 2).sum())),
        ObjectiveError,
        r"^lower\(x, y, batch\) returned 2, which does not depend on y",
    ),
    "without y, but with something else that is learned": Bad(
        lambda: construct(Problem(lambda x, y, b: (x * ELSEWHERE).sum(), g)),
        ObjectiveError,
        r"^upper\(x, y, batch\) returned 2, which does not depend on y",
    ),
    "without x": Bad(
        lambda: construct(Problem(f, lambda x, y, b: (y**2).sum())),
        ObjectiveError,
        r"^neither upper\(x, y, batch\) nor lower\(x, y, batch\) depends on x",
    ),
    "not a function": Bad(
        lambda: Problem(3, g),  # type: ignore[arg-type]
        ArgumentTypeError,
        r"^upper must be a function of \(x, y, batch\), not 3",
    ),
    "not a problem": Bad(
        lambda: construct(f), ArgumentTypeError, r"^problem must be a bilevel\.Problem, not <func"
    ),
}

VARIABLES = {
    "integer x": Bad(
        lambda: construct(x0=torch.arange(2)), ArgumentTypeError, r"^x has dtype torch\.int64"
    ),
    "integer part of y": Bad(
        lambda: construct(y0={"a": torch.zeros(2), "b": torch.arange(2)}),
        ArgumentTypeError,
        r"^y\['b'\] has dtype torch\.int64",
    ),
    "array": Bad(
        lambda: construct(x0=np.ones(2)), ArgumentTypeError, r"^x is ndarray array\(\[1\., 1\.\]\)"
    ),
    "no tensor": Bad(lambda: construct(y0=[]), ArgumentError, r"^y holds no tensor .*: \[\]"),
    "meta": Bad(
        lambda: construct(y0=torch.ones(2, device="meta")),
        ArgumentError,
        "^y is on the meta device",
    ),
    "different devices": Bad(
        lambda: construct(y0=on_cuda(2)),
        ArgumentError,
        "^x0 is on cpu and y0 on cuda:0; move one, or give device=",
    ),
    "several devices": Bad(
        lambda: construct(x0=[torch.ones(2), on_cuda(2)]),
        ArgumentError,
        r"^x lies on several devices \(cpu, cuda:0\)",
    ),
    "set": Bad(
        lambda: construct(Problem(f, g, x_set=0.5)),
        ArgumentTypeError,
        r"^x_set must be a callable .* not 0\.5",
    ),
    "set that gives no number": Bad(
        lambda: construct(Problem(f, g, y_set=lambda v: v / v.norm())),
        ArgumentError,
        "^the set of y .*not finite",
    ),
}

DATA = {
    "empty tensor": Bad(
        lambda: construct(lower_data=rows(0)), ArgumentError, "^lower_data is empty: .* 0 samples"
    ),
    "empty part": Bad(
        lambda: construct(upper_data=(rows(0), rows(0))),
        ArgumentError,
        "^upper_data is empty: .* 0 samples",
    ),
    "empty dataset": Bad(
        lambda: construct(lower_data=TensorDataset(rows(0))),
        ArgumentError,
        "^lower_data is empty: .* 0 samples",
    ),
    "empty list": Bad(
        lambda: construct(lower_data=[]), ArgumentError, r"^lower_data is empty: \[\]"
    ),
    "empty loader": Bad(
        lambda: construct(lower_data=DataLoader(TensorDataset(rows(0)))),
        DataExhaustedError,
        "^lower_data gave no batch at all",
    ),
    "empty iterator": Bad(
        lambda: construct(upper_data=some(0)),
        DataExhaustedError,
        "^upper_data ended after 0 batches",
    ),
    "first dimensions": Bad(
        lambda: construct(lower_data={"a": rows(4), "b": rows(5)}),
        ArgumentError,
        r"first dimensions .* len\(lower_data\['a'\]\) = 4, len\(lower_data\['b'\]\) = 5",
    ),
    "not data": Bad(
        lambda: construct(lower_data=7), ArgumentTypeError, "^lower_data must be .* not 7"
    ),
    "batch of none": Bad(
        lambda: construct(lower_data=rows(), batch_size=0),
        ArgumentError,
        "^batch_size must be a whole number of at least 1, not 0",
    ),
    "negative batch": Bad(
        lambda: construct(lower_data=rows(), batch_size=-3), ArgumentError, "^batch_size .*not -3"
    ),
    "broken batch": Bad(
        lambda: construct(lower_data=rows(), batch_size=2.5),
        ArgumentError,
        r"^batch_size .*not 2\.5",
    ),
    "batch above the data": Bad(
        lambda: construct(upper_data=rows(9), lower_data=rows(10), batch_size=10),
        ArgumentError,
        "^batch_size=10 is more than the 9 samples of upper_data",
    ),
    "batch size of a loader": Bad(
        lambda: construct(lower_data=DataLoader(TensorDataset(rows())), batch_size=2),
        ArgumentError,
        r"^batch_size=2 is for data that is sampled here, but lower_data \(DataLoader\)",
    ),
    "batch size of a function": Bad(
        lambda: construct(lower_data=lambda generator: rows(), batch_size=2),
        ArgumentError,
        r"^batch_size=2 is for data that is sampled here, but lower_data \(function\)",
    ),
    "batch size of nothing": Bad(
        lambda: construct(batch_size=2),
        ArgumentError,
        "^batch_size=2 needs upper_data or lower_data",
    ),
    "chunks of one batch": Bad(
        lambda: construct(lower_data=rows(), batch_size=2, chunk_size=2),
        ArgumentError,
        "^chunk_size=2 leaves minibatches of batch_size=2 whole; give a smaller one",
    ),
    "chunks for a method without": Bad(
        lambda: construct(method="f3sa", lower_data=rows(), batch_size=2, chunk_size=1),
        ArgumentError,
        "^chunk_size=1 .* give direction_batch_size too, or use F2SA or F2BA",
    ),
    "scale of another kind": Bad(
        lambda: construct(method=bilevel.F2SA(loss_scale=1024.0)),
        ArgumentTypeError,
        r"^loss_scale must be None or bilevel.LossScale\(...\), not 1024.0",
    ),
    "start that is not finite": Bad(
        lambda: construct(x0=torch.tensor([1.0, float("nan")])),
        ArgumentError,
        "^x0 holds a number that is not finite",
    ),
    "part of a start that is not finite": Bad(
        lambda: construct(y0={"w": torch.tensor([float("inf")])}),
        ArgumentError,
        r"^y0\['w'\] holds a number that is not finite",
    ),
    "a set's class": Bad(
        lambda: construct(Problem(f, g, x_set=bilevel.sets.Simplex)),
        ArgumentTypeError,
        "^x_set is the class Simplex; give an instance of it",
    ),
    "optimizer of other things": Bad(
        lambda: construct(
            method=F2SA(upper_optimizer=lambda p: torch.optim.SGD([torch.ones(1)], lr=1))
        ),
        ArgumentError,
        "^the optimizer of x was not built from the parameters",
    ),
    "direction of none": Bad(
        lambda: construct(lower_data=rows(), direction_batch_size=0),
        ArgumentError,
        "^direction_batch_size .*not 0",
    ),
    "direction word": Bad(
        lambda: construct(lower_data=rows(), direction_batch_size="some"),
        ArgumentError,
        "^direction_batch_size .*'all'.*not 'some'",
    ),
    "direction above the data": Bad(
        lambda: construct(lower_data=rows(), direction_batch_size=11),
        ArgumentError,
        "^direction_batch_size=11 is more than the 10 samples of lower_data",
    ),
    "direction without data": Bad(
        lambda: construct(direction_batch_size="all"),
        ArgumentError,
        "^direction_batch_size='all' needs upper_data or lower_data",
    ),
    "direction of an iterator": Bad(
        lambda: run(lower_data=some(100), direction_batch_size=5),
        ArgumentError,
        "^direction_batch_size=5 needs data that can be indexed",
    ),
    "chunk": Bad(
        lambda: construct(lower_data=rows(), direction_batch_size="all", chunk_size=0),
        ArgumentError,
        "^chunk_size .*not 0",
    ),
    "exhausted": Bad(
        lambda: run(F2SA(inner_steps=1), lower_data=some(5)),
        DataExhaustedError,
        "^lower_data ended after 5 batches and cannot be begun again",
    ),
}

METHODS = {
    "unknown name": Bad(
        lambda: construct(method="sgd"),
        ArgumentError,
        "^method='sgd' is not known; known are 'f2sa', 'f3sa'",
    ),
    "class": Bad(
        lambda: construct(method=F2SA), ArgumentTypeError, "^method must be .*F2SA.*an instance"
    ),
    "number": Bad(
        lambda: construct(method=3),
        ArgumentTypeError,
        "^method must be one of 'f2sa', 'f3sa', .* or a method object, not 3",
    ),
    "factory that makes none": Bad(
        lambda: construct(method=F2SA(lower_optimizer=lambda params: 3)),  # type: ignore[arg-type, return-value]
        ArgumentTypeError,
        "^the optimizer factory of y must return a torch.optim.Optimizer or .*, not 3",
    ),
    "optimizer that evaluates": Bad(
        lambda: construct(method=F2SA(upper_optimizer=torch.optim.LBFGS)),
        ArgumentTypeError,
        "^the optimizer of x is LBFGS",
    ),
}

LOOP = {
    "steps": Bad(lambda: minimize(steps=-1), ArgumentError, "^steps .* at least 0, not -1"),
    "broken steps": Bad(lambda: minimize(steps=1.5), ArgumentError, r"^steps .*not 1\.5"),
    "record_every": Bad(lambda: minimize(record_every=0), ArgumentError, "^record_every .*not 0"),
    "select": Bad(
        lambda: minimize(select="worst"),
        ArgumentError,
        "^select must be one of 'last', 'best', 'random', not 'worst'",
    ),
    "callback": Bad(lambda: minimize(callback=3), ArgumentTypeError, "^callback .*not 3"),
    "seed": Bad(lambda: minimize(seed=-1), ArgumentError, "^seed .* at least 0, not -1"),
    "seed of another type": Bad(lambda: minimize(seed=True), ArgumentError, "^seed .*not True"),
}

TABLE = {
    f"{group}: {name}": bad
    for group, table in {
        "objective": OBJECTIVES,
        "variable": VARIABLES,
        "data": DATA,
        "method": METHODS,
        "loop": LOOP,
    }.items()
    for name, bad in table.items()
}


@pytest.mark.parametrize(("call", "error", "message"), TABLE.values(), ids=list(TABLE))
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, BilevelError)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ArgumentError, ValueError),
        (ArgumentTypeError, TypeError),
        (ObjectiveError, ValueError),
        (StateError, ValueError),
        (NonFiniteError, ArithmeticError),
        (MissingExtraError, ImportError),
    ],
)
def test_code_that_knows_nothing_of_the_library_can_catch(
    error: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(error, builtin)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors take no notes")
def test_an_objective_that_misses_its_batch_is_told_where_that_comes_from() -> None:
    def unpacks(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        features, targets = batch
        return ((features @ y - targets) ** 2).mean() + (x * y).sum()

    data = (torch.ones(3, 2), torch.ones(3))
    with pytest.raises(TypeError, match="cannot unpack") as caught:
        construct(Problem(unpacks, unpacks), upper_data=data)
    assert caught.value.__notes__ == [
        "lower(x, y, batch) was called with the batch None, as it always is without lower_data"
    ]
    with pytest.raises(AttributeError) as other:  # there is a batch, and something else is wrong
        construct(Problem(lambda x, y, batch: batch.nothing, g), upper_data=data)
    assert not hasattr(other.value, "__notes__")
    with pytest.raises(ObjectiveError) as unrelated:
        construct(Problem(f, lambda x, y, batch: y - x))
    assert not hasattr(unrelated.value, "__notes__")


def test_a_rate_of_a_function_is_checked_before_anything_moves() -> None:
    solver = construct(method=F2SA(upper_lr=lambda k: -1.0))
    with pytest.raises(ArgumentError):
        solver.step()
    assert solver.y.tolist() == [0, 0]


# The multiplier


@pytest.mark.parametrize("method", [F2SA, F3SA])
def test_a_multiplier_that_decreases_is_warned_about(method: Any) -> None:
    with pytest.warns(MultiplierWarning) as caught:
        run(method(multiplier=lambda k: [10.0, 10.0, 5.0, 6.0][k]))
    (warning,) = caught
    assert str(warning.message).startswith(
        "multiplier(2) = 5.0 is below its value of 10.0 one step earlier"
    )


def test_a_multiplier_that_decreases_after_a_resume_is_warned_about() -> None:
    solver = construct(method=F2SA(0.1, 0.1, multiplier=20.0))
    solver.step()
    resumed = construct(method=F2SA(0.1, 0.1, multiplier=10.0))
    resumed.load_state_dict(solver.state_dict())
    with pytest.warns(MultiplierWarning, match=r"multiplier\(1\) = 10\.0 .* 20\.0"):
        resumed.step()


# Numbers that are not finite

BOTH = {
    "f2sa": F2SA(0.1, 0.1, inner_steps=3),
    "single pass": F2SA(0.1, 0.1, inner_steps=3, single_pass=True),
    "f3sa": F3SA(0.1, 0.1, momentum=0.5),
    "combined": F3SA(0.1, 0.1, momentum=0.5, recursion="combined"),
}


class Switch:
    """Problems that break once it is on."""

    def __init__(self) -> None:
        self.on = False

    def at(self, step: int) -> Callable[[bilevel.Solver, Any], None]:
        """A callback after which step ``step`` breaks."""

        def callback(solver: bilevel.Solver, info: Any) -> None:
            self.on = info.step == step - 1

        return callback

    def problem(self, breaks: str) -> Problem:
        def break_value(value: Tensor) -> Tensor:
            return value + math.inf if self.on else value

        def break_gradient(variable: Tensor) -> Tensor:
            """0 with a gradient that is not a number: inf - inf."""
            return torch.sqrt(variable - variable).sum() if self.on else 0 * variable.sum()

        at_y = False  # an evaluation is f at y, g at y, g at z

        def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
            nonlocal at_y
            at_y = True
            value = f(x, y, batch) + 0.1 * (x**2).sum()
            return break_value(value) if breaks == "upper" else value

        def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
            nonlocal at_y
            copy, at_y = "y" if at_y else "z", False
            value = g(x, y, batch)
            if breaks == "x":
                value = value + break_gradient(x)
            if breaks == copy:
                value = value + break_gradient(y)
            return break_value(value) if breaks == f"lower at {copy}" else value

        return Problem(upper, lower)


BREAKS = [
    ("upper", r"^upper\(x, y\) is not finite at step 3"),
    ("lower at y", r"^lower\(x, y\) is not finite at step 3"),
    ("lower at z", r"^lower\(x, z\) is not finite at step 3"),
    ("y", "^the gradient of y is not finite at step 3"),
    ("z", "^the gradient of z is not finite at step 3"),
    ("x", "^the gradient of x is not finite at step 3"),
]


def tensors_in(state: Any) -> list[Tensor]:
    if isinstance(state, dict):
        return [t for part in state.values() for t in tensors_in(part)]
    if isinstance(state, list | tuple):
        return [t for part in state for t in tensors_in(part)]
    return [state] if isinstance(state, Tensor) else []


@pytest.mark.parametrize("method", BOTH.values(), ids=list(BOTH))
@pytest.mark.parametrize(("breaks", "message"), BREAKS)
def test_a_number_that_is_not_finite_stops_the_run(method: Any, breaks: str, message: str) -> None:
    switch = Switch()
    problem = switch.problem(breaks)
    x0, y0 = torch.ones(2), torch.zeros(2)
    with pytest.raises(NonFiniteError, match=message) as caught:
        bilevel.minimize(problem, x0, y0, method=method, steps=9, callback=switch.at(3))
    error = caught.value
    assert error.step == 3

    good = bilevel.minimize(switch.problem("nothing"), x0, y0, method=method, steps=3)
    result = error.result
    assert result is not None
    assert result.outcome is bilevel.Outcome.BROKEN
    assert result.steps == result.selected_step == 3
    assert result.history["step"].tolist() == [0, 1, 2]
    assert torch.equal(result.x, good.x)
    assert bool(torch.isfinite(result.y).all())

    assert error.state is not None
    floats = [t for t in tensors_in(error.state) if t.is_floating_point()]
    assert floats
    assert all(bool(torch.isfinite(t).all()) for t in floats)
    switch.on = False
    resumed = bilevel.Solver(problem, x0, y0, method=method)
    resumed.load_state_dict(error.state)
    assert resumed.k == 3
    assert torch.equal(resumed.x, good.x)
    resumed.step()
    assert bool(torch.isfinite(resumed.x).all())


@pytest.mark.parametrize("method", BOTH.values(), ids=list(BOTH))
def test_a_run_goes_on_from_the_last_finite_state(method: Any) -> None:
    switch = Switch()
    problem = switch.problem("upper")  # breaks in the first evaluation of a step
    start = torch.ones(2), torch.zeros(2)
    whole = bilevel.minimize(problem, *start, method=method, steps=6)
    with pytest.raises(NonFiniteError) as caught:
        bilevel.minimize(problem, *start, method=method, steps=6, callback=switch.at(3))
    switch.on = False
    resumed = bilevel.Solver(problem, *start, method=method)
    assert caught.value.state is not None
    resumed.load_state_dict(caught.value.state)
    for _ in range(3):
        resumed.step()
    assert torch.equal(resumed.x, whole.x)


@pytest.mark.filterwarnings("ignore::bilevel.errors.DivergenceWarning")
@pytest.mark.parametrize("method", BOTH.values(), ids=list(BOTH))
def test_rates_too_large_for_the_curvature_stop_the_run_with_finite_numbers(method: Any) -> None:
    known = bilevel.problems.Quadratic()
    wild = type(method)(lower_lr=100.0)
    with pytest.raises(
        NonFiniteError, match="a smaller lower_lr or upper_lr, or a larger"
    ) as caught:
        bilevel.minimize(known, known.x0, known.y0, method=wild, steps=1000)
    floats = [t for t in tensors_in(caught.value.state) if t.is_floating_point()]
    assert all(bool(torch.isfinite(t).all()) for t in floats)


def test_a_random_iterate_of_a_broken_run_is_one_of_its_iterates() -> None:
    start = torch.ones(2), torch.zeros(2)
    for seed in range(20):
        switch = Switch()
        visited: list[tuple[Tensor, Tensor]] = []

        def visit(
            solver: bilevel.Solver, info: Any, switch: Switch = switch, visited: Any = visited
        ) -> None:
            switch.at(3)(solver, info)
            visited.append((solver.x, solver.y))

        with pytest.raises(NonFiniteError) as caught:
            bilevel.minimize(
                switch.problem("upper"), *start, steps=9, callback=visit, select="random", seed=seed
            )
        result = caught.value.result
        assert result is not None
        iterates = [start[0], *(x for x, _ in visited)]
        assert torch.equal(result.x, iterates[result.selected_step])
        assert torch.equal(result.y, visited[result.selected_step][1])


def test_a_set_that_stops_giving_numbers_leaves_the_variables_finite() -> None:
    switch = Switch()
    problem = Problem(f, g, x_set=lambda v: v * math.nan if switch.on else v)
    solver = construct(problem)
    solver.step()
    switch.on = True
    with pytest.raises(ArgumentError, match=r"the set of x .*not finite"):
        solver.step()
    assert bool(torch.isfinite(solver.x).all())


def steps(solver: bilevel.Solver, count: int) -> None:
    for _ in range(count):
        solver.step(measure=False)


class Interrupted(BaseException):
    """As KeyboardInterrupt, but pytest does not stop for it."""


@pytest.mark.parametrize("method", BOTH.values(), ids=list(BOTH))
@pytest.mark.parametrize("failing_call", [1, 2, 7, 11, 12, 14, 18])
def test_an_interrupted_step_leaves_no_gradient_behind(method: Any, failing_call: int) -> None:
    calls = -100  # construction does not count

    def interrupted(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise Interrupted
        return g(x, y, batch)

    def fresh(lower: Any) -> bilevel.Solver:
        sweep = {"direction_batch_size": "all", "chunk_size": 1}
        if method == BOTH["single pass"]:
            sweep = {}
        return bilevel.Solver(
            Problem(f, lower), torch.ones(2), torch.zeros(2), method=method,
            lower_data=torch.arange(6.0).reshape(3, 2), **sweep,  # type: ignore[arg-type]
        )  # fmt: skip

    solver = fresh(interrupted)
    calls = 0
    with pytest.raises(Interrupted):
        steps(solver, 9)
    again = fresh(g)
    again.load_state_dict(solver.state_dict())
    solver.step()
    again.step()
    assert torch.equal(solver.x, again.x)
    assert torch.equal(solver.y, again.y)


def test_data_that_ends_hands_back_what_was_reached() -> None:
    with pytest.raises(DataExhaustedError) as caught:
        minimize(lower_data=(row for row in rows(25)), method=F2SA(inner_steps=4), steps=99)
    # five batches per step, four of them inner: the sixth step finds none
    assert caught.value.result is not None
    assert caught.value.result.steps == 5
    assert caught.value.result.outcome is bilevel.Outcome.BROKEN
    assert caught.value.state is not None
    whole = minimize(lower_data=list(rows(25)), method=F2SA(inner_steps=4), steps=5)
    assert torch.equal(caught.value.result.x, whole.x)


def test_an_upper_loss_that_is_only_reported_stops_the_run_too() -> None:
    def infinite_at_z(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return f(x, y, batch) / torch.is_grad_enabled()  # f at z is evaluated without gradients

    with pytest.raises(NonFiniteError, match=r"^upper\(x, z\) is not finite at step 0"):
        bilevel.minimize(Problem(infinite_at_z, g), torch.ones(2), torch.zeros(2), steps=1)


def test_batch_size_is_for_the_level_that_is_sampled_here() -> None:
    seen = []

    def upper(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        seen.append(len(batch))
        return f(x, y, batch)

    bilevel.minimize(
        Problem(upper, g), torch.ones(2), torch.zeros(2),
        upper_data=rows(9), lower_data=DataLoader(rows(8)), batch_size=3, steps=1,
    )  # fmt: skip
    assert set(seen) == {3}


@pytest.mark.parametrize("method", BOTH.values(), ids=BOTH)
def test_a_step_that_would_overflow_is_not_taken(method: Any) -> None:
    wild = dataclasses.replace(method, upper_lr=3e38)
    with pytest.raises(NonFiniteError, match=r"^the step of x is not finite at step 0") as caught:
        run(wild, steps=1)
    assert caught.value.result is not None
    assert torch.equal(caught.value.result.x, torch.ones(2))


@pytest.mark.parametrize("recursion", ["separate", "combined"])
def test_f3sa_starts_its_estimators_afresh_after_a_step_that_broke(recursion: Any) -> None:
    known = bilevel.problems.Quadratic()
    broken = False

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        value = known.lower(x, y, batch)
        return value * float("nan") if broken and x.requires_grad else value  # the x phase only

    solver = bilevel.Solver(
        Problem(known.upper, lower),
        known.x0,
        known.y0,
        method=F3SA(momentum=0.1, recursion=recursion),
    )
    steps(solver, 5)
    broken = True
    with pytest.raises(NonFiniteError):
        solver.step()
    broken = False
    for _ in range(20):
        x, z = solver.x, solver.y
        solver.step()
    # without noise an estimator is the gradient itself, at the point where it was taken
    exact = (z - known.lower_solution(x)) @ known.A
    torch.testing.assert_close(solver.state.z_estimate[0], exact)


# States that do not fit


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    saved = construct(lower_data=rows())
    steps(saved, 2)
    other = construct(lower_data=list(rows()))
    before = other.x
    with pytest.raises(StateError, match=r"^the state does not fit this solver"):
        other.load_state_dict(saved.state_dict())
    assert other.k == 0
    assert torch.equal(other.x, before)


@pytest.mark.parametrize(
    ("saver", "loader", "message"),
    [
        (F2SA(), F3SA(), "^the state was saved by 'F2SA', but this solver runs 'F3SA'"),
        (
            F2SA(0.1, 0.1),
            F2SA(0.1, upper_optimizer=sgd),
            "^the state of x was saved without an optimizer",
        ),
        (
            F2SA(upper_lr=0.1, lower_optimizer=sgd),
            F2SA(0.1, 0.1),
            "^the state of y was saved with an optimizer",
        ),
    ],
)
def test_a_state_of_another_method_is_refused(saver: Any, loader: Any, message: str) -> None:
    state = construct(method=saver).state_dict()
    with pytest.raises(StateError, match=message):
        construct(method=loader).load_state_dict(state)


def test_a_state_of_another_problem_is_refused() -> None:
    state = construct(x0=torch.ones(1)).state_dict()
    message = r"^the saved leaves of x have the shapes \[\(1,\)\], but here they are \[\(2,\)\]"
    with pytest.raises(StateError, match=message):
        construct().load_state_dict(state)


# Exceptions travel between processes


@pytest.mark.parametrize(
    "error",
    [
        ArgumentError("lower_lr must be positive, not 0"),
        DataExhaustedError("lower_data ended"),
        MissingExtraError("rich", "cli"),
        MissingDataError("no such file"),
        NonFiniteError(3, "lower(x, z)"),
        OutputError("the folder cannot be written"),
        RowError(5, 9, (0, 3)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_pickling(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_good_run_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run().outcome is bilevel.Outcome.COMPLETED


@pytest.mark.parametrize(
    ("warning", "choices"),
    [
        (MultiplierWarning, {"method": F2SA(multiplier=lambda k: 10 / (1 + k))}),
        (CompileWarning, {"method": "soba", "compile": True}),
    ],
)
def test_warnings_point_at_the_line_that_called_the_library(
    warning: type[Warning], choices: dict[str, Any]
) -> None:
    with pytest.warns(warning) as caught:
        bilevel.minimize(Problem(f, g), torch.zeros(2), torch.zeros(2), steps=2, **choices)
    assert {seen.filename for seen in caught} == {__file__}
