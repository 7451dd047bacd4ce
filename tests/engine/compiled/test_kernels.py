"""Kernels compute what the traced graphs say, and notice what those do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import cross_entropy

import bilevel
from bilevel import F2SA, Problem, Solver
from bilevel.engine.compiled import tracing
from bilevel.errors import NonFiniteError
from tests.engine.compiled.common import (
    ROWS,
    SCHEMES,
    SETTINGS,
    assert_modules_and_numbers_move,
    assert_same,
    compiler,
    evaluator,
    gathered,
    lower,
    numbers,
    solver,
    upper,
)


@compiler
@gathered
def test_kernels_take_the_steps_of_the_reference_in_double_precision() -> None:
    method = F2SA(**SETTINGS)
    start = solver(method, compile=False)
    known = method.reference(upper, lower, start.x, start.y, start.draw)
    found = solver(method, compile=True)
    for _ in range(100):
        iterates = next(known)
        found.step(measure=False)
    assert evaluator(found).compilations == 2
    for a, b in zip((found.x, found.y), iterates, strict=True):
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
            torch.full((20,), 0.5),
            {"w": torch.zeros(3, 3), "b": torch.zeros(3)},
            method=F2SA(**SETTINGS),
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
    evaluator(runs[1])
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
            x0, y0, method=F2SA(**SETTINGS), compile=c,
        )
        for c in (False, True)
    ]  # fmt: skip
    assert_same(runs, 6)
    assert evaluator(runs[1])
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
        torch.zeros(width, 8),
        torch.ones(width, 8),
        method=F2SA(inner_steps=1, lower_lr=1e-5, upper_lr=1e-5),
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
    assert evaluator(run).compilations == 2
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
            problem,
            start,
            start,
            method=F2SA(inner_steps=4, lower_lr=3.0, upper_lr=0.1),
            compile=compile,
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
