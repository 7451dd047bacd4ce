"""Errors: what is wrong, where, and with which value; and what a run that breaks hands back."""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

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
    MissingExtraError,
    MultiplierWarning,
    NonFiniteError,
    ObjectiveError,
    StateError,
)
from tests.errors.common import construct, f, g, rows, run, some, steps

ELSEWHERE = torch.ones(2, requires_grad=True)


def on_cuda(*shape: int) -> Tensor:
    """A tensor that says it is on a GPU, on a machine that has none."""
    with FakeTensorMode():
        return torch.zeros(*shape, device="cuda")


def wrong(value: Any) -> Any:
    return lambda x, y, batch: value


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


class Bad(NamedTuple):
    """A call that is refused.

    Attributes:
        names: a pattern for what the message names: the arguments that do not go together.
    """

    call: Callable[[], Any]
    error: type[Exception]
    names: str


REFUSED = {
    # single bad values are in bad_inputs; here is what is wrong only in its place
    "one-element vector": Bad(
        lambda: construct(Problem(f, lambda x, y, b: ((y - x) ** 2).sum(0, keepdim=True))),
        ObjectiveError,
        "lower",
    ),
    "objective without y, but with something else that is learned": Bad(
        lambda: construct(Problem(lambda x, y, b: (x * ELSEWHERE).sum(), g)),
        ObjectiveError,
        "upper",
    ),
    "objectives without x": Bad(
        lambda: construct(Problem(f, lambda x, y, b: (y**2).sum())),
        ObjectiveError,
        r"upper.*lower.*\bx\b",
    ),
    "integer part of y": Bad(
        lambda: construct(y0={"a": torch.zeros(2), "b": torch.arange(2)}),
        ArgumentTypeError,
        r"y\w*\['b'\]",
    ),
    "part of a start that is not finite": Bad(
        lambda: construct(y0={"w": torch.tensor([float("inf")])}), ArgumentError, r"y0\['w'\]"
    ),
    "start that is not finite": Bad(
        lambda: construct(x0=torch.tensor([1.0, float("nan")])), ArgumentError, "x0"
    ),
    "different devices": Bad(
        lambda: construct(y0=on_cuda(2)), ArgumentError, "x0.*cpu.*y0.*cuda:0.*device="
    ),
    "several devices": Bad(
        lambda: construct(x0=[torch.ones(2), on_cuda(2)]), ArgumentError, "^x.*cpu, cuda:0"
    ),
    "set that gives no number": Bad(
        lambda: construct(Problem(f, g, y_set=lambda v: v / v.norm())), ArgumentError, r"\by"
    ),
    "empty part": Bad(
        lambda: construct(upper_data=(rows(0), rows(0))), ArgumentError, "upper_data"
    ),
    "empty dataset": Bad(
        lambda: construct(lower_data=TensorDataset(rows(0))), ArgumentError, "lower_data"
    ),
    "empty loader": Bad(
        lambda: construct(lower_data=DataLoader(TensorDataset(rows(0)))),
        DataExhaustedError,
        "lower_data",
    ),
    "empty iterator": Bad(
        lambda: construct(upper_data=some(0)), DataExhaustedError, "upper_data.* 0 "
    ),
    "first dimensions": Bad(
        lambda: construct(lower_data={"a": rows(4), "b": rows(5)}),
        ArgumentError,
        r"lower_data\['a'\].*4.*lower_data\['b'\].*5",
    ),
    "batch above the data": Bad(
        lambda: construct(upper_data=rows(9), lower_data=rows(10), batch_size=10),
        ArgumentError,
        "batch_size=10.*9.*upper_data",
    ),
    "batch size of a loader": Bad(
        lambda: construct(lower_data=DataLoader(TensorDataset(rows())), batch_size=2),
        ArgumentError,
        "batch_size=2.*lower_data",
    ),
    "batch size of a function": Bad(
        lambda: construct(lower_data=lambda generator: rows(), batch_size=2),
        ArgumentError,
        "batch_size=2.*lower_data",
    ),
    "chunks of one batch": Bad(
        lambda: construct(lower_data=rows(), batch_size=2, chunk_size=2),
        ArgumentError,
        "chunk_size=2.*smaller",
    ),
    "chunks for a method without": Bad(
        lambda: construct(method="f3sa", lower_data=rows(), batch_size=2, chunk_size=1),
        ArgumentError,
        "chunk_size=1",
    ),
    "direction above the data": Bad(
        lambda: construct(lower_data=rows(), direction_batch_size=11),
        ArgumentError,
        "direction_batch_size=11.*10.*lower_data",
    ),
    "direction of an iterator": Bad(
        lambda: run(lower_data=some(100), direction_batch_size=5),
        ArgumentError,
        "direction_batch_size=5",
    ),
    "exhausted": Bad(
        lambda: run(F2SA(inner_steps=1), lower_data=some(5)),
        DataExhaustedError,
        "lower_data.* 5 ",
    ),
    "scale of another kind": Bad(
        lambda: construct(loss_scale=1024.0), ArgumentTypeError, "loss_scale"
    ),
    "optimizer of other things": Bad(
        lambda: construct(
            method=F2SA(upper_optimizer=lambda p: torch.optim.SGD([torch.ones(1)], lr=1))
        ),
        ArgumentError,
        r"optimizer.*\bx\b",
    ),
    "factory that makes no optimizer": Bad(
        lambda: construct(method=F2SA(lower_optimizer=lambda params: 3)),  # type: ignore[arg-type, return-value]
        ArgumentTypeError,
        r"optimizer.*\by\b",
    ),
    "optimizer that evaluates": Bad(
        lambda: construct(method=F2SA(upper_optimizer=torch.optim.LBFGS)),
        ArgumentTypeError,
        r"optimizer.*\bx\b.*LBFGS",
    ),
}


@pytest.mark.parametrize(("call", "error", "names"), REFUSED.values(), ids=list(REFUSED))
def test_what_does_not_go_together_is_refused(
    call: Callable[[], Any], error: type[Exception], names: str
) -> None:
    with pytest.raises(error, match=names) as caught:
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
    (note,) = caught.value.__notes__
    assert "lower_data" in note
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
    for part in ("multiplier(2)", "5.0", "10.0"):
        assert part in str(warning.message)


def test_a_multiplier_that_decreases_after_a_resume_is_warned_about() -> None:
    solver = construct(method=F2SA(0.1, 0.1, multiplier=20.0))
    solver.step()
    resumed = construct(method=F2SA(0.1, 0.1, multiplier=10.0))
    resumed.load_state_dict(solver.state_dict())
    with pytest.warns(MultiplierWarning, match=r"multiplier\(1\).*10\.0.*20\.0"):
        resumed.step()


# States that do not fit


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    saved = construct(lower_data=rows())
    steps(saved, 2)
    other = construct(lower_data=list(rows()))
    before = other.x
    with pytest.raises(StateError, match="state"):
        other.load_state_dict(saved.state_dict())
    assert other.k == 0
    assert torch.equal(other.x, before)


@pytest.mark.parametrize(
    ("saver", "loader", "message"),
    [
        (F2SA(), F3SA(), "F2SA.*F3SA"),
        (
            F2SA(0.1, 0.1),
            F2SA(0.1, upper_optimizer=sgd),
            r"\bx\b.*optimizer",
        ),
        (
            F2SA(upper_lr=0.1, lower_optimizer=sgd),
            F2SA(0.1, 0.1),
            r"\by\b.*optimizer",
        ),
    ],
)
def test_a_state_of_another_method_is_refused(saver: Any, loader: Any, message: str) -> None:
    state = construct(method=saver).state_dict()
    with pytest.raises(StateError, match=message):
        construct(method=loader).load_state_dict(state)


def test_a_state_of_another_problem_is_refused() -> None:
    state = construct(x0=torch.ones(1)).state_dict()
    with pytest.raises(StateError, match=r"\bx\b.*\(1,\).*\(2,\)"):
        construct().load_state_dict(state)


# Exceptions travel between processes


@pytest.mark.parametrize(
    "error",
    [
        ArgumentError("lower_lr must be positive, not 0"),
        DataExhaustedError("lower_data ended"),
        MissingExtraError("rich", "cli"),
        NonFiniteError(3, "lower(x, z)"),
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
