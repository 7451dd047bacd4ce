"""The steps of tables: their optimizers, what a step costs, and the run around it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import bilevel
from bilevel import Table
from bilevel.errors import (
    ArgumentTypeError,
    NonFiniteError,
    ObjectiveError,
    StateError,
)
from bilevel.problem import Box
from tests.variables.tables import (
    FEATURES,
    LOWER_DATA,
    OPTIMIZERS,
    PER_SAMPLE,
    ROWS,
    SETTINGS,
    STARTS,
    TARGETS,
    UPPER_DATA,
    lower,
    plain,
    single_precision,
    solver_of,
    upper,
)

# -- optimizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("extra", [{}, {"x_set": Box(-0.3, 0.3)}], ids=["free", "box"])
def test_sparse_optimizers_are_the_dense_ones_where_every_row_is_touched(
    name: str, extra: dict[str, Any]
) -> None:
    by_rows, whole = OPTIMIZERS[name]
    ends = []
    for x0, factory in ((Table(STARTS), by_rows), (STARTS, whole)):
        method = bilevel.F2SA(0.1, inner_steps=2, upper_optimizer=factory)
        solver = solver_of(x0, method, 6, batch_size=None, **extra)
        ends.append(plain(solver.x))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_move_the_rows_of_the_batch_alone(name: str) -> None:
    data = LOWER_DATA[0][:9], LOWER_DATA[1][:9], LOWER_DATA[2][:9]
    problem = bilevel.Problem(lambda x, y, b: ((b[0] @ y - b[1]) ** 2).mean(), lower)
    method = bilevel.F2SA(0.1, inner_steps=1, upper_optimizer=OPTIMIZERS[name][0])
    solver = solver_of(Table(STARTS), method, 20, problem=problem, lower_data=data)
    moved = solver.x.values != STARTS
    assert bool(moved[:9].all())
    assert not bool(moved[9:].any())


@pytest.mark.parametrize("method", [bilevel.F3SA, bilevel.MASOBA])
def test_sparse_adam_takes_the_dense_directions_of_momentum(method: Any) -> None:
    sparse, whole = OPTIMIZERS["sparse adam"]
    ends = [
        plain(solver_of(x0, method(0.1, upper_optimizer=factory), 5).x)
        for x0, factory in ((Table(STARTS), sparse), (STARTS, whole))
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)


class OwnAdam(torch.optim.Adam):
    """What a user derives from Adam."""


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (torch.optim.Adam, r"of x\.values is Adam\(\.\.\.\), .* use torch\.optim\.SparseAdam"),
        (OwnAdam, r"of x\.values is Adam"),
        (torch.optim.AdamW, r"is AdamW"),
        (lambda p: torch.optim.SGD(p, momentum=0.9), r"is SGD\(momentum=0\.9\)"),
        (lambda p: torch.optim.SGD(p, weight_decay=0.1), r"is SGD\(weight_decay=0\.1\)"),
        (lambda p: torch.optim.Adagrad(p, weight_decay=0.1), r"Adagrad\(weight_decay=0\.1\)"),
    ],
)
def test_optimizers_that_move_every_row_are_refused(factory: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        solver_of(Table(STARTS), bilevel.F2SA(0.1, upper_optimizer=factory))


def test_sparse_adam_is_refused_beside_a_plain_tensor() -> None:
    problem = bilevel.Problem(
        lambda x, y, b: upper(x["w"], y, b) + x["b"] ** 2, lambda x, y, b: lower(x["w"], y, b)
    )
    method = bilevel.F2SA(0.1, upper_optimizer=torch.optim.SparseAdam)
    b = torch.tensor(3.0, dtype=torch.float64)
    with pytest.raises(ArgumentTypeError, match=r"no dense gradients, as x\['b'\] has them"):
        solver_of({"w": Table(STARTS), "b": b}, method, problem=problem)


class Recorder(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.seen: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.extend(p.grad for group in self.param_groups for p in group["params"])


def test_an_optimizer_of_the_users_own_is_given_each_row_once() -> None:
    made: list[Recorder] = []

    def factory(params: Any) -> Recorder:
        made.append(Recorder(params))
        return made[0]

    # duplicates within the batch, and the same rows at y and at z
    data = FEATURES[:4], TARGETS[:4], torch.tensor([3, 9, 3, 3])
    problem = bilevel.Problem(lambda x, y, b: ((b[0] @ y - b[1]) ** 2).mean(), lower)
    solver_of(
        Table(STARTS),
        bilevel.F2SA(0.1, upper_optimizer=factory),
        1,
        problem=problem,
        lower_data=data,
        batch_size=None,
    )
    (gradient,) = made[0].seen
    assert gradient.is_coalesced()
    assert gradient.indices().tolist() == [[3, 9]]


# -- what a step costs -----------------------------------------------------------------------------

MANY = 100_003  # more than any block of indices
LOOKUPS = {
    "aten.index_select.default",  # rows out
    "aten.index.Tensor",
    "aten.index_add_.default",  # rows in
    "aten.index_put_.default",
    "aten.detach.default",
}


class WholeTable(TorchDispatchMode):
    """Which operations see a dense tensor as large as the table."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        parts: list[Any] = [*args, *(kwargs or {}).values(), out]
        while parts:
            part = parts.pop()
            if isinstance(part, list | tuple):
                parts.extend(part)
            elif isinstance(part, Tensor) and not part.is_sparse and part.numel() >= MANY:
                self.seen.add(str(func))
        return out


def _seen_in_a_step(solver: bilevel.Solver) -> set[str]:
    solver.step()
    with WholeTable() as whole:
        solver.step()
        solver.step(measure=False)
    return whole.seen


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("x_set", [None, Box(-1, 1)], ids=["free", "box"])
def test_a_step_touches_the_rows_of_its_batch_alone(name: str, x_set: Any) -> None:
    table = Table(torch.zeros(MANY, dtype=torch.float64))
    assert _seen_in_a_step(solver_of(table, SETTINGS[name], x_set=x_set)) <= LOOKUPS


@pytest.mark.parametrize("name", ["f2sa", "f2sa, single pass", "f2ba", "vpbgd", "no-bilevel"])
def test_a_step_of_a_lower_table_touches_the_rows_of_its_batch_alone(name: str) -> None:
    table = Table(torch.zeros(MANY, dtype=torch.float64))
    x0 = torch.tensor(0.3, dtype=torch.float64)
    solver = solver_of(x0, SETTINGS[name], problem=PER_SAMPLE, y0=table)
    assert _seen_in_a_step(solver) <= LOOKUPS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_an_optimizer_touches_the_rows_of_its_batch_alone(name: str) -> None:
    table = Table(torch.zeros(MANY, dtype=torch.float64))
    method = bilevel.F2SA(0.1, inner_steps=2, upper_optimizer=OPTIMIZERS[name][0])
    # they add to the table, and to their own states, by sparse tensors
    sparse = {"aten.add_.Tensor", "aten.sparse_mask.default"}
    assert _seen_in_a_step(solver_of(table, method)) <= LOOKUPS | sparse


def test_the_cost_test_would_notice_a_whole_table() -> None:
    tensor = torch.zeros(MANY, dtype=torch.float64)
    assert not _seen_in_a_step(solver_of(tensor)) <= LOOKUPS


# -- the run around it -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        bilevel.F2SA(0.1, 0.1, inner_steps=2),
        bilevel.F2SA(0.1, inner_steps=2, upper_optimizer=OPTIMIZERS["sparse adam"][0]),
        bilevel.F3SA(0.1, 0.1, momentum=0.5),
    ],
    ids=["plain", "sparse adam", "f3sa"],
)
def test_a_saved_state_goes_on_bit_for_bit(method: Any) -> None:
    whole = solver_of(Table(STARTS), method, 9, seed=3)
    half = solver_of(Table(STARTS), method, 5, seed=3)
    state = copy.deepcopy(half.state_dict())
    half.step()
    resumed = solver_of(Table(torch.zeros_like(STARTS)), method, 2, seed=4)
    resumed.load_state_dict(state)
    for _ in range(4):
        resumed.step()
    assert torch.equal(resumed.x.values, whole.x.values)
    assert torch.equal(resumed.y, whole.y)


@pytest.mark.slow
def test_same_seed_same_bits_and_another_seed_not() -> None:
    first, again, other = (solver_of(Table(STARTS), steps=9, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.x.values, again.x.values)
    assert not torch.equal(first.x.values, other.x.values)


def test_a_state_of_another_number_of_rows_is_refused() -> None:
    state = solver_of(Table(STARTS)).state_dict()
    with pytest.raises(
        StateError, match=r"x/leaves/0 is a tensor of torch.float64 and the shape \(40,\)"
    ):
        solver_of(Table(torch.zeros(41, dtype=torch.float64))).load_state_dict(state)


def test_what_is_handed_out_is_the_users_to_keep_and_to_start_from() -> None:
    solver = solver_of(Table(STARTS), steps=2)
    handed = solver.x
    before = handed.values.clone()
    solver.step()
    assert torch.equal(handed.values, before)
    assert handed.values.numpy().shape == (ROWS,)  # it requires no gradient
    assert not handed[[1]].requires_grad
    handed.requires_grad_(True)
    handed[torch.tensor([2, 2])].sum().backward()
    assert handed.values.grad.to_dense()[2] == 2  # nothing of the run is left on it
    assert isinstance(solver_of(handed.requires_grad_(False), steps=1).x, Table)


def test_a_step_leaves_no_gradient_behind_not_even_when_it_breaks() -> None:
    def breaking(x: Any, y: Tensor, batch: Any) -> Tensor:
        return lower(x, y, batch) / (0.0 if batch[2].max() < limit else 1.0)

    limit = 0
    solver = solver_of(Table(STARTS), problem=bilevel.Problem(upper, breaking))
    solver.step()
    limit = ROWS
    with pytest.raises(NonFiniteError) as caught:
        solver.step()
    assert caught.value.state is not None
    x = solver.state.x
    assert x.leaves[0].grad is None
    assert x.grads()[0]._nnz() == 0


def test_a_gradient_that_is_not_finite_is_named() -> None:
    problem = bilevel.Problem(lambda x, y, b: upper(x, y, b) + x[b[2]].abs().sqrt().mean(), lower)
    solver = solver_of(Table(torch.zeros(ROWS, dtype=torch.float64)), problem=problem)
    with pytest.raises(NonFiniteError, match=r"gradient of x\.values.*step 0"):
        solver.step()


@pytest.mark.parametrize("select", ["last", "best", "random"])
def test_minimize_returns_a_table(select: Any) -> None:
    found, known = (
        bilevel.minimize(
            bilevel.Problem(upper, lower),
            x0,
            torch.zeros(3, dtype=torch.float64),
            upper_data=UPPER_DATA,
            lower_data=LOWER_DATA,
            batch_size=8,
            method=bilevel.F2SA(0.1, 0.1),
            steps=12,
            select=select,
        )
        for x0 in (Table(STARTS), STARTS)
    )
    assert isinstance(found.x, Table)
    assert found.selected_step == known.selected_step
    torch.testing.assert_close(found.x.values, known.x, rtol=1e-9, atol=1e-12)
    for quantity, series in known.history.items():
        if quantity != "seconds":
            np.testing.assert_allclose(found.history[quantity], series, rtol=1e-9, atol=1e-12)


def test_a_table_is_moved_to_a_device_and_keeps_its_dtype() -> None:
    problem = single_precision()
    solver = solver_of(
        Table(STARTS.float()), steps=2, problem=problem, y0=torch.zeros(3), device="cpu"
    )
    assert solver.x.dtype == torch.float32
    low = solver_of(Table(STARTS.bfloat16()), steps=2, problem=problem, y0=torch.zeros(3))
    assert low.x.dtype == torch.bfloat16
    assert bool((low.x.values != STARTS.bfloat16()).any())


def test_an_objective_that_looks_nothing_up_is_refused() -> None:
    problem = bilevel.Problem(
        lambda x, y, b: (y**2).sum(), lambda x, y, b: (x[b[2]].detach().sum() * y**2).sum()
    )
    with pytest.raises(ObjectiveError, match="depends on x"):
        solver_of(Table(STARTS), problem=problem)


# -- exact hypergradients --------------------------------------------------------------------------


def test_exact_hypergradients_of_tables_are_those_of_tensors() -> None:
    batches = {"upper_batch": UPPER_DATA, "lower_batch": LOWER_DATA}
    problem, y0 = bilevel.Problem(upper, lower), torch.zeros(3, dtype=torch.float64)
    found, known = (
        bilevel.hypergradient(problem, x0, y0, **batches) for x0 in (Table(STARTS), STARTS)
    )
    torch.testing.assert_close(found, known, rtol=1e-9, atol=1e-12)
    check, expected = (
        bilevel.check_hypergradient(problem, x0, y0, multiplier=1e4, **batches)
        for x0 in (Table(STARTS), STARTS)
    )
    assert check.relative_error == pytest.approx(expected.relative_error, rel=1e-6)
    torch.testing.assert_close(check.direction, expected.direction, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("scheme", ["forward", "midpoint"])
def test_exact_hypergradients_with_a_lower_table(scheme: Any) -> None:
    batches = {"upper_batch": UPPER_DATA, "lower_batch": LOWER_DATA}
    x0, method = torch.tensor(0.3, dtype=torch.float64), bilevel.F2SA(0.1, 0.1, scheme=scheme)
    found, known = (
        bilevel.check_hypergradient(PER_SAMPLE, x0, y0, multiplier=100.0, method=method, **batches)
        for y0 in (Table(STARTS), STARTS)
    )
    assert found.exact == pytest.approx(float(known.exact), rel=1e-9)
    assert found.direction == pytest.approx(float(known.direction), rel=1e-7)
