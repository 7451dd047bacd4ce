"""Hostile input: whatever comes, a run ends well or with an error of the library's own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset

import bilevel
from bilevel import F2SA, F3SA
from bilevel.errors import (
    ArgumentError,
    BilevelError,
    DivergenceWarning,
    FlatWarning,
    NonFiniteError,
    PrecisionWarning,
)

METHODS: list[Any] = [
    F2SA(lower_lr=0.1, upper_lr=0.1, inner_steps=2),
    F3SA(lower_lr=0.1, upper_lr=0.1),
    "f2sa",
    "soba",
]
methods = st.sampled_from(METHODS)
few = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [leaf for part in parts if part is not None for leaf in leaves(part)]


def total(value: Any) -> Tensor:
    return torch.stack([leaf.double().sum() for leaf in leaves(value)]).sum()


def upper(x: Any, y: Any, batch: Any) -> Tensor:
    far = torch.stack([((leaf.double() - 1) ** 2).sum() for leaf in leaves(y)]).sum()
    return 1e-3 * far + 0 * total(x)


def lower(x: Any, y: Any, batch: Any) -> Tensor:
    centre = 1e-3 * total(x)
    return 0.5 * torch.stack([((leaf.double() - centre) ** 2).sum() for leaf in leaves(y)]).sum()


PROBLEM = bilevel.Problem(upper, lower)


def outcome(x0: Any, y0: Any, **options: Any) -> bilevel.Result | BilevelError:
    """A run of a few steps: its result, or the library's error; nothing else may come of it."""
    with warnings.catch_warnings():
        for kind in (DivergenceWarning, PrecisionWarning, FlatWarning):
            warnings.simplefilter("ignore", kind)
        try:
            return bilevel.minimize(PROBLEM, x0, y0, **{"steps": 3, **options})
        except BilevelError as error:
            found = error
    assert len(str(found)) > 20
    return found


# Variables of every kind

dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
tensors = st.builds(lambda shape, dtype: torch.ones(shape, dtype=dtype), shapes, dtypes)


def trees(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaf,
        lambda part: (
            st.lists(part, max_size=3)
            | st.tuples(part, part)
            | st.dictionaries(st.text(max_size=3), part, max_size=3)
        ),
        max_leaves=5,
    )


@pytest.mark.slow
@few
@given(trees(tensors | st.none()), trees(tensors | st.none()), methods)
def test_trees_of_tensors_of_any_shape_and_type(x0: Any, y0: Any, method: Any) -> None:
    found = outcome(x0, y0, method=method)
    if isinstance(found, bilevel.Result):
        for given_, returned in ((x0, found.x), (y0, found.y)):
            assert type(returned) is type(given_)
            pairs = zip(leaves([given_]), leaves([returned]), strict=True)
            for a, b in pairs:
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
                assert bool(torch.isfinite(b).all())
                assert bool((a == 1).all())  # the user's own is as it was


odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from(
        [
            np.ones(2),
            object(),
            int,
            len,
            ...,
            torch.arange(3),
            torch.ones(2, dtype=torch.complex64),
            torch.ones(2, device="meta"),
            torch.ones(2).to_sparse(),
            torch.tensor([math.nan]),
        ]
    ),
)


@pytest.mark.slow
@few
@given(trees(tensors | odd), trees(tensors | odd))
def test_wrong_trees(x0: Any, y0: Any) -> None:
    outcome(x0, y0)


numbers = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.slow
@few
@given(
    st.lists(numbers, min_size=1, max_size=4),
    st.lists(numbers, min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.float64]),
    methods,
    st.sampled_from(["warn", "raise", "backtrack"]),
)
def test_huge_and_tiny_numbers(
    xs: list[float], ys: list[float], dtype: torch.dtype, method: Any, reaction: Any
) -> None:
    x0, y0 = torch.tensor(xs, dtype=dtype), torch.tensor(ys, dtype=dtype)
    found = outcome(x0, y0, method=method, on_divergence=reaction)
    result = found.__dict__.get("result") if isinstance(found, BilevelError) else found
    if result is not None:
        assert bool(torch.isfinite(result.x).all() and torch.isfinite(result.y).all())


@pytest.mark.slow
@few
@given(
    st.one_of(
        st.none(),
        st.integers(-2, 5),
        st.floats(),
        st.text(max_size=4),
        st.lists(st.floats(allow_nan=False), max_size=4),
        st.builds(lambda s: torch.zeros(s), shapes),
        st.builds(lambda s: [torch.zeros(s)] * 2, shapes),
        st.builds(lambda a, b: (torch.zeros(a), torch.zeros(b)), shapes, shapes),
        st.builds(lambda s: {"a": np.zeros(s)}, shapes),
    ),
    st.one_of(st.none(), st.integers(-1, 5), st.floats()),
)
def test_data_of_every_kind(data: Any, size: Any) -> None:
    outcome(torch.ones(2), torch.ones(2), lower_data=data, batch_size=size)


@pytest.mark.parametrize("device", ["meta", "cuda:99", "xpu:7", "mps"])
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(BilevelError, match=r"device|meta"):
        bilevel.minimize(PROBLEM, torch.ones(2), torch.ones(2), device=device, steps=1)


# Objectives with side effects


class Effects:
    """An objective that does something beside, at its fifth evaluation."""

    def __init__(self, effect: Callable[[Any, Any], Any]) -> None:
        self.effect = effect
        self.calls = 0

    def __call__(self, x: Any, y: Any, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls == 5:
            self.effect(x, y)
        return lower(x, y, batch)


def _in_place(x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        y.add_(1.0)


EFFECTS: dict[str, Callable[[Any, Any], Any]] = {
    "no more gradients": lambda x, y: torch.set_grad_enabled(False),
    "another default type": lambda x, y: torch.set_default_dtype(torch.float64),
    "another seed": lambda x, y: torch.manual_seed(9),
    "a gradient of its own": lambda x, y: (y**2).sum().backward(),
    "a change of y": _in_place,
    "frozen": lambda x, y: y.requires_grad_(False),
    "a shape": lambda x, y: y.data.resize_(7),
    "an exit": lambda x, y: exit(3),
    "an interrupt": lambda x, y: (_ for _ in ()).throw(KeyboardInterrupt()),
    "an error": lambda x, y: [][0],
}


@pytest.mark.parametrize("effect", EFFECTS.values(), ids=list(EFFECTS))
@pytest.mark.parametrize("method", METHODS[:3], ids=["f2sa", "f3sa", "auto"])
def test_side_effects_leave_the_program_around_a_run_as_it_was(
    effect: Callable[[Any, Any], Any], method: Any
) -> None:
    x0, y0 = torch.ones(2), torch.zeros(2)
    before = torch.get_rng_state(), torch.is_grad_enabled()
    dtype = torch.get_default_dtype()
    try:
        # what comes of it is torch's error or the objective's own, or nothing at all
        with suppress(BilevelError, SystemExit, KeyboardInterrupt, IndexError, RuntimeError):
            problem = bilevel.Problem(upper, Effects(effect))
            bilevel.minimize(problem, x0, y0, method=method, steps=3)
    finally:
        torch.set_default_dtype(dtype)  # which is the objective's to answer for
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.is_grad_enabled() == before[1]
    assert x0.tolist() == [1, 1]
    assert y0.tolist() == [0, 0]
    assert x0.grad is None


def test_an_inference_mode_is_named() -> None:
    with torch.inference_mode(), pytest.raises(ArgumentError, match=r"torch\.inference_mode\(\)"):
        bilevel.minimize(PROBLEM, torch.ones(2), torch.ones(2))


# Data that changes under way


class Shrinking(Dataset[Tensor]):
    """Has ten rows until eight were asked for, then none."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 10 if self.asked < 8 else 0

    def __getitem__(self, index: int) -> Tensor:
        self.asked += 1
        if self.asked > 20:
            raise IndexError(f"row {index} is gone")
        return torch.zeros(2)


class Raising:
    """An iterable whose third batch is an error."""

    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(2)
        yield torch.zeros(2)
        raise ConnectionError("the store is gone")


def with_batch(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return lower(x, y, None) + 0 * torch.as_tensor(batch).sum()


@pytest.mark.parametrize(
    ("data", "error", "message", "size"),
    [
        (Shrinking(), IndexError, "is gone", 2),
        (Raising(), ConnectionError, "the store is gone", None),
        (iter([torch.zeros(2)] * 7), BilevelError, "lower_data ended after 7 batches", None),
        ([torch.zeros(2), "no batch"], TypeError, "", None),
    ],
    ids=["shrinks", "raises", "ends", "changes its kind"],
)
def test_what_was_saved_before_data_failed_goes_on(
    data: Any, error: type[Exception], message: str, size: int | None, tmp_path: Path
) -> None:
    problem = bilevel.Problem(upper, with_batch)
    options: dict[str, Any] = {
        "method": F2SA(lower_lr=0.1, upper_lr=0.1, inner_steps=1),
        "steps": 30,
        "checkpoint": bilevel.Checkpoint(tmp_path, every_steps=1),
        "batch_size": size,
    }
    start = torch.ones(2), torch.zeros(2)
    if isinstance(data, list):
        problem = bilevel.Problem(upper, lambda x, y, b: lower(x, y, None) + 0 * (b + y).sum())
    with pytest.raises(error, match=message or None):
        bilevel.minimize(problem, *start, lower_data=data, **options)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names
    assert all(name.startswith("step-") for name in names)  # nothing half-written


def test_a_start_that_overflows_at_once_is_told() -> None:
    huge = torch.full((2,), 1e300, dtype=torch.float64)
    with pytest.raises(NonFiniteError, match="not finite at step 0"):
        bilevel.minimize(PROBLEM, huge, huge, method=METHODS[0], steps=3)


@pytest.mark.slow
def test_numbers_that_a_small_type_does_not_have() -> None:
    """A rate, or the factor of a difference of gradients, may be one where the steps are small."""
    half, single = torch.ones((), dtype=torch.float16), torch.ones(())
    found = bilevel.minimize(PROBLEM, half.bfloat16(), (half, single), steps=20)
    assert all(bool(leaf.isfinite()) for leaf in found.y)

    def lower(x: Any, y: Any, batch: Any) -> Tensor:
        return 0.5 * ((y - 1e-3 * x.float()) ** 2).sum()

    problem = bilevel.Problem(lambda x, y, batch: ((y - 1) ** 2).sum(), lower)
    options: dict[str, Any] = {"method": bilevel.F2SA(0.1, 1e5, inner_steps=1), "steps": 1}
    starts = (torch.zeros(3, dtype=dtype) for dtype in (torch.float16, torch.float32))
    runs = [bilevel.minimize(problem, start, torch.zeros(3), **options).x for start in starts]
    assert bool((runs[1] != 0).all())
    torch.testing.assert_close(runs[0].float(), runs[1], rtol=2e-3, atol=0)
